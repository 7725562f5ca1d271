"""The loop over rounds: draw → admit → announce → gather → update.

:mod:`~dpscaffold.engines.adapter` takes the rounds of one run with it, experiments those of a
stack of runs, on whichever engine. Only :mod:`~dpscaffold.engines.fast.lockstep` counts rounds
itself: there a GPU replays a whole round as one recorded graph. Tests compare it with this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Cohort, Known, Slots
from dpscaffold.config import Run
from dpscaffold.engines import (
    Draw,
    Gatherer,
    Memories,
    RoundUploads,
    Simulator,
    StackedEngine,
    State,
    mean_weights,
)
from dpscaffold.engines.machine import sent
from dpscaffold.randomness.streams import Randomness

#: Who takes part in a round; None ends the run before it.
Drawing = Callable[[int], Draw | None]


@dataclass(frozen=True)
class FinishedRound:
    """A finished round: who was drawn, what came back, and the server after its move."""

    number: int
    draw: Draw
    gathered: RoundUploads
    state: State


def rounds(
    setting: Run, engine: Gatherer, drawing: Drawing, state: State
) -> Iterator[FinishedRound]:
    """The rounds that are left of one run, each yielded when it is done.

    >>> from dpscaffold import Logistic, Plan, fedavg, synthetic
    >>> from dpscaffold.engines import Loop
    >>> data = synthetic(users=5, records=20)
    >>> setting = Run(data.roster, Logistic(40, 10), fedavg(), Plan(rounds=2, local_steps=3))
    >>> loop, start = Loop(setting, data), State.initial(setting, torch.device("cpu"))
    >>> drawing = plain_draws(setting, loop.randomness)
    >>> [done.state.round for done in rounds(setting, loop, drawing, start)]
    [1, 2]
    """
    for done in stacked_rounds([setting], _StackOfOne(engine), [drawing], [state]):
        yield done[0]


def stacked_rounds(
    settings: Sequence[Run],
    engine: StackedEngine,
    drawings: Sequence[Drawing],
    states: list[State],
) -> Iterator[list[FinishedRound]]:
    """The same for runs of equal shape. ``states`` is moved in place; between two rounds the caller
    may change it. A round that the engine is to redo (the caller asked whether it was cut short) is
    yielded once more."""
    first = settings[0]
    for number in range(states[0].round + 1, first.plan.rounds + 1):
        draws: list[Draw] = []
        for drawing in drawings:
            made = drawing(number)
            if made is None:
                return
            draws.append(made)
        warm, phase = first.warm_rounds, first.algorithm
        phase = phase.phase(number, warm) if warm else phase
        asked = zip(settings, states, draws, engine.all_memories, strict=True)
        broadcasts = [announced(*one, phase) for one in asked]
        before, gathered = list(states), engine.gather_all(phase, broadcasts, draws)
        while True:
            for k, (setting, got) in enumerate(zip(settings, gathered, strict=True)):
                server = before[k].server
                if got.arrived:  # a round of which nothing came back leaves the server as it was
                    server = phase.update(server, got.mean, setting.plan.server_rate)
                states[k] = before[k].moved(server, setting)
            yield [
                FinishedRound(number, *one)
                for one in zip(draws, gathered, list(states), strict=True)
            ]
            if not engine.to_redo:
                break
            gathered = engine.again()


def announced(
    setting: Run, state: State, draw: Draw, memories: Memories, phase: Algorithm
) -> Broadcast:
    """What the server sends to the participants of the next round: x and what is announced."""
    server, number = state.server, state.round + 1
    cohort = DrawnCohort(setting, draw, memories, phase.mirrored, server.params.device, number)
    announced = phase.announce(server, cast("Cohort", cohort))
    return Broadcast(number, server.params, announced)


@dataclass(frozen=True)
class DrawnCohort:
    """The participants of a round as a :class:`~dpscaffold.algorithms.Cohort`: what an algorithm
    asks about them is looked up then."""

    setting: Run
    draw: Draw
    held: Memories
    mirrored: bool
    #: Where the server's state is.
    device: torch.device
    #: The round's number, for its step size.
    round: int = 1

    @cached_property
    def users(self) -> tuple[int, ...]:
        """Who takes part."""
        return tuple(self.draw.active.tolist())

    @cached_property
    def weights(self) -> Tensor:
        """Those of the mean of Δy, (m,)."""
        weights = torch.as_tensor(mean_weights(self.setting, self.draw), dtype=torch.float32)
        return sent(weights, self.device)

    @cached_property
    def known(self) -> Known:
        """The public numbers of their participation."""
        return self.setting.known(self.users, self.round)

    @cached_property
    def memories(self) -> Slots:
        """Their slots, where the algorithm is mirrored; private ones are nobody else's."""
        held = self.held.recall(self.users) if self.mirrored else {}
        return {
            name: value for name, value in held.items() if name in self.setting.algorithm.shared
        }

    @cached_property
    def seen(self) -> Tensor:
        """Who took part before, (m,)."""
        return self.held.seen(self.users)


def plain_draws(setting: Run, randomness: Randomness) -> Drawing:
    """⌊lM⌋ of the users, from the run's own stream; everybody drawn takes part."""

    def draw(round: int) -> Draw:
        drawn = randomness.cohort(round, setting.users, setting.cohort_size)
        return Draw(drawn, drawn)

    return draw


class _StackOfOne:
    """An engine of one run as a stack of one."""

    def __init__(self, engine: Gatherer) -> None:
        self.engine, self.all_memories = engine, [engine.memories]

    @property
    def to_redo(self) -> bool:
        """Whether the last round was cut short; most engines know no such thing."""
        return bool(getattr(self.engine, "to_redo", False))

    def again(self) -> list[RoundUploads]:
        assert isinstance(self.engine, Simulator)
        return self.engine.again()

    def gather_all(
        self, phase: Algorithm, broadcasts: Sequence[Broadcast], draws: Sequence[Draw]
    ) -> list[RoundUploads]:
        return [self.engine.gather(phase, broadcasts[0], draws[0])]
