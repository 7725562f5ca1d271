"""Local steps of linear models by a CPU's script, bit for bit those of
:func:`~dpscaffold.engines.participation.steps.local_steps`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Local, Participant
from dpscaffold.algorithms.affine import affine
from dpscaffold.engines.fast.fused import model_of
from dpscaffold.engines.fast.kernels.scripts import CpuSteps, run_on_cpu
from dpscaffold.engines.participation.drawing import NOISE_BLOCK, Indices, Row, distinct
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.engines.participation.steps import Scales
from dpscaffold.randomness.csprng import grid_step
from dpscaffold.randomness.streams import NoiseStreams, OneRound
from dpscaffold.tasks import Task
from dpscaffold.tasks.base import BOUNDS, SHORTEST
from dpscaffold.tasks.clipping import TAME


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

    That is so for models, losses and directions without a script, clips read off the batch, means
    rescaled towards whole users, users with K_i of their own, records or errors that are not all
    tame, records that contribute nothing, and noise that cannot be redrawn identically if a value
    overflows midway: whether noise is used must not depend on what it is.
    """
    model, way = model_of(task), affine(phase, at)
    rescaled = scales.unit == "user" and scales.sampling == "poisson"
    uneven = scales.own_steps is not None or records.weight is not None
    if model is None or way is None or rescaled or not records.tame or not _repeats(rows):
        return None
    if isinstance(scales.clip, str) or records.device.type != "cpu" or uneven:
        return None
    firsts, which = distinct(rows)
    index, count = drawn
    streams, spread = None, torch.zeros_like(scales.divisor)
    if scales.noise is not None and isinstance(scales.clip, Tensor):
        wanted = [(row.randomness, row.user) for row in firsts]
        streams = NoiseStreams.of(at.broadcast.round, wanted, task.parameters)
        spread = scales.spread(scales.clip)
    full = bool((count == index.shape[2]).all())
    y, total = at.broadcast.params, torch.zeros_like(at.broadcast.params)
    block = max(1, NOISE_BLOCK // (len(firsts) * task.parameters))
    for k in range(0, scales.steps, block):
        part = slice(k, min(k + block, scales.steps))
        noise = None if streams is None else streams.draw(part.stop - k)
        steps = CpuSteps(
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
            shifts=way.shifts,
            pull=way.pull,
            moves=way.moves,
        )
        found = run_on_cpu(model, steps, y, total, (TAME, BOUNDS[0], SHORTEST))
        if found is None:
            return None
        y, total = found
    return Local(y, total / scales.steps)


def _repeats(rows: Sequence[Row]) -> bool:
    """Whether draws that are asked for twice are the same: those of a seed, or of held keys."""
    return all(not row.randomness.secret or isinstance(row.randomness, OneRound) for row in rows)
