"""Laplace noise on the integers, exactly: no number is rounded, so no released integer could have
come from one dataset only (Canonne, Kamath, Steinke 2020, algorithms 1 and 2)."""

from __future__ import annotations

import secrets
from collections.abc import Callable

#: Draws an integer from 0 up to, and without, its argument.
Below = Callable[[int], int]


def discrete_laplace(scale: int, below: Below = secrets.randbelow) -> int:
    """An integer z with probability proportional to exp(−|z|/``scale``), from the operating system.

    Added to an integer that a change of the data moves by at most Δ, it makes an ε-DP release with
    ε = Δ/``scale``.

    Args:
        scale: t, an integer of 1 or more.
        below: What draws; another is for tests.

    >>> isinstance(discrete_laplace(5), int)
    True
    """
    while True:
        rest = below(scale)
        if not _happens(rest, scale, below):
            continue
        times = 0
        while _happens(1, 1, below):
            times += 1
        size, negative = rest + scale * times, below(2) == 1
        if size or not negative:  # zero counts once
            return -size if negative else size


def _happens(numerator: int, denominator: int, below: Below) -> bool:
    """Whether an event of probability exp(−numerator/denominator) happens; the ratio is at most
    1."""
    count = 1
    while below(denominator * count) < numerator:
        count += 1
    return count % 2 == 1
