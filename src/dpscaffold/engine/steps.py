"""The K local steps of some participations, side by side: all vectors are (U, P)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Local, Participant
from dpscaffold.engine.query import Numbers, Query
from dpscaffold.tasks import Batch, Task

#: A batch and the standard normals of its noise, for every step.
Drawn = Iterable[tuple[Batch, Tensor | None]]


def local_steps(
    task: Task,
    algorithm: Algorithm,
    query: Query,
    at: Participant,
    numbers: Numbers,
    drawn: Drawn,
) -> Local:
    """The inner loop of Algorithm 1 for U users at once. A user that has taken its K_i steps stands
    still."""
    y = algorithm.begin_at(at)
    total = torch.zeros_like(y)
    for step, (batch, normals) in enumerate(drawn):
        gradient = query(task, y, batch, numbers, normals)
        gradient.addcmul_(numbers.regularisation, y)
        moved = y - numbers.step_size * algorithm.direction(gradient, y, at)
        if isinstance(numbers.steps, Tensor):
            active = step < numbers.steps
            gradient, moved = gradient.where(active, 0.0), moved.where(active, y)
        total += gradient
        y = moved
    return Local(y, total / numbers.steps)
