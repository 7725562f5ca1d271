"""What a local step learns from records: the only place where records touch anything that leaves.

A query takes each user's own parameters and a batch, (U, P) → (U, P). The ``release`` that it holds
is the one of which the accountant makes the run's mechanism, so that what is done and what is
stated cannot differ. Which query a run has is decided once, in :func:`query_of`.

An empty (Poisson) batch is a zero sum, and its noise is added all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from dpscaffold.algorithms import Known
from dpscaffold.config import Run
from dpscaffold.config.gaussian import NoisedStep
from dpscaffold.config.plan import Plan
from dpscaffold.errors import BadInput
from dpscaffold.privacy.adversary import CLIPPED_SHARE
from dpscaffold.privacy.mechanism import noise_scale
from dpscaffold.randomness.csprng import on_grid
from dpscaffold.tasks import Batch, Task
from dpscaffold.tasks.base import Exact, sums_exactly


@dataclass(frozen=True)
class Numbers:
    """The public numbers of U participations, (U, 1) each: η_l, λ, the divisor b_i, the weight in
    means, C, σ_i, and the standard deviation of the noise on the mean of a batch. They may differ
    from row to row (unequal users, several runs in one stack).

    ``steps`` is K, or K_i of every row where users take different numbers of steps.
    """

    #: Those that a user has in all rounds.
    OF_USERS: ClassVar = ("regularisation", "divisor", "weight", "clip", "noise", "spread")

    step_size: Tensor
    regularisation: Tensor
    divisor: Tensor
    weight: Tensor
    clip: Tensor
    noise: Tensor
    spread: Tensor
    steps: int | Tensor

    @classmethod
    def of_one(
        cls,
        plan: Plan,
        round: int,
        user: int,
        batch: int,
        weight: float,
        release: NoisedStep | None,
        device: torch.device,
    ) -> Numbers:
        """Those of one user, (1, 1) each, whose ``release`` has its own noise."""
        clip = 0.0 if release is None or isinstance(release.clip, str) else release.clip
        values = {
            "step_size": plan.step_size_in(round),
            "regularisation": plan.regularisation,
            "divisor": float(batch),
            "weight": weight,
            "clip": clip,
            "noise": 0.0 if release is None else release.noise,
            "spread": 0.0 if release is None else float(release.scale(clip, batch)),
        }
        columns = {
            name: torch.tensor([[value]], dtype=torch.float32, device=device)
            for name, value in values.items()
        }
        steps: int | Tensor = plan.local_steps
        if plan.steps_by_user is not None:
            steps = torch.tensor([[float(plan.steps_of(user))]], device=device)
        return cls(steps=steps, **columns)


@dataclass(frozen=True)
class Plain:
    """The mean gradient of the batch."""

    release: None = None

    def __call__(
        self, task: Task, y: Tensor, batch: Batch, numbers: Numbers, normals: Tensor | None
    ) -> Tensor:
        """No noise, no clip."""
        return task.clipped_sum(y, batch, None).total / numbers.divisor

    def known(self, numbers: Numbers) -> Known:
        """There is no noise."""
        return _known(numbers, 0.0)


@dataclass(frozen=True)
class NoisedMean:
    """H̃ = (1/b)Σ clip(g_j) + (2C/b)σ·N(0, I)."""

    release: NoisedStep

    def __call__(
        self, task: Task, y: Tensor, batch: Batch, numbers: Numbers, normals: Tensor | None
    ) -> Tensor:
        """Clip to a bound that is known, and add noise."""
        total = task.clipped_sum(y, batch, numbers.clip[:, 0]).total
        return noised(total.div_(numbers.divisor), numbers.spread, normals)

    def known(self, numbers: Numbers) -> Known:
        """The noise is known."""
        return _known(numbers, numbers.spread)


@dataclass(frozen=True)
class UserMean(NoisedMean):
    """The same towards whole users with Poisson batches: as their sum is not bounded by bC, the
    mean is first rescaled to norm at most C."""

    def __call__(
        self, task: Task, y: Tensor, batch: Batch, numbers: Numbers, normals: Tensor | None
    ) -> Tensor:
        """Clip records, rescale the mean, and add noise."""
        total = task.clipped_sum(y, batch, numbers.clip[:, 0]).total
        mean = rescaled(total.div_(numbers.divisor), numbers.clip)
        return noised(mean, numbers.spread, normals)


@dataclass(frozen=True)
class MedianClip:
    """The paper's heuristic: C is the median norm of the batch, so nothing is guaranteed."""

    release: NoisedStep

    def __call__(
        self, task: Task, y: Tensor, batch: Batch, numbers: Numbers, normals: Tensor | None
    ) -> Tensor:
        """Clip to the batch's median, and add noise for it."""
        clipped = task.clipped_sum(y, batch, "median")
        bound = cast("Tensor", clipped.bound)[:, None]
        mean, unit = clipped.total.div_(numbers.divisor), self.release.unit
        if unit == "user":
            mean = rescaled(mean, bound)
        return noised(mean, noise_scale(1.0, unit, bound, numbers.divisor) * numbers.noise, normals)

    def known(self, numbers: Numbers) -> Known:
        """The noise depends on the batch."""
        return _known(numbers, None)


