"""What a run carries from round to round, and what an engine is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dpscaffold.setting import Setting


@dataclass
class State:
    """One run between two rounds: x, c, every user's c_i, and the running average of the
    iterates."""

    round: int
    params: Tensor
    control: Tensor | None
    memory: Tensor | None  # (M, P)
    average: Tensor
    averaged: int = 0

    @classmethod
    def initial(cls, setting: Setting, device: torch.device) -> State:
        """x⁰, and control variates of zero where the algorithm has them."""
        params = setting.task.initial(setting.plan.seed).to(device)
        remembers = setting.algorithm.memory
        return cls(
            round=0,
            params=params,
            control=torch.zeros_like(params) if remembers else None,
            memory=torch.zeros(setting.users, len(params), device=device) if remembers else None,
            average=torch.zeros_like(params),
        )

    @property
    def output(self) -> Tensor:
        """The model to hand out: the averaged iterate where there is one, else x^t."""
        return self.average if self.averaged else self.params

    def advance(self, round: int, params: Tensor, control: Tensor | None, setting: Setting) -> None:
        """Take the server's new state and count x^round into the average where the plan says so."""
        self.round, self.params, self.control = round, params, control
        if setting.plan.averages(round, setting.warm_rounds):
            self.averaged += 1
            self.average = self.average + (params - self.average) / self.averaged

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            key: value.cpu() if isinstance(value, Tensor) else value
            for key, value in vars(self).items()
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any], device: torch.device) -> State:
        """From a checkpoint."""
        placed: dict[str, Any] = {
            k: v.to(device) if isinstance(v, Tensor) else v for k, v in saved.items()
        }
        return cls(**placed)


@dataclass(frozen=True)
class Draw:
    """Who was drawn for a round and who takes part: a drawn user at its cap declines, the divisor
    stays."""

    drawn: np.ndarray
    active: np.ndarray


@dataclass(frozen=True)
class RoundReport:
    """What a round tells about itself."""

    round: int
    participants: tuple[int, ...]
    metrics: dict[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """Where rounds run. Engines hold the state and decide nothing else."""

    state: State

    def round(self, round: int, draw: Draw) -> RoundReport:
        """Run one round with these participants and move the state to x^round."""
        ...


def mean_weights(setting: Setting, draw: Draw) -> np.ndarray:
    """The weights of the active users in the mean of Δy: 1/m, or R_i/ΣR_j over all drawn users,
    (active,)."""
    if setting.plan.weighting == "uniform":
        return np.full(len(draw.active), 1 / len(draw.drawn))
    sizes = setting.federation.train.sizes.numpy()
    return sizes[draw.active] / sizes[draw.drawn].sum()
