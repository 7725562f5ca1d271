"""An audit: games in every view until the trials or the minutes are spent, then what they prove."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpscaffold.audit.game import NOT_FINITE, STATISTICS, Played, server_games
from dpscaffold.audit.limits import Proof, prove, weighted
from dpscaffold.audit.onerun import OneRun
from dpscaffold.audit.secure import OF_SECURE_SUMS, SumAttack
from dpscaffold.audit.subject import AuditedRun, AuditSubject, Claim
from dpscaffold.audit.sums import OF_SUMS, statistics, sum_games
from dpscaffold.checks import number, whole
from dpscaffold.errors import BadInput
from dpscaffold.privacy.loss import Array

#: The share of the minutes and of the chance of error that each view may take, relative to one
#: another. The server sees the most, so its games find mistakes that no other view shows.
SHARES = {"server": 0.8, "third_party": 0.1, "participant": 0.1, "alone": 0.2}
#: The share of the chance of error that one real run takes, where it is asked for.
ONE_RUN = 0.1
#: The statistic that is made of single uploads.
WEIGHTED = "uploads of every round, weighted"
#: About how many steps of users are played at a time; the time is looked at in between.
BLOCK = 40_000

#: Told what is going on: the view, games played on each dataset, games wanted, seconds left.
Watch = Callable[[str, int, int, float], None]


@dataclass(frozen=True)
class AuditLimits:
    """How long, and how sure. ``trials`` are games on each of the two datasets, at most.

    ``confidence`` holds for all that an audit says together.
    """

    trials: int = 20_000
    minutes: float = 2.0
    confidence: float = 0.99
    seed: int | None = None

    def __post_init__(self) -> None:
        whole("--trials", self.trials, 100)
        if not number("--minutes", self.minutes) > 0:
            raise BadInput("out-of-range", f"--minutes is {self.minutes}; it must be positive")
        if not 0.5 <= number("--confidence", self.confidence) < 1:
            raise BadInput(
                "out-of-range",
                f"--confidence is {self.confidence}; it must be at least 0.5, below 1",
            )


@dataclass(frozen=True)
class Finding:
    """What the games in one view prove, next to what is claimed."""

    view: str
    bound: str
    claimed: float
    delta: float
    proved: float
    confidence: float
    games: int
    statistic: str
    hits: tuple[float, float]
    false_alarms: tuple[float, float]
    curve_beaten: bool
    not_finite: int
    seconds: float
    colluders: int = 0
    secure: bool = False

    @property
    def ratio(self) -> float:
        """The proved part of the claim."""
        return self.proved / self.claimed if self.claimed > 0 else float(self.proved > 0)

    @property
    def beaten(self) -> bool:
        """Whether the claim is refuted, by ε at δ or by its trade-off curve. Uploads that are not
        finite refute it too, since every claim rests on clipping that holds for all floats."""
        return self.proved > self.claimed or self.curve_beaten or self.not_finite > 0


@dataclass(frozen=True)
class Report:
    """A whole audit."""

    name: str
    simulated: bool
    records: int
    batch: int
    participations: int | None
    canary: float | None
    unclipped: bool
    findings: tuple[Finding, ...]
    one_run: OneRun | None
    remark: str
    seconds: float

    @property
    def beaten(self) -> bool:
        """Whether any claim is refuted."""
        return (
            self.unclipped
            or any(f.beaten for f in self.findings)
            or bool(self.one_run and self.one_run.beaten)
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        said = asdict(self)
        for row, finding in zip(said["findings"], self.findings, strict=True):
            row |= {"ratio": finding.ratio, "beaten": finding.beaten}
        if self.one_run:
            said["one_run"] |= {"ratio": self.one_run.ratio, "beaten": self.one_run.beaten}
        return said | {"beaten": self.beaten}


def audit(
    case: AuditedRun,
    limits: AuditLimits,
    views: Sequence[str] = tuple(SHARES),
    watch: Watch | None = None,
    one_run: Callable[[float], OneRun] | None = None,
) -> Report:
    """Play against a case's claims. ``one_run(seconds)`` is played at the end, if given."""
    started = time.monotonic()
    rng = np.random.default_rng(limits.seed)
    played = [view for view in views if view in case.claims]
    budget = 60 * limits.minutes * (0.5 if one_run else 1.0)
    all_views = sum(SHARES[view] for view in played)
    error = (1 - limits.confidence) * (1 - ONE_RUN if one_run else 1.0)
    findings: list[Finding] = []
    for view in () if case.subject.pair.unclipped else played:
        share = SHARES[view] / all_views
        seconds, sure = share * budget, 1 - share * error
        findings.append(_view(case.subject, case.claims[view], limits, sure, seconds, rng, watch))
    pair = case.subject.pair
    left = 60 * limits.minutes - (time.monotonic() - started)
    alone = one_run(left) if one_run and not pair.unclipped else None
    return Report(
        case.name,
        case.simulated,
        pair.records,
        pair.batch,
        case.subject.participations,
        pair.length if math.isfinite(pair.length) else None,
        pair.unclipped,
        tuple(findings),
        alone,
        case.not_played,
        round(time.monotonic() - started, 2),
    )


