"""The processes of one run (ranks), and what they send each other.

Rank 0 has the server's state, the ledger and the run folder. The other ranks wait for what it asks
for (:meth:`Ranks.ask`, :meth:`Ranks.serve`) and answer with the values of their own users.
Both sides then call the same collective operations in the same order.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from traceback import clear_frames
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dpscaffold.algorithms import Size, Slots
from dpscaffold.engines.memories import Memories
from dpscaffold.errors import RankLost
from dpscaffold.federation.share import user_ranges

#: The bytes of a request, JSON with spaces at the end.
_REQUEST = 4096

#: How many values of users' slots are sent together.
_BLOCK = 1 << 22

#: What a rank does for rank 0, by the name of the request.
Handlers = Mapping[str, Callable[..., object]]


class Ranks:
    """This process among those that share a run, with a process group of their own.

    ``device`` is where this rank computes. Requests and small numbers go through gloo; parameters
    and uploads through NCCL where the device is a GPU.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.device, self.timeout = torch.device("cpu"), timeout
        wait = timedelta(seconds=timeout)
        self._small: Any = dist.new_group(backend="gloo", timeout=wait)
        self._large = self._small
        dist.barrier(group=self._small)  # one that leaves at once has been met by all

    def compute_on(self, device: torch.device) -> None:
        """Let every rank compute on a device of one kind."""
        self.device = device
        if device.type == "cuda":
            wait = timedelta(seconds=self.timeout)
            with self._watched():
                self._large = dist.new_group(backend="nccl", timeout=wait)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def users(self, count: int) -> range:
        """The users of this rank, of ``count`` in all."""
        return user_ranges(count, self.count)[self.rank]

    # --- requests of rank 0

    def ask(self, request: str, **numbers: Any) -> None:
        """Rank 0: have all other ranks do something; this rank does its own part of it next."""
        text = json.dumps([request, numbers]).encode()
        assert len(text) <= _REQUEST
        self.broadcast(torch.from_numpy(np.frombuffer(text.ljust(_REQUEST), np.uint8).copy()))

    def serve(self, handlers: Handlers) -> None:
        """Other ranks: do what rank 0 asks for until it ends the run."""
        while True:
            text = self.broadcast(torch.empty(_REQUEST, dtype=torch.uint8))
            request, numbers = json.loads(bytes(text.numpy()))
            if request == "end":
                return
            handlers[request](**numbers)

    # --- collective operations: every rank calls them in the same order

    def broadcast(self, values: Tensor) -> Tensor:
        """The values of rank 0, on every rank; the tensor is filled in place."""
        with self._watched():
            dist.broadcast(values, 0, group=self._group(values))
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """Rank 0: the tensors of all ranks, which have one shape; elsewhere an empty list."""
        found = [torch.empty_like(values) for _ in range(self.count)] if self.leads else None
        with self._watched():
            dist.gather(values.contiguous(), found, 0, group=self._group(values))
        return found or []

    def gather_rows(self, rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Rank 0: the rows (U, ·) of every rank, whose numbers of rows every rank knows."""
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        found = self.gather(padded)
        return [part[:count] for part, count in zip(found, counts, strict=False)]

    def reduced(self, values: Tensor) -> Tensor:
        """Rank 0: the sum of the ranks' tensors, which are overwritten."""
        with self._watched():
            dist.reduce(values, 0, group=self._group(values))
        return values

    def gather_values(self, value: Any) -> list[Any]:
        """The picklable values of all ranks, on every rank."""
        found: list[Any] = [None] * self.count
        with self._watched():
            dist.all_gather_object(found, value, group=self._small)
        return found

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest of each number over all ranks, on every rank."""
        found = torch.tensor(values, dtype=torch.float64)
        with self._watched():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._small)
        return [float(value) for value in found]

    def added(self, values: Tensor) -> Tensor:
        """The sum of the ranks' tensors on the CPU, on every rank."""
        found = values.detach().cpu().clone()
        with self._watched():
            dist.all_reduce(found, group=self._small)
        return found

    def _group(self, values: Tensor) -> Any:
        return self._large if values.device.type == "cuda" else self._small

    # --- failures

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Say in one sentence that another rank is gone."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            clear_frames(error.__traceback__)  # they refer to the connections
            said = (str(error).splitlines() or [type(error).__name__])[0]
            self.fail()
            raise RankLost(f"rank {self.rank} lost contact with another rank ({said})") from error

    def _stop_nccl(self) -> None:
        """End what waits on the device for another rank: nothing else could be computed there."""
        group, self._large = self._large, self._small
        if group is not self._small:
            with suppress(Exception):
                dist.distributed_c10d._abort_process_group(group)

    def fail(self) -> None:
        """Close the connections at once, so that the other ranks notice."""
        self._stop_nccl()
        self.close()
        gc.collect()  # connections close when nothing refers to them any more

    def close(self) -> None:
        """Close the connections of this run."""
        groups = {id(one): one for one in (self._small, self._large) if one is not None}
        self._small = self._large = None
        while groups:
            _, group = groups.popitem()
            with suppress(Exception):
                dist.destroy_process_group(group)
            del group


class SharedMemories(Memories):
    """The slots of all users at rank 0, where each rank holds those of its own users (``own``)."""

    def __init__(self, own: Memories, ranks: Ranks, users: int, remembers: Mapping[str, Size]):
        self.own, self.ranks, self.device = own, ranks, own.device
        self._users, self._names = users, list(remembers)
        self._seen = np.zeros(users, dtype=bool)

    def handlers(self) -> Handlers:
        """What the other ranks do for the methods of rank 0."""
        return {
            "recall": lambda count: self._recalled(torch.empty(count, dtype=torch.int64)),
            "largest": self._largest,
            "collect": self._collected,
            "restore": lambda count: self._restored(torch.empty(count, dtype=torch.int64)),
        }

    @property
    def users(self) -> list[int]:
        """Who was seen."""
        found: list[int] = np.flatnonzero(self._seen).tolist()
        return found

    def took_part(self, users: np.ndarray) -> None:
        """These users count as seen from now on."""
        self._seen[users] = True

    def seen(self, users: Sequence[int]) -> Tensor:
        """Which of these users took part before, (U,) on the CPU."""
        return torch.from_numpy(self._seen[np.asarray(users, dtype=np.int64)])

    def recall(self, users: Sequence[int]) -> dict[str, Tensor]:
        """The slots of these users, (U, P) or (U, 1)."""
        self.ranks.ask("recall", count=len(users))
        return self._recalled(torch.tensor(users, dtype=torch.int64))

    def _recalled(self, users: Tensor) -> dict[str, Tensor]:
        self.ranks.broadcast(users)
        places = self.places_by_rank(users.numpy())
        mine = users[places[self.ranks.rank]].tolist()
        return self._assembled(self.own.recall(mine), places)

    def places_by_rank(self, users: np.ndarray) -> list[np.ndarray]:
        """For each rank the places of its users among these."""
        ranges = user_ranges(self._users, self.ranks.count)
        return [np.flatnonzero((users >= r.start) & (users < r.stop)) for r in ranges]

    def _assembled(self, own: Slots, places: Sequence[np.ndarray]) -> dict[str, Tensor]:
        """Rank 0: the slots of all ranks at their places."""
        counts, found = [len(part) for part in places], {}
        for name in self._names:
            parts = self.ranks.gather_rows(own[name], counts)
            if parts:
                whole = own[name].new_empty(sum(counts), own[name].shape[1])
                for part, place in zip(parts, places, strict=True):
                    whole[torch.from_numpy(place)] = part
                found[name] = whole
        return found

    def largest(self) -> dict[str, float]:
        """The largest norm of each slot over all users."""
        if not self._names:
            return {}
        self.ranks.ask("largest")
        return self._largest()

    def _largest(self) -> dict[str, float]:
        own = self.own.largest()
        most = self.ranks.most([own[name] for name in self._names])
        return dict(zip(self._names, most, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint: who was seen, and their slots."""
        if not self._names:
            return {"users": self.users, "slots": {}}
        self.ranks.ask("collect")
        return self._collected()

    def _collected(self) -> dict[str, Any]:
        """Rank 0: the slots of everybody who was seen, block by block."""
        own = self.own.to_dict()
        counts = self.ranks.gather_values(len(own["users"]))
        held = torch.tensor(own["users"], dtype=torch.int64)
        users = torch.cat([held[:0], *self.ranks.gather_rows(held, counts)])
        slots = {name: self._stacked(own["slots"][name], counts) for name in self._names}
        return {"users": users.tolist(), "slots": slots}

    def _stacked(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Rank 0: the rows of all ranks, one rank after the other."""
        step = max(1, _BLOCK // own.shape[1])
        firsts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        whole = own.new_empty(sum(counts) if self.ranks.leads else 0, own.shape[1])
        for start in range(0, max(counts), step):
            here = [max(0, min(step, count - start)) for count in counts]
            parts = self.ranks.gather_rows(own[start : start + step], here)
            for first, part in zip(firsts, parts, strict=False):
                whole[first + start : first + start + len(part)] = part
        return whole

    def replace_all(self, users: Sequence[int], slots: Slots) -> None:
        """Hold the slots of these users and of nobody else, whichever ranks held them before."""
        given = torch.tensor(users, dtype=torch.int64)
        self._seen[:] = False
        self._seen[given.numpy()] = True
        if self._names:
            self.ranks.ask("restore", count=len(users))
            self._restored(given, slots)

    def _restored(self, users: Tensor, slots: Slots | None = None) -> None:
        """Each rank keeps the slots of its own users."""
        self.ranks.broadcast(users)
        mine = self.ranks.users(self._users)
        widths = {name: value.shape[1] for name, value in self.own.recall([]).items()}
        step = max(1, _BLOCK // max(widths.values()))
        for start in range(0, len(users), step):
            block = users[start : start + step]
            kept = (block >= mine.start) & (block < mine.stop)
            found = {}
            for name in self._names:
                rows = torch.empty(len(block), widths[name])
                if slots is not None:
                    rows.copy_(slots[name][start : start + step])
                found[name] = self.ranks.broadcast(rows)[kept].to(self.device)
            self.own.keep(block[kept].tolist(), found)
