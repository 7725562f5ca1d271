"""One device's part of a round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpscaffold.algorithms import Algorithm, Broadcast, Slots, Upload
from dpscaffold.engines.store import Store
from dpscaffold.federation import Federation
from dpscaffold.local.drawing import Indices, Row
from dpscaffold.local.graphs import Graphs
from dpscaffold.local.participate import participate
from dpscaffold.machine import full_precision
from dpscaffold.setting import Setting

#: Bytes that a chunk of rows may take on a CPU: larger chunks gain nothing there.
CPU_CHUNK_BYTES = 256 << 20

#: Larger federations are not prepared as a whole on a CPU, where that would be a second copy.
CPU_RESIDENT_BYTES = 2 << 30


class Worker:
    """A device with the records it needs: K steps of the rows that it is handed.

    Workers on one device may share a ``store``.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        federations: Sequence[Federation],
        device: torch.device,
        store: Store | None = None,
    ) -> None:
        self.settings, self.federations, self.device = settings, federations, device
        self.task = settings[0].task
        limit = CPU_RESIDENT_BYTES
        if device.type == "cuda":
            limit = torch.cuda.mem_get_info(device)[0] // 2
        self.store = store or Store(federations, self.task, device, limit)
        self.graphs = Graphs() if device.type == "cuda" else None
        if device.type == "cuda":
            full_precision()

    def participate(
        self,
        phase: Algorithm,
        rows: Sequence[Row],
        broadcast: Broadcast,
        memory: Slots,
        drawn: Indices | None,
    ) -> tuple[Upload, Slots]:
        """The rows' uploads and new slots, on this device."""
        records = self.store.of([(self.federations[row.run], row.user) for row in rows])
        memory = {name: value.to(self.device) for name, value in memory.items()}
        graphs = self.graphs if self.store.resident else None
        return participate(self.task, phase, rows, records, broadcast, memory, drawn, graphs)

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
            row += 8 * max(int(f.train.sizes.max()) for f in self.federations) * dimension
        budget = CPU_CHUNK_BYTES
        if self.device.type == "cuda":
            budget = torch.cuda.mem_get_info(self.device)[0] // 3
        return max(1, budget // row)
