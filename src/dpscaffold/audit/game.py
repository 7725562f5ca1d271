"""The distinguishing game: a user holds one of two datasets, the engine runs, the adversary looks.

In the server's view a user's uploads are all that depends on its record, so a game is that user's
participations and nothing else, and thousands of games are the users of one simulated federation.
Views of sums are in :mod:`dpscaffold.audit.sums`, games that compare uploads with one another in
:mod:`dpscaffold.audit.pairs`.

The step size, the model that is sent out and everybody's data are the adversary's choice: DP holds
for all of them. It sends x⁰ in every round and takes a step size so small that a canary's gradient
does not turn while its user moves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dpscaffold.algorithms import Algorithm, Broadcast, Server
from dpscaffold.audit.pairs import BETWEEN_ROUNDS, between_rounds
from dpscaffold.audit.subject import AuditSubject, SentModel
from dpscaffold.audit.tally import CHANGE, CONTROL, MOVE, RESTORED, UploadTally
from dpscaffold.audit.watching import WatchedSimulator
from dpscaffold.engines import Draw, Simulator, State
from dpscaffold.engines.rounds import announced
from dpscaffold.privacy.loss import Array
from dpscaffold.setting import Setting

#: The name of the statistic that no game may ever see.
NOT_FINITE = "uploads that are not finite"
#: What the adversary computes from what it sees, by place.
STATISTICS = (
    "likelihood ratio of the moves",
    "likelihood ratio of the control variates",
    "likelihood ratio of the moves, round by round",
    "likelihood ratio of the moves, one batch for all steps",
    "likelihood ratio of the control variates, round by round",
    "likelihood ratio of the control variates, one batch for all steps",
    "control variates along the canary",
    "moves along the canary, memory added back",
    "moves along the canary",
    "noise across the canary",
    NOT_FINITE,
    *(f"moves, {name}" for name in BETWEEN_ROUNDS),
    *(f"control variates, {name}" for name in BETWEEN_ROUNDS),
)
#: (inside, outside): statistics (S, n) of games on the two datasets.
Played = tuple[Array, Array]


def server_games(subject: AuditSubject, games: int, rng: np.random.Generator) -> Played:
    """This many games on each dataset, as the server sees them: the statistics above, then the
    uploads of each participation."""
    users = 2 * games
    tally = play(subject, [place % 2 == 0 for place in range(users)], subject.times(users, rng),
                 [subject.start], rng)  # fmt: skip
    pairs = [row for kind in (RESTORED, CONTROL) for row in between_rounds(tally.looked[kind])]
    uploads = np.nan_to_num(tally.looked[[MOVE, CHANGE]]).reshape(-1, users)
    statistics = np.stack([*tally.likelihoods(), *tally.plain, *pairs, *uploads])
    return statistics[:, ::2], statistics[:, 1::2]


def play(
    subject: AuditSubject,
    tables: list[bool | None],
    times: np.ndarray,
    models: list[SentModel],
    rng: np.random.Generator,
) -> UploadTally:
    """The participations of users who hold these tables, each this many times. In round t they are
    sent the model t of ``models``, which are repeated."""
    federation = subject.federation(tables)
    setting = subject.setting(federation)
    engine = WatchedSimulator(
        [setting], [federation], [subject.streams(rng)], subject.pair.direction
    )
    tally = UploadTally(subject, len(tables), set(setting.algorithm.shared))
    for number in range(1, int(times.max(initial=0)) + 1):
        active = np.flatnonzero(times >= number)
        draw, model = Draw(active, active), models[(number - 1) % len(models)]
        phase = setting.algorithm.phase(number, setting.warm_rounds)
        engine.gather(phase, sent(setting, engine, phase, draw, number, model), draw)
        tally.enter(engine.round_seen(), model.known)
    return tally


def sent(
    setting: Setting,
    engine: Simulator,
    phase: Algorithm,
    draw: Draw,
    number: int,
    model: SentModel,
) -> Broadcast:
    """A model and what the algorithm announces with it."""
    state = State.initial(setting, engine.device)
    server = Server(model.params, state.server.slots)
    state = replace(state, round=number - 1, server=server)
    return announced(setting, state, draw, engine.memories, phase)
