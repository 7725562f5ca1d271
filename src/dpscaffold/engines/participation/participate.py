"""A participation: the K steps of some users, with their batches, scales and noise.

The simulator calls it with a shard of a round's participants, a deployed site with its one user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Participant, Slots, Upload
from dpscaffold.algorithms.affine import FAST_FIELDS
from dpscaffold.config.gaussian import NoisedStep
from dpscaffold.engines.fast.devices import BatchOverflow, draws_on, on_device
from dpscaffold.engines.fast.graphs import Graphs
from dpscaffold.engines.fast.scripted import scripted_steps
from dpscaffold.engines.participation.drawing import (
    NOISE_BLOCK,
    Indices,
    Row,
    distinct,
    indices,
)
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.engines.participation.steps import Scales, local_steps, noised_mean
from dpscaffold.errors import BadInput
from dpscaffold.randomness.streams import NoiseStreams
from dpscaffold.tasks import Batch, Clip, Task


def participate(
    task: Task,
    phase: Algorithm,
    rows: Sequence[Row],
    records: LocalRecords,
    broadcast: Broadcast,
    memory: Slots,
    drawn: Indices | None = None,
    graphs: Graphs | None = None,
    cut: BatchOverflow | None = None,
) -> tuple[Upload, Slots]:
    """K local steps of these rows from y = x; their uploads and new slots, all (U, ·).

    ``drawn`` are the batches of the distinct rows where they are drawn already. A GPU draws for
    itself, unless the run is secret, and records its work where it is given ``graphs``; with
    ``cut`` it is not waited for. Rows of a secure sum upload integers.
    """
    if rows[0].sums is not None:
        return secure_upload(task, rows, records, broadcast, drawn)
    fits = draws_on(records.device, rows) and not phase.in_use_beyond(FAST_FIELDS)
    if drawn is None and fits:
        return on_device(task, phase, rows, records, broadcast, memory, graphs, cut)
    scales = scales_of(rows, records.device)
    at = Participant(broadcast, memory, scales.known)
    drawn = drawn or indices(broadcast.round, distinct(rows)[0])
    local = scripted_steps(task, phase, at, rows, drawn, records, scales)
    if local is not None:
        return phase.finish(local, at)
    batches = noised_batches(broadcast.round, rows, records, task.parameters, drawn)
    return local_steps(task, phase, at, batches, scales)


def secure_upload(
    task: Task,
    rows: Sequence[Row],
    records: LocalRecords,
    broadcast: Broadcast,
    drawn: Indices | None = None,
) -> tuple[Upload, Slots]:
    """The noised batch means of these rows at x as integers of their runs' sums, (U, P) int64.

    Every row's mechanism has the noise of the list that takes part
    (:meth:`~dpscaffold.config.secure.SumPlan.noise_for`).
    """
    scales, size = scales_of(rows, records.device), task.parameters
    batches = noised_batches(broadcast.round, rows, records, size, drawn)
    means = [noised_mean(task, broadcast.params, *step, scales) for step in batches]
    if len(means) != 1:
        raise BadInput(
            "secure-not-proved",
            f"plan.local_steps is {len(means)}, and a secure sum has one step; give 1",
        )
    integers = torch.empty_like(means[0], dtype=torch.int64)
    for sums in {id(row.sums): row.sums for row in rows}.values():
        if sums is None:
            raise BadInput(
                "not-stackable", "rows with and without secure sums cannot be computed together"
            )
        mine = [place for place, row in enumerate(rows) if row.sums is sums]
        integers[mine] = sums.quantise([rows[place].user for place in mine], means[0][mine])
    return Upload(integers), {}


def _column(device: torch.device, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def _clip_of(mechanisms: Sequence[NoisedStep], device: torch.device) -> Clip:
    """The bounds C of the rows, (U,); None without privacy."""
    if not mechanisms:
        return None
    clips = [one.clip for one in mechanisms if not isinstance(one.clip, str)]
    return _column(device, clips)[:, 0] if clips else "median"


def _noise_of(mechanisms: Sequence[NoisedStep], device: torch.device) -> Tensor | None:
    """The noise of the rows, (U, 1); None where no row has any."""
    noises = [one.noise for one in mechanisms]
    return _column(device, noises) if max(noises, default=0.0) > 0 else None


def scales_of(rows: Sequence[Row], device: torch.device) -> Scales:
    """The numbers of these rows, from the plans and the mechanisms of their runs."""
    first, column = rows[0], partial(_column, device)
    mechanisms = [row.privacy for row in rows if row.privacy is not None]
    return Scales(
        step_size=column([row.step_size for row in rows]),
        regularisation=column([row.plan.regularisation for row in rows]),
        divisor=column([float(row.batch) for row in rows]),
        steps=first.plan.local_steps,
        weight=column([row.weight for row in rows]),
        clip=_clip_of(mechanisms, device),
        noise=_noise_of(mechanisms, device),
        sampling=first.sampling,
        unit=first.privacy.unit if first.privacy else "record",
        own_steps=column([row.steps for row in rows]) if first.plan.steps_by_user else None,
        shifting=any(row.declared is not None for row in rows),
    )


def _noise_streams(round: int, rows: Sequence[Row], size: int) -> NoiseStreams | None:
    wanted = [(row.randomness, row.user) for row in rows if row.privacy is not None]
    return NoiseStreams.of(round, wanted, size) if wanted else None


def noised_batches(
    round: int,
    rows: Sequence[Row],
    records: LocalRecords,
    size: int,
    drawn: Indices | None = None,
) -> Iterator[tuple[Batch, Tensor | None]]:
    """The K (batch, noise) pairs of these rows, drawn from their own streams on the CPU."""
    device, users = records.device, len(rows)
    starts = torch.tensor(records.starts, device=device)[:, None]
    firsts, which = distinct(rows)
    places = None if which is None else torch.tensor(which, device=device)
    index, count = drawn or indices(round, firsts)
    streams = _noise_streams(round, firsts, size)
    index, longest = index.to(device), index.shape[2]
    full = bool((count == longest).all())
    column = torch.arange(longest, device=device)
    counts = count.to(device)
    steps, block = rows[0].plan.local_steps, max(1, NOISE_BLOCK // (len(firsts) * size))
    for k in range(steps):
        if streams is not None and k % block == 0:
            noises = torch.from_numpy(streams.draw(min(block, steps - k))).to(device)
        here = _spread(index[:, k], places) + starts
        flat = here.view(-1)
        real = None if full else (column < _spread(counts[:, k], places)[:, None]).float()
        yield (
            Batch(
                features=records.features.index_select(0, flat).view(users, longest, -1),
                labels=records.labels.index_select(0, flat).view(users, longest),
                weight=records.weights(here, real),
                squares=records.squares.index_select(0, flat).view(users, longest),
                tame=records.tame,
            ),
            None if streams is None else _spread(noises[k % block], places),
        )


def _spread(values: Tensor, places: Tensor | None) -> Tensor:
    """What was drawn once, handed to every row that draws it."""
    return values if places is None else values.index_select(0, places)
