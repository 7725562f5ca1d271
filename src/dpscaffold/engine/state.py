"""What a run carries from round to round, and what an engine is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Server, Upload
from dpscaffold.config import Run
from dpscaffold.engine.device import CPU


def running_average(average: Tensor, x: Tensor, count: Tensor) -> Tensor:
    """The average of ``count`` iterates, of which x is the last and ``average`` has the others."""
    return average + (x - average) / count[..., None]


@dataclass(frozen=True)
class State:
    """A server between two rounds: x and its slots, and the running average of the iterates.

    Of S runs in a stack, all tensors have a first axis of S; ``averaged`` says how many iterates
    are in each average.
    """

    round: int
    server: Server
    average: Tensor
    averaged: Tensor

    @classmethod
    def initial(cls, run: Run, device: torch.device = CPU) -> State:
        """x⁰, and zero in every slot that the algorithm keeps."""
        params = run.task.initial(run.plan.public_seed).to(device)
        slots = {
            name: torch.zeros_like(params) if size == "vector" else params.new_zeros(1)
            for name, size in run.algorithm.keeps.items()
        }
        none = torch.zeros((), dtype=torch.int64)
        return cls(0, Server(params, slots), torch.zeros_like(params), none)

    @classmethod
    def stack(cls, states: Sequence[State]) -> State:
        """The states of several runs as one."""
        servers = [one.server for one in states]
        slots = {
            name: torch.stack([server.slots[name] for server in servers])
            for name in servers[0].slots
        }
        return cls(
            states[0].round,
            Server(torch.stack([server.params for server in servers]), slots),
            torch.stack([one.average for one in states]),
            torch.stack([one.averaged for one in states]),
        )

    @property
    def params(self) -> Tensor:
        """x^t."""
        return self.server.params

    @property
    def output(self) -> Tensor:
        """The model to hand out: the averaged iterate where there is one, else x^t."""
        some = (self.averaged > 0).to(self.params.device)
        return self.average.where(some[..., None], self.params)

    def moved(self, server: Server, runs: Sequence[Run]) -> State:
        """The next round's state; x^round counts into the average where the plan says so."""
        round = self.round + 1
        takes = torch.tensor([round >= run.averaged_from for run in runs]).view_as(self.averaged)
        moved = replace(self, round=round, server=server)
        if not bool(takes.any()):
            return moved
        count, device = self.averaged + takes, server.params.device
        average = running_average(self.average, server.params, count.clamp_min(1).to(device))
        average = average.where(takes.to(device)[..., None], self.average)
        return replace(moved, average=average, averaged=count)

    def under(self, run: Run) -> State:
        """This state in a plan that may have been given more rounds since: where the average now
        begins later than the rounds that are done, it begins again.

        Where it began earlier it goes on, as rounds cannot be taken out of it.
        """
        if bool(self.averaged) and self.round < run.averaged_from:
            none = torch.zeros_like(self.averaged)
            return replace(self, average=torch.zeros_like(self.average), averaged=none)
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
        numbers = {"round": self.round, "averaged": int(self.averaged)}
        return {**numbers, "params": self.params, "slots": slots, "average": average}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> State:
        """From a checkpoint."""
        server = Server(saved["params"], dict(saved["slots"]))
        averaged = torch.tensor(saved["averaged"])
        return cls(saved["round"], server, saved["average"].contiguous(), averaged)


@dataclass(frozen=True)
class Draw:
    """Who was drawn for a round and who takes part: a drawn user at its cap declines, the divisor
    stays."""

    drawn: np.ndarray
    active: np.ndarray

    @classmethod
    def all(cls, users: np.ndarray) -> Draw:
        """Everybody who was drawn takes part."""
        return cls(users, users)


@dataclass(frozen=True)
class RoundUploads:
    """What a round brings back: the mean upload, who it came from, and what it tells about itself.

    ``arrived`` may be fewer than take part (a reply is lost); less noise is then in the sum.
    ``metrics`` may stay on their device, so that a round need not wait for them.
    """

    mean: Upload
    arrived: tuple[int, ...]
    metrics: Mapping[str, float | Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Round:
    """A finished round: the server after its move, and what came back, of every run of a stack."""

    state: State
    found: Sequence[RoundUploads] | Callable[[], Sequence[RoundUploads]]

    @cached_property
    def uploads(self) -> Sequence[RoundUploads]:
        """What came back in every run; an engine may put it together when it is asked for."""
        return self.found() if callable(self.found) else self.found

    @property
    def arrived(self) -> tuple[int, ...]:
        """Whose uploads arrived, in the first run."""
        return self.uploads[0].arrived

    @property
    def metrics(self) -> Mapping[str, float | Tensor]:
        """What the round tells about itself, in the first run."""
        return self.uploads[0].metrics


#: Counts users of the round once more, who release with fresh noise, by their numbers; returns
#: when that is on the disk.
Count = Callable[[Sequence[int]], None]


def count_nothing(users: Sequence[int]) -> None:
    """Nobody keeps a ledger."""


class Engine(Protocol):
    """Where rounds are taken: in this process, or at sites.

    The users of ``draws`` are in the ledger once. An engine that asks them again, and cannot know
    that they answer with the same upload, calls ``count`` before the question leaves.
    """

    def round(self, state: State, draws: Sequence[Draw], count: Count = count_nothing) -> Round:
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
