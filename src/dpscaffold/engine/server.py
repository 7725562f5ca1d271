"""What a server does in a round of one run: announce, and move."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dpscaffold.algorithms import Algorithm, Broadcast, Cohort
from dpscaffold.config import Run
from dpscaffold.engine.aggregate import mean_weights
from dpscaffold.engine.memory import Memory
from dpscaffold.engine.state import Draw, Round, RoundUploads, State

#: Brings back the uploads of those who were drawn.
Gather = Callable[[Algorithm, Broadcast, Draw], RoundUploads]


def server_round(run: Run, state: State, draw: Draw, memories: Memory, gather: Gather) -> Round:
    """One round: announce to the participants, gather what they send, and move. A round of which
    nothing came back leaves the server as it was."""
    phase, server = phase_of(run, state.round + 1), state.server
    found = gather(phase, announced(run, state, draw, memories, phase), draw)
    if found.arrived:
        server = phase.update(server, found.mean, run.plan.server_rate)
    return Round(state.moved(server, [run]), [found])


def phase_of(run: Run, round: int) -> Algorithm:
    """The algorithm of a round: the warm-up first, where there is one."""
    return run.algorithm.phase(round, run.warm_rounds) if run.warm_rounds else run.algorithm


def announced(run: Run, state: State, draw: Draw, memories: Memory, phase: Algorithm) -> Broadcast:
    """What the server sends to the participants of the next round: x and what is announced."""
    users, device, number = draw.active, state.params.device, state.round + 1
    held = memories.recall(users) if phase.mirrored else {}
    cohort = Cohort(
        torch.from_numpy(users).to(device),
        torch.as_tensor(mean_weights(run, draw), dtype=torch.float32).to(device),
        run.known(users.tolist(), number),
        {name: value for name, value in held.items() if name in phase.shared},
        memories.seen(users),
    )
    return Broadcast(number, state.params, phase.announce(state.server, cohort))
