"""The distinguishing game: a user holds one of two datasets, the engine runs, the adversary looks.

In the server's view a user's uploads are all that depends on its record, so a game is that user's
participations and nothing else, and thousands of games are the users of one simulated federation.
Views of sums are in :mod:`dpscaffold.audit.sums`.

The step size, the model that is sent out and everybody's data are the adversary's choice: DP holds
for all of them. It sends x⁰ in every round and takes a step size so small that a canary's gradient
does not turn while its user moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.special import logsumexp
from scipy.stats import binom

from dpscaffold.algorithms import Algorithm, Broadcast
from dpscaffold.audit.canary import Pair, federation_of
from dpscaffold.audit.watching import Seen, Watched
from dpscaffold.engines import Draw, State
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Kind
from dpscaffold.local import Gaussian
from dpscaffold.plan import Plan
from dpscaffold.privacy import Mechanism
from dpscaffold.privacy.loss import Array
from dpscaffold.randomness import NoiseStreams, Randomness
from dpscaffold.rounds import announced
from dpscaffold.setting import Setting
from dpscaffold.tasks import Task

#: The name of the statistic that no game may ever see.
NOT_FINITE = "uploads that are not finite"
#: What the adversary computes from what it sees, by place.
STATISTICS = (
    "likelihood ratio of the moves",
    "likelihood ratio of the control variates",
    "control variates along the canary",
    "moves along the canary, memory added back",
    "moves along the canary",
    "noise across the canary",
    NOT_FINITE,
    "moves less another user's",
    "moves less the noise of the configured seed",
)
#: Of how many participations each upload is looked at by itself.
LOOKED = 32
#: (inside, outside): statistics (S, n) of games on the two datasets.
Played = tuple[Array, Array]


@dataclass(frozen=True)
class Subject:
    """What is audited: the mechanism as described, and the parts of the run that make it.

    ``participations`` is how often the user took part, where that is known; else it is drawn, as
    the run draws it. ``seed`` is the one that is written in the configuration. ``step`` is the
    adversary's step size where it needs a certain one.
    """

    task: Task
    kind: Kind
    classes: int
    algorithm: Algorithm
    privacy: Gaussian
    run: Mechanism
    pair: Pair
    seed: int
    participations: int | None = None
    step: float | None = None

    @cached_property
    def plan(self) -> Plan:
        """The run's plan on the pair's few records, with the adversary's step size."""
        run, pair = self.run, self.pair
        ratio = pair.batch / pair.records
        noise = self.privacy.scale(self.privacy.clip, pair.batch) * math.sqrt(run.local_steps)
        length = float(pair.inside[0].nan_to_num(0.0).norm(dim=1).max()) + 1
        step = self.step or 0.02 / (length * (noise + run.local_steps * float(run.clip)))
        return Plan(
            rounds=run.rounds + 2,
            local_steps=run.local_steps,
            user_ratio=1.0,
            data_ratio=ratio,
            learning_rate=step * ratio * run.local_steps,
            regularisation=0.0,
            warm_rounds=1,
            seed=self.seed,
        )

    def setting(self, federation: Federation) -> Setting:
        """The setting of a game on these users."""
        algorithm = self.algorithm.replace(full_pass=False)
        return Setting(federation.roster, self.task, algorithm, self.plan, self.privacy)

    def federation(self, tables: list[bool | None]) -> Federation:
        """Users with the canary (True), without it (False), and others (None)."""
        pair = self.pair
        known = {True: pair.inside, False: pair.outside, None: pair.others or pair.outside}
        held = [known[table] for table in tables]
        made = federation_of(held, self.kind, self.classes)
        return made.declaring(self.pair.records) if self.run.declared_sizes else made

    def times(self, games: int, rng: np.random.Generator) -> np.ndarray:
        """How often the user takes part in each game, (games,)."""
        if self.participations is not None:
            return np.full(games, self.participations)
        run = self.run
        most = run.max_participations or run.rounds
        return np.minimum(rng.binomial(run.rounds, run.user_ratio, games), most)

    def streams(self, rng: np.random.Generator) -> Randomness:
        """Noise that the adversary does not know: secret, or from a seed of the game's own."""
        if self.privacy.secret:
            return Randomness(self.seed, secret=True)
        return Randomness(int(rng.integers(1 << 62)))


def server_games(
    subject: Subject, games: int, rng: np.random.Generator, bystanders: bool = False
) -> Played:
    """So many games on each dataset, as the server sees them.

    With ``bystanders`` each user has another one beside it, whose data the adversary knows, and the
    last statistics are there too; without, the uploads of each participation follow.
    """
    victims = 2 * games
    tables: list[bool | None] = [place % 2 == 0 for place in range(victims)]
    tables += [None] * victims if bystanders else []
    federation = subject.federation(tables)
    setting = subject.setting(federation)
    engine = Watched([setting], [federation], [subject.streams(rng)], subject.pair.direction)
    ledger = _Ledger(subject, len(tables), set(setting.algorithm.remembers))
    times = subject.times(victims, rng)
    for number in range(1, int(times.max(initial=0)) + 1):
        active = np.flatnonzero(times >= number)
        if bystanders:
            active = np.concatenate([active, active + victims])
        draw = Draw(active, active)
        phase = setting.algorithm.phase(number, setting.warm_rounds)
        engine.gather(phase, sent(setting, engine, phase, draw, number), draw)
        ledger.enter(engine.round_seen(), number, seeded=bystanders and subject.privacy.secret)
    statistics = ledger.statistics(victims, bystanders)
    return statistics[:, ::2], statistics[:, 1::2]


