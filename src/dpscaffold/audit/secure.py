"""Games against secure sums: a hostile server with some of the sites, or with all other sites.

Uploads take the path of a deployed run. The engine gives each member's integers with the noise of
the list, :class:`~dpscaffold.deployment.site.secure.KeyRing` masks them, and the server adds what
arrives modulo 2^w. The adversary then subtracts what its colluders put in, so the sum of the honest
members is left. Towards the server with k sites it names the shortest list that a site accepts;
together with all other sites it names the longest list, in which a site adds the least noise.

It also looks at the uploads of one site, less the masks that the site shares with colluders. If the
masks do their work, they are uniform: :class:`MaskCheck` tests that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from scipy.stats import chi2
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Slots, Upload
from dpscaffold.audit.game import Played, sent
from dpscaffold.audit.pairs import BETWEEN_ROUNDS, between_rounds
from dpscaffold.audit.subject import AuditSubject
from dpscaffold.audit.tally import canary_hits, likelihood_ratio
from dpscaffold.deployment.protocol.masks import Bits, EpochKey
from dpscaffold.deployment.protocol.messages import public_of
from dpscaffold.deployment.protocol.sums import Attempt, Members
from dpscaffold.deployment.site.secure import KeyRing
from dpscaffold.engines import Draw, Hardware, Simulator
from dpscaffold.engines.fast.stacking import StackedBroadcast
from dpscaffold.engines.fast.worker import Worker
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.privacy.loss import Array
from dpscaffold.setting import Setting
from dpscaffold.setting.secure import SumGrid

#: What the adversary computes from what it sees, by place.
OF_SECURE_SUMS = (
    "likelihood ratio of the sums",
    "likelihood ratio of the sums, attempt by attempt",
    "sums along the canary",
    *(f"sums, {name}" for name in BETWEEN_ROUNDS),
    "one site's uploads along the canary",
    *(f"one site's uploads, {name}" for name in BETWEEN_ROUNDS),
)
#: What must look uniform to whoever lacks the keys of two honest members.
HIDDEN = (
    "one site's upload",
    "difference of two uploads of one site",
    "sum of all honest uploads but one",
)
#: What the model's digest is made of: all games send the same model.
MODEL = b"audit"


class WatchedSums(Simulator):
    """The simulator, unchanged, with all integers kept as they leave their users."""

    def _participate(
        self, worker: Worker, phase: Algorithm, rows: Sequence[Row], broadcast: StackedBroadcast
    ) -> tuple[Upload, Slots]:
        upload, kept = super()._participate(worker, phase, rows, broadcast)
        self._seen.append((rows, upload.params))
        return upload, kept

    def attempt(
        self, subject: AuditSubject, number: int, part: np.ndarray, members: int
    ) -> np.ndarray:
        """The words of one attempt with a list of this many ``members``, (part, members, P), in
        the runs ``part``."""
        self._seen: list[tuple[Sequence[Row], Tensor]] = []
        setting, users = self.settings[0], np.arange(members)
        everyone = Draw(users, users)
        phase = setting.algorithm.phase(number, setting.warm_rounds)
        broadcast = sent(setting, self, phase, everyone, number, subject.start)
        runs = len(self.settings)  # all of them: a secure sum has no empty list
        self.gather_all(phase, [broadcast] * runs, [everyone] * runs)
        words = np.zeros((runs, members, setting.task.parameters), self.grid.dtype)
        for rows, integers in self._seen:
            of_runs, places = np.array([(row.run, row.user) for row in rows]).T
            words[of_runs, places] = self.grid.words(integers)
        return np.asarray(words[part])

    @property
    def grid(self) -> SumGrid:
        """The integers of the sums."""
        sums = self.settings[0].sums
        assert sums is not None
        return sums.grid

    def along(self, subject: AuditSubject, words: np.ndarray) -> Array:
        """Words (n, P) as numbers along the canary's direction, (n,)."""
        restored = self.grid.restore(self.grid.integers(words))
        return np.asarray((restored @ subject.pair.direction.double()).numpy())


