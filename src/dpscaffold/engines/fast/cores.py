"""The cores of a CPU, each with its share of a chunk's rows.

PyTorch's own threads help inside one product or one sum and wait for each other after it; between
them a step is dozens of small vectors on one core. So a chunk of many users is cut into shares of
users instead, and each core takes all K steps of its share, with one thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch

from dpscaffold.engines.participation.drawing import Row, distinct
from dpscaffold.randomness.streams import draw_alone

Answer = TypeVar("Answer")

#: The part of all cores that shares of whole users must keep busy: with 17 users, 16 cores would
#: mostly wait for the one that has two.
_BUSY = 0.7

#: Multiplications of one step (rows × records × parameters) below which handing out shares costs
#: more than it gains.
_WORTHWHILE = 1 << 20

#: The same of one row, above which PyTorch's own threads are busy enough inside its products.
_LARGE = 1 << 24


@dataclass(frozen=True)
class Share:
    """Some rows of a chunk, by their places in it, and which of the distinct draws are theirs."""

    rows: tuple[int, ...]
    drawn: slice


def _pays(rows: int, work: int, cores: int) -> bool:
    """Whether several cores are faster, for rows that need so much work each."""
    return min(rows, cores) >= 2 and rows * work >= _WORTHWHILE and work <= _LARGE


def shares_of(rows: Sequence[Row], parameters: int, cores: int) -> list[Share]:
    """The rows cut into a share a core, in their order; no shares where that would not pay.

    Rows that draw alike (runs of one seed in a stack) stay together, so that they are drawn once.
    """
    work = max(row.batch for row in rows) * parameters
    if not _pays(len(rows), work, cores):
        return []
    firsts, places = distinct(rows)
    largest = -(-len(firsts) // min(cores, len(firsts)))
    if len(firsts) < _BUSY * cores * largest:
        return []
    count = -(-len(firsts) // largest)
    ends = [len(firsts) * k // count for k in range(count + 1)]
    member = places or range(len(rows))
    return [
        Share(tuple([k for k, place in enumerate(member) if a <= place < b]), slice(a, b))
        for a, b in pairwise(ends)
    ]


def side_by_side(works: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """What each work makes, all at the same time, each in a thread that computes with one core.

    The first failure is raised once all have ended: nothing goes on behind the caller's back.

    >>> side_by_side([lambda: 1, torch.get_num_threads])
    [1, 1]
    """
    begun = [_threads(len(works)).submit(work) for work in works]
    try:
        return [one.result() for one in begun]
    finally:
        wait(begun)


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """This many threads, of which each computes and draws alone."""
    together = threading.Barrier(count)
    threads = ThreadPoolExecutor(count, thread_name_prefix="core")

    def settle() -> None:
        # PyTorch keeps the number for each thread, and that which was set last for new threads; a
        # thread takes it over when it first asks, which must not be after this.
        torch.get_num_threads()
        torch.set_num_threads(1)
        draw_alone()
        together.wait()

    own = torch.get_num_threads()
    wait([threads.submit(settle) for _ in range(count)])
    torch.set_num_threads(own)
    return threads


if hasattr(os, "register_at_fork"):  # threads do not live on in a forked process
    os.register_at_fork(after_in_child=_threads.cache_clear)
