"""Games against secure sums: a hostile server with some of the sites, or with all other sites.

The engine gives each member's integers with the noise of the list, as a site computes them before
it masks them. Masks hide all but the sum (tests/statistical/test_masks.py), so the adversary knows
the sum of all members, less what its colluders put in. Towards the server with k sites it names the
shortest list that a site accepts; together with all other sites it names the longest list, in which
a site adds the least noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from dpscaffold.algorithms import Slots, Upload
from dpscaffold.audit.game import Played, sent
from dpscaffold.audit.subject import AuditSubject
from dpscaffold.audit.tally import canary_hits, likelihood_ratio
from dpscaffold.audit.watching import rows_of
from dpscaffold.config import Run
from dpscaffold.config.secure import SumGrid
from dpscaffold.engine import Draw, Engine
from dpscaffold.engine.aggregate import Summed
from dpscaffold.engine.steps import Drawn, Participation
from dpscaffold.privacy.loss import Array

#: What the adversary computes from what it sees, by place.
OF_SECURE_SUMS = (
    "likelihood ratio of the sums",
    "likelihood ratio of the sums, attempt by attempt",
    "sums along the canary",
)


class WatchedSums(Summed):
    """The law of secure sums, with all integers kept as they leave their users."""

    def participate(
        self, of: Participation, drawn: Drawn, users: Mapping[int, Sequence[int]]
    ) -> tuple[Upload, Slots]:
        """The uploads of these users of each run."""
        upload, kept = super().participate(of, drawn, users)
        self.seen.append((users, upload.params))
        return upload, kept

    def attempt(
        self, engine: Engine, subject: AuditSubject, number: int, part: np.ndarray, members: int
    ) -> np.ndarray:
        """The words of one attempt with a list of this many ``members``, (part, members, P), in
        the runs ``part``."""
        self.seen: list[tuple[Mapping[int, Sequence[int]], Tensor]] = []
        runs = len(self.runs)  # all of them: a secure sum has no empty list
        asked = sent(self.runs, number, subject.start)
        engine.round(asked, [Draw.all(np.arange(members))] * runs)
        words = np.zeros((runs, members, len(subject.pair.direction)), self.grid.dtype)
        for users_of, integers in self.seen:
            words[rows_of(users_of)] = self.grid.words(integers)
        return np.asarray(words[part])

    @property
    def grid(self) -> SumGrid:
        """The integers of the sums."""
        sums = self.runs[0].sums
        assert sums is not None
        return sums.grid

    def along(self, subject: AuditSubject, words: np.ndarray) -> Array:
        """Words (n, P) as numbers along the canary's direction, (n,)."""
        restored = self.grid.restore(self.grid.integers(words))
        return np.asarray((restored @ subject.pair.direction.double()).numpy())


@dataclass(frozen=True)
class SumAttack:
    """Who attacks: a server with ``colluders`` of the ``members`` of every list."""

    colluders: int
    members: int

    def games(self, subject: AuditSubject, games: int, rng: np.random.Generator) -> Played:
        """This many games on each dataset, with the statistics above."""
        others: list[bool | None] = [None] * (subject.run.cohort_size - 1)
        worlds = [subject.federation([inside, *others]) for inside in (True, False)]
        settings = [subject.setting(world) for world in worlds]
        streams = [subject.streams(rng) for _ in range(2 * games)]
        law = WatchedSums(settings * games)
        engine = Engine(settings * games, worlds * games, streams=streams, law=law)
        # A void attempt is a full release if the member that is missing colludes.
        times = subject.times(2 * games, rng) + subject.run.extra
        seen = np.full((max(1, int(times.max())), 2 * games), np.nan)
        for number in range(1, int(times.max()) + 1):
            part = np.flatnonzero(times >= number)
            words = law.attempt(engine, subject, number, part, self.members)
            seen[number - 1, part] = law.along(subject, self.honest_sum(words))
        statistics = self._statistics(subject, settings[0], seen)
        return statistics[:, ::2], statistics[:, 1::2]

    def honest_sum(self, words: np.ndarray) -> np.ndarray:
        """The sum of all members' words (runs, members, P), less what the colluders put in."""
        honest = words[:, : self.members - self.colluders]
        return np.asarray(honest.sum(1, dtype=words.dtype))

    def _statistics(self, subject: AuditSubject, setting: Run, seen: Array) -> Array:
        """Statistics (S, n) from the honest sums (T, n), NaN where the user took no part."""
        pair, privacy = subject.pair, setting.privacy_of(0, self.members)
        assert privacy is not None
        whole, honest = subject.run.unit == "user", self.members - self.colluders
        unit = float(pair.moved.norm()) / (1 if whole else pair.batch)
        rate = 1.0 if whole else pair.batch / pair.records
        variance = honest * (privacy.scale(privacy.clip, pair.batch) / unit) ** 2
        sums = seen / unit - honest * subject.start.known
        counts = np.isfinite(sums).sum(0)
        whole_ratio = np.zeros(sums.shape[1])
        for times in np.unique(counts[counts > 0]):
            mine = counts == times
            of_all = (*canary_hits(int(times), rate), times * variance)
            whole_ratio[mine] = likelihood_ratio(np.nansum(sums, 0)[mine], *of_all)
        of_one = (*canary_hits(1, rate), variance)
        by_attempt = sum(likelihood_ratio(np.nan_to_num(row), *of_one) * np.isfinite(row)
                         for row in sums)  # fmt: skip
        return np.stack([whole_ratio, by_attempt, np.nansum(sums, 0)])
