"""Records as local steps want them, and where the engine finds them: on the device as a whole, or
loaded round by round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpscaffold.federation import Federation
from dpscaffold.tasks import Batch, Task
from dpscaffold.tasks.clipping import all_tame, prepared

#: Record numbers (U, B) within each user's own, the weight of each (None: all 1), and standard
#: normals (U, P), of every step.
Steps = Iterable[tuple[Tensor, Tensor | None, Tensor | None]]


@dataclass(frozen=True)
class Records:
    """Prepared records on the device: features (N, D), their squared norms and labels (N,).
    ``tame`` says that no row is extreme (False: unknown). ``weight`` (N,) is 0 for records that
    count but contribute nothing (None: all contribute)."""

    features: Tensor
    squares: Tensor
    labels: Tensor
    tame: bool = False
    weight: Tensor | None = None

    @classmethod
    def of(
        cls, task: Task, features: Tensor, labels: Tensor, device: torch.device, look: bool = True
    ) -> Records:
        """Raw records, prepared. A GPU is waited for only where somebody may ``look``."""
        made, squares = prepared(task, features, device)
        return cls(made, squares, labels.to(device), look and all_tame(squares))

    def batches(self, starts: Tensor, steps: Steps) -> Iterator[tuple[Batch, Tensor | None]]:
        """The batches of users whose records begin at ``starts`` (U, 1), with their normals."""
        for index, weight, normals in steps:
            flat = (index + starts).view(-1)
            if self.weight is not None:
                own = self.weight.index_select(0, flat).view(index.shape)
                weight = own if weight is None else own * weight
            batch = Batch(
                self.features.index_select(0, flat).view(*index.shape, -1),
                self.labels.index_select(0, flat).view(index.shape),
                weight,
                self.squares.index_select(0, flat).view(index.shape),
                self.tame,
            )
            yield batch, normals


def handed_out(steps: Steps, places: Tensor | None) -> Steps:
    """What was drawn once, for every row that draws it: (U,) ``places`` among the distinct ones
    (None: each has its own)."""
    for step in steps:
        if places is None:
            yield step
        else:
            index, weight, normals = step
            yield (
                index.index_select(0, places),
                None if weight is None else weight.index_select(0, places),
                None if normals is None else normals.index_select(0, places),
            )


class Store:
    """The training records of one or several federations.

    Federations that fit are prepared once and stay on the device. If one is memory-mapped, or
    larger than ``limit`` bytes, then only the users asked for are read, prepared and put there.
    """

    def __init__(
        self,
        federations: Sequence[Federation],
        task: Task,
        device: torch.device,
        limit: int,
        users: range | None = None,
    ) -> None:
        """``users`` are those that are asked for, if not all are."""
        self.federations, self.task, self.device = list(federations), task, device
        own = {id(one): one for one in self.federations}
        parts = [_rows(one, users) for one in own.values()]
        size = sum(
            4 * (part.stop - part.start) * one.train.features.shape[1]
            for one, part in zip(own.values(), parts, strict=True)
        )
        self.resident = size <= limit and not any(one.mapped for one in own.values())
        self.held: Records | None = None
        self._base: dict[int, int] = {}
        if self.resident:
            tables = [one.train for one in own.values()]
            first = 0
            for key, part in zip(own, parts, strict=True):
                self._base[key] = first - part.start
                first += part.stop - part.start
            each = list(zip(tables, parts, strict=True))
            features = tables[0].features[parts[0]]
            if len(tables) > 1:
                features = torch.cat([table.features[part] for table, part in each])
            labels = torch.cat([table.labels[part] for table, part in each])
            self.held = Records.of(task, features, labels, device)

    def starts(self, run: int) -> Tensor:
        """Where the resident records of each user of a run begin, (M,)."""
        federation = self.federations[run]
        return federation.train.offsets[:-1] + self._base.get(id(federation), 0)

    def of(self, users: Iterable[tuple[int, np.ndarray]]) -> tuple[Records, Tensor]:
        """The records of these users of each run, where none are resident, and where each user's
        begin, (U, 1)."""
        tables = [
            self.federations[run].train.of(user) for run, own in users for user in own.tolist()
        ]
        sizes = torch.tensor([0, *(len(labels) for _, labels in tables[:-1])])
        features = torch.cat([features for features, _ in tables])
        labels = torch.cat([labels for _, labels in tables])
        look = self.device.type == "cpu"
        made = Records.of(self.task, features, labels, self.device, look)
        return made, sizes.cumsum(0)[:, None].to(self.device)


def _rows(federation: Federation, users: range | None) -> slice:
    """The training records of these users, who are consecutive."""
    offsets, users = federation.train.offsets, users or range(federation.users)
    return slice(int(offsets[users.start]), int(offsets[users.stop]))