@dataclass(frozen=True)
class SecureMean(NoisedMean):
    """The same for a secure sum: added up in float64, noised, and not rounded to any grid yet.

    In float32 the rounding of a sum of b gradients may move it by 2b²·2⁻²⁴·C more than C: 3 % at
    b = 500. With float32 products of 64 records at a time it is at most 5·10⁻⁴, so gradients are
    clipped to a little less than C. Where a record ``shifts`` the places of others (add-remove), it
    could change all of these products, so all are float64.
    """

    shifts: bool = False

    def __call__(
        self, task: Task, y: Tensor, batch: Batch, numbers: Numbers, normals: Tensor | None
    ) -> Tensor:
        """The mean in float64 with noise in float64."""
        assert normals is not None
        clip = numbers.clip[:, 0] * CLIPPED_SHARE
        if sums_exactly(task):
            exact: Exact = "double" if self.shifts else "blocks"
            clipped = task.clipped_sum(y, replace(batch, exact=exact), clip)
        else:
            clipped = task.clipped_sum(y.double(), _in_double(batch), clip.double())
        if clipped.total.dtype != torch.float64:
            raise BadInput(
                "wrong-type",
                f"the task {task.name!r} sums gradients in {clipped.total.dtype}, and secure sums "
                f"need float64; let clipped_sum keep the type of its arguments",
            )
        mean = clipped.total / numbers.divisor.double()
        if self.release.unit == "user":
            mean = rescaled(mean, numbers.clip)
        return mean.addcmul_(numbers.spread.double(), normals.double())


#: What a step asks of a batch: each holds what one answer releases (None: nothing is protected).
Query = Plain | NoisedMean | MedianClip


def query_of(run: Run) -> Query:
    """The query of a run's steps."""
    if run.secure is not None and run.privacy is not None:
        return SecureMean(run.privacy.step, run.roster.declared)
    return query_of_step(run.privacy and run.privacy.step)


def query_of_step(release: NoisedStep | None) -> Query:
    """The query of what parties agreed to do in a step."""
    if release is None:
        return Plain()
    if release.clip == "median":
        return MedianClip(release)
    if release.unit == "user" and release.sampling == "poisson":
        return UserMean(release)
    return NoisedMean(release)


def rescaled(means: Tensor, clip: Tensor) -> Tensor:
    """Means (U, P) of norm at most C (U, 1). In float64: the squares of float32 numbers would
    overflow or vanish."""
    norms = torch.linalg.vector_norm(means, dim=1, keepdim=True, dtype=torch.float64)
    means *= torch.where(norms > clip, clip.double() / norms, 1.0)
    return means


def noised(mean: Tensor, spread: Tensor, normals: Tensor | None) -> Tensor:
    """mean + spread·normals, (U, P), in place. Secret noise is in double precision: it is added
    there, and the sum is rounded to a public grid before it is used, so that no value gives away
    its origin by being one that only some sums can reach."""
    if normals is None:
        return mean
    if normals.dtype == torch.float64:
        return on_grid(mean.double().addcmul_(spread.double(), normals), spread).to(mean.dtype)
    return mean.addcmul_(spread, normals)


def _known(numbers: Numbers, spread: float | Tensor | None) -> Known:
    return Known(numbers.steps, numbers.step_size, spread, numbers.weight)


def _in_double(batch: Batch) -> Batch:
    """The batch with all numbers but class labels in float64."""

    def double(values: Tensor | None) -> Tensor | None:
        return values if values is None or not values.is_floating_point() else values.double()

    return replace(
        batch,
        features=batch.features.double(),
        labels=cast("Tensor", double(batch.labels)),
        weight=double(batch.weight),
        squares=double(batch.squares),
    )
