"""K steps of linear models on a CPU as one TorchScript: the same operations in the same order,
without the interpreter between them.

A step is dozens of small operations. From Python each gives the interpreter's lock back and takes
it again, so that threads which share a round spend their time in handing it to each other; a script
runs without it. Where a script cannot be had (it is an older part of PyTorch), steps are taken one
by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dpscaffold.engines.fast.kernels import tried
from dpscaffold.engines.fast.kernels.linear import LOSSES, LinearModel


@dataclass(frozen=True)
class CpuSteps:
    """What some steps of U rows are made of.

    - ``features`` (N, D) with ones, ``labels``, ``squares`` (N,): tame records.
    - ``index`` (V, K, B) and ``counts`` (V, K) or None (all real): the batches of V distinct rows.
    - ``places`` (U,) or None: which of them each row draws; ``starts`` (U, 1) of its records.
    - ``noise`` (K, V, P) or None, and its ``spread`` (U, 1); secret noise is in float64, and sums
      with it are rounded to multiples of ``grid`` (U, 1) in float64.
    - ``step_size``, ``regularisation``, ``divisor`` (U, 1); ``bound`` (U,) or None: C.
    - ``x`` (U, P); a step goes along the gradient, plus ``shifts`` (U, P) one after the other, plus
      ``pull``·(y − x), or nowhere where it ``moves`` not.
    """

    features: Tensor
    labels: Tensor
    squares: Tensor
    index: Tensor
    counts: Tensor | None
    places: Tensor | None
    starts: Tensor
    noise: Tensor | None
    spread: Tensor
    grid: Tensor | None
    step_size: Tensor
    regularisation: Tensor
    divisor: Tensor
    bound: Tensor | None
    x: Tensor
    shifts: tuple[Tensor, ...]
    pull: float
    moves: bool


def run_on_cpu(
    model: LinearModel,
    steps: CpuSteps,
    y: Tensor,
    total: Tensor,
    limits: tuple[float, float, float],
) -> tuple[Tensor, Tensor] | None:
    """y (U, P) after these steps from ``y``, and the sum of their gradients beside ``total``; None
    where they have to be taken one by one, as an error is wild or there is no script.

    ``limits`` are the squared norm of the longest tame row, the least bound and the least norm.
    """
    script = _compiled(_steps)
    if script is None:
        return None
    given = [list(part) if isinstance(part, tuple) else part for part in vars(steps).values()]
    numbers = (model.outputs, LOSSES[model.loss], model.delta, *limits)
    y, total, fine = script(*given, y, total, *numbers)
    return (y, total) if fine else None


def _steps(
    features: Tensor,
    labels: Tensor,
    squares: Tensor,
    index: Tensor,
    counts: Tensor | None,
    places: Tensor | None,
    starts: Tensor,
    noise: Tensor | None,
    spread: Tensor,
    grid: Tensor | None,
    step_size: Tensor,
    regularisation: Tensor,
    divisor: Tensor,
    bound: Tensor | None,
    x: Tensor,
    shifts: list[Tensor],
    pull: float,
    moves: bool,
    y: Tensor,
    total: Tensor,
    outputs: int,
    loss: int,
    delta: float,
    longest: float,
    least: float,
    shortest: float,
) -> tuple[Tensor, Tensor, bool]:
    """As :func:`~dpscaffold.engines.participation.steps.local_steps`,
    :class:`~dpscaffold.tasks.linear.Linear` and
    :func:`~dpscaffold.tasks.clipping.clip_outer` say it, operation by operation."""
    users, width = x.shape[0], index.shape[2]
    column = torch.arange(width)
    minus = torch.full([], -1.0, dtype=x.dtype).expand([users, 1, width])
    used = bound
    if bound is not None:
        used = torch.threshold(bound, least, 0.0)[:, None]
    for k in range(index.shape[1]):
        mine = index[:, k]
        if places is not None:
            mine = mine.index_select(0, places)
        flat = (mine + starts).view(-1)
        rows = features.index_select(0, flat).view(users, width, -1)
        targets = labels.index_select(0, flat).view(users, 1, width)
        errors = torch.bmm(y.view(users, outputs, -1), rows.transpose(1, 2))
        if loss == 0:
            errors = errors.sub_(errors.amax(1, keepdim=True)).exp_()
            errors /= errors.sum(1, keepdim=True)
            errors.scatter_add_(1, targets, minus)
        elif loss == 1:
            away = (1 - 2 * targets).to(errors.dtype)
            errors = errors.mul_(away).sigmoid_().mul_(away)
        else:
            errors = errors.sub_(targets)
            if loss == 3:
                errors = errors.clamp_(-delta, delta)
        weight: Tensor | None = None
        if counts is not None:
            count = counts[:, k]
            if places is not None:
                count = count.index_select(0, places)
            weight = (column < count[:, None]).to(errors.dtype)
        if used is not None:
            own = (errors * errors).sum(1)
            if not bool(own.amax() <= longest):  # NaN too
                return y, total, False
            norms = own.mul_(squares.index_select(0, flat).view(users, width)).sqrt_()
            factor = (used / norms.clamp_min_(shortest)).clamp_max_(1.0)
            if weight is not None:
                factor *= weight
            errors *= factor[:, None, :]
        elif weight is not None:
            errors.mul_(weight[:, None, :]).masked_fill_((weight == 0)[:, None, :], 0.0)
        gradient = torch.bmm(errors, rows).view(users, -1).div_(divisor)
        if noise is not None:
            normals = noise[k]
            if places is not None:
                normals = normals.index_select(0, places)
            if grid is None:
                gradient.addcmul_(spread, normals)
            else:
                noised = gradient.double().addcmul_(spread.double(), normals)
                noised = torch.where(spread > 0, torch.round(noised / grid) * grid, noised)
                gradient = noised.to(gradient.dtype)
        gradient.addcmul_(regularisation, y)
        total += gradient
        if moves:
            for shift in shifts:
                gradient += shift
            if pull != 0.0:
                gradient += pull * (y - x)
            y = y - step_size * gradient
    return y, total, True


@cache
def _compiled(program: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function as a script, or None where there is no such thing here."""

    def compiled() -> Callable[..., Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is an older part is known
            made: Callable[..., Any] = torch.jit.script(program)
        return made

    return tried("K steps on a CPU", compiled)
