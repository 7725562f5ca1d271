"""How often does a run change rooms before its first local step?

A CSV with a user column, ``privacy.epsilon`` and four rounds go through ``dpscaffold train``. A
room is the first folder, or the top-level file, of the package in which a called function stands;
counted are the calls whose room is not that of the call before. What is called while a module is
being imported is left out: it happens once, and is no part of the run. The script also counts how
often a setting is made and a table of records validated. It runs on other trees too::

    python benchmarks/rooms.py
    PYTHONPATH=old/src python benchmarks/rooms.py --list
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import dpscaffold

ROOT = Path(dpscaffold.__file__).parent
CONFIG = """
[data]
source = "csv"
path = "{path}"
user = "who"
label = "ill"
[plan]
rounds = 4
local_steps = 3
user_ratio = 0.5
[privacy]
epsilon = 2.0
"""

#: A function (not a module or the body of a class) keeps its variables in fast slots.
FUNCTION = 0x1


#: Where steps are taken, one by one or all K in a script: their noise is still to be drawn.
STEPS = ("noised_query", "scripted_steps")


class FirstStep(BaseException):
    """The first local step is about to be taken."""


class Tour:
    """Notes the room of every function of the package that is called, in order."""

    def __init__(self) -> None:
        self.visits: list[tuple[str, str]] = []
        self.changes = 0
        self.counts: Counter[str] = Counter()
        self.imports = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function."""
        code = frame.f_code
        if code.co_name == "_find_and_load" and event in ("call", "return"):
            self.imports += 1 if event == "call" else -1
        if self.imports or event != "call" or not code.co_flags & FUNCTION:
            return
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT):
            return
        place = path.relative_to(ROOT)
        room = place.parts[0].removesuffix(".py")
        if not self.visits or self.visits[-1][0] != room:
            self.changes += 1
        self.visits.append((room, f"{place}:{code.co_name}"))
        self.counts[code.co_qualname if hasattr(code, "co_qualname") else code.co_name] += 1
        if code.co_name in STEPS:
            raise FirstStep


@contextmanager
def csv_run() -> Iterator[Path]:
    """A folder with a table of ten users and its configuration."""
    stream = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.csv"
        rows = [
            f"user{u},{stream.normal():.4f},{stream.normal():.4f},{stream.integers(2)}"
            for u in range(10)
            for _ in range(40)
        ]
        table.write_text("who,age,dose,ill\n" + "\n".join(rows) + "\n", encoding="utf-8")
        config = Path(folder) / "run.toml"
        config.write_text(CONFIG.format(path=table), encoding="utf-8")
        yield config


def tour() -> Tour:
    """The calls from the command to the first local step."""
    from dpscaffold.cli.train import train_command

    found = Tour()
    with csv_run() as config:
        sys.setprofile(found)
        try:
            train_command(config, out=config.parent / "out", as_json=True)
        except FirstStep:
            pass
        finally:
            sys.setprofile(None)
    return found


def main() -> None:
    """Print the counts."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--list", action="store_true", help="print every change of room")
    chosen = options.parse_args()
    os.environ.setdefault("DPSCAFFOLD_CACHE", tempfile.gettempdir())
    found = tour()
    if chosen.list:
        before = ""
        for room, where in found.visits:
            if room != before:
                print(where)
            before = room
    print(f"{found.changes} changes of room before the first local step")
    for name in ("Setting.__post_init__", "Records.validate", "Plan.__post_init__"):
        print(f"{found.counts[name]} × {name}")


if __name__ == "__main__":
    main()
