"""What a run carries from round to round, and what an engine is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Server, Upload
from dpscaffold.config import Run
from dpscaffold.engines.memories import Memories


def running_average(average: Tensor, x: Tensor, count: Tensor | int) -> Tensor:
    """The average of ``count`` iterates, of which x is the last and ``average`` has the others."""
    return average + (x - average) / count


@dataclass(frozen=True)
class State:
    """A server between two rounds: x and its slots, and the running average of the iterates."""

    round: int
    server: Server
    average: Tensor
    averaged: int = 0

    @classmethod
    def initial(cls, setting: Run, device: torch.device) -> State:
        """x⁰, and zero in every slot that the algorithm keeps."""
        params = setting.task.initial(setting.plan.public_seed).to(device)
        slots: dict[str, Tensor] = {}
        for name, size in setting.algorithm.keeps.items():
            slots[name] = torch.zeros_like(params) if size == "vector" else params.new_zeros(1)
        return cls(0, Server(params, slots), torch.zeros_like(params))

    @property
    def params(self) -> Tensor:
        """x^t."""
        return self.server.params

    @property
    def output(self) -> Tensor:
        """The model to hand out: the averaged iterate where there is one, else x^t."""
        return self.average if self.averaged else self.params

    def moved(self, server: Server, setting: Run) -> State:
        """The next round's state; x^round counts into the average where the plan says so."""
        moved = replace(self, round=self.round + 1, server=server)
        if moved.round < setting.averaged_from:
            return moved
        count = self.averaged + 1
        average = running_average(self.average, server.params, count)
        return replace(moved, averaged=count, average=average)

    def under(self, setting: Run) -> State:
        """This state in a plan that may have been given more rounds since: where the average now
        begins later than the rounds that are done, it begins again.

        Where it began earlier it goes on, as rounds cannot be taken out of it.
        """
        if self.averaged and self.round < setting.averaged_from:
            return replace(self, average=torch.zeros_like(self.average), averaged=0)
        return self

    def to(self, device: torch.device) -> State:
        """The same state on a device."""
        slots = {name: value.to(device) for name, value in self.server.slots.items()}
        server = Server(self.params.to(device), slots)
        return replace(self, server=server, average=self.average.to(device))

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint. An average of nothing is zero, and stored as one number."""
        slots, average = dict(self.server.slots), self.average
        if not self.averaged:
            average = average.new_zeros(1).expand_as(average)
        numbers = {"round": self.round, "averaged": self.averaged}
        return {**numbers, "params": self.params, "slots": slots, "average": average}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> State:
        """From a checkpoint."""
        server = Server(saved["params"], dict(saved["slots"]))
        return cls(saved["round"], server, saved["average"].contiguous(), saved["averaged"])


@dataclass(frozen=True)
class Draw:
    """Who was drawn for a round and who takes part: a drawn user at its cap declines, the divisor
    stays."""

    drawn: np.ndarray
    active: np.ndarray


@dataclass(frozen=True)
class RoundUploads:
    """What a round brings back: the mean upload, who it came from, and what it tells about itself.

    ``arrived`` may be fewer than take part (a reply is lost); less noise is then in the sum.
    ``metrics`` may stay on their device, so that a round need not wait for them.
    """

    mean: Upload
    arrived: tuple[int, ...]
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)


#: Counts users of the round once more, who release with fresh noise, by their numbers; returns
#: when that is on the disk.
Count = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Round:
    """A finished round: the state after it, whose uploads arrived in each run, and what the round
    tells about itself. ``metrics`` may stay on their device."""

    state: State
    arrived: tuple[int, ...]
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)


class Engine(Protocol):
    """Where rounds are taken: in this process, or at sites.

    The users of ``draws`` are in the ledger once. An engine that asks them again, and cannot know
    that they answer with the same upload, calls ``count`` before the question leaves.
    """

    def round(self, state: State, draws: Sequence[Draw], count: Count) -> Round:
        """The round after ``state``; one draw for each run that shares the engine."""
        ...

    def acknowledge(self, round: int) -> None:
        """The checkpoint of this round is on the disk, so users may forget its uploads."""
        ...

    def memory(self) -> dict[str, Any]:
        """What a checkpoint holds of the users, by the fields of
        :class:`~dpscaffold.runs.checkpoint.Checkpoint`."""
        ...

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Take up what :meth:`memory` gave."""
        ...

    def norms(self) -> dict[str, float]:
        """The largest norm of each slot of the users."""
        ...


class Comm(Protocol):
    """The processes that take the rounds of a run together."""

    @property
    def leads(self) -> bool:
        """Whether this process writes, prints and reports progress."""
        ...

    def first(self, value: Any) -> Any:
        """The value of the first process, on every process."""
        ...


@dataclass(frozen=True)
class Alone:
    """One process."""

    leads: bool = True

    def first(self, value: Any) -> Any:
        """Its own value."""
        return value


class Gatherer(Protocol):
    """Where users' steps run. It gathers uploads; the server's move is taken elsewhere.

    ``memories`` is what is known here of the users' slots.
    """

    @property
    def memories(self) -> Memories:
        """The slots of users who took part."""
        ...

    def gather(self, phase: Algorithm, broadcast: Broadcast, draw: Draw) -> RoundUploads:
        """One round at the users who take part."""
        ...


class StackedEngine(Protocol):
    """Gathers for several runs of equal shape at once; ``all_memories`` are those of each run."""

    @property
    def all_memories(self) -> list[Memories]:
        """The slots of each run's users."""
        ...

    @property
    def to_redo(self) -> bool:
        """Whether the last round is to be gathered :meth:`again`."""
        ...

    def again(self) -> list[RoundUploads]:
        """The last round with the same draws."""
        ...

    def gather_all(
        self, phase: Algorithm, broadcasts: Sequence[Broadcast], draws: Sequence[Draw]
    ) -> list[RoundUploads]:
        """The same round of every run."""
        ...
