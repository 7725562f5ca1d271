"""Where the simulator finds records: on the device as a whole, or loaded round by round."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpscaffold.engines.participation.records import LocalRecords
from dpscaffold.federation import Federation
from dpscaffold.tasks import Task
from dpscaffold.tasks.clipping import all_tame, prepared


class Store:
    """The training records of one or several federations.

    Federations that fit are prepared once and stay on the device. If one is memory-mapped, or
    larger than
    ``limit`` bytes, then only the users asked for are read, prepared and put there.
    """

    def __init__(
        self,
        federations: Sequence[Federation],
        task: Task,
        device: torch.device,
        limit: int | None = None,
    ) -> None:
        # Kept here, so that no other object can take the id of one of them.
        self.federations = list({id(f): f for f in federations}.values())
        self.task = task
        self.device = device
        size = sum(4 * f.train.features.numel() for f in self.federations)
        self.resident = not any(f.mapped for f in self.federations) and (
            limit is None or size <= limit
        )
        self._offsets = {id(f): f.train.offsets.numpy() for f in self.federations}
        self._base: dict[int, int] = {}
        if self.resident:
            self._load_all()

    def _load_all(self) -> None:
        parts, base = [], 0
        for federation in self.federations:
            self._base[id(federation)] = base
            base += len(federation.train.labels)
            features, squares = prepared(self.task, federation.train.features, self.device)
            parts.append((features, squares, federation.train.labels.to(self.device)))
        if len(parts) == 1:
            self._features, self._squares, self._labels = parts[0]
        else:
            self._features, self._squares, self._labels = (
                torch.cat(column) for column in zip(*parts, strict=True)
            )
        #: Whether no resident row is extreme.
        self.tame = all_tame(self._squares)

    def of(self, wanted: Sequence[tuple[Federation, int]]) -> LocalRecords:
        """The records of these (federation, user) pairs."""
        if self.resident:
            starts = [self._base[id(f)] + int(self._offsets[id(f)][user]) for f, user in wanted]
            return LocalRecords(self._features, self._squares, self._labels, starts, self.tame)
        tables = [federation.train.of(user) for federation, user in wanted]
        features, squares = prepared(self.task, torch.cat([x for x, _ in tables]), self.device)
        labels = torch.cat([y for _, y in tables]).to(self.device)
        starts = [0]
        for _, y in tables[:-1]:
            starts.append(starts[-1] + len(y))
        tame = self.device.type == "cpu" and all_tame(squares)  # a GPU would be waited for
        return LocalRecords(features, squares, labels, starts, tame)
