"""What games prove: lower bounds on ε at a stated confidence, from counted guesses alone.

For any event E and two neighbouring datasets, (ε, δ)-DP says P[E] ≤ e^ε·P'[E] + δ. So
ε ≥ log((p − δ)/p'), where p is a lower and p' an upper confidence limit (Clopper and Pearson 1934)
of how often E was seen. The event is chosen on other games than those it is counted on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.stats import beta, binom

from dpscaffold.privacy import TradeOff
from dpscaffold.privacy.loss import Array

#: The share of games that only choose the event.
CHOOSING = 1 / 3
#: At most this many thresholds are tried for a statistic.
THRESHOLDS = 400


@dataclass(frozen=True)
class Event:
    """ "This statistic lies above (or below) a threshold", counted for one of the two datasets."""

    statistic: int
    threshold: float
    above: bool
    inside: bool

    def of(self, inside: Array, outside: Array) -> tuple[int, int, int, int]:
        """How often it is seen where it speaks for the dataset, and where it does not: (hits,
        games, false alarms, games)."""
        first, second = (inside, outside) if self.inside else (outside, inside)
        counts = [int(self._seen(world[self.statistic]).sum()) for world in (first, second)]
        return counts[0], first.shape[1], counts[1], second.shape[1]

    def _seen(self, values: Array) -> Array:
        seen = values > self.threshold if self.above else values <= self.threshold
        return np.asarray(seen)


@dataclass(frozen=True)
class Proof:
    """What some games prove.

    ``epsilon`` is proved with probability at least ``confidence``: the chance that it exceeds the
    truth, or that ``curve_beaten`` is said of a curve that holds, is at most 1 − ``confidence``.
    ``hits`` and ``false_alarms`` are (limit, seen) of the event that ``epsilon`` rests on.
    """

    epsilon: float
    statistic: int
    hits: tuple[float, float]
    false_alarms: tuple[float, float]
    curve_beaten: bool
    games: int


def lower_limit(count: int, games: int, tail: float) -> float:
    """The probability that is not below the truth's lower limit: Clopper and Pearson, one-sided.

    >>> round(lower_limit(10, 100, 0.05), 4), lower_limit(0, 100, 0.05)
    (0.0553, 0.0)
    """
    return float(beta.ppf(tail, count, games - count + 1)) if count else 0.0


def upper_limit(count: int, games: int, tail: float) -> float:
    """The other side.

    >>> round(upper_limit(0, 100, 0.05), 4), upper_limit(100, 100, 0.05)
    (0.0295, 1.0)
    """
    return float(beta.ppf(1 - tail, count + 1, games - count)) if count < games else 1.0


def prove(
    inside: Array,
    outside: Array,
    delta: float,
    confidence: float,
    curve: TradeOff | None = None,
    for_curve: int = 0,
) -> Proof:
    """The ε that games prove, from statistics (S, n) of games on one dataset and on its neighbour.

    One event is chosen for ε and one against the claimed trade-off ``curve``, on the first third of
    the games; both are counted on the others, and share the chance of error. The last ``for_curve``
    statistics are looked at for the curve alone: ε rests on rare events, of which a statistic that
    was fitted to few games knows little.

    >>> rng = np.random.default_rng(0)
    >>> apart = prove(rng.normal(3, 1, (1, 3000)), rng.normal(0, 1, (1, 3000)), 1e-5, 0.95)
    >>> alike = prove(rng.normal(0, 1, (1, 3000)), rng.normal(0, 1, (1, 3000)), 1e-5, 0.95)
    >>> apart.epsilon > 3, alike.epsilon < 0.3
    (True, True)
    """
    cut = _cut(inside, outside)
    tail = (1 - confidence) / (2 if curve is None else 4)
    chosen = _choose(inside[:, :cut], outside[:, :cut], delta, curve, tail, for_curve)
    epsilon = 0.0
    beaten = False
    seen = []
    for event in chosen:
        hits, first, false, second = event.of(inside[:, cut:], outside[:, cut:])
        low, high = lower_limit(hits, first, tail), upper_limit(false, second, tail)
        seen.append(((low, hits / first), (high, false / second)))
        if curve is not None:
            beaten = beaten or low > float(curve.power(high))
    (low, rate), (high, false_rate) = seen[0]
    if low > delta:
        epsilon = max(0.0, math.log((low - delta) / high))
    return Proof(
        epsilon, chosen[0].statistic, (low, rate), (high, false_rate), beaten, inside.shape[1]
    )


def weighted(inside: Array, outside: Array) -> tuple[Array, Array]:
    """Numbers (F, n) of games as one number each, (n,): the weights best tell the first third of
    the games apart (Fisher's linear discriminant), which are those that choose the event.

    >>> rng = np.random.default_rng(0)
    >>> rounds = rng.normal(size=(2, 4, 3000)) * [[1.0], [9.0], [1.0], [1.0]]
    >>> best, _ = weighted(rounds[0] + 0.5, rounds[1])
    >>> bool(0.9 < best.mean() / best.std() / 0.5 / 3**0.5 < 1.2)
    True
    """
    cut = _cut(inside, outside)
    weights = _discriminant(inside[:, :cut], outside[:, :cut])
    return weights @ inside, weights @ outside


def _cut(inside: Array, outside: Array) -> int:
    """How many games choose the event."""
    return max(1, int(CHOOSING * min(inside.shape[1], outside.shape[1])))


def _discriminant(inside: Array, outside: Array) -> Array:
    """S⁻¹·(difference of means), (F,), S the covariance within, drawn to its diagonal where games
    are few."""
    centred = [world - world.mean(1, keepdims=True) for world in (inside, outside)]
    games = inside.shape[1] + outside.shape[1]
    within = (centred[0] @ centred[0].T + centred[1] @ centred[1].T) / games
    deviations = np.sqrt(np.diag(within))
    used = deviations > 1e-9 * max(deviations.max(initial=0.0), 1e-300)
    weights = np.zeros(len(inside))
    if not used.any():
        return weights
    scaled = within[np.ix_(used, used)] / np.outer(deviations[used], deviations[used])
    towards = min(1.0, used.sum() / games + 1e-6)
    scaled = (1 - towards) * scaled + towards * np.eye(int(used.sum()))
    apart = (inside.mean(1) - outside.mean(1))[used] / deviations[used]
    weights[used] = np.linalg.solve(scaled, apart) / deviations[used]
    return weights


def _thresholds(inside: Array, outside: Array) -> Array:
    """The values of a statistic, or quantiles of them where they are many."""
    both: Array = np.unique(np.concatenate([inside, outside]))
    if len(both) > THRESHOLDS:
        both = np.quantile(both, np.linspace(0.0, 1.0, THRESHOLDS + 2)[1:-1])
    return both


def _choose(
    inside: Array,
    outside: Array,
    delta: float,
    curve: TradeOff | None,
    tail: float,
    for_curve: int = 0,
) -> tuple[Event, ...]:
    """The event that promises the largest ε, and the one that stands out most from the curve."""
    best: tuple[float, Event] = (-math.inf, Event(0, 0.0, True, True))
    sharpest: tuple[float, Event] = (-math.inf, best[1])
    for statistic in range(len(inside)):
        both = _thresholds(inside[statistic], outside[statistic])
        for above, positive in product((True, False), repeat=2):
            first, second = (inside, outside) if positive else (outside, inside)
            rates = [_limits(w[statistic], both, above, tail) for w in (first, second)]
            low, high = rates[0][0], rates[1][1]
            gain = np.log(np.maximum(low - delta, 1e-300) / high)
            k = int(np.argmax(gain))
            if gain[k] > best[0] and statistic < len(inside) - for_curve:
                best = float(gain[k]), Event(statistic, float(both[k]), above, positive)
            if curve is None:
                continue
            excess = low - curve.power(high)
            k = int(np.argmax(excess))
            if excess[k] > sharpest[0]:
                sharpest = float(excess[k]), Event(statistic, float(both[k]), above, positive)
    return (best[1],) if curve is None else (best[1], sharpest[1])


def _limits(values: Array, thresholds: Array, above: bool, tail: float) -> tuple[Array, Array]:
    """Limits of how often values lie above (or not above) each threshold."""
    games = len(values)
    counts = np.searchsorted(np.sort(values), thresholds, side="right")
    counts = games - counts if above else counts
    low = np.where(counts > 0, beta.ppf(tail, np.maximum(counts, 1), games - counts + 1), 0.0)
    high = np.where(
        counts < games, beta.ppf(1 - tail, counts + 1, np.maximum(games - counts, 1)), 1.0
    )
    return low, high


def one_run_epsilon(
    canaries: int, guesses: int, right: int, delta: float, confidence: float
) -> float:
    """ε proved by one run into which ``canaries`` records were put or not, each by its own coin.

    Of these, ``guesses`` were guessed and ``right`` of the guesses were right. An (ε, δ)-DP run
    makes this many right guesses with probability at most p (Steinke, Nasr, Jagielski 2023, Theorem
    3.1), so every ε with p < 1 − ``confidence`` is refuted.

    >>> one_run_epsilon(100, 100, 50, 1e-5, 0.95), round(one_run_epsilon(100, 100, 90, 1e-5, 0.95))
    (0.0, 2)
    """
    if _chance(canaries, guesses, right, 0.0, delta) >= 1 - confidence:
        return 0.0
    low, high = 0.0, 1.0
    while high < 60 and _chance(canaries, guesses, right, high, delta) < 1 - confidence:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        refuted = _chance(canaries, guesses, right, middle, delta) < 1 - confidence
        low, high = (middle, high) if refuted else (low, middle)
    return low


def _chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How probable at least this many right guesses are, at most, under (ε, δ)-DP.

    With W ~ Binomial(r, e^ε/(1 + e^ε)): P[W ≥ v] + 2mδ·max_i P[v > W ≥ v − i]/i.
    """
    q = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, q))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
    worst = float(np.max(below / np.arange(1, len(below) + 1), initial=0.0))
    return min(1.0, tail + 2 * canaries * delta * worst)
