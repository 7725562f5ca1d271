"""How an ε, and the δ and σ_g next to it, are shown to people: rounded up, never down.

Messages, tables, figures, the live line and the statement all call these, so that no number that is
read is smaller than the number that was computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_CEILING, Decimal


def round_up(value: float | None, digits: int = 3) -> str:
    """A figure for reading, never smaller than it is.

    >>> round_up(0.86007), round_up(0.5), round_up(None)
    ('0.861', '0.500', 'none')
    """
    if value is None:
        return "none"
    if math.isinf(value):
        return "infinite"
    # Exactly, on the binary number as it is: scaling by 1000 in floating point may round down.
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING))


def digits_up(value: float, digits: int = 3) -> str:
    """A δ or a σ_g with few significant digits, never smaller than it is.

    A δ that is read smaller than it was promises too much, and noise that is copied smaller than
    it was solved gives a larger ε.

    >>> digits_up(1 / 1200), digits_up(1e-5), digits_up(9.8765432, 6), digits_up(60.0)
    ('0.000834', '1e-05', '9.87655', '60')
    """
    if not value or not math.isfinite(value):
        return f"{value:g}"
    exact = Decimal(repr(value))  # as it was written, so that 1e-5 stays what it is
    step = Decimal(1).scaleb(exact.adjusted() - digits + 1)
    return f"{float(exact.quantize(step, rounding=ROUND_CEILING)):.{digits}g}"


def percent(value: float) -> str:
    """A probability as a percentage, rounded up to a tenth (to a hundredth below 1 %).

    >>> percent(0.54211), percent(0.0020124)
    ('54.3 %', '0.21 %')
    """
    digits = 1 if value >= 0.01 else 2
    return f"{min(100.0, float(round_up(value * 100, digits))):.{digits}f} %"


def next_knot(count: int) -> int:
    """The next of few numbers, each a tenth above the one before; up to ten it is ``count``.

    >>> [next_knot(count) for count in (0, 10, 11, 99, 100)]
    [0, 10, 12, 107, 107]
    """
    if count <= 10:
        return count
    return math.ceil(1.1 ** math.ceil(math.log(count) / math.log(1.1) - 1e-9))


def largest_count(holds: Callable[[int], bool], most: int) -> int:
    """The largest n ≤ ``most`` for which ``holds(n)``, where all smaller ones hold too; 0 where not
    even 1 does. Found by doubling and halving, so large n are tried only where they may hold.

    >>> largest_count(lambda n: n <= 37, 400), largest_count(lambda n: n <= 37, 20)
    (37, 20)
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
