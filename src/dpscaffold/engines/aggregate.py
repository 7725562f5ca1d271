"""The two laws of aggregation: Δy is averaged over those drawn, totals are divided by M."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Known, Local, Participant, Upload
from dpscaffold.config import Run
from dpscaffold.config.secure import SumPlan
from dpscaffold.engines.machine import sent
from dpscaffold.engines.state import Draw, RoundUploads
from dpscaffold.errors import BadInput


def mean_weights(setting: Run, draw: Draw) -> np.ndarray:
    """The weights of the active users in the mean of Δy: 1/m, or w_i/Σw_j over all drawn users,
    (active,), with w_i = R_i or by noise."""
    if setting.plan.weighting == "uniform":
        return np.full(len(draw.active), 1 / len(draw.drawn))
    given = setting.weights.numpy()
    weights: np.ndarray = given[draw.active] / given[draw.drawn].sum()
    return weights


def weighted_sum(weights: Tensor, moves: Tensor) -> Tensor:
    """Σ w_i Δy_i of weights (m,) and moves (m, P), or of every run of a stack, (S, m, P).

    On a CPU it is added in the order of the users, not as a matrix-vector product: libraries add
    its rows in blocks, or round each product first, depending on the processor.
    """
    if moves.device.type != "cpu":
        return weights @ moves
    if moves.dim() == 2:
        return _added(moves.new_zeros(moves.shape[1]), weights, moves.unbind())
    return _added(torch.zeros_like(moves[:, 0]), weights, moves.unbind(1))


def _added(total: Tensor, weights: Tensor, rows: Sequence[Tensor]) -> Tensor:
    for weight, row in zip(weights.tolist(), rows, strict=True):
        total.add_(row, alpha=weight)
    return total


class Aggregate:
    """A round's mean upload in the making, part by part as uploads come in."""

    def __init__(self, setting: Run, draw: Draw, x: Tensor) -> None:
        self.users, self.algorithm = setting.users, setting.algorithm
        weights = mean_weights(setting, draw).tolist()
        self.weights = dict(zip(draw.active.tolist(), weights, strict=True))
        self.mean = torch.zeros_like(x)
        self.totals: dict[str, Tensor] = {}
        self.arrived: list[int] = []
        self.drifts: list[Tensor] = []

    def add(self, users: Sequence[int], uploads: Upload) -> None:
        """The uploads of some users, (U, P)."""
        if not uploads.totals.keys() <= self.totals.keys():  # names that were not checked yet
            self.algorithm.check_upload(uploads)
        weights = sent(torch.tensor([self.weights[user] for user in users]), self.mean.device)
        self.mean += weighted_sum(weights, uploads.params)
        for name, value in uploads.totals.items():
            self.totals[name] = self.totals.get(name, torch.zeros_like(value[0])) + value.sum(0)
        self.arrived += users
        self.drifts.append(uploads.params.norm(dim=1).max())

    def set(self, users: Sequence[int], sums: Upload, drift: Tensor) -> None:
        """The uploads of all users, added up elsewhere, (P,), and the largest norm of Δy."""
        self.mean, self.totals = sums.params, dict(sums.totals)
        self.arrived, self.drifts = list(users), [drift]

    def gathered(self) -> RoundUploads:
        """The mean, once all that will come has come."""
        totals = {name: value / self.users for name, value in self.totals.items()}
        drift = torch.stack(self.drifts).max() if self.drifts else torch.zeros(())
        return RoundUploads(
            Upload(self.mean, totals), tuple(self.arrived), {"largest_drift": drift}
        )


class SecureAggregate:
    """The sum of a round's integers in the making; its mean is moved as one participant's would be.

    All or nothing: without the upload of every user that takes part there is no sum.
    """

    def __init__(
        self, setting: Run, sums: SumPlan, draw: Draw, broadcast: Broadcast, phase: Algorithm
    ) -> None:
        self.setting, self.sums, self.draw = setting, sums, draw
        self.broadcast, self.phase = broadcast, phase
        self.total = torch.zeros_like(broadcast.params, dtype=torch.int64)
        self.arrived: list[int] = []

    def add(self, users: Sequence[int], uploads: Upload) -> None:
        """The integers of some users, (U, P)."""
        if uploads.params.dtype != torch.int64 or uploads.totals:
            raise BadInput(
                "wrong-type",
                "an upload to a secure sum is one vector of integers, and nothing else",
            )
        self.total = self.sums.grid.total(self.total + uploads.params.sum(0))
        self.arrived += users

    def gathered(self) -> RoundUploads:
        """What the server's move is made of, once all have come."""
        members = self.draw.active.tolist()
        if sorted(self.arrived) != sorted(members):
            raise BadInput(
                "uploads-missing",
                f"{len(self.arrived)} of {len(members)} uploads of a secure sum came; without all "
                f"of them there is no sum",
            )
        mean = self.sums.mean(self.total, members)
        made = upload_of_mean(self.setting, self.phase, self.broadcast, mean)
        return RoundUploads(made, tuple(self.arrived))


def upload_of_mean(setting: Run, phase: Algorithm, broadcast: Broadcast, mean: Tensor) -> Upload:
    """The mean upload of a round of one step, from the mean of its noised gradients (P,) float64.

    It is what one participant with that gradient would send: uploads are linear in the gradient.
    """
    x, plan = broadcast.params, setting.plan
    step_size = setting.settled.step_size_in(broadcast.round)
    at = Participant(broadcast, {}, Known(1, step_size))
    gradient = mean.to(x.dtype) + plan.regularisation * x
    y = x - step_size * phase.direction(gradient, x, at)
    return phase.finish(Local(y, gradient), at)[0]


def new_aggregate(
    setting: Run, draw: Draw, broadcast: Broadcast, phase: Algorithm
) -> Aggregate | SecureAggregate:
    """What adds up a round's uploads."""
    if setting.sums is not None:
        return SecureAggregate(setting, setting.sums, draw, broadcast, phase)
    return Aggregate(setting, draw, broadcast.params)


def aggregate(
    setting: Run,
    draw: Draw,
    broadcast: Broadcast,
    uploads: Iterable[tuple[Sequence[int], Upload]],
    phase: Algorithm | None = None,
) -> RoundUploads:
    """The mean of the uploads of some users at a time, (U, P) each."""
    made = new_aggregate(setting, draw, broadcast, phase or setting.algorithm)
    for users, upload in uploads:
        made.add(users, upload)
    return made.gathered()
