"""From a configuration or a run folder to what is audited, and what is claimed for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from dpscaffold.algorithms import Algorithm
from dpscaffold.audit.canary import Pair, clipped_at, federation_of, make_pair, small
from dpscaffold.config import Run, load
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import Plan
from dpscaffold.config.secure import Secure
from dpscaffold.data.loading import load_federation
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Kind
from dpscaffold.privacy import (
    ALONE,
    Adversary,
    Mechanism,
    TradeOff,
    adversaries,
    losses,
    no_guarantee,
    noise_seen,
)
from dpscaffold.privacy.page import THEOREMS
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.earlier import refuse_old
from dpscaffold.runs.ledger import read_account
from dpscaffold.tasks import Task


@dataclass(frozen=True)
class SentModel:
    """Parameters that the adversary sends out. Along the canary's direction and in units of the
    canary, a step's sum without the canary is ``known``."""

    params: Tensor
    known: float


@dataclass(frozen=True)
class AuditSubject:
    """What is audited: the mechanism as described, and the parts of the run that make it.

    ``participations`` is how often the user took part, where that is known; else it is drawn, as
    the run draws it. ``seed`` is the one that is written in the configuration.
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

    @cached_property
    def plan(self) -> Plan:
        """The run's plan on the pair's few records, with the adversary's step size."""
        run, pair = self.run, self.pair
        ratio = pair.batch / pair.records
        noise = self.privacy.scale(self.privacy.clip, pair.batch) * math.sqrt(run.local_steps)
        length = float(pair.inside[0].nan_to_num(0.0).norm(dim=1).max()) + 1
        step = 0.02 / (length * (noise + run.local_steps * float(run.clip)))
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

    def setting(self, federation: Federation) -> Run:
        """The setting of a game on these users."""
        given = self.task, self.algorithm, self.plan, self.privacy, self.secure
        return Run(federation.roster, *given)

    @property
    def secure(self) -> Secure | None:
        """The run's secure sums; None where the server sees every upload."""
        terms = self.run.secure
        if terms is None:
            return None
        return Secure(colluders=terms.colluders, least=terms.least, voids=self.run.extra)

    def federation(self, tables: Sequence[bool | None]) -> Federation:
        """Users with the canary (True), without it (False), and others (None)."""
        pair = self.pair
        known = {True: pair.inside, False: pair.outside, None: pair.outside}
        held = [known[table] for table in tables]
        made = federation_of(held, self.kind, self.classes)
        return made.declaring(self.pair.records) if self.run.declared_sizes else made

    @cached_property
    def start(self) -> SentModel:
        """x⁰, at which the canary moves a step's sum the farthest."""
        pair, whole = self.pair, self.run.unit == "user"
        features, labels = pair.outside
        params = self.task.initial(self.seed)
        [other] = clipped_at(params, self.task, features[-1:], labels[-1:], float(self.run.clip))
        along = float(other.double() @ pair.direction.double())
        known = along * (1 if whole else pair.batch) / float(pair.moved.norm())
        return SentModel(params, known)

    def times(self, games: int, rng: np.random.Generator) -> np.ndarray:
        """How often the user takes part in each game, (games,)."""
        if self.participations is not None:
            return np.full(games, self.participations)
        run = self.run
        return rng.binomial(run.rounds, run.user_ratio, games)

    def streams(self, rng: np.random.Generator) -> Randomness:
        """Noise that the adversary does not know: secret, or from a seed of the game's own."""
        if self.privacy.secret:
            return Randomness(self.seed, secret=True)
        return Randomness(int(rng.integers(1 << 62)))


@dataclass(frozen=True)
class Claim:
    """What is claimed towards a view: ε at δ by a bound, and the trade-off curve behind it."""

    view: str
    bound: str
    epsilon: float
    delta: float
    curve: TradeOff
    colluders: int = 0


@dataclass(frozen=True)
class AuditedRun:
    """An audit's subject, its claims by view, and the real run where one is asked for."""

    name: str
    subject: AuditSubject
    claims: Mapping[str, Claim]
    setting: Run
    federation: Federation
    simulated: bool
    not_played: str = ""


