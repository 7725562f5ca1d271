"""Rounds one after the other, for the benchmarks next to this file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dpscaffold.config import Run
from dpscaffold.engine import Draw, Engine, Round, State
from dpscaffold.federation import Federation


def rounds_of(
    runs: Sequence[Run], data: Federation, device: torch.device | None = None
) -> Iterator[Round]:
    """The rounds of these runs side by side, each when it is asked for."""
    engine = Engine(runs, [data] * len(runs), device or torch.device("cpu"))
    states = [State.initial(run, engine.device) for run in runs]
    state = states[0] if len(runs) == 1 else State.stack(states)
    while True:
        drawn = [
            one.cohort(state.round + 1, run.users, run.cohort_size)
            for run, one in zip(runs, engine.streams, strict=True)
        ]
        done = engine.round(state, [Draw.all(users) for users in drawn])
        state = done.state
        yield done
