"""Values that differ only in how they are written: ``Köln`` and ``KÖLN``, ``1`` and ``true``.

Each counts as a value of its own, since nobody but the reader knows better. A site that is written
in two ways is two users, though, and a class in two ways halves what is learnt of it: so it is
said, and ``data.values`` makes them one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from dpscaffold.data.tables.spellings import written

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


#: Words for yes and for no, as forms in several languages have them.
_YES = "yes y ja j oui o si sí sì s sim tak t ano da kyllä jah evet true wahr vrai vero"
_NO = "no n nein non não nao nie ne nee nej nei ei hayır false falsch faux falso"
_ANSWERS = dict.fromkeys(_YES.split(), "yes") | dict.fromkeys(_NO.split(), "no")


def same_values(counts: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The values that seem to be one, by the most frequent of them: those that differ in capitals
    or blanks only, and yes and no in several languages.

    >>> same_values({"ja": 5, "nein": 7, "yes": 6, "No": 2, "maybe": 1})
    {'nein': ('No',), 'yes': ('ja',)}
    """
    groups: dict[str, list[str]] = {}
    for value in counts:
        groups.setdefault(_ANSWERS.get(_folded(value), _folded(value)), []).append(value)
    found = {}
    for group in groups.values():
        first = max(group, key=lambda value: counts[value])
        if len(group) > 1:
            found[first] = tuple(value for value in group if value != first)
    return dict(sorted(found.items()))


def typing_errors(counts: Mapping[str, int]) -> dict[str, str]:
    """The rare values that may be a frequent one with a typing error, and which one.

    >>> typing_errors({"yes": 90, "no": 80, "ys": 1, "grade 1": 50, "grade 2": 2})
    {'ys': 'yes'}
    """
    total = sum(counts.values())
    often = [value for value, count in counts.items() if count > max(5, total // 50)]
    rare = [value for value, count in counts.items() if 50 * count <= total and value.isalpha()]
    near = {value: get_close_matches(value, often, 1, cutoff=0.75) for value in rare}
    return {value: found[0] for value, found in near.items() if found}


def alike_values(name: str, values: Iterable[str], what: str) -> tuple[str, ...]:
    """A warning of a column whose values may be the same; ``what`` each of them is.

    >>> alike_values("ill", ["JA", "ja", "nein"], "class")[0][:61]
    "warning: column 'ill' holds 'JA' and 'ja': each is a class of"
    """
    groups = same_values(dict.fromkeys(values, 1))
    if not groups:
        return ()
    first, others = next(iter(groups.items()))
    shown = " and ".join(f"'{value}'" for value in (first, *others)[:3])
    more = f" (and {len(groups) - 1} more such)" if len(groups) > 1 else ""
    return (
        f"warning: column '{name}' holds {shown}{more}: each is a {what} of its own; if they are "
        f"one, add {written(name, groups)} to [data]",
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
