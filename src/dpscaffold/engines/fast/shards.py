"""Shards of a round's rows, and what happens where one does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
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
    """Hands rows to the worker, ``chunk`` at a time.

    Where the device runs out of memory the chunk is halved, for good, and the rows that are not
    done are computed again: nothing of them has left, and their draws are the same.
    """

    def __init__(self, worker: Worker, chunk: int) -> None:
        self.worker, self.chunk = worker, chunk

    def answers(
        self, rows: Sequence[Row], work: Callable[[Sequence[Row]], Answer]
    ) -> Iterator[tuple[Sequence[Row], Answer]]:
        """Some rows, and what work made of them, until all are done."""
        start = 0
        while start < len(rows):
            part = rows[start : start + self.chunk]
            try:
                answer = work(part)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                short = True
            else:
                short = False
            if short:  # outside the block above, whose traceback holds what was computed
                self._halve(len(part), part[0])
                continue
            start += len(part)
            yield part, answer

    def _halve(self, rows: int, row: Row) -> None:
        """Half of the rows that did not fit, from now on."""
        device = self.worker.device
        self.worker.give_back()
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
