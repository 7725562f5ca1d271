"""One device's part of a round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Slots, Upload
from dpscaffold.config import Run
from dpscaffold.engines.fast.cores import Share, shares_of, side_by_side
from dpscaffold.engines.fast.devices import BatchOverflow
from dpscaffold.engines.fast.graphs import Graphs
from dpscaffold.engines.machine import full_precision
from dpscaffold.engines.participation.drawing import Indices, Row, distinct, indices
from dpscaffold.engines.participation.participate import participate
from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.engines.store import Store
from dpscaffold.federation import Federation
from dpscaffold.federation.share import UserShare
from dpscaffold.tasks.base import apart

#: Bytes that a chunk of rows may take on a CPU: larger chunks gain nothing there.
CPU_CHUNK_BYTES = 256 << 20

#: Larger federations are not prepared as a whole on a CPU, where that would be a second copy.
CPU_RESIDENT_BYTES = 2 << 30


class Worker:
    """A device with the records it needs: K steps of the rows that it is handed.

    On a CPU, the rows are shared by this many ``cores``;
    what comes of a row is the same, bit for bit, however many they are. ``share`` is given where
    the federation is a share of a larger one.
    """

    def __init__(
        self,
        settings: Sequence[Run],
        federations: Sequence[Federation],
        device: torch.device,
        cores: int = 1,
        share: UserShare | None = None,
    ) -> None:
        self.settings, self.federations, self.device = settings, federations, device
        self.first_user = share.users.start if share else 0
        largest = [share.largest] if share else [int(f.train.sizes.max()) for f in federations]
        self.largest = max(largest)
        self.task = settings[0].task
        limit = CPU_RESIDENT_BYTES
        if device.type == "cuda":
            limit = torch.cuda.mem_get_info(device)[0] // 2
        self.store = Store(federations, self.task, device, limit)
        self.cores = cores if apart(self.task) else 1
        self.graphs = Graphs() if device.type == "cuda" else None
        self.cut = BatchOverflow()
        if device.type == "cuda":
            full_precision()

    def participate(
        self,
        phase: Algorithm,
        rows: Sequence[Row],
        broadcast: Broadcast,
        memory: Slots,
        drawn: Indices | None = None,
        records: LocalRecords | None = None,
    ) -> tuple[Upload, Slots]:
        """The rows' uploads and new slots, on this device."""
        records = records or self.records_of(rows)
        memory = {name: value.to(self.device) for name, value in memory.items()}
        graphs = self.graphs if self.store.resident else None
        shares = shares_of(rows, self.task.parameters, self.cores)
        if len(shares) < 2:
            given = (self.task, phase, rows, records, broadcast, memory, drawn, graphs, self.cut)
            return participate(*given)
        # Drawn together, so that all are padded to one width: a product's last bits depend on it.
        index, count = drawn or indices(broadcast.round, distinct(rows)[0])

        def of(share: Share) -> Callable[[], tuple[Upload, Slots]]:
            mine, part = [rows[k] for k in share.rows], (index[share.drawn], count[share.drawn])
            places = torch.tensor(share.rows)
            received = Broadcast(
                broadcast.round, broadcast.params[places], _at(broadcast.shared, places)
            )
            own = replace(records, starts=[records.starts[k] for k in share.rows])
            held = _at(memory, places)
            return lambda: participate(self.task, phase, mine, own, received, held, part)

        return _put_together(shares, side_by_side([of(share) for share in shares]))

    def records_of(self, rows: Sequence[Row]) -> LocalRecords:
        """The records of these rows."""
        first = self.first_user
        return self.store.of([(self.federations[row.run], row.user - first) for row in rows])

    def give_back(self) -> None:
        """Hold no memory beyond the records."""
        if self.graphs is not None:
            self.graphs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def fitting_chunk(self) -> int:
        """How many rows fit the memory that a chunk may take."""
        first = self.settings[0]
        dimension = first.roster.schema.dimension
        batch = max(int(s.batch_sizes.max()) for s in self.settings)
        if first.sampling == "poisson":
            batch += int(6 * batch**0.5) + 6
        floats = batch * (2 * dimension + self.task.width) + 10 * self.task.parameters
        row = 4 * floats + 8 * first.plan.local_steps * batch
        if not self.store.resident:
            row += 8 * self.largest * dimension
        budget = CPU_CHUNK_BYTES
        if self.device.type == "cuda":
            budget = torch.cuda.mem_get_info(self.device)[0] // 3
        return max(1, budget // row)


def _at(slots: Slots, places: Tensor) -> dict[str, Tensor]:
    """The slots of some rows."""
    return {name: value[places] for name, value in slots.items()}


def _put_together(
    shares: Sequence[Share], answers: Sequence[tuple[Upload, Slots]]
) -> tuple[Upload, Slots]:
    """The answers of all shares, in the order of the rows."""
    order = torch.tensor([row for share in shares for row in share.rows]).argsort()
    uploads, kept = zip(*answers, strict=True)

    def joined(parts: Sequence[Slots]) -> dict[str, Tensor]:
        return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

    params = torch.cat([upload.params for upload in uploads])[order]
    return Upload(params, joined([upload.totals for upload in uploads])), joined(kept)
