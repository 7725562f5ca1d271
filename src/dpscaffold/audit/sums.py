"""Games in the views of a third party and of participants, who see a round's sums alone.

Every game is a run of its own. The adversary sees, round by round, how far the sum of moves and the
sum of what users remember lie along the canary; how much each tells is learnt on the games that
choose the event, and never on those that are counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dpscaffold.audit.game import Played, sent
from dpscaffold.audit.limits import weighted
from dpscaffold.audit.subject import AuditSubject
from dpscaffold.audit.watching import UploadProjections, Watched
from dpscaffold.engine import Draw, Engine, RoundUploads
from dpscaffold.privacy.loss import Array

#: What the adversary computes from what it saw, by place.
OF_SUMS = ("sums of moves", "sums of control variates", "sums by round, weighted")


def sum_games(
    subject: AuditSubject, games: int, rng: np.random.Generator, colluders: int = 0
) -> Played:
    """This many games on each dataset as a third party sees them, or ``colluders`` of the
    participants, who subtract what they uploaded themselves: (2·rounds, games), moves and control
    variates, 0 in rounds without the user."""
    others: list[bool | None] = [None] * (subject.run.cohort_size - 1)
    worlds = [subject.federation([inside, *others]) for inside in (True, False)]
    settings = [subject.setting(world) for world in worlds]
    runs = 2 * games
    law = Watched(settings * games, subject.pair.direction)
    streams = [subject.streams(rng) for _ in range(runs)]
    engine = Engine(settings * games, worlds * games, streams=streams, law=law)
    users = np.arange(subject.run.cohort_size)
    everyone, nobody = Draw(users, users), Draw(users, users[:0])
    times, known = subject.times(runs, rng), users[1 : 1 + colluders]
    most = subject.participations or subject.run.rounds
    seen, kept = np.zeros((2, most, runs)), np.zeros(runs)
    for number in range(1, int(times.max(initial=0)) + 1):
        takes_part = times >= number
        draws = [everyone if active else nobody for active in takes_part]
        done = engine.round(sent(settings * games, number, subject.start), draws)
        moves, changes = _sums(law, done.uploads, law.round_seen(), known, len(users))
        kept += changes * takes_part  # what is remembered follows from what was sent before
        seen[:, number - 1] = np.stack([-moves, kept]) * takes_part
    flat = seen.reshape(2 * most, runs)
    return flat[:, ::2], flat[:, 1::2]


def _sums(
    law: Watched,
    gathered: Sequence[RoundUploads],
    seen: UploadProjections,
    known: np.ndarray,
    users: int,
) -> tuple[Array, Array]:
    """The round's mean move and mean change of memory along the canary, (runs,), without what the
    ``known`` users uploaded."""
    runs, own = len(gathered), np.isin(seen.users, known)
    moves = law.along(torch.stack([got.mean.params for got in gathered]))
    totals = np.array([
        sum(float(law.along(v)) for v in got.mean.totals.values() if v.ndim and len(v) > 1)
        for got in gathered
    ])  # fmt: skip
    moves = moves - np.bincount(seen.runs[own], seen.move[own], runs) / users
    for value in seen.totals.values():
        totals = totals - np.bincount(seen.runs[own], value[own], runs) / users
    return moves, totals


def statistics(inside: Array, outside: Array) -> Played:
    """Rounds (2T, n) of games as statistics (S, n): the plain sums, and the rounds weighted as best
    tells."""
    best = weighted(inside, outside)
    return _rows(inside, best[0]), _rows(outside, best[1])


def _rows(rounds: Array, best: Array) -> Array:
    """One row a statistic."""
    moves, controls = np.split(rounds, 2)
    return np.stack([moves.sum(0), controls.sum(0), best])