@dataclass(frozen=True)
class _Stage:
    """One view of an audit: its claim, how sure it may be, and how long it may take."""

    subject: AuditSubject
    claim: Claim
    limits: AuditLimits
    confidence: float
    seconds: float
    watch: Watch | None
    started: float

    def play(self, users: int, block_of: Callable[[int], Played]) -> Played:
        """Play the trials block by block, or as many as the time allows. A game has ``users``."""
        trials, games = self.limits.trials, 0
        parts: list[Played] = []
        block = _block(self.subject, users)
        while games < trials and (self._left() > 0 or not parts):
            size = min(block, trials - games)
            parts.append(block_of(size))
            games += size
            if self.watch:
                self.watch(self.claim.view, games, trials, max(0.0, self._left()))
        inside, outside = (np.concatenate([part[k] for part in parts], axis=1) for k in (0, 1))
        return inside, outside

    def _left(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def prove(self, inside: Array, outside: Array, for_curve: int = 0) -> Proof:
        """What games prove against the claim."""
        claim = self.claim
        return prove(inside, outside, claim.delta, self.confidence, claim.curve, for_curve)

    def finding(
        self,
        proof: Proof,
        names: tuple[str, ...],
        played: Played,
        not_finite: int = 0,
    ) -> Finding:
        """What was proved on the games ``played``, whose statistics have these names."""
        claim = self.claim
        return Finding(
            claim.view,
            claim.bound,
            claim.epsilon,
            claim.delta,
            proof.epsilon,
            self.limits.confidence,
            played[0].shape[1],
            names[proof.statistic],
            proof.hits,
            proof.false_alarms,
            proof.curve_beaten,
            not_finite,
            round(time.monotonic() - self.started, 2),
            claim.colluders,
            self.subject.run.secure is not None,
        )


def _view(
    subject: AuditSubject,
    claim: Claim,
    limits: AuditLimits,
    confidence: float,
    seconds: float,
    rng: np.random.Generator,
    watch: Watch | None,
) -> Finding:
    """All games of one view, and what they prove."""
    stage = _Stage(subject, claim, limits, confidence, seconds, watch, time.monotonic())
    if subject.run.secure is not None:
        return _through_secure_sums(stage, subject.run.secure.least, rng)
    return _as_server(stage, rng) if claim.view == "server" else _as_outsider(stage, rng)


def _as_server(stage: _Stage, rng: np.random.Generator) -> Finding:
    """The server sees every upload."""
    subject = stage.subject
    played = told_apart(*stage.play(1, lambda games: server_games(subject, games, rng)))
    # The weighted statistic is for the curve alone.
    proof = stage.prove(*played, for_curve=1)
    return stage.finding(proof, (*STATISTICS, WEIGHTED), played, _not_finite(*played))


def _as_outsider(stage: _Stage, rng: np.random.Generator) -> Finding:
    """Third parties and participants see sums."""
    subject, colluders = stage.subject, stage.claim.colluders
    users = subject.run.cohort_size
    played = statistics(*stage.play(users, lambda games: sum_games(subject, games, rng, colluders)))
    return stage.finding(stage.prove(*played), OF_SUMS, played)


def _through_secure_sums(stage: _Stage, least: int, rng: np.random.Generator) -> Finding:
    """A server that sees sums of integers, with k sites or with all others."""
    subject, hidden = stage.subject, stage.claim.view == "server"
    attack = SumAttack(stage.claim.colluders, least if hidden else subject.run.cohort_size)
    played = stage.play(attack.members, lambda games: attack.games(subject, games, rng))
    return stage.finding(stage.prove(*played), OF_SECURE_SUMS, played)


def told_apart(inside: Array, outside: Array) -> Played:
    """Games in the server's view: their statistics, and every upload weighted as best tells."""
    single = len(STATISTICS)
    best = weighted(inside[single:], outside[single:])
    made = [
        np.stack([*world[:single], row]) for world, row in zip((inside, outside), best, strict=True)
    ]
    return made[0], made[1]


def _block(subject: AuditSubject, users: int) -> int:
    """How many games to play at a time. It depends on the run alone, so that a seed and a number of
    trials make an audit."""
    run = subject.run
    times = subject.participations or max(1, round(run.rounds * run.user_ratio))
    steps = 2 * users * times * (10 + run.local_steps)  # drawing streams takes as long as 10 steps
    return max(20, min(2000, BLOCK // steps))


def _not_finite(inside: Array, outside: Array) -> int:
    """How many uploads were not finite, in all games."""
    place = STATISTICS.index(NOT_FINITE)
    return int(inside[place].sum() + outside[place].sum())
