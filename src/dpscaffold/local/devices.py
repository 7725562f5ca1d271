"""The batches and the noise of some participants, drawn on the device that uses them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dpscaffold.devicedraws import DeviceBatches, DeviceDraws
from dpscaffold.local.drawing import Row, distinct
from dpscaffold.local.records import LocalRecords
from dpscaffold.randomness import Randomness
from dpscaffold.tasks import Batch

#: How many numbers of noise are held on a device at a time.
_NOISE = 1 << 28


def draws_on(device: torch.device, rows: Sequence[Row]) -> bool:
    """Whether these rows draw on the device: a GPU, with streams that anyone may repeat.

    Secret runs keep the cipher of the CPU, and an experiment's own streams stay where they are.
    """
    return device.type == "cuda" and all(
        type(row.randomness) is Randomness and not row.randomness.secret and row.declared is None
        for row in rows
    )


def device_batches(
    round: int, rows: Sequence[Row], records: LocalRecords, size: int
) -> Iterator[tuple[Batch, Tensor | None]]:
    """The K (batch, noise) pairs of these rows, without waiting for the device in between."""
    device, users, steps = records.device, len(rows), rows[0].plan.local_steps
    firsts, which = distinct(rows)
    draws = DeviceDraws(
        [row.randomness.seed for row in firsts],
        [round] * len(firsts),
        [row.user for row in firsts],
        device,
    )
    drawn = _drawn(draws, firsts, steps)
    places = None if which is None else torch.tensor(which).to(device, non_blocking=True)
    starts = torch.tensor(records.starts).to(device, non_blocking=True)[:, None]
    block = max(1, _NOISE // (len(firsts) * size))
    noise: Tensor | None = None
    for k in range(steps):
        if rows[0].privacy is not None and k % block == 0:
            noise = draws.normals(k, min(block, steps - k), size)
        index = _of(drawn.index[k], places)
        flat = (index + starts).view(-1)
        yield (
            Batch(
                features=records.features.index_select(0, flat).view(users, index.shape[1], -1),
                labels=records.labels.index_select(0, flat).view(users, index.shape[1]),
                weight=None if drawn.weight is None else _of(drawn.weight[k], places),
                squares=records.squares.index_select(0, flat).view(users, index.shape[1]),
            ),
            None if noise is None else _of(noise[k % block], places),
        )


def _drawn(draws: DeviceDraws, rows: Sequence[Row], steps: int) -> DeviceBatches:
    """The K batches of rows that all differ."""
    sizes, batches = [row.records for row in rows], [row.batch for row in rows]
    if rows[0].sampling == "poisson":
        return draws.poisson(0, steps, sizes, batches).complete()
    return draws.fixed(0, steps, sizes, batches)


def _of(values: Tensor, places: Tensor | None) -> Tensor:
    """What was drawn once, handed to every row that draws it."""
    return values if places is None else values.index_select(0, places)
