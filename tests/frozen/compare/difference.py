"""What a comparison finds, and the rule for numbers of a guarantee."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: How far below the old ε a new one may be, and how far above.
BELOW, ABOVE = 1e-9, 5e-4
#: What is no ε: counts, names and δ have no tolerance.
EXACT = ("delta", "participations", "allowed", "steps", "left", "spent", "rounds", "reserved_delta")


@dataclass(frozen=True)
class Difference:
    """One thing that was compared: its name, what both packages say, and what is wrong with that.

    ``why`` is empty where the two agree. Names begin with the kind of the comparison, such as
    ``mechanisms/017:poisson/server``, so that patterns can choose among them.
    """

    id: str
    old: Any
    new: Any
    why: str = ""


def fault(old: Any, new: Any) -> str:
    """What is wrong with a new ε next to the old one, or the empty string.

    A number may not fall, and may rise by 0.0005 (relative or absolute, whichever is more). What
    was refused stays refused.

    >>> fault(1.0, 1.0004), fault(1.0, 0.999999)
    ('', 'smaller than it was')
    """
    if _is_refusal(old) or _is_refusal(new):
        if _is_refusal(old) and _is_refusal(new):
            return ""
        return "was refused, and is not" if _is_refusal(old) else "is refused, and was not"
    if isinstance(old, list):
        if not isinstance(new, list) or len(new) != len(old):
            return "not as many numbers as there were"
        found = [fault(*pair) for pair in zip(old, new, strict=True)]
        return next((one for one in found if one), "")
    if new is None or old is None:
        return "" if new is old else "stated by one of the two only"
    if isinstance(old, bool) or not _is_number(old):
        return "" if old == new else "not the same"
    before, now = _of(old), _of(new)
    if now == before:
        return ""
    if not now >= before * (1 - BELOW):  # no number is no number that is large enough
        return "smaller than it was"
    return "" if now <= before + ABOVE * max(1.0, before) else "larger than it was"


def _is_refusal(value: Any) -> bool:
    return isinstance(value, Mapping) and "refused" in value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or value == "infinite"


def _of(value: Any) -> float:
    if value == "infinite":
        return math.inf
    return float(value) if _is_number(value) else math.nan


def differences(
    name: str, old: Mapping[str, Any], new: Mapping[str, Any], keys: list[str]
) -> Iterator[Difference]:
    """The two answers key by key; a refusal of the whole stands for all of them."""
    if "refused" in old or "refused" in new:
        yield Difference(name, _brief(old), _brief(new), fault(_brief(old), _brief(new)))
        return
    for key in keys:
        one, other = old.get(key), new.get(key)
        wrong = fault(one, other)
        if key in EXACT and not wrong and one != other:
            wrong = "not the same"
        yield Difference(f"{name}/{key}", one, other, wrong)


def _brief(said: Mapping[str, Any]) -> Any:
    """A refusal by its code alone; another answer as a number that stands for it."""
    return {"refused": said["refused"]} if "refused" in said else 0.0
