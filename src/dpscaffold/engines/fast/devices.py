"""The K steps of some participants on the device that also draws their batches and their noise.

What differs from round to round is put into a few tensors by name; what decides shapes and
constants into a :class:`Layout`. The rest is a function of both that never waits for the device, so
that a GPU can record it once and replay it (:mod:`~dpscaffold.engines.fast.graphs`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import nan

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Participant, Slots, Upload
from dpscaffold.engines.fast.draws import (
    DeviceBatches,
    DeviceDraws,
    addresses,
    poisson_width,
    sizes_of,
)
from dpscaffold.engines.fast.fused import fused_steps
from dpscaffold.engines.fast.graphs import Graphs, Tensors
from dpscaffold.engines.machine import sent
from dpscaffold.engines.participation.drawing import Row, distinct
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.engines.participation.steps import Scales, local_steps
from dpscaffold.privacy.mechanism import Sampling, Unit
from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks import Batch, Clip, Task

#: How many numbers of noise are held on a device at a time.
_NOISE = 1 << 28

#: How many labels and row norms are gathered for all steps at once.
_GATHERED = 1 << 25


@dataclass
class BatchOverflow:
    """Whether a Poisson batch of a round did not fit its padded width (chance 2⁻¹²⁸ each): the
    device's own answers, which nobody waits for until what the round made is looked at.

    What was cut short is not a number, and so can be mistaken for nothing; the round is then run
    again, with the same draws and room for every record (``whole``).
    """

    flags: list[Tensor] = field(default_factory=list)
    whole: bool = False

    def happened(self) -> bool:
        """Wait for the device, and say."""
        return any(bool(flag) for flag in self.flags)


def draws_on(device: torch.device, rows: Sequence[Row]) -> bool:
    """Whether these rows draw on the device: a GPU, with streams that anyone may repeat.

    Secret runs keep the cipher of the CPU, and an experiment's own streams stay where they are.
    Work that is recorded does not know secure sums.
    """
    return device.type == "cuda" and all(_draws_itself(row) for row in rows)


def _draws_itself(row: Row) -> bool:
    plain = type(row.randomness) is Randomness and not row.randomness.secret
    return plain and row.declared is None and row.sums is None


def _width(rows: Sequence[Row], most: int) -> int:
    """How many records a batch has room for, of ``most`` that a user holds; rounded up where rows
    differ, so that few layouts suffice."""
    pairs = {(row.records, row.batch) for row in rows}
    if rows[0].sampling == "poisson":
        width = max(poisson_width(*pair) for pair in pairs)
        return width if len(pairs) == 1 else min(most, rounded_up(width))
    batches = {batch for _, batch in pairs}
    return max(batches) if len(batches) == 1 else min(most, rounded_up(max(batches)))


@dataclass(frozen=True)
class Layout:
    """What decides the shapes and the constants of a participation: nothing that is drawn.

    ``most`` records and batches of ``width`` have room for every row; they are rounded up, so that
    cohorts of unequal users share a layout. ``even`` batches all have that width.
    """

    rows: int
    shared: bool
    steps: int
    size: int
    most: int
    width: int
    even: bool
    sampling: Sampling
    unit: Unit
    private: bool
    noisy: bool
    median: bool
    uneven: bool = False

    @classmethod
    def of(cls, rows: Sequence[Row], size: int, shared: bool) -> Layout:
        """The layout of these rows, with ``size`` parameters; some of them draw alike if they are
        ``shared``."""
        first = rows[0]
        records, batch_sizes = {row.records for row in rows}, {row.batch for row in rows}
        even = first.sampling == "fixed" and len(batch_sizes) == 1
        most = max(records) if len(records) == 1 else rounded_up(max(records))
        width = _width(rows, most)
        mechanisms = [row.privacy for row in rows if row.privacy is not None]
        return cls(
            rows=len(rows),
            shared=shared,
            steps=first.plan.local_steps,
            size=size,
            most=most,
            width=width,
            even=even,
            sampling=first.sampling,
            unit=first.privacy.unit if first.privacy else "record",
            private=bool(mechanisms),
            noisy=any(mechanism.noise > 0 for mechanism in mechanisms),
            median=any(isinstance(mechanism.clip, str) for mechanism in mechanisms),
            uneven=first.plan.steps_by_user is not None,
        )


def rounded_up(count: int) -> int:
    """The next number with three leading bits: at most a quarter more, and few different ones.

    >>> [rounded_up(count) for count in (3, 9, 16, 17, 4000)]
    [3, 10, 16, 20, 4096]
    """
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def integers(
    round: int, firsts: Sequence[Row], places: Sequence[int] | None, starts: Sequence[int]
) -> dict[str, Tensor]:
    """What is drawn for the distinct rows, which of it each row gets, and where the records of each
    begin, on the CPU."""
    count = len(firsts)
    seeds = [row.randomness.seed for row in firsts]
    where = addresses(seeds, [round] * count, [row.user for row in firsts])
    sizes = sizes_of([row.records for row in firsts], [row.batch for row in firsts])
    made = {"draws": torch.cat([where, sizes], dim=1), "starts": torch.tensor(starts)}
    return made if places is None else {**made, "places": torch.tensor(places)}


def scale_numbers(rows: Sequence[Row]) -> Tensor:
    """η_l, λ, b_i, the weight, C, σ_g and K_i of every row, (U, 7); 0 where there is none."""
    numbers = []
    for row in rows:
        mechanism = row.privacy
        clip = 0.0 if mechanism is None or isinstance(mechanism.clip, str) else mechanism.clip
        noise = 0.0 if mechanism is None else mechanism.noise
        numbers.append(
            [
                row.step_size,
                row.plan.regularisation,
                float(row.batch),
                row.weight,
                clip,
                noise,
                float(row.steps),
            ]
        )
    return torch.from_numpy(np.array(numbers, dtype=np.float32))


def scales_from(layout: Layout, numbers: Tensor) -> Scales:
    """The scales of the rows, from :func:`scale_numbers` on the device."""
    step_size, regularisation, divisor, weight, bound, noise, own = numbers.split(1, dim=1)
    clip: Clip = None
    if layout.private:
        clip = "median" if layout.median else bound[:, 0]
    return Scales(
        step_size=step_size,
        regularisation=regularisation,
        divisor=divisor,
        steps=layout.steps,
        weight=weight,
        clip=clip,
        noise=noise if layout.noisy else None,
        sampling=layout.sampling,
        unit=layout.unit,
        own_steps=own if layout.uneven else None,
    )


class Unreadable:
    """Represents the round's number in recorded work, which is replayed in other rounds: an
    algorithm that reads it cannot be recorded."""

    def _refuse(self, *_: object) -> bool:
        raise TypeError("the algorithm reads the number of the round")

    __eq__ = __bool__ = _refuse
    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class DeviceWork:
    """K local steps as a function of tensors alone: ``draws`` (F, 10) of the distinct rows, which
    of them is each row's (``places``, where rows draw alike), where its records begin (``starts``),
    its ``scales``, x (``params``), and by their prefix what it receives (``shared.``) and remembers
    (``memory.``). It makes the uploads (``params``, ``totals.``), the new slots (``kept.``) and,
    with Poisson batches, whether one did not fit (``overflowed``)."""

    task: Task
    phase: Algorithm
    layout: Layout
    records: LocalRecords

    def __call__(self, inputs: Tensors, round: object = None, whole: bool = False) -> Tensors:
        """The steps; recorded work, which is replayed, does not know the ``round``."""
        broadcast = Broadcast(
            Unreadable() if round is None else round,
            inputs["params"],
            under("shared.", inputs),
        )
        drawn = _drawn(self.layout, inputs["draws"], whole)
        scales = scales_from(self.layout, inputs["scales"])
        at = Participant(broadcast, under("memory.", inputs), scales.known)
        local = fused_steps(self.task, self.phase, at, drawn, inputs, self.records, scales)
        if local is not None:
            upload, kept = self.phase.finish(local, at)
        else:
            steps = batches_of(self.layout, drawn, inputs, self.records)
            upload, kept = local_steps(self.task, self.phase, at, steps, scales)
        made = {"params": upload.params}
        made |= {f"totals.{name}": value for name, value in upload.totals.items()}
        made |= {f"kept.{name}": value for name, value in kept.items()}
        if drawn.overflowed is None or whole:
            return made
        poisoned = {k: value.masked_fill(drawn.overflowed, nan) for k, value in made.items()}
        return {**poisoned, "overflowed": drawn.overflowed}


def on_device(
    task: Task,
    phase: Algorithm,
    rows: Sequence[Row],
    records: LocalRecords,
    broadcast: Broadcast,
    memory: Slots,
    graphs: Graphs | None = None,
    cut: BatchOverflow | None = None,
) -> tuple[Upload, Slots]:
    """K local steps of these rows with draws of the device; recorded where there are graphs.

    Where a Poisson batch is cut short, ``cut`` will tell; without it the device is waited for.
    """
    firsts, places = distinct(rows)
    layout = Layout.of(rows, task.parameters, places is not None)
    numbers = integers(broadcast.round, firsts, places, records.starts)
    given: Tensors = {name: sent(value, records.device) for name, value in numbers.items()}
    given["scales"] = sent(scale_numbers(rows), records.device)
    given["params"] = broadcast.params
    given |= {f"shared.{name}": value for name, value in broadcast.shared.items()}
    given |= {f"memory.{name}": value for name, value in memory.items()}

    work = DeviceWork(task, phase, layout, records)

    def plain(inputs: Tensors) -> Tensors:
        return work(inputs, broadcast.round)

    if cut is not None and cut.whole:
        made = work(given, broadcast.round, whole=True)
    elif graphs is None:
        made = plain(given)
    else:
        made = graphs.run(_key(task, phase, layout, records, given), work, given, plain)
    overflowed = made.pop("overflowed", None)
    if overflowed is not None:
        if cut is not None:
            cut.flags.append(overflowed)
        elif bool(overflowed):
            made = work(given, broadcast.round, whole=True)
    return Upload(made["params"], under("totals.", made)), under("kept.", made)


def under(prefix: str, tensors: Tensors) -> Tensors:
    """The tensors whose name begins so, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _key(
    task: Task, phase: Algorithm, layout: Layout, records: LocalRecords, given: Tensors
) -> tuple[object, ...]:
    """Equal keys are equal work: the task, the algorithm, the layout, all shapes, and the very
    tensors that hold the records."""
    held = tuple(
        (value.data_ptr(), value.shape)
        for value in (records.features, records.squares, records.labels, records.weight)
        if value is not None
    )
    shapes = tuple((name, value.shape, value.dtype) for name, value in given.items())
    numbers = tuple(sorted((name, str(value)) for name, value in phase.numbers.items()))
    return id(task), phase, phase.name, numbers, layout, records.tame, held, shapes


