"""Compares today's package with version 0.2.0 and ends with 1 where they differ unannounced.

``python -m frozen.compare [--quick] [--only WORD] [--show]`` in ``tests/``. A difference is
announced by an entry of ``accepted.toml``: a pattern of its name, the reason, and the words by
which CHANGELOG.md names it.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from frozen import compare, old
from frozen.compare.difference import Difference

ACCEPTED = Path(__file__).parents[1] / "accepted.toml"
CHANGELOG = old.ROOT / "CHANGELOG.md"
#: How many unannounced differences are shown for each comparison.
SHOWN = 20


@dataclass(frozen=True)
class Accepted:
    """A difference that is meant: the pattern of its name (fnmatch), why, and the words by which
    the changelog names it. ``why`` may say which kind of difference alone is meant."""

    id: str
    reason: str
    changelog: str
    why: str = "*"

    def covers(self, one: Difference) -> bool:
        return fnmatchcase(one.id, self.id) and fnmatchcase(one.why, self.why)


def accepted(path: Path = ACCEPTED) -> list[Accepted]:
    """The entries of the list."""
    tables = tomllib.loads(path.read_text(encoding="utf-8")).get("accepted", [])
    return [Accepted(**table) for table in tables]


def unnamed(entries: Iterable[Accepted], changelog: str) -> list[str]:
    """A sentence for each entry that the changelog does not name."""
    flat = " ".join(changelog.split())
    return [
        f"accepted.toml: {entry.id!r} relies on the words {entry.changelog!r}, which CHANGELOG.md "
        f"does not have; name the change there"
        for entry in entries
        if not entry.changelog.strip() or " ".join(entry.changelog.split()) not in flat
    ]


def comparisons(only: str = "") -> dict[str, Callable[[bool], Iterable[Difference]]]:
    """The modules of this folder that compare something, by name."""
    found = {}
    for module in pkgutil.iter_modules(compare.__path__):
        if module.name == "__main__":
            continue
        loaded = importlib.import_module(f"frozen.compare.{module.name}")
        if hasattr(loaded, "compare") and only in module.name:
            found[module.name] = loaded.compare
    return found


def main() -> int:
    """Run every comparison and print what came of it."""
    parser = argparse.ArgumentParser(
        prog="frozen.compare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="a fixed sample, a few minutes")
    parser.add_argument("--only", default="", help="comparisons whose name holds this word")
    parser.add_argument("--show", action="store_true", help="list every difference")
    given = parser.parse_args()
    entries = accepted()
    bad = unnamed(entries, CHANGELOG.read_text(encoding="utf-8"))
    used: Counter[str] = Counter()
    print(f"{'comparison':<16}{'agree':>8}{'accepted':>10}{'differ':>8}{'seconds':>9}", flush=True)
    for name, ask in comparisons(given.only).items():
        started, agree, meant, differ = time.monotonic(), 0, 0, []
        for one in ask(given.quick):
            entry = next((entry for entry in entries if one.why and entry.covers(one)), None)
            agree += not one.why
            if entry is not None:
                meant += 1
                used[entry.id] += 1
            elif one.why:
                differ.append(one)
        seconds = time.monotonic() - started
        print(f"{name:<16}{agree:>8}{meant:>10}{len(differ):>8}{seconds:>9.0f}", flush=True)
        if agree + meant + len(differ) == 0:
            bad.append(f"{name}: nothing was compared")
        bad += [_line(one) for one in differ[: None if given.show else SHOWN]]
        if not given.show and len(differ) > SHOWN:
            bad.append(f"{name}: {len(differ) - SHOWN} more; --show lists them")
    for id, times in used.items():
        print(f"accepted {times:>6} × {id}")
    for sentence in bad:
        print(sentence)
    return 1 if bad else 0


def _line(one: Difference) -> str:
    return f"{one.id}: {one.why}: {_short(one.old)} → {_short(one.new)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…"


if __name__ == "__main__":
    sys.exit(main())
