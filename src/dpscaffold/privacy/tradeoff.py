"""The trade-off function of a run: how well any test can tell two neighbouring datasets apart.

A test that sees a run's outputs and decides between two neighbours has a false-positive rate α and
a false-negative rate β. The trade-off function f(α) is the smallest β that any test can reach
(Dong, Roth, Su 2022), and 1 − f(α) the largest true-positive rate. A statement "(ε, δ)-DP" is one
lower bound on it, f_{ε,δ}(α) = max(0, 1 − δ − e^ε·α, e^{−ε}·(1 − δ − α)), and a loss distribution
makes one such statement for every ε ≥ 0; together they are f = sup_ε f_{ε,δ(ε)} (their section 2.3,
"a primal–dual connection").

**Which side is safe.** A smaller f grants the adversary more. Here f is the largest of finitely
many f_{ε_j,δ_j}: a convex, piecewise-linear function that is symmetric and *never above* the true
one, because every δ_j is at or above the true δ(ε_j) (a pessimistic law, its mass at infinity
included, rounded up) and leaving statements out only lowers a supremum. What is computed from it
(true-positive rates, accuracy, the ε of a group) is therefore never below the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from dpscaffold.privacy.loss import EPS, Array, Loss

#: How many statements (ε_j, δ_j) make up f. Between two of them, h apart, f loses about h²·α/8.
STATEMENTS = 4096
#: Beyond this ε, e^ε overflows; f then rests on the statements below it, which is safe.
LARGEST_EPSILON = 690.0
#: How far above its supremum an answer may lie.
PRECISION = 2e-5
#: A few units in the last place, added upwards wherever a line is evaluated.
ROUNDING = 8 * EPS


@dataclass(frozen=True)
class TradeOff:
    """f as the largest of f_{ε_j,δ_j}; ``epsilons`` and ``deltas`` are (n,), ε_0 = 0 and ascending.

    >>> from dpscaffold.privacy.loss import step_losses
    >>> gaussian = TradeOff.of(step_losses(1.0, 1.0, "fixed"))  # μ = 1: f(α) = Φ(Φ⁻¹(1−α) − 1)
    >>> round(1 - float(gaussian.power(0.05)), 4), round(gaussian.advantage(), 4)
    (0.7405, 0.3829)
    >>> round(gaussian.advantage(group=3), 4)  # that of 3·μ, not of √3·μ
    0.8664
    """

    epsilons: Array
    deltas: Array

    @classmethod
    def of(cls, laws: Sequence[Loss], statements: int = STATEMENTS) -> TradeOff:
        """From the loss distributions of a mechanism, both directions of its neighbouring pairs.

        Neighbours are neighbours in either order, so δ(ε) is the largest over the laws, and each
        statement holds with the two datasets exchanged: this gives the lines of slope −e^{−ε}.
        """
        reach = min(max(_reach(law) for law in laws), LARGEST_EPSILON)
        epsilons = np.linspace(0.0, reach, statements) if reach > 0 else np.zeros(1)
        deltas = np.max([law.deltas(epsilons) for law in laws], axis=0)
        return cls(epsilons, np.minimum(deltas, 1.0))

    @cached_property
    def _lines(self) -> tuple[Array, Array, Array]:
        """Slopes (falling) and intercepts of the lines above 1 − f, and where each hands over; the
        first and the last line are there twice, so that every line has two neighbours."""
        slopes = np.exp(self.epsilons)
        mirrored = 1.0 - (1.0 - self.deltas) / slopes
        slope = np.concatenate([slopes[::-1], 1.0 / slopes])
        start = np.concatenate([self.deltas[::-1], mirrored + ROUNDING])
        with np.errstate(divide="ignore", invalid="ignore"):
            knots = np.diff(start) / -np.diff(slope)
        knots = np.maximum.accumulate(np.nan_to_num(knots, nan=0.0, posinf=1.0, neginf=0.0))
        return np.pad(slope, 1, "edge"), np.pad(start, 1, "edge"), knots

    def power(self, false_positives: Array | float, group: int = 1) -> Array:
        """1 − f(α): the largest true-positive rate of any test at false-positive rate α.

        For a ``group`` of k records it is (1 − f)^{∘k}, 1 − f applied k times: step by step from
        one dataset to the other, a test with rate α on the first has at most rate (1 − f)(α) on the
        second, and so on (Dong, Roth, Su 2022, section 2.4).
        """
        rate = np.asarray(false_positives, dtype=np.float64)
        slope, start, knots = self._lines
        for _ in range(group):
            place = np.searchsorted(knots, rate)
            # Every line is a bound; the two next to the one found make up for rounded knots.
            near = [start[line] + slope[line] * rate for line in (place, place + 1, place + 2)]
            best = np.min(near, axis=0) * (1 + ROUNDING)
            rate = np.maximum(np.minimum(best, 1.0), rate)
        return rate

    def advantage(self, group: int = 1) -> float:
        """sup_α (1 − f(α) − α): the total variation distance, a test's best TPR − FPR.

        At even odds the best test is right with probability 1/2 + advantage/2.
        """
        if group == 1:
            return float(self.deltas[0])

        detected = partial(self.power, group=group)
        return min(1.0, _supremum(detected, np.linspace(0.0, 1.0, 257)))

    def epsilon(self, delta: float, group: int = 1) -> float:
        """The smallest ε ≥ 0 for which a group of k records is (ε, δ)-DP, as far as f tells.

        δ_k(ε) = sup_α (1 − f_k(α) − e^ε·α) ≤ δ asks for ε ≥ log((1 − f_k(α) − δ)/α) at every α.
        Infinite where the mass at infinity, carried through the group, exceeds δ.
        """
        tiniest = math.log(1e-300)
        if float(self.power(math.exp(tiniest), group)) > delta:
            return math.inf

        def needed(logarithm: Array) -> Array:
            excess = self.power(np.exp(logarithm), group) - delta
            with np.errstate(divide="ignore"):
                return np.log(np.maximum(excess, 0.0))

        return max(0.0, _supremum(needed, np.linspace(tiniest, 0.0, 257)))


def _reach(law: Loss) -> float:
    """The largest loss that still matters: above it lies no more mass than at infinity."""
    above = np.cumsum(law.probs[::-1])[::-1]
    heavy = np.flatnonzero(above > max(law.infinite, 1e-18))
    return float(law.losses[heavy[-1]]) if len(heavy) else 0.0


def _supremum(value: Callable[[Array], Array], edges: Array) -> float:
    """The supremum of value(x) − x over a range, never below it and PRECISION above at most.

    ``value`` does not fall, so value(high) − low bounds it on [low, high]. Intervals that may hold
    more than the best value seen are divided, until none is left.
    """
    parts, best = edges[None, :], -math.inf
    while parts.size:
        values = value(parts)
        best = max(best, float(np.max(values - parts)))
        undecided = values[:, 1:] - parts[:, :-1] > best + PRECISION
        low, high = parts[:, :-1][undecided], parts[:, 1:][undecided]
        parts = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, 9)
    return best + PRECISION
