"""Which values of a dial to try next, given those that were tried and the best of them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def near(ladder: Sequence[float], middle: float) -> list[float]:
    """The three rungs nearest to a step size, by their ratio."""
    return sorted(sorted(ladder, key=lambda rate: abs(math.log(rate / middle)))[:3])


def neighbours(tried: Sequence[float], best: float, values: Sequence[float]) -> list[float]:
    """The next of some values below and above the best one, where they are not tried yet.

    >>> neighbours([1.5], 1.5, [0.5, 1.0, 2.0]), neighbours([1.0, 1.5, 2.0], 1.5, [0.5, 1.0, 2.0])
    ([1.0, 2.0], [])
    >>> neighbours([1.0, 1.5, 2.0], 1.0, [0.5, 1.0, 2.0])
    [0.5]
    """
    return [value for value in _around(best, [*values, *tried]) if value not in tried]


def _around(best: float, values: Sequence[float]) -> tuple[float, float]:
    """The next values below and above the best one, or itself where there is none."""
    below = max((value for value in values if value < best), default=best)
    above = min((value for value in values if value > best), default=best)
    return below, above


def between(tried: Sequence[float], best: float, finer: Sequence[float]) -> list[float]:
    """The finer step sizes between the best of those tried and its neighbours.

    >>> between([0.1, 0.3, 1.0], 0.3, [0.05, 0.17, 0.5, 1.7])
    [0.17, 0.5]
    >>> between([0.1, 0.17, 0.3, 0.5, 1.0], 0.17, [0.05, 0.17, 0.5, 1.7])
    []
    """
    below, above = _around(best, tried)
    return [rate for rate in finer if below < rate < above and rate not in tried]


def rungs(
    tried: Sequence[float], best: float, ladder: Sequence[float], failed: bool = False
) -> list[float]:
    """The next step sizes on the side where the best one lies at the end, and those between it and
    its neighbours where a planned one was tried beyond a gap; below all where every one ``failed``,
    that is diverged. At the ladder's own end there is none.

    >>> rungs([0.1, 0.3], 0.3, [0.03, 0.1, 0.3, 1.0]), rungs([0.1, 0.3, 1.0], 0.3, [0.03, 3.0])
    ([1.0], [])
    >>> rungs([0.1, 0.3], 0.3, [0.03, 0.1, 0.3, 1.0], failed=True)
    [0.03]
    >>> rungs([0.1, 3.0], 3.0, [0.1, 0.3, 1.0, 3.0, 10.0])
    [1.0, 10.0]
    """
    if failed:
        below, _ = _around(min(tried), ladder)
        return [below] if below < min(tried) else []
    found = [rate for rate in _around(best, ladder) if rate not in (*tried, best)]
    return [rate for rate in found if not any(_within(other, rate, best) for other in tried)]


def _within(one: float, end: float, other: float) -> bool:
    return min(end, other) < one < max(end, other)


def at_end(tried: Sequence[float], best: float) -> bool:
    """Whether the best step size lies at an end of those tried.

    >>> at_end([0.1, 0.3, 1.0], 0.3), at_end([0.1, 0.3], 0.3)
    (False, True)
    """
    return best in (min(tried), max(tried))
