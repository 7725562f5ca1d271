"""One round at the users: K noised queries and the steps they drive, for a stack of users at
once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Known, Local, Participant, Slots, Upload
from dpscaffold.errors import BadInput
from dpscaffold.privacy.adversary import CLIPPED_SHARE
from dpscaffold.privacy.mechanism import Sampling, Unit
from dpscaffold.randomness.csprng import on_grid
from dpscaffold.tasks import Batch, Clip, Task
from dpscaffold.tasks.base import Exact, sums_exactly


@dataclass(frozen=True)
class Scales:
    """The numbers of U stacked users, each (U, 1): η_l, λ, the divisor b_i, the weight in means and
    σ_g; and the clip bound.

    They may differ from row to row (unequal users, several runs in one stack); how batches are
    sampled and which unit is protected may not.
    """

    step_size: Tensor
    regularisation: Tensor
    divisor: Tensor
    steps: int
    weight: Tensor
    clip: Clip = None
    noise: Tensor | None = None
    sampling: Sampling = "fixed"
    unit: Unit = "record"
    #: K_i of every row, (U, 1), where not all take K steps.
    own_steps: Tensor | None = None
    #: Whether a record that is there or not changes the places of others in a batch (add-remove).
    shifting: bool = False

    @property
    def known(self) -> Known:
        """The public numbers that an algorithm may use; a median clip has no spread."""
        spread: Tensor | float | None = 0.0
        if self.noise is not None:
            spread = self._fixed_spread if isinstance(self.clip, Tensor) else None
        return Known(self.taken, self.step_size, spread, self.weight)

    @property
    def taken(self) -> int | Tensor:
        """K, or K_i (U, 1) where they differ."""
        return self.steps if self.own_steps is None else self.own_steps

    def spread(self, bound: Tensor) -> Tensor:
        """The standard deviation of the noise on the mean, (U, 1), for the clip bound (U,) of a
        step."""
        if isinstance(self.clip, Tensor):
            return self._fixed_spread
        return self._spread(bound)

    @cached_property
    def _fixed_spread(self) -> Tensor:
        assert isinstance(self.clip, Tensor)
        return self._spread(self.clip)

    def _spread(self, bound: Tensor) -> Tensor:
        assert self.noise is not None
        # A row without noise may have an infinite clip, and ∞·0 must not poison it.
        wide = torch.where(self.noise > 0, 2 * bound[:, None] * self.noise, 0.0)
        return wide / self.divisor if self.unit == "record" else wide


def noised_query(
    task: Task, params: Tensor, batch: Batch, scales: Scales, normals: Tensor | None
) -> Tensor:
    """H̃ = (1/b)Σ clip(g_j) + (2C/b)σ_g·N(0, I), for each user's own parameters, (U, P) → (U, P).

    This is the only place where records touch anything that leaves a user. An empty (Poisson) batch
    is a zero sum, and its noise is added all the same. Towards whole users the noise is 2Cσ_g and,
    as a Poisson sum is not bounded by bC, the mean is first rescaled to norm at most C.
    """
    clipped = task.clipped_sum(params, batch, scales.clip)
    query = clipped.total / scales.divisor
    if clipped.bound is None:
        return query
    query = _bounded(query, clipped.bound, scales)
    if normals is None or scales.noise is None:
        return query
    return add_noise(query, scales.spread(clipped.bound), normals)


def noised_mean(
    task: Task, params: Tensor, batch: Batch, normals: Tensor | None, scales: Scales
) -> Tensor:
    """The same for a secure sum: added up in float64, and not rounded to any grid yet.

    In float32 the rounding of a sum of b gradients may move it by 2b²·2⁻²⁴·C more than C: 3 % at
    b = 500. With float32 products of 64 records at a time it is at most 5·10⁻⁴, so gradients are
    clipped to a little less than C. Where a record changes the places of others, it could change
    all of these products, so all are float64.
    """
    if not isinstance(scales.clip, Tensor) or scales.noise is None or normals is None:
        raise BadInput(
            "no-noise", "a secure sum needs a fixed clip and noise; give privacy.clip and noise"
        )
    clip = scales.clip * CLIPPED_SHARE
    if sums_exactly(task):
        exact: Exact = "double" if scales.shifting else "blocks"
        clipped = task.clipped_sum(params, replace(batch, exact=exact), clip)
    else:
        clipped = task.clipped_sum(params.double(), _in_double(batch), clip.double())
    if clipped.total.dtype != torch.float64:
        raise BadInput(
            "wrong-type",
            f"the task {task.name!r} sums gradients in {clipped.total.dtype}, and secure sums need "
            f"float64; let clipped_sum keep the type of its arguments",
        )
    mean = _bounded(clipped.total / scales.divisor.double(), scales.clip, scales)
    return mean.addcmul_(scales.spread(scales.clip).double(), normals.double())


def _bounded(query: Tensor, clip: Tensor, scales: Scales) -> Tensor:
    """Means (U, P), rescaled to norm at most C (U,) where a Poisson sum stands for a whole user."""
    if scales.unit == "user" and scales.sampling == "poisson":
        # In float64: the squares of float32 numbers would overflow or vanish.
        norms = torch.linalg.vector_norm(query, dim=1, keepdim=True, dtype=torch.float64)
        bound = clip[:, None].double()
        query *= torch.where(norms > bound, bound / norms, 1.0)
    return query


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


def add_noise(query: Tensor, spread: Tensor, normals: Tensor) -> Tensor:
    """query + spread·normals, (U, P). Secret noise is in double precision: it is added there, and
    the sum is rounded to a public grid before it is used, so that no value gives away its origin
    by being one that only some sums can reach."""
    if normals.dtype == torch.float64:
        return on_grid(query.double().addcmul_(spread.double(), normals), spread).to(query.dtype)
    return query.addcmul_(spread, normals)


def local_steps(
    task: Task,
    algorithm: Algorithm,
    at: Participant,
    batches: Iterable[tuple[Batch, Tensor | None]],
    scales: Scales,
) -> tuple[Upload, Slots]:
    """The inner loop of Algorithm 1 for U users at once; all vectors are (U, P).

    ``batches`` yields the K pairs (batch, standard normals or None).
    """
    y = algorithm.begin_at(at).clone()
    total = torch.zeros_like(y)
    for step, (batch, normals) in enumerate(batches):
        gradient = noised_query(task, y, batch, scales, normals)
        gradient.addcmul_(scales.regularisation, y)
        moved = y - scales.step_size * algorithm.direction(gradient, y, at)
        if scales.own_steps is None:
            total += gradient
            y = moved
        else:  # a user that has taken its K_i steps stands still
            active = step < scales.own_steps
            total += gradient.where(active, 0.0)
            y = moved.where(active, y)
    return algorithm.finish(Local(y, total / scales.taken), at)
