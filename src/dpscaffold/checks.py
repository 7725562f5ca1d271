"""Checks of single values, without torch: each gives the value back or a sentence that names it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

from dpscaffold.errors import BadInput


def floor_share(ratio: float, whole: int) -> int:
    """⌊ratio·whole⌋, forgiving the rounding of the product: 0.29 of 100 is 29, not 28.

    >>> floor_share(0.29, 100), floor_share(0.2, 4000), floor_share(0.5, 3)
    (29, 800, 1)
    """
    return math.floor(ratio * whole + 1e-9)


def least_ratio(whole_: int) -> float:
    """The smallest ratio of four decimals that selects one of ``whole_``."""
    return math.ceil(1e4 / whole_) / 1e4


def number(name: str, value: object) -> float:
    """``value`` as a finite float, or a refusal that names it."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise BadInput("not-a-number", f"{name} is {_shown(value)}; it must be a finite number")
    return float(value)


def _is_finite(value: float) -> bool:
    """Whether this is a finite float; an integer may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _shown(value: object, most: int = 40) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= most else f"{text[:most]}…"


def whole(name: str, value: object, least: int) -> int:
    """``value`` as an integer of at least ``least``, or a refusal that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadInput(
            "out-of-range" if type(value) is int else "not-a-whole-number",
            f"{name} is {value!r}; it must be a whole number, {least} or more",
        )
    return value


def instance(name: str, value: object, kind: type | tuple[type, ...], give: str) -> None:
    """Refuse a ``value`` of another type with a sentence that says what to ``give``."""
    if isinstance(value, kind):
        return
    called = getattr(value, "__name__", "")
    if isinstance(value, type):
        raise BadInput("wrong-type", f"{name} is the class {called} itself; give {give}")
    if callable(value) and str(called).isidentifier():
        raise BadInput("wrong-type", f"{name} is the function {called} itself; call it: {called}()")
    sort = "" if isinstance(value, str) else f" ({type(value).__name__})"
    raise BadInput("wrong-type", f"{name} is {_shown(value)}{sort}; give {give}")


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """``value`` as one of ``choices``, or a refusal that names it."""
    if value not in choices:
        raise BadInput("unknown-choice", f"{name} is {value!r}; choose one of {', '.join(choices)}")
    return str(value)


def at_least(name: str, value: object, least: float) -> float:
    """``value`` as a finite number of at least ``least``, or a refusal that names it."""
    if (found := number(name, value)) < least:
        what = "0 or positive" if least == 0 else f"{least:g} or more"
        raise BadInput("out-of-range", f"{name} is {value}; it must be {what}")
    return found


def above(name: str, value: object, bound: float) -> float:
    """``value`` as a finite number above ``bound``, or a refusal that names it."""
    if (found := number(name, value)) <= bound:
        what = "positive" if bound == 0 else f"above {bound:g}"
        raise BadInput("out-of-range", f"{name} is {value}; it must be {what}")
    return found


def fraction(name: str, value: object) -> float:
    """``value`` as a number in [0, 1), or a refusal that names it."""
    if not 0 <= (found := number(name, value)) < 1:
        raise BadInput("out-of-range", f"{name} is {value}; it must lie in [0, 1)")
    return found


class SampleSizes(TypedDict):
    """How many of the users take part in a round, and how many of its records each draws."""

    cohort_size: int
    batch_sizes: list[int]


def shares(sizes: Sequence[int], user_ratio: float, data_ratio: float) -> SampleSizes:
    """m = ⌊lM⌋ and b_i = ⌊sR_i⌋, where there is no plan to ask.

    >>> shares([50, 90], user_ratio=0.5, data_ratio=0.1)
    {'cohort_size': 1, 'batch_sizes': [5, 9]}
    """
    cohort_size = floor_share(user_ratio, len(sizes))
    if cohort_size < 1:
        raise BadInput(
            "no-participants", f"a user ratio of {user_ratio} selects none of {len(sizes)} users"
        )
    return SampleSizes(
        cohort_size=cohort_size, batch_sizes=[floor_share(data_ratio, size) for size in sizes]
    )
