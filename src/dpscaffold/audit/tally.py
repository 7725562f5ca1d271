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
#: What is looked at: Δy, the change of memory, Δy with the memory added back, control variates.
MOVE, CHANGE, RESTORED, CONTROL = range(4)


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
        self.sums = np.zeros((2, users))  # RESTORED and CONTROL, less what is known
        self.ratios = np.zeros((4, users))
        self.plain = np.zeros((5, users))
        #: (4, L, users), and NaN where a user did not take part so often.
        self.looked = np.full((4, min(LOOKED, subject.run.rounds), users), np.nan)

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
        for place, value in enumerate((control, move + held, move, rest, broken)):
            self.plain[place][users] += value
        left = np.stack([move + held, control]) - known * self.steps
        now = self.times[users]
        early = now < self.looked.shape[1]
        self.looked[:, now[early], users[early]] = np.stack([move, changed, *left])[:, early]
        self.sums[:, users] += left
        self.ratios[:, users] += [ratio for row in left for ratio in self._of_a_round(row)]
        self.times[users] += 1

    def _of_a_round(self, left: Array) -> tuple[Array, Array]:
        """Likelihood ratios of one participation: with fresh batches the canary is in
        h ~ Binomial(K, q) of them; with one batch for all steps it is in all K or in none."""
        drawn, variance = np.array([0.0, 1.0]), self.steps * self.spread**2
        hits, chances = canary_hits(self.steps, self.rate)
        once = binom.logpmf(drawn, 1, self.rate)
        return likelihood_ratio(left, hits, chances, variance), likelihood_ratio(
            left, drawn * self.steps, once, variance
        )

    def likelihoods(self) -> list[Array]:
        """How much likelier each user's uploads are with the canary (Neyman and Pearson): the sums
        over all participations, then round by round."""
        return [*(self._of_sums(row) for row in self.sums), *self.ratios]

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