@dataclass(frozen=True)
class MaskedList:
    """The members of a list with their keys, the honest ones first. The site that is attacked is
    member 0."""

    rings: tuple[KeyRing, ...]
    signers: tuple[Ed25519PrivateKey, ...]
    honest: int

    @classmethod
    def of(cls, members: int, colluders: int, rng: np.random.Generator) -> MaskedList:
        """A list with fresh keys. They come from ``rng``, so that a seed makes an audit."""
        names = tuple(f"site{place:04d}" for place in range(members))
        signers = tuple(Ed25519PrivateKey.from_private_bytes(rng.bytes(32)) for _ in names)
        publics = {name: public_of(key) for name, key in zip(names, signers, strict=True)}
        listed = Members(names, (1,) * members, publics)
        session = listed.session(rng.bytes(16).hex(), "audit")
        rings = tuple(
            KeyRing(
                name,
                session,
                listed,
                EpochKey(rng.bytes(16).hex(), X25519PrivateKey.from_private_bytes(rng.bytes(32))),
            )
            for name in names
        )
        return cls(rings, signers, members - colluders)

    def attempts(self, games: int) -> list[Attempt]:
        """An attempt of its own for each game, so that no two share a label."""
        pairs = zip(self.rings, self.signers, strict=True)
        keys = tuple(ring.announced(signer) for ring, signer in pairs)
        return [Attempt(number, keys) for number in range(1, games + 1)]

    def masked(self, words: np.ndarray, round: int, attempts: Sequence[Attempt]) -> np.ndarray:
        """What arrives at the server: words (runs, members, P) under their masks."""
        uploads, bits = words.copy(), _bits(words)
        for attempt, of_run in zip(attempts, uploads, strict=True):
            for ring, upload in zip(self.rings, of_run, strict=True):
                upload += ring.mask(attempt, round, MODEL, len(upload), bits)
        return uploads

    def honest_sum(self, uploads: np.ndarray, words: np.ndarray) -> np.ndarray:
        """The sum of all uploads, less what the colluders put in, (runs, P)."""
        known = words[:, self.honest :].sum(1, dtype=words.dtype)
        return np.asarray(uploads.sum(1, dtype=words.dtype) - known)

    def bare(
        self, uploads: np.ndarray, place: int, round: int, attempts: Sequence[Attempt]
    ) -> np.ndarray:
        """The uploads (runs, P) of one honest member, less the masks that colluders know."""
        known = {ring.name for ring in self.rings[self.honest :]}
        found, ring, bits = uploads[:, place].copy(), self.rings[place], _bits(uploads)
        for attempt, upload in zip(attempts, found, strict=True):
            upload -= ring.mask(attempt, round, MODEL, len(upload), bits, among=known)
        return found


def _bits(words: np.ndarray) -> Bits:
    return 32 if words.dtype.itemsize == 4 else 64


@dataclass(frozen=True)
class MaskCheck:
    """Whether uploads look uniform without the keys of two honest members.

    Every group of four bits of ``words`` numbers gets a chi-square test, for each of
    :data:`HIDDEN`. ``p_value`` is the smallest of them times their number. Masks that hide are
    ``refuted`` with probability at most ``tail``.
    """

    words: int
    p_value: float
    least_uniform: str
    tail: float

    @property
    def refuted(self) -> bool:
        """Whether the uploads are not uniform, so that they show more than their sum."""
        return self.p_value < self.tail


