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


def _is_within(key: str, known: Iterable[str]) -> bool:
    """Whether a key is one of these, or lies within a table of this name."""
    return any(f"{key}.".startswith(f"{name}.") for name in known)


def refuse_unknown(changes: Sequence[str], tables: Callable[[], Mapping[str, Any]] = dict) -> None:
    """Refuse ``--set KEY=``, which leaves a key out, where the name is no key and does not stand in
    the ``tables`` (asked for where it matters): it would silently leave out nothing.

    >>> refuse_unknown(["privacy.noise=", "data.missing.age=", "plan.rounds=3"])
    """
    emptied = _emptied(changes)
    known = names() if emptied else []
    for text in emptied:
        key = text.strip()
        if not (_is_within(key, known) or _stands_in(tables(), key)):
            raise BadInput(
                "unknown-key",
                f"--set is '{text}=', which leaves out no key{nearest(key, known)}; name a "
                f"table.key, e.g. privacy.noise=",
            )


def _stands_in(tables: Mapping[str, Any], key: str) -> bool:
    """Whether tables hold a dotted key, such as a number of your own algorithm."""
    held: Any = tables
    for part in key.split("."):
        if not isinstance(held, Mapping) or part not in held:
            return False
        held = held[part]
    return True
