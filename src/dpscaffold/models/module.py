"""A model as a plain ``torch.nn.Module``: preparation and scores in one forward pass."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpscaffold.data.features import Hog, RandomFeatures
from dpscaffold.data.prepared import (
    ClipNorm,
    Project,
    Ranges,
    Scale,
    Shift,
    Standardised,
    UnitNorm,
)
from dpscaffold.data.tables.codec import Coding
from dpscaffold.data.tables.missing import NaStrings, numbers_among
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared, Target
from dpscaffold.privacy.preparation import Remark
from dpscaffold.tasks import Linear, Mlp, ModuleTask, Task


class WholeModel(nn.Module):
    """Raw rows (N, columns) float32 ↦ scores (N, outputs).

    Columns are in the model's order. A categorical column holds the number of the category,
    counted from 0 in the order of ``categories``; NaN is a missing value, and so is a number that
    means one by the data's ``na_values``. What the training would have refused (a missing value, a
    number of no category) gives NaN scores, never a guess.
    """

    def __init__(
        self, stages: list[nn.Module], categories: dict[str, tuple[str, ...]], columns: list[str]
    ) -> None:
        super().__init__()
        self.stages = nn.Sequential(*stages)
        self.categories, self.columns = categories, columns

    def forward(self, rows: Tensor) -> Tensor:
        """Scores (N, outputs)."""
        scores: Tensor = self.stages(rows)
        return scores


def whole_model(
    task: Task,
    params: Tensor,
    preparation: Sequence[Prepared],
    columns: Sequence[str],
    target: Target | None = None,
) -> WholeModel:
    """Preparation and scores (task, parameters (P,)) in one module; see :class:`WholeModel`. A
    number with a range comes out in its own units."""
    stages = [_stage(step) for step in preparation if not isinstance(step, Remark)]
    coding = next((step for step in preparation if isinstance(step, Coding)), None)
    categories = dict(coding.categories) if coding else {}
    last = [_scoring(task, params)]
    if target is not None and target.low is not None:
        last.append(_Answers(target))
    return WholeModel([*stages, _SinglePrecision(), *last], categories, list(columns)).eval()


def _stage(step: Any) -> nn.Module:
    """One step of a preparation as a layer without parameters."""
    match step:
        case Coding():
            return _Coding(step)
        case Shift():
            factor = np.ones_like(step.mean) if step.factor is None else step.factor
            return _Affine(step.mean, factor, divide=False)
        case Standardised():
            return _Affine(step.mean, step.deviation, divide=True)
        case Project():
            return _Project(step.basis)
        case Ranges():
            return _Ranges(*step.scale)
        case UnitNorm():
            return _UnitNorm()
        case ClipNorm():
            return _ClipNorm(step.norm)
        case Hog():
            return _Hog(step)
        case RandomFeatures():
            return _Waves(step)
        case Scale():
            return _Affine(np.zeros_like(step.factor), step.factor, divide=False)
    raise BadInput(
        "step-not-exported",
        f"the step {type(step).__name__} of the preparation has no torch module",
    )


class _Coding(nn.Module):
    """The second half of the table codec: cells as numbers (dates as days since 1970, categories by
    their numbers) become features."""

    fills: Tensor

    def __init__(self, coding: Coding) -> None:
        super().__init__()
        self.layout = coding.layout
        self.register_buffer("fills", torch.tensor(self.layout.fills, dtype=torch.float32))
        at, na = {name: j for j, name in enumerate(coding.columns)}, NaStrings(coding.na_values)
        measured = [name for name in coding.numbers if name not in dict(coding.dates)]
        self.na_values = [(at[name], g) for name in measured for g in numbers_among(na.of(name))]

    def forward(self, rows: Tensor) -> Tensor:
        return self.layout.features(self._without_na_values(rows), self.fills)

    def _without_na_values(self, rows: Tensor) -> Tensor:
        """NaN where a number stands that means a missing one."""
        if not self.na_values:
            return rows
        gone = torch.zeros_like(rows, dtype=torch.bool)
        for j, number in self.na_values:
            here = torch.arange(rows.shape[1]) == j
            gone = gone | ((rows == number) & here)
        return torch.where(gone, torch.full_like(rows, math.nan), rows)


class _Affine(nn.Module):
    """(x − mean)·factor, or (x − mean)/factor, in the precision of the numbers."""

    mean: Tensor
    factor: Tensor

    def __init__(self, mean: np.ndarray, factor: np.ndarray, divide: bool) -> None:
        super().__init__()
        self.divide = divide
        self.register_buffer("mean", torch.from_numpy(np.array(mean)))
        self.register_buffer("factor", torch.from_numpy(np.array(factor)))

    def forward(self, rows: Tensor) -> Tensor:
        moved = rows.to(self.mean.dtype) - self.mean
        return moved / self.factor if self.divide else moved * self.factor


class _Ranges(nn.Module):
    """(x − middle)/width, cut at ±bound."""

    middle: Tensor
    width: Tensor
    bound: Tensor

    def __init__(self, middle: np.ndarray, half: np.ndarray, bound: np.ndarray) -> None:
        super().__init__()
        for name, value in (("middle", middle), ("width", half), ("bound", bound)):
            self.register_buffer(name, torch.from_numpy(value))

    def forward(self, rows: Tensor) -> Tensor:
        moved = (rows.float() - self.middle) / self.width
        return torch.maximum(torch.minimum(moved, self.bound), -self.bound)


class _Project(nn.Module):
    basis: Tensor

    def __init__(self, basis: np.ndarray) -> None:
        super().__init__()
        self.register_buffer("basis", torch.from_numpy(np.array(basis)))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.basis


class _Hog(nn.Module):
    """Histograms of oriented gradients."""

    def __init__(self, step: Hog) -> None:
        super().__init__()
        self.step = step

    def forward(self, rows: Tensor) -> Tensor:
        return self.step.features(rows.float())


class _Waves(nn.Module):
    """Random Fourier features."""

    weights: Tensor
    phases: Tensor

    def __init__(self, step: RandomFeatures) -> None:
        super().__init__()
        self.register_buffer("weights", torch.from_numpy(np.array(step.weights)))
        self.register_buffer("phases", torch.from_numpy(np.array(step.phases)))

    def forward(self, rows: Tensor) -> Tensor:
        scale = math.sqrt(2 / len(self.phases))
        return (rows.float() @ self.weights + self.phases).cos() * scale


class _UnitNorm(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        norms = rows.square().sum(dim=1, keepdim=True).sqrt()
        return rows / torch.where(norms > 0, norms, torch.ones_like(norms))


class _ClipNorm(nn.Module):
    def __init__(self, norm: float) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, rows: Tensor) -> Tensor:
        norms = rows.square().sum(dim=1, keepdim=True).sqrt()
        return rows * (self.norm / norms.clamp_min(1e-30)).clamp_max(1.0)


class _SinglePrecision(nn.Module):
    """Single precision, in which models are trained."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows.float()


