"""The best of a random number of private trials: what whoever sees only the winner can learn.

A mechanism Q (a candidate drawn at random, trained and scored) is run J times and the best output
is released, by an order on outputs that is fixed beforehand. J is drawn independently of the data,
and neither J nor any other output is released. If J were a constant, the ε of the winner could grow
with it; a random J hides how many trials were lost (Liu and Talwar 2019; Papernot and Steinke
2022). docs/privacy-proofs.md has the conditions and the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Protocol

import numpy as np

from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.loss import Array

#: A privacy profile: ε → δ, at least the hockey-stick divergence of order e^ε in both directions.
Profile = Callable[[float], float]

#: The largest mean and bound of the number of trials, which are drawn, and added up, one by one.
MOST = 1_000_000

#: Where ε̂ of the profile's bound is looked for.
GRID = tuple(float(x) for x in np.geomspace(1e-4, 30, 160))


class Uniform(Protocol):
    """What draws need: numbers in [0, 1)."""

    def random(self) -> float:
        """The next."""


@dataclass(frozen=True)
class TrialCount:
    """The law of J, the number of trials: truncated negative binomial of shape η and mean E[J].

    P[J = j] = (1−γ)^j / (γ^{−η} − 1) · Π_{i<j} (i + η)/(i + 1) for j ≥ 1, with γ in (0, 1) solved
    for the mean; η = 1 is the geometric law γ(1−γ)^{j−1}, η = 0 the logarithmic one, and η = ∞
    represents Poisson, which may also be 0. With ``most`` = N it is this law given J ≤ N (drawn
    again while it is above), whose mean is below ``mean``.

    >>> TrialCount(mean=10.0).gamma, round(TrialCount(10.0).probability(1), 12)
    (0.1, 0.1)
    >>> round(TrialCount(10.0, most=20).expected, 3)
    7.232
    >>> round(TrialCount(4.0, shape=0.5).generating(1.0), 12)
    1.0
    >>> TrialCount(4.0, math.inf).generating(1.0)
    1.0
    """

    mean: float
    shape: float = 1.0
    most: int | None = None

    def __post_init__(self) -> None:
        if not self.shape > -1 or math.isnan(self.shape):
            raise PrivacyError(
                "out-of-range",
                f"the shape of the number of trials is {self.shape}; give a number above -1 (1: "
                f"geometric, 0: logarithmic), or the Poisson law",
            )
        least = 0 if self.poisson else 1
        if not least < self.mean <= MOST:
            raise PrivacyError(
                "out-of-range",
                f"the mean number of trials is {self.mean:g}; give a number above {least} and at "
                f"most {MOST:,}",
            )
        if self.most is not None and (self.most < 1 or self.most > MOST):
            raise PrivacyError(
                "out-of-range",
                f"the most trials are {self.most}; give a whole number from 1 to {MOST:,}, or none",
            )
        self._reachable()

    def _reachable(self) -> None:
        """Refuse laws that drawing cannot follow: their first chance vanishes in float64."""
        start = -self.mean if self.poisson else -self.shape * -math.log(self.gamma)
        if start < -600:
            raise PrivacyError(
                "out-of-range",
                f"the mean number of trials is {self.mean:g}, which is too large to draw from a "
                f"law as narrow as this; give a smaller mean, or shape 1",
            )
        if self.within < 1e-3:
            raise PrivacyError(
                "out-of-range",
                f"the most trials are {self.most}, which a law of mean {self.mean:g} keeps once in "
                f"more than 1,000 draws; raise it, or lower the mean",
            )

    @property
    def poisson(self) -> bool:
        """Whether J is Poisson."""
        return math.isinf(self.shape)

    @cached_property
    def gamma(self) -> float:
        """γ, of which the mean is E[J] = η(1−γ)/(γ(1−γ^η)), or (1/γ − 1)/log(1/γ) where η = 0."""
        if self.shape == 1:
            return 1 / self.mean
        low, high = -690.0, -1e-12  # log γ; the mean falls as γ rises
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) > self.mean else (low, middle)
        return math.exp((low + high) / 2)

    def _mean(self, log: float) -> float:
        odds = math.expm1(-log)  # (1−γ)/γ
        if self.shape == 0:
            return odds / -log
        # η/(1 − γ^η) with γ^η = e^{η·log γ}; both signs of η are fine
        return odds * self.shape / -math.expm1(max(-690.0, min(690.0, self.shape * log)))

    def probability(self, trials: int) -> float:
        """P[J = trials]."""
        if self.most is not None:
            return float(self._up_to[trials]) if 0 <= trials <= self.most else 0.0
        if self.poisson:
            logs = trials * math.log(self.mean) - self.mean - math.lgamma(trials + 1)
            return math.exp(logs)
        if trials < 1:
            return 0.0
        value = self._first
        for i in range(1, trials):
            value *= (1 - self.gamma) * (i + self.shape) / (i + 1)
        return value

    @cached_property
    def _up_to(self) -> Array:
        """P[J = j] for j = 0, …, N of the bounded law."""
        assert self.most is not None
        chances = np.fromiter(self._chances(), float, self.most + 1)
        return np.asarray(chances / chances.sum())

    @cached_property
    def within(self) -> float:
        """P[J ≤ N] of the law without its bound; 1 where there is none."""
        if self.most is None:
            return 1.0
        return min(1.0, float(np.fromiter(self._chances(), float, self.most + 1).sum()))

    @cached_property
    def expected(self) -> float:
        """E[J]: the mean, or what the bound leaves of it."""
        if self.most is None:
            return self.mean
        return min(self.mean, float(self._up_to @ np.arange(self.most + 1)))

    def _chances(self) -> Iterator[float]:
        """P[J = 0], P[J = 1], … of the law without its bound."""
        value = math.exp(-self.mean) if self.poisson else 0.0
        yield value
        for trials in count(1):
            if self.poisson:
                value *= self.mean / trials
            elif trials == 1:
                value = self._first
            else:
                value *= (1 - self.gamma) * (trials - 1 + self.shape) / trials
            yield value

    @property
    def _first(self) -> float:
        """P[J = 1] = (1−γ)·η/(γ^{−η} − 1)."""
        log = math.log(self.gamma)
        if self.shape == 0:
            return (1 - self.gamma) / -log
        return (1 - self.gamma) * self.shape / math.expm1(-self.shape * log)

    def generating(self, q: float) -> float:
        """E[q^J], q in [0, 1]."""
        if self.most is not None:
            return float(self._up_to @ q ** np.arange(self.most + 1))
        if self.poisson:
            return math.exp(self.mean * (q - 1))
        left = -math.log1p(-(1 - self.gamma) * q)  # −log(1 − (1−γ)q)
        whole = -math.log(self.gamma)
        if self.shape == 0:
            return left / whole
        return math.expm1(self.shape * left) / math.expm1(self.shape * whole)

    def draw(self, stream: Uniform) -> int:
        """J, by inversion of its distribution function."""
        point, reached = self.within * stream.random(), 0.0
        for trials, chance in enumerate(self._chances()):
            reached += chance
            if trials == self.most or reached > point or (chance == 0 and trials > self.mean):
                break
        return trials

    def __str__(self) -> str:
        bound = "" if self.most is None else f", given that it is at most {self.most}"
        if self.poisson:
            return f"Poisson with mean {self.mean:g}{bound}"
        if self.shape == 1:
            return f"geometric with mean {self.mean:g}{bound}"
        return f"truncated negative binomial of shape {self.shape:g} with mean {self.mean:g}{bound}"


def selected_renyi(
    stopping: TrialCount, orders: Array, curve: Array, profile: Profile | None = None
) -> Array:
    """ε′(λ) of the winner at every order λ > 1 of Q's Rényi curve ε(λ) (Papernot, Steinke 2022).

    Theorem 2, negative binomial: ε′(λ) = ε(λ) + (1+η)(1 − 1/λ̂)ε(λ̂) + (1+η)·log(1/γ)/λ̂
    + log E[J]/(λ−1), the best over orders λ̂. Theorem 6, Poisson with mean μ, the outcome of no
    trial at all counted too: e^{(λ−1)ε′(λ)} = e^{−μ} + μ·e^{(λ−1)(ε(λ) + μδ̂)}, where Q is
    (log(1 + 1/(λ−1)), δ̂)-DP, which ``profile`` says. A bound on J (``most``) is covered: E[J] is
    that of the bounded law, and Poisson chances are divided by P[J ≤ N] (docs/privacy-proofs.md).

    >>> orders = np.array([2.0, 8.0, 64.0])
    >>> selected_renyi(TrialCount(5.0), orders, 0.01 * orders).round(3).tolist()
    [2.172, 0.852, 1.208]
    """
    mean, below = stopping.mean, orders - 1
    if stopping.poisson:
        if profile is None:
            raise PrivacyError(
                "bound-not-applicable", "a Poisson number of trials needs the profile of one trial"
            )
        deltas = np.array([profile(math.log1p(1 / one)) for one in below])
        some = math.log(mean) + below * (curve + mean * deltas)
        return np.asarray((np.logaddexp(-mean, some) - math.log(stopping.within)) / below)
    hats = (1 - 1 / orders) * curve + math.log(1 / stopping.gamma) / orders
    least = (1 + stopping.shape) * float(np.nanmin(hats))
    return np.asarray(curve + least + math.log(stopping.expected) / below)


def selected_profile(
    stopping: TrialCount, profile: Profile, epsilon_of: Callable[[float], float], delta: float
) -> float:
    """ε of the winner at δ from Q's privacy profile, for negative binomial J.

    For every ε̂ with δ̂ = profile(ε̂): δ′(ε + (1+η)·log(e^ε̂ + δ̂(1−γ)/γ)) ≤ E[J]·δ_Q(ε), so ε′ is
    ε_Q(δ/E[J]) plus the smallest such term (docs/privacy-proofs.md; Koskela, Redberg, Wang 2024).
    A bound on J only lowers E[J].

    >>> pure = lambda epsilon: 0.0 if epsilon >= 0.5 else 1.0
    >>> round(selected_profile(TrialCount(5.0), pure, lambda delta: 0.5, 1e-6), 6)  # 3ε
    1.5
    """
    if stopping.poisson:
        raise PrivacyError(
            "bound-not-applicable",
            "the profile's bound is proved for negative binomial numbers of trials",
        )
    alone = epsilon_of(delta / stopping.expected)
    odds = (1 - stopping.gamma) / stopping.gamma

    def term(hat: float) -> float:
        return float(np.logaddexp(hat, math.log(odds * max(profile(hat), 1e-300))))

    hats = [*GRID, alone]
    return alone + (1 + stopping.shape) * min(term(hat) for hat in hats)


def largest_profile(profiles: Sequence[Profile]) -> Profile:
    """The profile of a mechanism that is one of several, by a coin that does not look at the data
    and may be seen: at most the largest of theirs."""

    def profile(epsilon: float) -> float:
        return max(one(epsilon) for one in profiles)

    return profile
