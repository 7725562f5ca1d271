"""What users keep between rounds, held for those who have taken part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpscaffold.algorithms import Size, Slots
from dpscaffold.machine import sent


class Memories:
    """The slots of a run's users: zero at the start, and stored only for users who were seen, so
    that those who never took part cost nothing.

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
        self._tables = {
            name: torch.zeros(1, parameters if size == "vector" else 1, device=device)
            for name, size in remembers.items()
        }

    @property
    def users(self) -> list[int]:
        """Who was seen, in the order of their first round."""
        return list(self._places)

    def recall(self, users: Sequence[int]) -> dict[str, Tensor]:
        """The slots of these users, (U, P) or (U, 1)."""
        rows = torch.tensor([self._places.get(int(user), 0) for user in users], dtype=torch.long)
        rows = sent(rows, self.device)
        return {name: table[rows] for name, table in self._tables.items()}

    def keep(self, users: Sequence[int], slots: Slots) -> None:
        """Store the slots of these users, who count as seen from now on."""
        for user in users:
            self._places.setdefault(int(user), len(self._places) + 1)
        rows = sent(torch.tensor([self._places[int(user)] for user in users]), self.device)
        for name, table in self._tables.items():
            if len(self._places) >= len(table):
                table = self._grown(table)
                self._tables[name] = table
            table[rows] = slots[name]

    def _grown(self, table: Tensor) -> Tensor:
        """Twice the room, or what is needed now."""
        room = table.new_zeros(max(2 * len(table), len(self._places) + 1), table.shape[1])
        room[: len(table)] = table
        return room

    def seen(self, users: Sequence[int]) -> Tensor:
        """Which of these users took part before, (U,)."""
        return sent(torch.tensor([int(user) in self._places for user in users]), self.device)

    def largest(self) -> dict[str, float]:
        """The largest norm of each slot over all users."""
        return {name: float(table.norm(dim=1).max()) for name, table in self._tables.items()}

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: who was seen, and their slots."""
        used = slice(1, len(self._places) + 1)
        slots = {name: table[used].cpu() for name, table in self._tables.items()}
        return {"users": self.users, "slots": slots}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self._places = {}
        self.keep(saved["users"], {k: v.to(self.device) for k, v in saved["slots"].items()})
