"""Values that differ only in how they are written: ``Köln`` and ``KÖLN``, ``1`` and ``true``.

Each counts as a value of its own, since nobody but the reader knows better. A site that is written
in two ways is two users, though, and a class in two ways halves what is learnt of it: so it is
said.
"""

from __future__ import annotations

from collections.abc import Iterable

_ONE = {"true": "1", "false": "0"}


def alike(values: Iterable[str]) -> list[tuple[str, ...]]:
    """The values that may be the same, together; values of their own are left out.

    >>> alike(["Köln", "KÖLN", "Bonn", "1", "true"])
    [('Köln', 'KÖLN'), ('1', 'true')]
    """
    groups: dict[str, list[str]] = {}
    for value in values:
        groups.setdefault(_folded(value), []).append(value)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _folded(value: str) -> str:
    text = " ".join(value.split()).casefold()
    text = _ONE.get(text, text)
    try:
        return f"{float(text):.17g}"
    except ValueError:
        return text


def alike_values(name: str, values: Iterable[str], what: str) -> tuple[str, ...]:
    """A warning of a column whose values may be the same; ``what`` each of them is.

    >>> alike_values("ill", ["JA", "ja", "nein"], "class")[0][:61]
    "warning: column 'ill' holds 'JA' and 'ja': each is a class of"
    """
    groups = alike(values)
    if not groups:
        return ()
    shown = " and ".join(f"'{value}'" for value in groups[0][:3])
    more = f" (and {len(groups) - 1} more such)" if len(groups) > 1 else ""
    return (
        f"warning: column '{name}' holds {shown}{more}: each is a {what} of its own; if they are "
        f"one, write them alike",
    )


def alike_users(name: str | None, users: Iterable[str]) -> tuple[str, ...]:
    """A warning of users who may be the same. It names none of them: that somebody took part may be
    what is hidden.

    >>> alike_users("site", ["Bonn", "BONN"])[0][:71]
    "warning: 2 names in column 'site' differ in capitals or blanks only: ea"
    """
    count = sum(len(group) for group in alike(users))
    if name is None or not count:
        return ()
    return (
        f"warning: {count} names in column '{name}' differ in capitals or blanks only: each is a "
        f"user of its own; if they are one, write them alike",
    )
