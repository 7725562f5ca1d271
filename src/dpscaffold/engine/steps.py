"""The K local steps of some participations, side by side: all vectors are (U, P)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Local, Participant
from dpscaffold.engine.query import Numbers, Query
from dpscaffold.tasks import Batch, Task

#: A batch and the standard normals of its noise, for every step.
Drawn = Iterable[tuple[Batch, Tensor | None]]


@dataclass(frozen=True)
class Participation:
    """What U users compute with in a round: the task, the algorithm (``phase``), what a step asks
    of a batch, what they received and remember, and their public numbers."""

    task: Task
    phase: Algorithm
    query: Query
    at: Participant
    numbers: Numbers


def local_steps(of: Participation, drawn: Drawn) -> Local:
    """The inner loop of Algorithm 1 for U users at once. A user that has taken its K_i steps stands
    still."""
    at, numbers = of.at, of.numbers
    y = of.phase.begin_at(at)
    total = torch.zeros_like(y)
    for step, (batch, normals) in enumerate(drawn):
        gradient = of.query(of.task, y, batch, numbers, normals)
        gradient.addcmul_(numbers.regularisation, y)
        moved = y - numbers.step_size * of.phase.direction(gradient, y, at)
        if isinstance(numbers.steps, Tensor):
            active = step < numbers.steps
            gradient, moved = gradient.where(active, 0.0), moved.where(active, y)
        total += gradient
        y = moved
    return Local(y, total / numbers.steps)
