"""What becomes of a round's uploads: Δy is averaged over those drawn, totals are divided by M.

Sums are in float64, so that the order in which users are added hardly ever shows in the float32
result. Of a stack of runs every tensor has a first axis of S, and runs are added apart: in one
product with a matrix of weights 0·NaN of a run that diverged would poison the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Broadcast, Known, Local, Participant, Slots, Upload
from dpscaffold.config import Run
from dpscaffold.config.secure import SumPlan
from dpscaffold.engine.state import Draw, RoundUploads
from dpscaffold.engine.steps import Drawn, Participation, local_steps
from dpscaffold.errors import BadInput

#: Sums over the participants of every run, by the name of what is added.
Sums = dict[str, Tensor]


@dataclass
class Averaged:
    """The server sees every upload."""

    runs: Sequence[Run]

    def participate(
        self, of: Participation, drawn: Drawn, users: Mapping[int, Sequence[int]]
    ) -> tuple[Upload, Slots]:
        """The uploads and the new slots of these ``users`` of each run, after K local steps."""
        return of.phase.finish(local_steps(of, drawn), of.at)

    def added(self, uploads: Upload, weights: Tensor) -> Sums:
        """Σ w_i Δy_i, and the totals."""
        runs, count = weights.shape
        moves = uploads.params.view(runs, count, -1).double()
        sums = {"params": torch.bmm(weights[:, None], moves)[:, 0]}
        for name, value in uploads.totals.items():
            sums[name] = value.view(runs, count, -1).double().sum(1)
        return sums

    def uploads(
        self, phase: Algorithm, broadcast: Broadcast, sums: Sums, draws: Sequence[Draw]
    ) -> Upload:
        """Totals are divided by the number of all users."""
        users: Any = self.runs[0].users
        if any(run.users != users for run in self.runs):
            users = sums["params"].new_tensor([[run.users] for run in self.runs])
        totals = {k: (v / users).float() for k, v in sums.items() if k != "params"}
        return Upload(sums["params"].float(), totals)


@dataclass
class Summed:
    """The server sees sums of integers. Without the upload of every user there is no sum."""

    runs: Sequence[Run]

    def participate(
        self, of: Participation, drawn: Drawn, users: Mapping[int, Sequence[int]]
    ) -> tuple[Upload, Slots]:
        """The noised batch means at x as integers of their runs' sums, (U, P)."""
        ((batch, normals),) = drawn
        means = of.query(of.task, of.at.broadcast.params, batch, of.numbers, normals)
        parts = means.split([len(own) for own in users.values()])
        integers = [
            sums_of(self.runs[k]).quantise(own, part)
            for (k, own), part in zip(users.items(), parts, strict=True)
        ]
        return Upload(torch.cat(integers)), {}

    def added(self, uploads: Upload, weights: Tensor) -> Sums:
        """Integers add to the same sum in any order."""
        if uploads.params.dtype != torch.int64 or uploads.totals:
            raise BadInput(
                "wrong-type",
                "an upload to a secure sum is one vector of integers, and nothing else",
            )
        return {"params": uploads.params.view(*weights.shape, -1).sum(1)}

    def uploads(
        self, phase: Algorithm, broadcast: Broadcast, sums: Sums, draws: Sequence[Draw]
    ) -> Upload:
        """What one participant with the mean gradient would send."""
        made = []
        for k, (run, draw) in enumerate(zip(self.runs, draws, strict=True)):
            members, own = draw.active.tolist(), sums_of(run)
            mean = own.mean(own.grid.total(sums["params"][k]), members)
            asked = Broadcast(broadcast.round, broadcast.params[k])
            made.append(upload_of_mean(run, phase, asked, mean).params)
        return Upload(torch.stack(made))


def sums_of(run: Run) -> SumPlan:
    """The secure sums of a run that has them."""
    assert run.sums is not None
    return run.sums


#: What leaves users, and what the server makes of the sums.
Law = Averaged | Summed


def law_of(runs: Sequence[Run]) -> Law:
    """The law of these runs, which are alike."""
    return Averaged(runs) if runs[0].secure is None else Summed(runs)


def mean_weights(run: Run, draw: Draw) -> np.ndarray:
    """The weights of the active users in the mean of Δy: 1/m, or w_i/Σw_j over all drawn users,
    (active,), with w_i = R_i or by noise."""
    if run.plan.weighting == "uniform":
        return np.full(len(draw.active), 1 / len(draw.drawn))
    given = run.weights.numpy()
    weights: np.ndarray = given[draw.active] / given[draw.drawn].sum()
    return weights


def upload_of_mean(run: Run, phase: Algorithm, broadcast: Broadcast, mean: Tensor) -> Upload:
    """The mean upload of a round of one step, from the mean of its noised gradients (P,) float64.

    It is what one participant with that gradient would send: uploads are linear in the gradient.
    """
    x, plan = broadcast.params, run.plan
    step_size = run.settled.step_size_in(int(broadcast.round))
    at = Participant(broadcast, {}, Known(1, step_size))
    gradient = mean.to(x.dtype) + plan.regularisation * x
    y = x - step_size * phase.direction(gradient, x, at)
    return phase.finish(Local(y, gradient), at)[0]


def aggregate(
    run: Run,
    draw: Draw,
    broadcast: Broadcast,
    uploads: Iterable[tuple[Sequence[int], Upload]],
    phase: Algorithm | None = None,
) -> RoundUploads:
    """The mean of the uploads of some users at a time, (U, P) each; what comes late does not
    count."""
    law, x = law_of([run]), broadcast.params
    weights = dict(zip(draw.active.tolist(), mean_weights(run, draw).tolist(), strict=True))
    sums: Sums = {}
    arrived: list[int] = []
    drift = x.new_zeros(())
    for users, upload in uploads:
        run.algorithm.check_upload(upload)
        own = torch.tensor([[weights[user] for user in users]], dtype=torch.float64)
        for name, value in law.added(upload, own.to(x.device)).items():
            sums[name] = sums[name] + value if name in sums else value
        arrived += users
        drift = torch.maximum(drift, upload.params.float().norm(dim=1).max())
    if isinstance(law, Summed) and sorted(arrived) != sorted(draw.active.tolist()):
        raise BadInput(
            "uploads-missing",
            f"{len(arrived)} of {len(draw.active)} uploads of a secure sum came; without all of "
            f"them there is no sum",
        )
    if not arrived:
        return RoundUploads(Upload(torch.zeros_like(x)), (), {"largest_drift": drift})
    asked = Broadcast(broadcast.round, x[None])
    made = law.uploads(phase or run.algorithm, asked, sums, [draw])
    totals = {name: value[0] for name, value in made.totals.items()}
    return RoundUploads(Upload(made.params[0], totals), tuple(arrived), {"largest_drift": drift})