def sent(setting: Setting, engine: Watched, phase: Algorithm, draw: Draw, number: int) -> Broadcast:
    """x⁰ and what the algorithm announces with it, in every round."""
    state = replace(State.initial(setting, engine.device), round=number - 1)
    return announced(setting, state, draw, engine.memories, phase)


class _Ledger:
    """What the server has added up of every user, in units of one canary in one step's sum."""

    def __init__(self, subject: Subject, users: int, remembered: set[str]) -> None:
        self.subject, self.remembered = subject, remembered
        whole = subject.run.unit == "user"
        self.unit = float(subject.pair.moved.norm()) / (1 if whole else subject.pair.batch)
        self.rate = 1.0 if whole else subject.pair.batch / subject.pair.records
        self.times = np.zeros(users, dtype=np.int64)
        self.steps = subject.run.local_steps
        self.memory = {name: np.zeros(users) for name in remembered}
        self.sums = np.zeros((5, users))
        self.looked = np.zeros((2, min(LOOKED, subject.run.rounds), users))
        self.noise = np.zeros(users)

    def enter(self, seen: Seen, number: int, seeded: bool) -> None:
        """A round's uploads. What a user remembers follows from what it uploaded before."""
        users, step = seen.users, self.subject.plan.step_size
        self.times[users] += 1
        broken = ~np.isfinite(seen.move + seen.rest)
        move = -np.nan_to_num(seen.move, posinf=0.0, neginf=0.0) / (step * self.unit)
        held = sum((value[users] for value in self.memory.values()), np.zeros(len(users)))
        control, changed = np.zeros(len(users)), np.zeros(len(users))
        for name, value in seen.totals.items():
            told = np.nan_to_num(value, posinf=0.0, neginf=0.0) * self.steps / self.unit
            changed += told
            if name in self.memory:
                self.memory[name][users] += told
                control += self.memory[name][users]
            else:
                control += told
        now = self.times[users] - 1
        early = now < self.looked.shape[1]
        self.looked[:, now[early], users[early]] = np.stack([move, changed])[:, early]
        rest = np.nan_to_num(seen.rest, posinf=0.0) / (step * self.unit)
        for place, value in enumerate((control, move + held, move, rest, broken)):
            self.sums[place][users] += value
        if seeded:
            self.noise[users] += self._configured(number, users)

    def _configured(self, number: int, users: np.ndarray) -> Array:
        """The noise along the canary, had it come from the seed in the configuration."""
        subject = self.subject
        seeded = Randomness(subject.seed)
        streams = [seeded.normals(number, int(user)) for user in users]
        direction = subject.pair.direction.numpy()
        drawn = NoiseStreams(streams, len(direction)).draw(self.steps).sum(0) @ direction
        spread = subject.privacy.scale(subject.privacy.clip, subject.pair.batch)
        return np.asarray(drawn * spread / self.unit, dtype=np.float64)

    def statistics(self, victims: int, bystanders: bool) -> Array:
        """One row a statistic, (S, victims)."""
        own = self.sums[:, :victims]
        ratios = [self._likelihood(own[place]) for place in (1, 0)]
        if not bystanders:
            return np.stack([*ratios, *own, *self.looked.reshape(-1, self.looked.shape[2])])
        best = own[1]
        others = [best - self.sums[1, victims:], best - self.noise[:victims]]
        return np.stack([*ratios, *own, *others])

    def _likelihood(self, sums: Array) -> Array:
        """How much likelier each sum is with the canary: the best test of sums (Neyman, Pearson).

        In n participations it is in h ~ Binomial(nK, q) of the batches, and the sum is
        N(h, nK·s²), s being the noise on a step in units of the canary.
        """
        subject, ratios = self.subject, np.zeros_like(sums)
        spread = subject.privacy.scale(subject.privacy.clip, subject.pair.batch) / self.unit
        offset = self._offset()
        for times in np.unique(self.times[: len(sums)]):
            if times == 0:
                continue
            steps, mine = int(times) * self.steps, self.times[: len(sums)] == times
            middle, reach = steps * self.rate, 9 * math.sqrt(steps * self.rate) + 9
            hits = np.arange(max(0, int(middle - reach)), min(steps, int(middle + reach)) + 1)
            chances = binom.logpmf(hits, steps, self.rate)
            value = sums[mine] - offset * steps
            exponent = (np.outer(value, hits) - hits**2 / 2) / (steps * spread**2)
            ratios[mine] = logsumexp(exponent + chances, axis=1)
        return ratios

    def _offset(self) -> float:
        """What a step's sum is along the canary where the canary is not in it."""
        subject = self.subject
        if subject.run.sampling == "poisson" and subject.run.unit == "record":
            return 0.0
        return -0.5 * (1 if subject.run.unit == "user" else subject.pair.batch)


def blocks(total: int, size: int) -> Iterator[int]:
    """``total`` in parts of at most ``size``.

    >>> list(blocks(5, 2))
    [2, 2, 1]
    """
    for start in range(0, total, size):
        yield min(size, total - start)
