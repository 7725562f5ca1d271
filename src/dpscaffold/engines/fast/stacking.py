"""Rows of several runs side by side: which runs may share a stack, and whose rows are whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from dpscaffold.algorithms import Broadcast, Slots, Upload
from dpscaffold.config import Run
from dpscaffold.engines.machine import sent
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.errors import BadInput


def by_run(rows: Sequence[Row]) -> Iterator[tuple[int, slice, list[int]]]:
    """Rows come run by run: for each run its number, its slice of the rows, and its users."""
    start = 0
    for run, members in groupby(rows, key=lambda row: row.run):
        users = [row.user for row in members]
        yield run, slice(start, start + len(users)), users
        start += len(users)


def of_slice(slots: Slots, where: slice) -> dict[str, Tensor]:
    """The slots of some rows."""
    return {name: value[where] for name, value in slots.items()}


def part(upload: Upload, where: slice) -> Upload:
    """The uploads of some rows."""
    return Upload(upload.params[where], of_slice(upload.totals, where))


def joined(parts: Sequence[Slots]) -> dict[str, Tensor]:
    """The slots of all rows, from those of each run."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class StackedBroadcast:
    """What each run's server sent, ready to be handed to any of the rows."""

    def __init__(self, broadcasts: Sequence[Broadcast]) -> None:
        self.round = broadcasts[0].round
        self.params = torch.stack([one.params for one in broadcasts])
        self.shared = {
            name: torch.stack([one.shared[name] for one in broadcasts])
            for name in broadcasts[0].shared
        }

    def to(self, rows: Sequence[Row], device: torch.device) -> Broadcast:
        """The broadcast as these rows get it, (U, ·)."""
        runs = sent(torch.tensor([row.run for row in rows]), self.params.device)
        shared = {name: value[runs].to(device) for name, value in self.shared.items()}
        return Broadcast(self.round, self.params[runs].to(device), shared)


def refuse_unlike(first: Run, other: Run) -> None:
    """Stacked runs share shapes and structure; say which part differs."""
    theirs = other.structure
    for name, value in first.structure.items():
        if theirs[name] != value:
            raise BadInput(
                "not-stackable",
                f"runs cannot be stacked: {name} is {value} in one and {theirs[name]} in another; "
                f"run them apart",
            )
    if first.algorithm != other.algorithm:
        raise BadInput(
            "not-stackable",
            f"runs cannot be stacked: they differ in a number of {first.algorithm.name}; run them "
            f"apart",
        )
    if first.task is not other.task and first.task != other.task:
        raise BadInput(
            "not-stackable",
            f"runs cannot be stacked: each has its own task {first.task.name!r}; give both the "
            f"same",
        )
