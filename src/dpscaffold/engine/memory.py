"""What users keep between rounds, and who took part before."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Size, Slots
from dpscaffold.engine.device import sent

#: Numbers of users.
Rows = Sequence[int] | np.ndarray | Tensor

#: Tables of more bytes than this are mapped from a file without a name.
MAPPED = 1 << 31

#: How many rows are looked at together.
_BLOCK = 1 << 14


class Memory:
    """The slots of all users of S runs, zero until a user takes part. Pages of a table that nobody
    has written to take no memory on a CPU, so users who never take part cost nothing.

    A device that has no room for the tables is sent the rows that it needs.

    >>> memory = Memory({"control": "vector"}, parameters=2, users=9)
    >>> memory.keep([7], {"control": torch.tensor([[1.0, 2.0]])})
    >>> memory.recall([3, 7])["control"].tolist(), memory.seen([3, 7]).tolist()
    ([[0.0, 0.0], [1.0, 2.0]], [False, True])
    """

    def __init__(
        self,
        remembers: Mapping[str, Size],
        parameters: int,
        users: int,
        device: torch.device | None = None,
        runs: int = 1,
    ) -> None:
        self.users, self.device = users, device or torch.device("cpu")
        widths = {name: parameters if size == "vector" else 1 for name, size in remembers.items()}
        rows = runs * users
        self._seen = np.zeros(rows, dtype=bool)
        #: Where the tables are.
        self.place = self.device
        if self.place.type == "cuda" and 4 * rows * sum(widths.values()) > _free(self.place) / 4:
            self.place = torch.device("cpu")
        self.tables = {name: _zeros(rows, width, self.place) for name, width in widths.items()}

    def recall(self, rows: Rows) -> dict[str, Tensor]:
        """The slots of these users, (U, P) or (U, 1). User i of run k is row k·M + i."""
        found = torch.as_tensor(rows, dtype=torch.int64).to(self.place)
        return {
            name: sent(table.index_select(0, found), self.device)
            for name, table in self.tables.items()
        }

    def keep(self, rows: Rows, slots: Slots) -> None:
        """Store the slots of these users, who count as seen from now on."""
        found = torch.as_tensor(rows, dtype=torch.int64)
        self.see(found.numpy())
        self.put(found, slots)

    def put(self, rows: Tensor, slots: Slots) -> None:
        """Store the slots of these users."""
        for name, table in self.tables.items():
            table.index_copy_(0, rows.to(self.place), slots[name].to(self.place))

    def see(self, rows: np.ndarray) -> None:
        """These users took part, wherever their slots are held."""
        self._seen[rows] = True

    def seen(self, rows: Rows) -> Tensor:
        """Which of these users took part before, (U,) on the CPU."""
        return torch.from_numpy(self._seen[np.asarray(rows, dtype=np.int64)])

    def forget(self, run: int) -> None:
        """Let nobody of a run have taken part."""
        own = slice(run * self.users, (run + 1) * self.users)
        self._seen[own] = False
        for table in self.tables.values():
            table[own] = 0.0

    def norms(self) -> dict[str, float]:
        """The largest norm of each slot over all users who were seen."""
        rows = torch.from_numpy(np.flatnonzero(self._seen))
        found = {}
        for name, table in self.tables.items():
            blocks = [table[part.to(table.device)] for part in rows.split(_BLOCK)]
            found[name] = max((float(block.norm(dim=1).max()) for block in blocks), default=0.0)
        return found

    def to_dict(self, users: range | None = None) -> dict[str, Any]:
        """For a checkpoint: who of these ``users`` (all of them) was seen, and their slots."""
        first, last = (0, len(self._seen)) if users is None else (users.start, users.stop)
        rows = torch.from_numpy(first + np.flatnonzero(self._seen[first:last]))
        slots = {name: table[rows.to(table.device)].cpu() for name, table in self.tables.items()}
        return {"users": rows.tolist(), "slots": slots}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """From a checkpoint: hold these slots and no others."""
        self.forget(0)
        self.keep(saved["users"], saved["slots"])


def _zeros(rows: int, width: int, device: torch.device) -> Tensor:
    """A table of zeros whose pages take no memory until they are written, on a CPU."""
    if device.type != "cpu":
        return torch.zeros(rows, width, device=device)
    size = 4 * rows * width
    if size <= MAPPED:
        room = mmap.mmap(-1, max(1, size))
        with suppress(AttributeError, OSError):  # else one row would take a page of 2 MB
            room.madvise(mmap.MADV_NOHUGEPAGE)
        return torch.frombuffer(room, dtype=torch.float32, count=rows * width).view(rows, width)
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(rows, width)))


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]
