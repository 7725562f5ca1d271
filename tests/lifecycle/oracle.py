"""What really left: every release of every run, and the exact ε of any set of them.

The oracle counts calls that make uploads, not lines that were written. All runs of the model use
every record in every step (s = 1), so one participation is K Gaussian queries with multiplier σ_g,
and ε has a closed form: K·n queries are one Gaussian with μ = √(K·n)/σ_g. Participants are drawn
with probability l, so over the draw δ(ε) is the mean of the closed form over the number of
participations. Nothing here uses the package's accounting.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scipy.stats import norm


@dataclass(frozen=True, eq=False)
class Release:
    """One participation of some users in one round, with fresh noise. Two are never equal.

    ``draw`` names who decided on the participants: rounds of the same draw have the same ones.
    """

    draw: object
    round: int
    users: tuple[int, ...]


@dataclass(frozen=True)
class Oracle:
    """Exact ε for runs of ``local_steps`` full-batch steps with multiplier ``noise``, in which a
    user is drawn with probability ``rate``."""

    noise: float
    local_steps: int
    rate: float

    def given_the_draw(self, releases: Iterable[Release], delta: float) -> float:
        """The largest ε of a user, given who took part."""
        counts = Counter(user for release in releases for user in release.users)
        most = max(counts.values(), default=0)
        return _solve(lambda epsilon: self._delta(epsilon, most), delta)

    def over_the_draw(self, releases: Iterable[Release], delta: float) -> float:
        """ε of one user over draws that nobody chose: every draw's rounds count if the user is
        drawn, as often as they were released."""
        times = Counter((release.draw, release.round) for release in releases)
        chances = {0: 1.0}
        for count in times.values():
            longer: dict[int, float] = defaultdict(float)
            for n, chance in chances.items():
                longer[n] += chance * (1 - self.rate)
                longer[n + count] += chance * self.rate
            chances = longer
        return _solve(
            lambda epsilon: sum(p * self._delta(epsilon, n) for n, p in chances.items()), delta
        )

    def _delta(self, epsilon: float, participations: int) -> float:
        """δ(ε) of a Gaussian with μ = √(K·n)/σ (Balle and Wang 2018)."""
        if participations == 0:
            return 0.0
        mu = math.sqrt(self.local_steps * participations) / self.noise
        above = float(norm.cdf(mu / 2 - epsilon / mu))
        return above - math.exp(epsilon + float(norm.logcdf(-mu / 2 - epsilon / mu)))


def _solve(delta_at: Callable[[float], float], delta: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) ≤ δ."""
    if delta_at(0.0) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_at(high) > delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_at(middle) > delta else (low, middle)
    return low