def read_case(source: Path, overrides: list[str] | None = None) -> AuditedRun:
    """A configuration as it would run, or a run folder as it ran (given who took part)."""
    folder = source if source.is_dir() else None
    config = source / "config.toml" if folder else source
    if not config.exists():
        what = "holds no run (config.toml)" if folder else "does not exist"
        raise BadInput("not-a-run", f"{source} {what}; give a configuration (TOML) or a run folder")
    refuse_old(source)
    settings = load(config, overrides or [])
    federation = load_federation(settings.data)
    setting = settings.setting(federation)
    run, participations, seeded = _described(setting), None, not setting.secret
    if folder:
        if overrides:
            raise BadInput(
                "not-applicable",
                f"--set is given for {folder}, which has run; give a configuration",
            )
        account = read_account(folder)
        ledger, seeded = account.ledger, account.seeded
        run, participations = ledger.run, int(ledger.participations.max())
        if participations == 0:
            raise BadInput(
                "no-rounds-yet",
                f"nobody has taken part in {folder} yet, so it has no guarantee so far",
            )
    subject = subject_of(setting, run, federation, participations)
    claims = claims_of(run, participations, setting.limits.colluders)
    return AuditedRun(
        str(source),
        subject,
        claims,
        setting,
        federation,
        seeded,
        _not_played(run),
    )


def _described(setting: Run) -> Mechanism:
    run = setting.describe()
    if run is None:
        raise BadInput(
            "no-privacy", "the run is not private (no [privacy]), so it claims nothing to audit"
        )
    if setting.algorithm.sums is not None:
        raise BadInput(
            "not-applicable",
            f"algorithm.name is {setting.algorithm.name!r}, whose one sum the games do not play; "
            f"audit an algorithm with local steps",
        )
    if run.unequal:
        raise BadInput(
            "not-applicable",
            "users have noise of their own (privacy.epsilon is a table), and the games have one "
            "noise for all; audit the plan with the budget of one user as a number",
        )
    return run


def subject_of(
    setting: Run, run: Mechanism, federation: Federation, participations: int | None = None
) -> AuditSubject:
    """What plays the game: the run's task (at its smallest size), algorithm and mechanism."""
    reason = no_guarantee(run)
    if setting.privacy is None or reason:
        raise BadInput(
            "no-privacy", f"there is no claim to audit: {reason or 'the run is not private'}"
        )
    task, kind = small(setting.task)
    if task is setting.task:
        kind, classes, dimension = federation.target.kind, federation.classes, federation.dimension
    else:
        classes, dimension = 2, getattr(task, "features", 1)
    seed = setting.plan.public_seed
    pair = make_pair(task, kind, run, dimension, seed)
    return AuditSubject(
        task, kind, classes, setting.algorithm, setting.privacy, run, pair, seed, participations
    )


def claims_of(run: Mechanism, participations: int | None, colluders: int = 1) -> dict[str, Claim]:
    """ε of training alone by view: over the draw, or given that a user took part so often."""
    known = adversaries(run, min(colluders, max(1, run.users - 1)))
    if run.secure is not None:  # the others see no more than the server with its sites
        known = {name: known[name] for name in ("server", ALONE.name)}
    return {name: _claim(run, who, participations) for name, who in known.items()}


def _claim(run: Mechanism, who: Adversary, participations: int | None) -> Claim:
    laws = losses(run, who, times=participations)
    epsilon = max(law.epsilon(run.delta) for law in laws)
    if not np.isfinite(epsilon):
        raise BadInput(
            "epsilon-infinite",
            f"the claim at delta={run.delta} is infinite; give a larger delta",
        )
    theorem = "given" if participations is not None else noise_seen(run, who).theorem
    helpers = run.cohort_size - 1 if who == ALONE else who.knows
    curve = TradeOff.of(laws)
    return Claim(who.name, THEOREMS[theorem], float(epsilon), run.delta, curve, helpers)


def _not_played(run: Mechanism) -> str:
    if run.secure is not None:
        return "third parties and participants, who see no more than the server with its sites"
    return ""
