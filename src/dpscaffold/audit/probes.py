"""Games that look for noise which is not a user's own and new: shared with another user, repeated
in another round, or made from the seed of the configuration.

Next to every user of the game takes part another one, whose data the adversary knows. Two models
are sent out: x⁰, and one at which the canary has little effect. Where noise repeats, the second
shows what is to be taken off the first, even if all records are in every batch.
"""

from __future__ import annotations

import numpy as np

from dpscaffold.audit.game import Played, play
from dpscaffold.audit.pairs import BETWEEN_ROUNDS, BETWEEN_USERS, between_rounds, between_users
from dpscaffold.audit.subject import AuditSubject, SentModel
from dpscaffold.audit.tally import CONTROL, RESTORED, UploadTally
from dpscaffold.privacy.loss import Array
from dpscaffold.randomness.streams import NoiseStreams, Randomness

#: What the adversary computes, by place.
PROBED = (
    *(f"moves, {name}" for name in (*BETWEEN_ROUNDS, *BETWEEN_USERS)),
    *(f"control variates, {name}" for name in (*BETWEEN_ROUNDS, *BETWEEN_USERS)),
    "moves less another user's",
    "moves plus another user's",
    "moves less the noise of the configured seed",
)
#: How far x⁰ is moved along the canary, in units of the reciprocal of its length.
FAR = tuple(sign * 10.0**k for k in np.arange(-1.0, 3.01, 0.25) for sign in (1, -1))
#: Effects that are taken to be the same.
ALIKE = 0.05
#: Which of the two models is sent in a round: Thue's sequence, which no period follows.
ORDER = tuple(number.bit_count() % 2 for number in range(64))


def probe_games(subject: AuditSubject, games: int, rng: np.random.Generator) -> Played:
    """This many games on each dataset, with the statistics above."""
    users = 2 * games
    tables: list[bool | None] = []
    for place in range(users):
        tables += [place % 2 == 0, None]
    times = subject.times(users, rng)
    models = (subject.start, second_model(subject))
    tally = play(subject, tables, np.repeat(times, 2), [models[k] for k in ORDER], rng)
    rows: list[Array] = []
    for kind in (RESTORED, CONTROL):
        own, others = tally.looked[kind][:, ::2], tally.looked[kind][:, 1::2]
        rows += [*between_rounds(own), *between_users(own, others)]
    best = tally.sums[0]
    rows += [best[::2] - best[1::2], best[::2] + best[1::2]]
    rows.append(best[::2] - _configured(subject, tally)[::2])
    statistics = np.stack(rows)
    return statistics[:, ::2], statistics[:, 1::2]


def second_model(subject: AuditSubject) -> SentModel:
    """The model near x⁰ at which the canary has the least effect, of those tried."""
    pair, start = subject.pair, subject.start
    length = float(pair.inside[0].nan_to_num(0.0).norm(dim=1).max()) or 1.0
    tried = [start, *(subject.model(start.params + far / length * pair.direction) for far in FAR)]
    least = min(abs(model.effect) for model in tried)
    return next(model for model in tried if abs(model.effect) <= least + ALIKE)


def _configured(subject: AuditSubject, tally: UploadTally) -> Array:
    """The noise of every user along the canary, had it come from the seed in the configuration;
    zero where noise is not secret, and the games have a seed of their own."""
    noise = np.zeros(len(tally.times))
    if not subject.privacy.secret:
        return noise
    seeded, direction = Randomness(subject.seed), subject.pair.direction.numpy()
    for number in range(1, int(tally.times.max(initial=0)) + 1):
        users = np.flatnonzero(tally.times >= number)
        streams = [seeded.normals(number, int(user)) for user in users]
        drawn = NoiseStreams(streams, len(direction)).draw(tally.steps).sum(0) @ direction
        noise[users] += drawn * tally.spread
    return noise
