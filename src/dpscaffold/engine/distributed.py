"""The processes that take the rounds of one run together (ranks), and what they tell each other.

Every rank does the same: it draws nothing that another one decides, computes the participations of
its own users, and moves the same server by sums over all ranks. Rank 0 decides who takes part, for
it has the ledger; it alone writes. So all ranks call the same operations in the same order.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from traceback import clear_frames
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dpscaffold.engine.device import CPU, pick_device
from dpscaffold.engine.launcher import VARIABLES, launched_ranks
from dpscaffold.errors import BadInput, RankLost

#: How long a rank waits for the others, in seconds; the environment variable changes it.
TIMEOUT, TIMEOUT_VARIABLE = 600.0, "DPSCAFFOLD_RANK_TIMEOUT"

Value = TypeVar("Value")


class Comm:
    """The processes of a run, as one of them sees them: here there is no other."""

    rank, count = 0, 1

    def on(self, device: str) -> torch.device:
        """Where this process computes, if it is to compute on this device."""
        return pick_device(device)

    def first(self, decide: Callable[[], Value]) -> Value:
        """What rank 0 decides, on every rank."""
        return decide()

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on every rank."""
        return values

    def all(self, value: Value) -> list[Value]:
        """The values of all ranks, on every rank."""
        return [value]

    def close(self) -> None:
        """Close the connections, so that other ranks notice."""


#: One process.
ALONE = Comm()


class Ranks(Comm):
    """One of several processes, over gloo, from GPUs too: NCCL would wait on the device for a rank
    that is gone, until it takes this process down."""

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.device = CPU
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        dist.barrier(group=self._group)  # one that leaves at once has been met by all

    def compute_on(self, device: torch.device) -> None:
        """Let every rank compute on a device of one kind."""
        refuse_differing(self, {"kind of device": device.type}, frozenset(("kind of device",)))
        self.device = device

    def on(self, device: str) -> torch.device:
        """The device that the connections were made for."""
        return self.device

    def first(self, decide: Callable[[], Value]) -> Value:
        """What rank 0 decides, on every rank."""
        said: list[Any] = [decide() if self.rank == 0 else None]
        with self._watched():
            dist.broadcast_object_list(said, 0, group=self._group)
        value: Value = said[0]
        return value

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the ranks' tensors, on every rank."""
        total = values.cpu().contiguous().clone()
        with self._watched():
            dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def all(self, value: Value) -> list[Value]:
        """The values of all ranks, on every rank."""
        found: list[Any] = [None] * self.count
        with self._watched():
            dist.all_gather_object(found, value, group=self._group)
        return found

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Say in one sentence that another rank is gone."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            clear_frames(error.__traceback__)  # they refer to the connections
            said = (str(error).splitlines() or [type(error).__name__])[0]
            self.close()
            raise RankLost(f"rank {self.rank} lost contact with another rank ({said})") from error

    def close(self) -> None:
        """Close the connections, so that other ranks notice."""
        group, self._group = self._group, None
        if group is None:  # it is closed
            return
        with suppress(Exception):
            dist.destroy_process_group(group)
        del group
        gc.collect()  # connections close when nothing refers to them any more


def join(device: str = "cpu", distributed: bool | None = None) -> Comm:
    """This process among the ranks of a run; alone where there are no others. The process group is
    joined here, unless the caller did so before. ``distributed`` None: where a launcher started
    several processes."""
    if distributed is None:
        distributed = launched_ranks() > 1
    if not distributed:
        return ALONE
    if not dist.is_available() or not dist.is_gloo_available():
        raise BadInput(
            "backend-missing",
            "several processes need the backend gloo, and this PyTorch was built without it; "
            "install one with it, or use one process",
        )
    timeout = _timeout()
    with _meeting(timeout):
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        ranks = Ranks(timeout)
    try:
        ranks.compute_on(_own_device(device))
    except BaseException:
        ranks.close()
        raise
    return ranks


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """What fails in this block on one rank ends it on all of them."""
    try:
        yield
    finally:
        comm.close()


def refuse_differing(comm: Comm, facts: dict[str, str], shown: frozenset[str]) -> None:
    """Refuse ranks that do not say the same of themselves; ``shown`` are the facts in words that
    help, others are checksums."""
    found = comm.all(facts)
    for name, own in found[0].items():
        other = next((rank for rank, said in enumerate(found) if said.get(name) != own), None)
        if other is not None:
            words = f" ({own} and {found[other].get(name)})" if name in shown else ""
            raise BadInput(
                "ranks-differ",
                f"rank {other} does not have the {name} of rank 0{words}; give every rank the same",
            )


@contextmanager
def _meeting(timeout: float) -> Iterator[None]:
    """Say in one sentence that the ranks did not find each other."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        where = ":".join(os.environ.get(name, "?") for name in VARIABLES[2:])
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(
            "no-rendezvous",
            f"rank {os.environ.get('RANK')} of {os.environ.get('WORLD_SIZE')} did not meet the "
            f"others at {where} within {timeout:g} s ({said}); start all ranks, and let them reach "
            f"that address",
        ) from None


def _own_device(device: str) -> torch.device:
    """The device of this rank: of several GPUs of a machine, the one of its local rank."""
    found = pick_device(device)
    if found.type == "cuda":
        if found.index is None:
            found = pick_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(found)
    return found


def _timeout() -> float:
    given = os.environ.get(TIMEOUT_VARIABLE)
    try:
        found = TIMEOUT if given is None else float(given)
    except ValueError:
        found = 0.0
    if not 1 <= found <= 86400:
        raise BadInput(
            "out-of-range",
            f"{TIMEOUT_VARIABLE} is {given!r}; give a number of seconds from 1 to 86400",
        )
    return found