class _Answers(nn.Module):
    """Scores of a number with a range in its own units."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target

    def forward(self, scores: Tensor) -> Tensor:
        return self.target.answers(scores)


def _scoring(task: Task, params: Tensor) -> nn.Module:
    """The task's scores as layers that hold the parameters."""
    params = params.detach().cpu()
    if isinstance(task, Linear):
        return _layer(params.view(task.outputs, task.features + 1))
    if isinstance(task, Mlp):
        first = task.hidden * (task.features + 1)
        return nn.Sequential(
            _layer(params[:first].view(task.hidden, -1)),
            nn.ReLU(),
            _layer(params[first:].view(task.classes, -1)),
        )
    if isinstance(task, ModuleTask):
        return _Shaped(task.filled(params), task.shape)
    return _Own(task, params)


def _layer(rows: Tensor) -> nn.Linear:
    """A linear layer of (outputs, inputs + 1) numbers, the bias last in each row."""
    layer = nn.Linear(rows.shape[1] - 1, rows.shape[0])
    with torch.no_grad():
        layer.weight.copy_(rows[:, :-1])
        layer.bias.copy_(rows[:, -1])
    return layer


class _Shaped(nn.Module):
    def __init__(self, module: nn.Module, shape: tuple[int, ...] | None) -> None:
        super().__init__()
        self.module, self.shape = module, shape

    def forward(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.module(rows if self.shape is None else rows.view(-1, *self.shape))
        return scores


class _Own(nn.Module):
    """Your own task, called as it is."""

    def __init__(self, task: Task, params: Tensor) -> None:
        super().__init__()
        self.task, self.flat = copy.copy(task), nn.Parameter(params.clone())

    def forward(self, rows: Tensor) -> Tensor:
        return self.task.scores(self.flat, self.task.prepare(rows))
