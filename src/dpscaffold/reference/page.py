"""The reference as files: for the command line, for the documentation, and as a whole example."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from dpscaffold.reference.keys import Key
from dpscaffold.reference.values import NEEDED, OMITTED, shown, toml

TITLES = {
    "data": "`[data]`: where the records come from",
    "step": "Steps of `data.preprocess`",
    "task": "`[task]`: what is learnt",
    "algorithm": "`[algorithm]`: how",
    "plan": "`[plan]`: what the parties agree on",
    "privacy": "`[privacy]`: what is hidden, and how well",
    "tune": "`[tune]`: which values are tried (`dpscaffold tune`)",
}

HEAD = """# Configuration

Every key of every table, generated from the code by `python -m dpscaffold.reference`.
`dpscaffold config explain plan.rounds` says the same on the command line, and
`dpscaffold config show CONFIG.toml` shows a configuration with all its defaults. Any key can be set
with `--set table.key=value` and left out with `--unset table.key`. A whole configuration with every
key of a run explained is `examples/annotated.toml`.
"""


def stored(found: Sequence[Key]) -> str:
    """The reference as JSON, read by the command line without loading anything else."""
    return json.dumps([asdict(key) for key in found], indent=1, ensure_ascii=False) + "\n"


def grouped(found: Iterable[Key]) -> dict[str, list[tuple[Key, list[str]]]]:
    """Keys by table, each once, with the places (sources, steps, algorithms) that have it."""
    tables: dict[str, dict[tuple[Any, ...], tuple[Key, list[str]]]] = {}
    for key in found:
        same = (key.name, key.kind, str(key.default), key.about)
        entry = tables.setdefault(key.table, {}).setdefault(same, (key, []))
        if key.place:
            entry[1].append(key.place)
    return {table: list(entries.values()) for table, entries in tables.items()}


def page(found: Sequence[Key]) -> str:
    """``docs/configuration.md``."""
    tables = grouped(found)
    lines = [HEAD]
    for table, title in TITLES.items():
        lines += [f"## {title}", ""]
        placed = any(places for _, places in tables[table])
        of = {"data": "sources", "step": "steps", "algorithm": "of"}.get(table, "of")
        head = ["key", "what it is", *([of] if placed else []), "value", "default", "example"]
        lines += [_row(head), _row(["---"] * len(head))]
        everywhere = len({place for _, places in tables[table] for place in places})
        for key, places in tables[table]:
            which = "all" if len(places) in (0, everywhere) else ", ".join(places)
            lines.append(
                _row(
                    [
                        f"`{key.name.partition('.')[2]}`",
                        key.about,
                        *([which] if placed else []),
                        key.kind,
                        _code(key.default),
                        f"`{toml(key.example)}`",
                    ]
                )
            )
        lines.append("")
    return "\n".join(lines)


def _code(default: Any) -> str:
    return default if default in (NEEDED, OMITTED) else f"`{shown(default)}`"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def annotated(found: Sequence[Key]) -> str:
    """A whole configuration: every key of the tables a run reads, explained, at its default."""
    lines = [
        "# Every key of a run, with its default; what is left out by default stands behind a #.",
        "# dpscaffold train annotated.toml; written by python -m dpscaffold.reference.",
        "",
    ]
    for table in ("data", "task", "algorithm", "plan", "privacy"):
        chosen = [key for key in found if key.table == table]
        chosen = [key for key in chosen if key.place in ("", "synthetic")]
        lines.append(f"[{table}]")
        for key in chosen:
            lines.append(f"# {key.about} [{key.kind}]")
            lines.append(_line(key))
        lines.append("")
    return "\n".join(lines)


def _line(key: Key) -> str:
    name = key.name.partition(".")[2]
    if key.name == "privacy.noise":
        return f"{name} = 30.0"
    given = key.default not in (OMITTED, NEEDED)
    return f"{name} = {toml(key.default)}" if given else f"# {name} = {toml(key.example)}"
