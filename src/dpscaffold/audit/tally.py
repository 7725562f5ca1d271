"""What the server has seen of every user, and what it computes from it.

All numbers are lengths along the canary's direction, in units of one canary in one step's sum. The
other records of a user are known, so what is left of an upload without them is noise, plus the
canary where it is there and was drawn.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import logsumexp
from scipy.stats import binom

from dpscaffold.audit.subject import AuditSubject
from dpscaffold.audit.watching import UploadProjections
from dpscaffold.privacy.loss import Array

#: Of how many participations each upload is looked at by itself.
LOOKED = 32


class UploadTally:
    """The uploads of a game's users, added up and one by one."""

    def __init__(self, subject: AuditSubject, users: int, remembered: set[str]) -> None:
        self.subject, self.steps = subject, subject.run.local_steps
        whole = subject.run.unit == "user"
        self.unit = float(subject.pair.moved.norm()) / (1 if whole else subject.pair.batch)
        self.rate = 1.0 if whole else subject.pair.batch / subject.pair.records
        self.spread = subject.privacy.scale(subject.privacy.clip, subject.pair.batch) / self.unit
        self.times = np.zeros(users, dtype=np.int64)
        self.memory = {name: np.zeros(users) for name in remembered}
        #: Δy with the memory added back, and control variates, less what is known.
        self.sums = np.zeros((2, users))
        self.once = np.zeros(users)
        self.across = np.zeros(users)
        self.broken = np.zeros(users)
        #: Δy and the change of memory, (2, L, users); NaN where a user did not take part so often.
        self.looked = np.full((2, min(LOOKED, subject.run.rounds), users), np.nan)

    def enter(self, seen: UploadProjections, known: float) -> None:
        """A round's uploads. A step's sum without the canary is ``known``; what a user remembers
        follows from what it uploaded before."""
        users, step = seen.users, self.subject.plan.step_size
        broken = ~np.isfinite(seen.move + seen.rest)
        move = -np.nan_to_num(seen.move, posinf=0.0, neginf=0.0) / (step * self.unit)
        held = sum((value[users] for value in self.memory.values()), np.zeros(len(users)))
        control, changed = np.zeros(len(users)), np.zeros(len(users))
        for name, value in seen.totals.items():
            total = np.nan_to_num(value, posinf=0.0, neginf=0.0) * self.steps / self.unit
            changed += total
            if name in self.memory:
                self.memory[name][users] += total
                control += self.memory[name][users]
            else:
                control += total
        rest = np.nan_to_num(seen.rest, posinf=0.0) / (step * self.unit)
        self.across[users] += rest
        self.broken[users] += broken
        left = np.stack([move + held, control]) - known * self.steps
        now = self.times[users]
        early = now < self.looked.shape[1]
        self.looked[:, now[early], users[early]] = np.stack([move, changed])[:, early]
        self.sums[:, users] += left
        self.once[users] += self._with_one_batch(left[0])
        self.times[users] += 1

    def _with_one_batch(self, left: Array) -> Array:
        """The likelihood ratio of one participation if a round has one batch for all its steps:
        the canary is in all K or in none."""
        drawn, variance = np.array([0.0, 1.0]), self.steps * self.spread**2
        once = binom.logpmf(drawn, 1, self.rate)
        return likelihood_ratio(left, drawn * self.steps, once, variance)

    def statistics(self) -> list[Array]:
        """What :data:`~dpscaffold.audit.game.STATISTICS` names. A likelihood ratio says how much
        likelier a user's uploads are with the canary (Neyman and Pearson)."""
        return [*(self._of_sums(row) for row in self.sums), self.once, self.across, self.broken]

    def _of_sums(self, sums: Array) -> Array:
        """In n participations the canary is in h ~ Binomial(nK, q) of the batches, and the sum is
        N(h, nK·s²), s being the noise on a step in units of the canary."""
        ratios = np.zeros_like(sums)
        for times in np.unique(self.times[self.times > 0]):
            steps, mine = int(times) * self.steps, self.times == times
            ratios[mine] = likelihood_ratio(
                sums[mine], *canary_hits(steps, self.rate), steps * self.spread**2
            )
        return ratios


def canary_hits(steps: int, rate: float) -> tuple[Array, Array]:
    """In how many of this many batches a record may be, and the logarithms of the chances."""
    middle, reach = steps * rate, 9 * math.sqrt(steps * rate) + 9
    lowest, highest = max(0, int(middle - reach)), min(steps, int(middle + reach))
    hits = np.arange(lowest, highest + 1, dtype=np.float64)
    return hits, binom.logpmf(hits, steps, rate)


def likelihood_ratio(values: Array, hits: Array, chances: Array, variance: float) -> Array:
    """log of Σ_h P(h)·N(value; h, variance) / N(value; 0, variance)."""
    exponent = (np.outer(values, hits) - hits**2 / 2) / variance
    return np.asarray(logsumexp(exponent + chances, axis=1))
