"""Local steps of linear models by a GPU's own program, where it says the same as
:func:`~dpscaffold.engines.participation.steps.local_steps`."""

from __future__ import annotations

import torch

from dpscaffold.algorithms import Algorithm, Local, Participant
from dpscaffold.algorithms.affine import affine
from dpscaffold.engines.fast.draws import DeviceBatches, DeviceDraws
from dpscaffold.engines.fast.graphs import Tensors
from dpscaffold.engines.fast.kernels.linear import LinearModel, Steps, fits, run_steps
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.engines.participation.steps import Scales
from dpscaffold.tasks import Task
from dpscaffold.tasks.base import BOUNDS
from dpscaffold.tasks.linear import Linear
from dpscaffold.tasks.logistic import Logistic
from dpscaffold.tasks.losses import (
    HuberErrors,
    OfScores,
    logistic_errors,
    softmax_errors,
    squared_errors,
)

#: How many numbers of noise are held for all steps at once.
_NOISE = 1 << 28

_LOSSES: dict[OfScores, str] = {
    softmax_errors: "softmax",
    logistic_errors: "logistic",
    squared_errors: "squared",
}


def _can_fuse(
    model: LinearModel, records: LocalRecords, scales: Scales, noise_numbers: int
) -> bool:
    """Whether there is a program for what the model, the records and the numbers ask for."""
    if records.weight is not None or not records.tame or not fits(model, records.device):
        return False
    rescaled = scales.unit == "user" and scales.sampling == "poisson"
    uneven = scales.own_steps is not None
    return not (isinstance(scales.clip, str) or rescaled or uneven) and noise_numbers <= _NOISE


def fused_steps(
    task: Task,
    phase: Algorithm,
    at: Participant,
    drawn: DeviceBatches,
    given: Tensors,
    records: LocalRecords,
    scales: Scales,
) -> Local | None:
    """What K steps leave behind, (U, P) each; None where they have to be taken one by one.

    That is so for models, losses and directions without a program, median clips, means
    rescaled towards whole users, users with K_i of their own, records that are not all tame, and
    records that contribute nothing.
    """
    model, params = model_of(task), at.broadcast.params
    places, draws = given.get("places"), given["draws"]
    noise_numbers = len(draws) * scales.steps * task.parameters
    if model is None or not _can_fuse(model, records, scales, noise_numbers):
        return None
    way = affine(phase, at)
    if way is None:
        return None
    noise, spread, bound = None, torch.zeros_like(scales.divisor), None
    if isinstance(scales.clip, torch.Tensor):
        bound = torch.threshold(scales.clip.double(), BOUNDS[0], 0.0).clamp_max_(BOUNDS[1])
        if scales.noise is not None:
            noise = DeviceDraws.at(draws[:, :6]).normals(0, scales.steps, task.parameters)
            spread = scales.spread(scales.clip)
    numbers = [scales.step_size, scales.regularisation, scales.divisor, scales.weight, spread]
    found = run_steps(
        model,
        Steps(
            features=records.features,
            labels=records.labels,
            squares=records.squares,
            index=drawn.index,
            weight=None if drawn.weight is None else drawn.weight.contiguous(),
            places=places,
            starts=given["starts"],
            noise=noise,
            numbers=torch.cat(numbers, dim=1),
            bound=bound,
            params=params.contiguous(),
            shift=None if way.shift is None else way.shift.contiguous(),
            pull=float(way.pull),
            moves=way.moves,
        ),
    )
    return None if found is None else Local(found[0], found[1] / scales.steps)


def model_of(task: Task) -> LinearModel | None:
    """The linear model that a task is, with a loss that the programs know: by its very functions,
    as your own loss may have any name."""
    if type(task) not in (Linear, Logistic):
        return None
    assert isinstance(task, Linear)
    errors = task.loss.errors
    delta = 0.0
    if type(errors) is HuberErrors:  # a subclass may be another loss
        assert isinstance(errors, HuberErrors)
        delta = errors.delta
    name = "huber" if delta else _LOSSES.get(errors)
    return None if name is None else LinearModel(task.features + 1, task.outputs, name, delta)
