"""K local steps of linear models on a CPU as one compiled program, bit for bit those of
:func:`~dpscaffold.engines.participation.steps.local_steps`.

A step is dozens of small operations. From Python each of them releases the interpreter's lock and
takes it again, so threads that share a round spend their time on handing it over. A TorchScript
program does not hold the lock: a round takes 1.7 to 2.0 times the bare arithmetic instead of 2.1 to
2.6 (``benchmarks/round.py``).

TorchScript is deprecated, and PyTorch has no successor that runs without a compiler and without
changing results. So everything about it is in this file: the deprecation warning is silenced where
the program is compiled, and where it cannot be compiled the steps are taken one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Local, Participant
from dpscaffold.algorithms.affine import FAST_FIELDS, affine
from dpscaffold.engines.fast.fused import model_of
from dpscaffold.engines.fast.kernels import tried
from dpscaffold.engines.fast.kernels.linear import LOSSES
from dpscaffold.engines.participation.drawing import NOISE_BLOCK, Indices, Row, distinct
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.engines.participation.steps import Scales
from dpscaffold.randomness.csprng import grid_step
from dpscaffold.randomness.streams import NoiseStreams, OneRound
from dpscaffold.tasks import Task
from dpscaffold.tasks.base import BOUNDS, SHORTEST
from dpscaffold.tasks.clipping import TAME

#: The fields of an algorithm that these programs know: they may begin anywhere.
KNOWN = FAST_FIELDS | {"begin_at"}


def scripted_steps(
    task: Task,
    phase: Algorithm,
    at: Participant,
    rows: Sequence[Row],
    drawn: Indices,
    records: LocalRecords,
    scales: Scales,
) -> Local | None:
    """What K steps leave behind, (U, P) each; None where they have to be taken one by one.

    That is so for models, losses and directions without a script, median clips, means
    rescaled towards whole users, users with K_i of their own, records or errors that are not all
    tame, records that contribute nothing, and noise that cannot be redrawn identically if a value
    overflows midway: whether noise is used must not depend on what it is.
    """
    rescaled = scales.unit == "user" and scales.sampling == "poisson"
    uneven = scales.own_steps is not None or records.weight is not None
    if rescaled or uneven or not records.tame or not _repeats(rows):
        return None
    if isinstance(scales.clip, str) or records.device.type != "cpu":
        return None
    model, way = model_of(task), affine(phase, at, KNOWN)
    if model is None or way is None:
        return None
    program = _compiled(_steps)
    if program is None:
        return None
    firsts, which = distinct(rows)
    index, count = drawn
    streams, spread = None, torch.zeros_like(scales.divisor)
    if scales.noise is not None and isinstance(scales.clip, Tensor):
        wanted, spread = [(row.randomness, row.user) for row in firsts], scales.spread(scales.clip)
        streams = NoiseStreams.of(at.broadcast.round, wanted, task.parameters)
    full = bool((count == index.shape[2]).all())
    y, total = phase.begin_at(at), torch.zeros_like(at.broadcast.params)
    pull = way.pull if isinstance(way.pull, Tensor) else y.new_full((1, 1), way.pull)
    block = max(1, NOISE_BLOCK // (len(firsts) * task.parameters))
    for k in range(0, scales.steps, block):
        part = slice(k, min(k + block, scales.steps))
        noise = None if streams is None else streams.draw(part.stop - k)
        y, total, fine = program(
            features=records.features,
            labels=records.labels,
            squares=records.squares,
            index=index[:, part],
            counts=None if full else count[:, part],
            places=None if which is None else torch.tensor(which),
            starts=torch.tensor(records.starts)[:, None],
            noise=None if noise is None else torch.from_numpy(noise),
            spread=spread,
            grid=grid_step(spread) if noise is not None and noise.dtype == np.float64 else None,
            step_size=scales.step_size,
            regularisation=scales.regularisation,
            divisor=scales.divisor,
            bound=scales.clip,
            x=at.broadcast.params,
            shifts=list(way.shifts),
            pull=pull,
            pulled=bool((pull != 0).any()),
            moves=way.moves,
            y=y,
            total=total,
            outputs=model.outputs,
            loss=LOSSES[model.loss],
            delta=model.delta,
            longest=TAME,
            least=BOUNDS[0],
            shortest=SHORTEST,
        )
        if not fine:
            return None
    return Local(y, total / scales.steps)


def _repeats(rows: Sequence[Row]) -> bool:
    """Whether draws that are asked for twice are the same: those of a seed, or of held keys."""
    return all(not row.randomness.secret or isinstance(row.randomness, OneRound) for row in rows)


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
    pull: Tensor,
    pulled: bool,
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
    """Some steps of U rows from ``y`` (U, P): the new y, ``total`` plus all gradients, and whether
    all errors were tame. It repeats :func:`~dpscaffold.tasks.clipping.clip_outer`,
    :class:`~dpscaffold.tasks.linear.Linear` and ``local_steps``, operation by operation.

    - ``features`` (N, D) with ones, ``labels``, ``squares`` (N,): tame records.
    - ``index`` (V, K, B) and ``counts`` (V, K) or None (all real): the batches of V distinct rows.
    - ``places`` (U,) or None: which of them each row draws; ``starts`` (U, 1) of its records.
    - ``noise`` (K, V, P) or None, and its ``spread`` (U, 1); secret noise is in float64, and sums
      with it are rounded to multiples of ``grid`` (U, 1) in float64.
    - ``step_size``, ``regularisation``, ``divisor`` (U, 1); ``bound`` (U,) or None: C.
    - ``x`` (U, P); a step goes along the gradient, plus each of ``shifts`` (U, P), plus
      ``pull`` (U or 1, 1)·(y − x) where ``pulled``, or does not move unless ``moves``.
    - ``longest``: the squared norm of the longest tame row; ``least`` bound, ``shortest`` norm.
    """
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
            if pulled:
                gradient += pull * (y - x)
            y = y - step_size * gradient
    return y, total, True


@cache
def _compiled(program: Callable[..., Any]) -> Callable[..., Any] | None:
    """The compiled program, or None where it cannot be compiled."""

    def compiled() -> Callable[..., Any]:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r".*torch\.jit\.script", DeprecationWarning)
            made: Callable[..., Any] = torch.jit.script(program)
        return made

    return tried("K steps on a CPU", compiled)
