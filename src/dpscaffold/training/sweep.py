"""Independent runs on several ranks: each rank computes some of them, and all get every answer.

Every rank executes the same command. Where it comes to a list of runs (:func:`each`), a rank takes
every N-th of them, and the answers are exchanged. So what follows from them (a wider grid, the next
stage of a plan) is the same on all ranks, and rank 0 writes and prints it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from dpscaffold.engines.machine import pick_device
from dpscaffold.engines.ranks import Ranks
from dpscaffold.errors import BadInput, RankLost
from dpscaffold.training.distributed import join, leads, refuse_differing, together
from dpscaffold.training.events import StopRequested

Answer = TypeVar("Answer")

_log = logging.getLogger(__name__)

#: The ranks that share the runs of this command; None where this process computes all of them.
_sharing: ContextVar[Ranks | None] = ContextVar("sharing", default=None)


@dataclass(frozen=True)
class Sweep:
    """This process in a command of many runs: its ranks, and the device that was asked for."""

    name: str
    ranks: Ranks | None = None

    @property
    def leads(self) -> bool:
        """Whether this process writes and prints."""
        return leads(self.ranks)

    @property
    def device(self) -> torch.device:
        """What this process computes on."""
        return pick_device(self.name) if self.ranks is None else self.ranks.device


@contextmanager
def sweeping(device: str) -> Iterator[Sweep]:
    """Share the runs of :func:`each` with the other ranks of a launcher, and what is refused in
    this block. Without a launcher this process computes all."""
    ranks = join(device)
    with together(ranks), shared_by(ranks):
        yield Sweep(device, ranks)


@contextmanager
def shared_by(ranks: Ranks | None) -> Iterator[None]:
    """Share the runs of :func:`each` with these ranks; None: with nobody."""
    token = _sharing.set(ranks)
    try:
        yield
    finally:
        _sharing.reset(token)


def agree(name: str, value: str) -> None:
    """Refuse ranks that differ in a value, such as the configuration or the data."""
    ranks = _sharing.get()
    if ranks is not None:
        digest = hashlib.sha256(value.encode()).hexdigest()
        refuse_differing(ranks, {name: digest})


def of_rank_0(value: Answer) -> Answer:
    """The value that rank 0 has, on every rank."""
    ranks = _sharing.get()
    found: Answer = value if ranks is None else ranks.gather_values(value)[0]
    return found


@dataclass(frozen=True)
class _Attempt(Generic[Answer]):
    """What became of a run: its answers (one, or none), or why there is none."""

    answers: tuple[Answer, ...] = ()
    code: str = ""
    said: str = ""
    stopped: str = ""


def each(names: Sequence[str], work: Callable[[int], Answer]) -> Iterator[Answer]:
    """``work(k)`` for each name, in their order: N at a time, on as many ranks.

    A run that fails is named and computed once more, by the next rank; if it fails again, so does
    the command. Input that is refused is not tried again.

    >>> list(each(["a", "b"], lambda k: k * k))
    [0, 1]
    """
    ranks = _sharing.get()
    count = 1 if ranks is None else ranks.count
    for start in range(0, len(names), count):
        here = range(start, min(start + count, len(names)))
        if ranks is None:
            yield work(start)
        else:
            yield from _wave(ranks, here, names, work)


def _wave(
    ranks: Ranks, here: range, names: Sequence[str], work: Callable[[int], Answer]
) -> list[Answer]:
    """The answers of one run for each rank."""
    found = _attempted(ranks, dict(enumerate(here)), work)
    failed = {k: rank for rank, k in enumerate(here) if not found[k].answers}
    if failed:
        for k, rank in failed.items():
            if ranks.leads:
                said, other = found[k].said, (rank + 1) % ranks.count
                _log.warning("%s failed on rank %s (%s); again on %s", names[k], rank, said, other)
        again = {(rank + 1) % ranks.count: k for k, rank in failed.items()}
        found |= _attempted(ranks, again, work)
    for k in failed:
        if not found[k].answers:
            raise RuntimeError(f"{names[k]} failed on two ranks: {found[k].said}")
    return [found[k].answers[0] for k in here]


def _attempted(
    ranks: Ranks, runs: dict[int, int], work: Callable[[int], Answer]
) -> dict[int, _Attempt[Answer]]:
    """What became of the run of each rank that has one; a stop and a refusal end all ranks."""
    own = None
    if ranks.rank in runs:
        with shared_by(None):  # a run is one rank's alone
            own = _attempt(work, runs[ranks.rank])
    told = ranks.gather_values(own)
    found = {k: told[rank] for rank, k in runs.items()}
    for rank, attempt in enumerate(told):
        if attempt is not None and attempt.stopped:
            raise StopRequested(attempt.stopped)
        if attempt is not None and attempt.code:
            raise BadInput(attempt.code, f"rank {rank}: {attempt.said}")
    return found


def _attempt(work: Callable[[int], Answer], k: int) -> _Attempt[Answer]:
    try:
        return _Attempt((work(k),))
    except StopRequested as stop:
        return _Attempt(stopped=str(stop))
    except BadInput as refused:
        return _Attempt(code=refused.code, said=str(refused))
    except RankLost:
        raise
    except Exception as error:  # whatever it is, another rank may have more luck
        return _Attempt(said=(str(error).splitlines() or [type(error).__name__])[0])
