"""The best of a random number of private trials: what whoever sees only the winner can learn.

A mechanism Q (a candidate drawn at random, trained and scored) is run J times and the best output
is released, by an order on outputs that is fixed beforehand. J is drawn independently of the data,
and neither J nor any other output is released. If J were a constant, the ε of the winner could grow
with it; a random J hides how many trials were lost (Liu and Talwar 2019; Papernot and Steinke
2022). docs/privacy-proofs.md has the conditions and the proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpscaffold.privacy.errors import PrivacyError

#: A privacy profile: ε → δ, at least the hockey-stick divergence of order e^ε in both directions.
Profile = Callable[[float], float]

#: The largest mean of the number of trials.
MOST = 1_000_000

#: Where ε̂ of the profile's bound is looked for.
GRID = tuple(float(x) for x in np.geomspace(1e-4, 30, 160))


class Uniform(Protocol):
    """What draws need: numbers in [0, 1)."""

    def random(self) -> float:
        """The next."""


@dataclass(frozen=True)
class TrialCount:
    """The law of J, the number of trials: geometric, P[J = j] = γ(1−γ)^{j−1} with γ = 1/E[J].

    >>> TrialCount(mean=10.0).gamma, round(TrialCount(10.0).probability(2), 12)
    (0.1, 0.09)
    >>> round(TrialCount(4.0).generating(1.0), 12)
    1.0
    """

    mean: float

    def __post_init__(self) -> None:
        if not 1 < self.mean <= MOST:
            raise PrivacyError(
                "out-of-range",
                f"the mean number of trials is {self.mean:g}; give a number above 1 and at most "
                f"{MOST:,}",
            )

    @property
    def gamma(self) -> float:
        """γ, the chance that a trial is the last."""
        return 1 / self.mean

    def probability(self, trials: int) -> float:
        """P[J = trials]."""
        return self.gamma * (1 - self.gamma) ** (trials - 1) if trials >= 1 else 0.0

    def generating(self, q: float) -> float:
        """E[q^J], q in [0, 1]."""
        return self.gamma * q / (1 - (1 - self.gamma) * q)

    def draw(self, stream: Uniform) -> int:
        """J, by inversion of its distribution function."""
        kept = 1.0 - stream.random()  # in (0, 1]
        return max(1, math.ceil(math.log(kept) / math.log1p(-self.gamma)))

    def __str__(self) -> str:
        return f"geometric with mean {self.mean:g}"


def selected_profile(
    stopping: TrialCount, profile: Profile, epsilon_of: Callable[[float], float], delta: float
) -> float:
    """ε of the winner at δ from Q's privacy profile.

    For every ε̂ with δ̂ = profile(ε̂): δ′(ε + 2·log(e^ε̂ + δ̂(1−γ)/γ)) ≤ E[J]·δ_Q(ε), so ε′ is
    ε_Q(δ/E[J]) plus the smallest such term (docs/privacy-proofs.md; Koskela, Redberg, Wang 2024).

    >>> pure = lambda epsilon: 0.0 if epsilon >= 0.5 else 1.0
    >>> round(selected_profile(TrialCount(5.0), pure, lambda delta: 0.5, 1e-6), 6)  # 3ε
    1.5
    """
    alone = epsilon_of(delta / stopping.mean)
    odds = (1 - stopping.gamma) / stopping.gamma

    def term(hat: float) -> float:
        return float(np.logaddexp(hat, math.log(odds * max(profile(hat), 1e-300))))

    return alone + 2 * min(term(hat) for hat in [*GRID, alone])


def largest_profile(profiles: Sequence[Profile]) -> Profile:
    """The profile of a mechanism that is one of several, by a coin that does not look at the data
    and may be seen: at most the largest of theirs."""

    def profile(epsilon: float) -> float:
        return max(one(epsilon) for one in profiles)

    return profile
