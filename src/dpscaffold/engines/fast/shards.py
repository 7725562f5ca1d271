"""Shards of a round's rows on several workers, and what happens where one does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from dpscaffold.engines.fast.worker import Worker
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.errors import BadInput

Answer = TypeVar("Answer")

#: How PyTorch says on a CPU that there is no memory left.
_NO_ROOM = ("can't allocate memory", "not enough memory", "out of memory")

_log = logging.getLogger(__name__)


class Shards:
    """Hands rows to workers, ``chunk`` at a time, each worker in a thread of its own where there
    are several. Answers come in the order of the rows, so that sums do not depend on who was
    faster.

    Where a device runs out of memory the chunk is halved, for good, and the rows that are not done
    are computed again: nothing of them has left, and their draws are the same.
    """

    def __init__(self, workers: Sequence[Worker], chunk: int) -> None:
        self.workers, self.chunk = list(workers), chunk
        self._threads = (
            ThreadPoolExecutor(len(self.workers), thread_name_prefix="worker")
            if len(self.workers) > 1
            else None
        )

    def answers(
        self, rows: Sequence[Row], work: Callable[[Worker, Sequence[Row]], Answer]
    ) -> Iterator[tuple[Sequence[Row], Answer]]:
        """Some rows, and what work made of them, until all are done."""
        start = 0
        while start < len(rows):
            parts = [
                rows[first : first + self.chunk]
                for first in range(start, len(rows), self.chunk)[: len(self.workers)]
            ]
            for part, answer in zip(parts, self._tried(parts, work), strict=True):
                if answer is None:
                    self._halve(len(part), part[0])
                    break
                start += len(part)
                yield part, answer

    def _tried(
        self, parts: list[Sequence[Row]], work: Callable[[Worker, Sequence[Row]], Answer]
    ) -> list[Answer | None]:
        """What each worker made of its part; None where its memory was not enough."""

        def attempt(worker: Worker, part: Sequence[Row]) -> Answer | None:
            try:
                return work(worker, part)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                return None

        if self._threads is None or len(parts) == 1:
            return [attempt(self.workers[0], parts[0])]
        return list(self._threads.map(attempt, self.workers, parts))

    def _halve(self, rows: int, row: Row) -> None:
        """Half of the rows that did not fit, from now on."""
        device = self.workers[0].device
        for worker in self.workers:
            worker.give_back()
        if rows == 1:
            raise BadInput(
                "memory-exceeded",
                f"the {row.plan.local_steps} steps of one user, with batches of {row.batch} of "
                f"{row.records} records, do not fit the memory of {device}; lower plan.data_ratio, "
                f"take a smaller model, or use a device with more memory",
            )
        self.chunk = rows // 2
        _log.warning("the memory of %s was not enough: %s users at a time", device, self.chunk)


def out_of_memory(error: BaseException) -> bool:
    """Whether this says that memory was not enough.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("sizes differ"))
    (True, False)
    """
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _NO_ROOM)
