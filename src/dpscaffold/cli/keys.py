"""The keys of a configuration for explanation, read without loading PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
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


#: ``--set`` of the commands that read a configuration.
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Override a key, for example plan.rounds=100. Can be repeated.",
    ),
]


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
