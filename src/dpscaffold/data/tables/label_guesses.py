"""What a label seems to be, for whoever checks a draft: classes with their counts, or a number with
a range."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpscaffold.data.tables.alike import same_values
from dpscaffold.data.tables.cell_kinds import numbers_in
from dpscaffold.data.tables.labels import by_value
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Target

#: A label that holds numbers with more values than this is taken for a number, not for classes.
MOST_CLASSES = 20


def target_in(path: Path, counts: Mapping[str, Counter[str]]) -> Target:
    """What label columns hold, by how many rows hold each value. A label with one value is
    refused."""
    if len(counts) > 1:
        return Target("labels", tuple(counts))
    ((name, found),) = counts.items()
    numbers = numbers_in(list(found.elements()))
    others = {other for group in same_values(found).values() for other in group}
    classes = [value for value in found if value not in others]
    if len(classes) < 2:
        held = f"holds a single value, '{classes[0]}'" if classes else "is empty"
        raise BadInput(
            f"{path}: the label column '{name}' {held}, so there is nothing to learn; name another "
            f"with --label COLUMN"
        )
    if numbers is None or not is_measured(numbers):
        return Target("class", tuple(sorted(classes, key=by_value)))
    low, high = rounded_range(numbers)
    return Target("number", low=low, high=high)


def described_label(counts: Counter[str], target: Target) -> str:
    """The values of a label and how many rows hold each, or the range that was guessed."""
    if target.kind == "number":
        return (
            f"a number: its range, low = {target.low:.12g} and high = {target.high:.12g}, was "
            f"guessed from the data, so write what it can be"
        )
    shown = [f"'{value}' ({count} rows)" for value, count in counts.most_common(MOST_CLASSES)]
    more = f" and {len(counts) - len(shown)} more" if len(counts) > len(shown) else ""
    return f"{len(counts)} values: {', '.join(shown)}{more}"


def is_measured(numbers: np.ndarray) -> bool:
    """Whether numbers are a measurement rather than the numbers of classes: fractions, or many
    different values.

    >>> [is_measured(np.array(one)) for one in ([0, 1, 1], [0.5, 1], range(30))]
    [False, True, True]
    """
    return bool((numbers != np.floor(numbers)).any()) or len(np.unique(numbers)) > MOST_CLASSES


def rounded_range(numbers: np.ndarray) -> tuple[float, float]:
    """A range of round numbers that holds these, from 0 where that is near. Where a few lie far
    outside, it holds 99 % of them.

    >>> rounded_range(np.array([9.0, 31.0, 58.0])), rounded_range(np.array([320.0, 485.0, 626.0]))
    ((0.0, 60.0), (300.0, 650.0))
    """
    low, high = float(numbers.min()), float(numbers.max())
    inner = np.quantile(numbers, [0.005, 0.995])
    if high - low > 3 * (inner[1] - inner[0]) > 0:
        low, high = float(inner[0]), float(inner[1])
    if 0 < low < high / 3:
        low = 0.0
    step = _round_step((high - low) / 5 or abs(high) or 1.0)
    low, high = step * math.floor(low / step), step * math.ceil(high / step)
    return _clean(low), _clean(high if high > low else low + step)


def _round_step(width: float) -> float:
    """1, 2 or 5 times a power of ten: the largest that is at most this wide."""
    power = 10.0 ** math.floor(math.log10(width))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= width * (1 + 1e-9))


def _clean(value: float) -> float:
    """A multiple of a round step without the last digits of its arithmetic."""
    return float(f"{value:.12g}")
