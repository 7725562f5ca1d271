"""The two laws of aggregation: Δy is averaged over those drawn, totals are divided by M."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Broadcast, Upload
from dpscaffold.engines.hardware import placed
from dpscaffold.engines.state import DeviceNumbers, Draw, RoundUploads
from dpscaffold.setting import Setting


def mean_weights(setting: Setting, draw: Draw) -> np.ndarray:
    """The weights of the active users in the mean of Δy: 1/m, or R_i/ΣR_j over all drawn users,
    (active,)."""
    if setting.plan.weighting == "uniform":
        return np.full(len(draw.active), 1 / len(draw.drawn))
    sizes = setting.sizes.numpy()
    weights: np.ndarray = sizes[draw.active] / sizes[draw.drawn].sum()
    return weights


def weighted_sum(weights: Tensor, moves: Tensor) -> Tensor:
    """Σ w_i Δy_i of weights (m,) and moves (m, P), or of every run of a stack, (S, m, P)."""
    return weights @ moves


class Aggregate:
    """A round's mean upload in the making, part by part as uploads come in."""

    def __init__(self, setting: Setting, draw: Draw, x: Tensor) -> None:
        self.users, self.algorithm = setting.users, setting.algorithm
        weights = mean_weights(setting, draw).tolist()
        self.weights = dict(zip(draw.active.tolist(), weights, strict=True))
        self.mean = torch.zeros_like(x)
        self.totals: dict[str, Tensor] = {}
        self.arrived: list[int] = []
        self.drifts: list[Tensor] = []

    def add(self, users: Sequence[int], uploads: Upload) -> None:
        """The uploads of some users, (U, P)."""
        self.algorithm.check_upload(uploads)
        weights = placed(torch.tensor([self.weights[user] for user in users]), self.mean.device)
        self.mean += weighted_sum(weights, uploads.params)
        for name, value in uploads.totals.items():
            self.totals[name] = self.totals.get(name, torch.zeros_like(value[0])) + value.sum(0)
        self.arrived += users
        self.drifts.append(uploads.params.norm(dim=1).max())

    def gathered(self) -> RoundUploads:
        """The mean, once all that will come has come."""
        totals = {name: value / self.users for name, value in self.totals.items()}
        drift = torch.stack(self.drifts).max() if self.drifts else torch.zeros(())
        return RoundUploads(
            Upload(self.mean, totals), tuple(self.arrived), DeviceNumbers({"largest_drift": drift})
        )


def aggregate(
    setting: Setting,
    draw: Draw,
    broadcast: Broadcast,
    uploads: Iterable[tuple[Sequence[int], Upload]],
) -> RoundUploads:
    """The mean of the uploads of some users at a time, (U, P) each."""
    made = Aggregate(setting, draw, broadcast.params)
    for users, upload in uploads:
        made.add(users, upload)
    return made.gathered()