class Nibbles:
    """Counts how often each group of four bits has each of its 16 values."""

    def __init__(self) -> None:
        self.counts: list[np.ndarray | None] = [None] * len(HIDDEN)

    def add(self, place: int, words: np.ndarray) -> None:
        """Further words of one kind in :data:`HIDDEN`."""
        shifts = range(0, 8 * words.dtype.itemsize, 4)
        flat = words.ravel()
        counted = np.stack([np.bincount(flat >> s & 15, minlength=16) for s in shifts])
        before = self.counts[place]
        self.counts[place] = counted if before is None else before + counted

    def check(self, tail: float) -> MaskCheck:
        """The chi-square tests of all groups."""
        found = [
            (float(chi2.sf(((row - row.mean()) ** 2 / row.mean()).sum(), 15)), place)
            for place, counts in enumerate(self.counts)
            if counts is not None
            for row in counts
        ]
        smallest, place = min(found)
        words = sum(int(counts[0].sum()) for counts in self.counts if counts is not None)
        return MaskCheck(words, min(1.0, smallest * len(found)), HIDDEN[place], tail)


@dataclass(frozen=True)
class SumAttack:
    """Who attacks: a server with ``colluders`` of the ``members`` of every list."""

    colluders: int
    members: int

    def games(
        self, subject: AuditSubject, games: int, rng: np.random.Generator, nibbles: Nibbles
    ) -> Played:
        """This many games on each dataset, with the statistics above. With two honest members or
        more, ``nibbles`` counts what must be uniform."""
        others: list[bool | None] = [None] * (subject.run.cohort_size - 1)
        worlds = [subject.federation([inside, *others]) for inside in (True, False)]
        settings = [subject.setting(world) for world in worlds]
        streams = [subject.streams(rng) for _ in range(2 * games)]
        engine = WatchedSums(settings * games, worlds * games, Hardware(), streams)
        listed = MaskedList.of(self.members, self.colluders, rng)
        attempts = listed.attempts(2 * games)
        # A void attempt is a full release if the member that is missing colludes.
        times = subject.times(2 * games, rng) + subject.run.voids
        seen = np.full((2, max(1, int(times.max())), 2 * games), np.nan)
        last: np.ndarray | None = None
        for number in range(1, int(times.max()) + 1):
            part = np.flatnonzero(times >= number)
            words = engine.attempt(subject, number, part, self.members)
            asked = [attempts[run] for run in part]
            uploads = listed.masked(words, number, asked)
            total = listed.honest_sum(uploads, words)
            single = listed.bare(uploads, 0, number, asked)
            seen[:, number - 1, part] = [engine.along(subject, w) for w in (total, single)]
            if listed.honest > 1:
                rest = listed.bare(uploads, listed.honest - 1, number, asked)
                nibbles.add(0, single)
                nibbles.add(2, total - rest)
                if last is not None:
                    nibbles.add(1, single - last[part])
            last = np.zeros((2 * games, words.shape[2]), words.dtype)
            last[part] = single
        statistics = self._statistics(subject, settings[0], seen)
        return statistics[:, ::2], statistics[:, 1::2]

    def _statistics(self, subject: AuditSubject, setting: Setting, seen: Array) -> Array:
        """Statistics (S, n) from the honest sums and one site's uploads, (2, T, n), NaN where the
        user took no part."""
        pair, privacy = subject.pair, setting.privacy_of(0, self.members)
        assert privacy is not None
        whole, honest = subject.run.unit == "user", self.members - self.colluders
        unit = float(pair.moved.norm()) / (1 if whole else pair.batch)
        rate = 1.0 if whole else pair.batch / pair.records
        variance = honest * (privacy.scale(privacy.clip, pair.batch) / unit) ** 2
        sums = seen[0] / unit - honest * subject.start.known
        counts = np.isfinite(sums).sum(0)
        whole_ratio = np.zeros(sums.shape[1])
        for times in np.unique(counts[counts > 0]):
            mine = counts == times
            of_all = (*canary_hits(int(times), rate), times * variance)
            whole_ratio[mine] = likelihood_ratio(np.nansum(sums, 0)[mine], *of_all)
        of_one = (*canary_hits(1, rate), variance)
        by_attempt = sum(likelihood_ratio(np.nan_to_num(row), *of_one) * np.isfinite(row)
                         for row in sums)  # fmt: skip
        rows = [whole_ratio, by_attempt]
        for values in (sums, seen[1]):
            rows += [np.nansum(values, 0), *between_rounds(values)]
        return np.stack(rows)
