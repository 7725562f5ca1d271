"""The distinguishing game: a user holds one of two datasets, the engine runs, the adversary looks.

In the server's view a user's uploads are all that depends on its record, so a game is that user's
participations and nothing else, and thousands of games are the users of one simulated federation.
Views of sums are in :mod:`dpscaffold.audit.sums`.

The step size, the model that is sent out and everybody's data are the adversary's choice: DP holds
for all of them. It sends x⁰ in every round and takes a step size so small that a canary's gradient
does not turn while its user moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpscaffold.algorithms import Server
from dpscaffold.audit.subject import AuditSubject, SentModel
from dpscaffold.audit.tally import UploadTally
from dpscaffold.audit.watching import Watched
from dpscaffold.config import Run
from dpscaffold.engine import Draw, Engine, State
from dpscaffold.privacy.loss import Array

#: The name of the statistic that no game may ever see.
NOT_FINITE = "uploads that are not finite"
#: What the adversary computes from what it sees, by place.
STATISTICS = (
    "likelihood ratio of the moves",
    "likelihood ratio of the control variates",
    "likelihood ratio of the moves, one batch for all steps",
    "noise across the canary",
    NOT_FINITE,
)
#: (inside, outside): statistics (S, n) of games on the two datasets.
Played = tuple[Array, Array]


def server_games(subject: AuditSubject, games: int, rng: np.random.Generator) -> Played:
    """This many games on each dataset, as the server sees them: the statistics above, then the
    uploads of each participation."""
    users = 2 * games
    tables = [place % 2 == 0 for place in range(users)]
    tally = play(subject, tables, subject.times(users, rng), rng)
    uploads = np.nan_to_num(tally.looked).reshape(-1, users)
    statistics = np.stack([*tally.statistics(), *uploads])
    return statistics[:, ::2], statistics[:, 1::2]


def play(
    subject: AuditSubject,
    tables: Sequence[bool],
    times: np.ndarray,
    rng: np.random.Generator,
) -> UploadTally:
    """The participations of users who hold these tables, each this many times."""
    federation = subject.federation(tables)
    setting = subject.setting(federation)
    law = Watched([setting], subject.pair.direction)
    engine = Engine([setting], [federation], streams=[subject.streams(rng)], law=law)
    tally = UploadTally(subject, len(tables), set(setting.algorithm.shared))
    for number in range(1, int(times.max(initial=0)) + 1):
        active = np.flatnonzero(times >= number)
        engine.round(sent([setting], number, subject.start), [Draw.all(active)])
        tally.enter(law.round_seen(), subject.start.known)
    return tally


def sent(settings: Sequence[Run], number: int, model: SentModel) -> State:
    """The servers of these runs before a round in which they send this model."""
    states = [State.initial(setting) for setting in settings]
    asked = [
        replace(one, round=number - 1, server=Server(model.params, one.server.slots))
        for one in states
    ]
    return State.stack(asked)
