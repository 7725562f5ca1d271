"""How an ε is shown to people: rounded up, never down, by this one function.

Messages, tables, figures, the live line and the statement all call it, so that no number that is
read is smaller than the number that was computed.
"""

from __future__ import annotations

import math
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
