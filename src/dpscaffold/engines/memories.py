"""What users keep between rounds, held for those who have taken part."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Server, Size, Slots
from dpscaffold.engines.machine import sent

#: Tables of more bytes than this are mapped from a file, on a CPU.
MAPPED = 1 << 31

#: How many rows are looked at together.
_BLOCK = 1 << 14


class GrowingTable:
    """A table of zeros with rows of one ``width`` that grows as it is asked to."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.table = torch.zeros(1, width, device=device)
        self._file: IO[bytes] | None = None

    def hold(self, rows: int) -> None:
        """Let there be this many rows: twice the room, where it is not enough."""
        have, width = self.table.shape
        if rows <= have:
            return
        rows = max(2 * have, rows)
        if self.table.device.type == "cpu" and 4 * rows * width > MAPPED:
            self._map(rows, width)
            return
        table = self.table.new_zeros(rows, width)
        table[:have] = self.table
        self.table = table

    def _map(self, rows: int, width: int) -> None:
        """The same rows in a file, and zeros after them, which take no place until written."""
        first = self._file is None
        file = self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115, it stays open
        file.truncate(4 * rows * width)
        table = torch.from_numpy(np.memmap(file, np.float32, "r+", shape=(rows, width)))
        if first:
            table[: len(self.table)] = self.table
        self.table = table

    def largest(self, rows: int) -> float:
        """The largest norm of the first rows."""
        norms = [part.norm(dim=1).max() for part in self.table[:rows].split(_BLOCK)]
        return float(torch.stack(norms).max())


class Memories:
    """The slots of a run's users: zero at the start, and stored only for users who were seen, so
    that those who never took part cost nothing. On a CPU, what exceeds :data:`MAPPED` bytes lives
    in a mapped file without a name, in the system's folder for temporary files.

    >>> memories = Memories({"control": "vector"}, parameters=2, device=torch.device("cpu"))
    >>> memories.keep([7], {"control": torch.tensor([[1.0, 2.0]])})
    >>> memories.recall([3, 7])["control"].tolist(), memories.seen([3, 7]).tolist()
    ([[0.0, 0.0], [1.0, 2.0]], [False, True])
    """

    def __init__(
        self, remembers: Mapping[str, Size], parameters: int, device: torch.device
    ) -> None:
        self.device = device
        self._places: dict[int, int] = {}
        # Row 0 stays zero: it is everyone's who was never seen.
        self._rooms = {
            name: GrowingTable(parameters if size == "vector" else 1, device)
            for name, size in remembers.items()
        }

    @property
    def users(self) -> list[int]:
        """Who was seen, in the order of their first round."""
        return list(self._places)

    def recall(self, users: Sequence[int]) -> dict[str, Tensor]:
        """The slots of these users, (U, P) or (U, 1)."""
        return self.recall_at(sent(torch.tensor(self.places(users)), self.device))

    def look(self, user: int) -> dict[str, Tensor]:
        """The slots of one user, (1, P) or (1, 1), without a copy: to read before :meth:`keep`."""
        place = self._places.get(int(user), 0)
        return {name: room.table[place : place + 1] for name, room in self._rooms.items()}

    def places(self, users: Sequence[int]) -> list[int]:
        """Where the slots of these users are, for :meth:`recall_at`."""
        return [self._places.get(int(user), 0) for user in users]

    def recall_at(self, places: Tensor) -> dict[str, Tensor]:
        """The slots at :meth:`places` (U,) that are on the device already."""
        places = places.long()  # a list of nobody has no type
        return {name: room.table[places] for name, room in self._rooms.items()}

    def keep(self, users: Sequence[int], slots: Slots) -> None:
        """Store the slots of these users, who count as seen from now on."""
        for user in users:
            self._places.setdefault(int(user), len(self._places) + 1)
        rows = sent(torch.tensor([self._places[int(user)] for user in users]), self.device)
        for name, room in self._rooms.items():
            room.hold(len(self._places) + 1)
            room.table[rows] = slots[name]

    def seen(self, users: Sequence[int]) -> Tensor:
        """Which of these users took part before, (U,) on the CPU."""
        return torch.tensor([int(user) in self._places for user in users], dtype=torch.bool)

    def largest(self) -> dict[str, float]:
        """The largest norm of each slot over all users."""
        used = len(self._places) + 1
        return {name: room.largest(used) for name, room in self._rooms.items()}

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: who was seen, and their slots."""
        used = slice(1, len(self._places) + 1)
        # Through numpy, without a copy: PyTorch would store the whole table with a part of it.
        slots = {
            name: torch.from_numpy(room.table[used].cpu().numpy())
            for name, room in self._rooms.items()
        }
        return {"users": self.users, "slots": slots}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.replace_all(saved["users"], saved["slots"])

    def replace_all(self, users: Sequence[int], slots: Slots) -> None:
        """Hold the slots of these users and of nobody else."""
        self._places = {}
        self.keep(users, {name: value.to(self.device) for name, value in slots.items()})


def slot_metrics(
    algorithm: Algorithm, server: Server, norms: Mapping[str, float]
) -> dict[str, float | None]:
    """What a row of metrics shows of the server's and the users' slots, in every kind of run:
    ``control_norm`` always (None where there are no controls), the norm of each slot of the server,
    and the largest norm over users, from ``norms``, of each slot that is not private."""
    kept = {f"{name}_norm": float(slot.norm()) for name, slot in server.slots.items()}
    largest = {
        f"largest_user_{name}": norm for name, norm in norms.items() if name in algorithm.shared
    }
    return {"control_norm": None, **kept, **largest}
