"""Metrics of records that several processes hold are those of all records together."""

from __future__ import annotations

import threading

import pytest
import torch

from dpscaffold.federation.labels import pack
from dpscaffold.federation.schema import Target
from dpscaffold.tasks import metrics as measured
from dpscaffold.tasks.metrics import metrics_for, report


class Threads:
    """Threads of this process as holders: they add when all have come."""

    def __init__(self, count: int) -> None:
        self.count, self.barrier, self.given = count, threading.Barrier(count), {}

    def of(self, rank: int) -> Holder:
        return Holder(self, rank)


class Holder:
    def __init__(self, group: Threads, rank: int) -> None:
        self.group, self.rank, self.count = group, rank, group.count

    def sum(self, values):
        self.group.given[self.rank] = values.clone()
        self.group.barrier.wait(10)
        total = sum(self.group.given[rank] for rank in range(self.count))
        self.group.barrier.wait(10)
        return total


def targets(
    kind: str, random: torch.Generator, scores: torch.Tensor
) -> tuple[Target, torch.Tensor]:
    rows = len(scores)
    if kind == "number":
        return Target("number"), torch.randn(rows, generator=random)
    if kind == "labels":
        sets = torch.randint(0, 2, (rows, 3), generator=random).numpy()
        return Target.labelled(3), torch.from_numpy(pack(sets, "labels"))
    classes = int(kind)
    return Target.numbered(classes), torch.randint(0, classes, (rows,), generator=random)


@pytest.mark.parametrize("kind", ["2", "3", "number", "labels"])
def test_holders_find_the_metrics_of_all_records(kind, monkeypatch):
    monkeypatch.setattr(measured, "_COMPARED", 7)  # several blocks
    random = torch.Generator().manual_seed(3)
    sizes = [[4, 1, 9], [6], [20, 2]]  # the users of three holders
    users = [size for held in sizes for size in held]
    outputs = {"2": 1, "number": 1}.get(kind, 3)
    scores = torch.randn(sum(users), outputs, generator=random).mul(4).round() / 4  # ties
    target, true = targets(kind, random, scores)
    user = torch.repeat_interleave(torch.arange(len(users)), torch.tensor(users))
    chosen = metrics_for(target)
    expected = report(chosen, scores, true, user, len(users))

    group, found, first = Threads(len(sizes)), {}, 0

    def hold(rank, rows, users):
        own = torch.repeat_interleave(torch.arange(len(users)), torch.tensor(users))
        given = (scores[rows], true[rows], own, len(users))
        found[rank] = report(chosen, *given, group.of(rank))

    threads = []
    for rank, held in enumerate(sizes):
        rows = slice(first, first + sum(held))
        threads.append(threading.Thread(target=hold, args=(rank, rows, held)))
        first = rows.stop
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(len(sizes)):
        assert found[rank] == pytest.approx(expected, nan_ok=True)