def _drawn(layout: Layout, numbers: Tensor, whole: bool = False) -> DeviceBatches:
    """The K batches of the distinct rows."""
    draws, counts = DeviceDraws.at(numbers[:, :6]), numbers[:, 6:]
    if layout.sampling == "poisson":
        width = layout.most if whole else layout.width
        return draws.poisson_of(0, layout.steps, counts, layout.most, width)
    return draws.fixed_of(0, layout.steps, counts, layout.most, layout.width, layout.even)


def _picked(values: Tensor, index: Tensor) -> Tensor:
    """The rows of ``values`` at an index of any shape."""
    return values.index_select(0, index.reshape(-1)).view(*index.shape, *values.shape[1:])


def _looked_up(
    layout: Layout, drawn: DeviceBatches, given: Tensors, records: LocalRecords
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Places of the records of each step, their labels and squares; of all steps at once where that
    takes little memory."""
    places, starts = given.get("places"), given["starts"][:, None]
    if layout.steps * drawn.index.shape[2] * layout.rows <= _GATHERED:
        every = _of(drawn.index, places, 1) + starts
        yield from zip(
            every, _picked(records.labels, every), _picked(records.squares, every), strict=True
        )
        return
    for k in range(layout.steps):
        index = _of(drawn.index[k], places, 0) + starts
        yield index, _picked(records.labels, index), _picked(records.squares, index)


def batches_of(
    layout: Layout, drawn: DeviceBatches, given: Tensors, records: LocalRecords
) -> Iterator[tuple[Batch, Tensor | None]]:
    """The K (batch, noise) pairs of the rows, without waiting for the device in between."""
    draws, places = DeviceDraws.at(given["draws"][:, :6]), given.get("places")
    block = max(1, _NOISE // (len(given["draws"]) * layout.size))
    normals: Tensor | None = None
    for k, (index, labels, squares) in enumerate(_looked_up(layout, drawn, given, records)):
        if layout.private and k % block == 0:
            normals = draws.normals(k, min(block, layout.steps - k), layout.size)
        weight = None if drawn.weight is None else _of(drawn.weight[k], places, 0)
        yield (
            Batch(
                features=_picked(records.features, index),
                labels=labels,
                weight=records.weights(index, weight),
                squares=squares,
                tame=records.tame,
            ),
            None if normals is None else _of(normals[k % block], places, 0),
        )


def _of(values: Tensor, places: Tensor | None, axis: int) -> Tensor:
    """What was drawn once, handed to every row that draws it."""
    return values if places is None else values.index_select(axis, places)
