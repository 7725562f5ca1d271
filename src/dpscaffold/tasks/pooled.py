"""Records that several processes hold, and sums over all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class Holders(Protocol):
    """Processes that each hold some of the records; this one is number ``rank`` of ``count``."""

    @property
    def rank(self) -> int:
        """Which of them this one is."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def sum(self, values: Tensor, /) -> Tensor:
        """The sum of the processes' tensors on the CPU, on every process."""
        ...


_holders: ContextVar[Holders | None] = ContextVar("holders", default=None)


def pooling() -> Holders | None:
    """Who holds the records over which means are taken; None where this process has them all."""
    return _holders.get()


@contextmanager
def pooled_over(holders: Holders | None) -> Iterator[None]:
    """Take means over the records of all holders; each of them computes the same means."""
    token = _holders.set(holders)
    try:
        yield
    finally:
        _holders.reset(token)


def over_all(sums: Tensor) -> Tensor:
    """Sums over the records of this process, added up over all holders."""
    holders = pooling()
    return sums if holders is None else holders.sum(sums).to(sums.device)
