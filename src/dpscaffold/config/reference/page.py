"""The reference as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dpscaffold.config.reference.keys import Key
from dpscaffold.config.reference.values import NEEDED, OMITTED, shown, toml

TITLES = {
    "data": "`[data]`: where the records come from",
    "step": "Steps of `data.preprocess`",
    "task": "`[task]`: what is learnt",
    "algorithm": "`[algorithm]`: the federated algorithm",
    "plan": "`[plan]`: rounds, steps and sampling",
    "privacy": "`[privacy]`: clipping, noise and budget",
    "secure": "`[secure]`: let the server see sums of uploads only",
    "facts": "`[facts]`: what is public about the data (`dpscaffold plan`)",
    "stopping": "`[stopping]`: end a run early by public rows (`dpscaffold train`)",
    "personal": "`[personal]`: a model for each site",
    "tune": "`[tune]`: which values are tried (`dpscaffold tune`)",
    "schema": "`[schema]`: what a row looks like at every site (`dpscaffold server run`)",
    "prepare": "Steps of `schema.prepare`",
    "deploy": "`[deploy]`: address and deadlines of a deployed run",
    "evaluate": "`[evaluate]`: public test records at the server",
    "federation": "`federation.toml`: who is invited (`dpscaffold provision`)",
    "site": "`site.toml`: a site, its data and its policy (`dpscaffold site`)",
}

#: Tables whose keys depend on the source of the records.
SOURCED = ("data", "evaluate", "site")

HEAD = """# Configuration

This page lists every key of every configuration file. On the command line,
`dpscaffold config explain plan.rounds` explains a key. `--set table.key=value` overrides a key for
one run, and `--set table.key=` removes it.

| file | used by | tables |
| --- | --- | --- |
| configuration | `train`, `plan`, `tune`, `audit`, … | `[data]`, `[task]`, `[algorithm]`, \
`[plan]`, `[privacy]`; optional: `[secure]`, `[facts]`, `[stopping]`, \
`[personal]`, `[tune]` |
| a server's plan | `server run`, `site check --offer` | `[schema]`, `[task]`, `[algorithm]`, \
`[plan]`, `[privacy]`, `[deploy]`; optional: `[evaluate]` |
| `federation.toml` | `provision` | only keys |
| `site.toml` | `site` | keys, `[data]` and `[policy]` |

`dpscaffold config show FILE.toml` spells a file out with every default. The page is generated from
the code by `python -m dpscaffold.config.reference`.
"""


@dataclass(frozen=True)
class Entry:
    """A key as the page shows it: once, with the places (sources, steps, algorithms) that have it
    under each default."""

    key: Key
    places: dict[str, list[str]]

    @property
    def everywhere(self) -> list[str]:
        """The places, whatever the default there."""
        return [place for places in self.places.values() for place in places if place]

    @property
    def default(self) -> str:
        """The default, or each with the places that have it."""
        if len(self.places) == 1:
            return next(iter(self.places))
        return ", ".join(f"{said} ({', '.join(of)})" for said, of in self.places.items())


def grouped(found: Iterable[Key]) -> dict[str, list[Entry]]:
    """Keys by table, each sense of a key once."""
    tables: dict[str, dict[tuple[str, ...], Entry]] = {}
    for key in found:
        same = (key.name, key.kind, key.about)
        entry = tables.setdefault(key.table, {}).setdefault(same, Entry(key, {}))
        entry.places.setdefault(_code(key.default), []).append(key.place)
    return {table: list(entries.values()) for table, entries in tables.items()}


def page(found: Sequence[Key]) -> str:
    """``docs/configuration.md``."""
    tables = grouped(found)
    lines = [HEAD]
    for table, title in TITLES.items():
        entries = tables[table]
        every = list(dict.fromkeys(place for one in entries for place in one.everywhere))
        named = every if table in SOURCED else []  # a step without keys would be missed
        head = ["key", "what it is", "value", "default", "example"]
        lines += [f"## {title}", "", _row(head), _row(["---"] * len(head))]
        lines += [_row(_cells(entry, named)) for entry in entries]
        lines.append("")
    return "\n".join(lines)


def _cells(entry: Entry, every: Sequence[str]) -> list[str]:
    key = entry.key
    which = _which(entry.everywhere, every)
    return [
        f"`{key.name.partition('.')[2]}`",
        key.about if which == "all" else f"{key.about} *({which})*",
        key.kind,
        entry.default,
        f"`{toml(key.example)}`",
    ]


def _which(places: Sequence[str], every: Sequence[str]) -> str:
    """Places in few words, among ``every`` where that is known.

    >>> _which(["a", "b", "c"], ["a", "b", "c", "d"]), _which(["d"], ["a", "b", "c", "d"])
    ('all but d', 'd')
    """
    missing = [place for place in every if place not in places]
    if not places or (every and not missing):
        return "all"
    if every and len(missing) < len(places) / 2:
        return f"all but {', '.join(missing)}"
    return ", ".join(places)


def _code(default: Any) -> str:
    return default if default in (NEEDED, OMITTED) else f"`{shown(default)}`"


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
