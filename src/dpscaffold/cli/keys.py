"""The keys of a configuration for completion and explanation, read without loading PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Annotated, Any

import typer

from dpscaffold.errors import BadInput, nearest


@cache
def known_keys() -> tuple[dict[str, Any], ...]:
    """The reference, one entry per key and source, step or algorithm that has it."""
    from dpscaffold.config.reference.keys import keys

    return tuple(asdict(key) for key in keys())


#: Tables whose keys ``--set`` changes in a run; the others stand in files of their own.
SETTABLE = ("data", "task", "algorithm", "plan", "privacy", "stopping", "facts", "personal", "tune")
#: Tables whose keys ``--set`` changes in a server's plan.
SERVED = ("schema", "task", "algorithm", "plan", "privacy", "deploy", "evaluate")


def names(tables: Sequence[str] = SETTABLE) -> list[str]:
    """The dotted names of the keys of these tables, each once.

    >>> "plan.rounds" in names(), names(["plan"])[0]
    (True, 'plan.rounds')
    """
    found = (key["name"] for key in known_keys())
    return list(dict.fromkeys(name for name in found if name.partition(".")[0] in tables))


def every_name() -> list[str]:
    """The dotted names of all keys, of the files of a deployment too."""
    return list(dict.fromkeys(key["name"] for key in known_keys()))


def complete_setting(incomplete: str) -> list[str]:
    """For ``--set``: keys with their sign, then the values that a key chooses among.

    >>> complete_setting("plan.weigh"), complete_setting("plan.weighting=r")
    (['plan.weighting='], ['plan.weighting=records'])
    """
    return _setting(incomplete, SETTABLE)


#: ``--set`` of the commands that read a configuration.
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a key, for example plan.rounds=100. Can be repeated.",
        autocompletion=complete_setting,
    ),
]


def complete_served(incomplete: str) -> list[str]:
    """For ``server run --set``.

    >>> complete_served("deploy.reh")
    ['deploy.rehearsal=']
    """
    return _setting(incomplete, SERVED)


def _setting(incomplete: str, tables: Sequence[str]) -> list[str]:
    name, sign, begun = incomplete.partition("=")
    if not sign:
        return [f"{key}=" for key in names(tables) if key.startswith(incomplete)]
    values = [value for value in _choices(name) if value.startswith(begun)]
    return [f"{name}={value}" for value in values]


def _emptied(changes: Iterable[str]) -> list[str]:
    """The keys of ``table.key=`` changes, which have no value."""
    parts = [change.partition("=") for change in changes]
    return [key for key, sign, value in parts if sign and not value.strip()]


def _first_parts(known: Iterable[str]) -> list[str]:
    """The top-level tables of keys, in order."""
    return list(dict.fromkeys(name.partition(".")[0] for name in known))


def _is_within(key: str, known: Iterable[str]) -> bool:
    """Whether a key is one of these, or lies within a table of this name."""
    return any(f"{key}.".startswith(f"{name}.") for name in known)


def unset_keys(
    asked: Sequence[str] | None,
    changes: Sequence[str] | None = None,
    tables: Callable[[], Mapping[str, Any]] = dict,
) -> list[str]:
    """The keys to leave out. A name that is no key, nor stands in the ``tables`` (asked for where
    it matters), would silently leave out nothing, and is refused, among ``--set`` changes without a
    value too.

    >>> unset_keys(["privacy", "privacy.noise", "data.missing.age"])
    ['privacy', 'privacy.noise', 'data.missing.age']
    """
    asked = list(asked or ())
    named = [("--unset", key) for key in asked]
    named += [("--set", key) for key in _emptied(changes or ())]
    known = names() if named else []
    first = _first_parts(known)
    for option, text in named:
        key = text.strip()
        if not (key in first or _is_within(key, known) or _stands_in(tables(), key)):
            raise BadInput(
                "unknown-key",
                f"{option} is {text!r}, which leaves out no key{nearest(key, [*first, *known])}; "
                f"name a table or table.key, e.g. privacy.noise",
            )
    return asked


def _stands_in(tables: Mapping[str, Any], key: str) -> bool:
    """Whether tables hold a dotted key, such as a number of your own algorithm."""
    held: Any = tables
    for part in key.split("."):
        if not isinstance(held, Mapping) or part not in held:
            return False
        held = held[part]
    return True


def complete_unset(incomplete: str) -> list[str]:
    """For ``--unset``: keys and whole tables."""
    tables = dict.fromkeys(name.partition(".")[0] for name in names())
    return [name for name in (*tables, *names()) if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """For ``config explain``."""
    return [name for name in every_name() if name.startswith(incomplete)]


def complete_source(incomplete: str) -> list[str]:
    """The sources of ``[data]``."""
    return [source for source in _choices("data.source") if source.startswith(incomplete)]


def complete_dataset(incomplete: str) -> list[str]:
    """The datasets that can be downloaded."""
    from dpscaffold.data.sources.catalogue import CATALOGUE

    return [name for name in CATALOGUE if name.startswith(incomplete)]


def complete_algorithm(incomplete: str) -> list[str]:
    """The algorithms by name."""
    from dpscaffold.algorithms import ALGORITHMS

    return [name for name in ALGORITHMS if name.startswith(incomplete)]


def complete_experiment(incomplete: str) -> list[str]:
    """The paper's experiments, which are files."""
    folder = files("dpscaffold.paper").joinpath("definitions")
    found = sorted(file.name.removesuffix(".toml") for file in folder.iterdir())
    return [name for name in (*found, "all") if name.startswith(incomplete)]


def _choices(name: str) -> list[str]:
    if name == "algorithm.name":
        return complete_algorithm("")
    kinds = [key["kind"] for key in known_keys() if key["name"] == name]
    if not kinds:
        return []
    if kinds[0].startswith("true or false"):
        return ["true", "false"]
    quoted = str(kinds[0]).split("'")
    return quoted[1::2]
