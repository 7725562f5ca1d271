"""What is learnt: a per-example loss on a flat parameter vector, and its clipped gradient sums."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

#: A clip bound: one number per user (U,), the batch's median norm, or None for no clipping at all.
Clip = Tensor | Literal["median"] | None

#: A norm below this counts as this: what underflow may take from the norm of an ordinary row is far
#: less, so that no norm is taken for shorter than it is; and 0/0 cannot happen.
SHORTEST = 1e-12

#: A clip bound below the first counts as 0 (float32 could not hold C/‖g‖ to full precision); no
#: gradient is left longer than the second, so that a sum of 10⁸ of them is finite.
BOUNDS = (1e-20, 1e30)


#: How a sum in float64 is made: of float64 products, or of float32 products of blocks of records.
Exact = Literal["double", "blocks"]


@dataclass(frozen=True)
class Batch:
    """Records of U users stacked: ``features`` (U, B, D) as :meth:`Task.prepare` made them,
    ``labels`` (U, B), which are classes in int64 or numbers in float32, ``weight`` (U, B) with 0
    for padding (None: all 1), and ``squares`` (U, B), the squared norms of the feature rows where
    they are known already (infinite where they overflow float32: such rows are measured again).
    ``tame`` says that none of these is extreme, so that a GPU need not guard against it. ``exact``
    asks for sums over the records in float64 (:func:`sums_exactly`), of float64 products or of
    float32 products of a few records at a time."""

    features: Tensor
    labels: Tensor
    weight: Tensor | None = None
    squares: Tensor | None = None
    tame: bool = False
    exact: Exact | None = None


@dataclass(frozen=True)
class ClippedSum:
    """Σ_j w_j·clip(∇f_j) per user, (U, P), and the clip bound that was used, (U,), or None."""

    total: Tensor
    bound: Tensor | None


@runtime_checkable
class Task(Protocol):
    """A model on a flat vector of ``parameters`` numbers that gives each record ``outputs`` scores.

    ``clipped_sum`` is where speed lives; ``losses`` is the plain definition, from which the loop
    engine derives its gradients and against which the fast path is tested. A task of your own needs
    these attributes and methods and nothing else; see :class:`~dpscaffold.tasks.module.ModuleTask`
    for wrapping any ``torch.nn.Module``.
    """

    @property
    def name(self) -> str:
        """What runs and reports call it."""
        ...

    @property
    def parameters(self) -> int:
        """P."""
        ...

    @property
    def outputs(self) -> int:
        """Scores per record; 0 where that is not known before the first record."""
        ...

    @property
    def convex(self) -> bool:
        """Whether every loss is convex in the parameters."""
        ...

    @property
    def width(self) -> int:
        """Numbers that clipped_sum holds per record, besides its features; it sizes the chunks."""
        ...

    def prepare(self, features: Tensor) -> Tensor:
        """Raw features (…, d) as the other methods expect them, e.g. with a column of ones."""
        ...

    def initial(self, seed: int) -> Tensor:
        """x⁰, (P,)."""
        ...

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """Scores (N, outputs) of prepared features (N, D)."""
        ...

    def scores_of(self, models: Tensor, features: Tensor) -> Tensor:
        """Scores (S, N, outputs) of many models (S, P); ``scores_of = stacked_scores`` will do."""
        ...

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Per-example losses f(params; ·), (N,), without the ℓ2 term."""
        ...

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """Σ_j w_j·∇f_j / max(1, ‖∇f_j‖/C) for each user's own parameters, (U, P) → (U, P).

        The norm is over the whole parameter vector, never per tensor. With a clip this holds for
        every float, of the parameters as of the records: no record adds more than C(1 + 1e-6), one
        whose gradient is not finite adds exactly zero, and the sum is finite.
        """
        ...


def apart(task: Task) -> bool:
    """Whether a task says that what comes of a user is the same, bit for bit, whichever users are
    next to it, and may be computed in several threads at once (an attribute ``apart``).

    Those that say nothing are computed by one thread at a time.
    """
    return bool(getattr(task, "apart", False))


def sums_exactly(task: Task) -> bool:
    """Whether a task says that it clips float32 gradients and adds them up in float64 where a batch
    asks for it (an attribute ``exact``). Others are given all numbers in float64."""
    return bool(getattr(task, "exact", False))


def stacked_scores(task: Task, models: Tensor, features: Tensor) -> Tensor:
    """Scores (S, N, outputs) of models (S, P), one after the other: :meth:`Task.scores_of` for a
    task that has no faster way."""
    return torch.stack([task.scores(model, features) for model in models])


def clip_factors(
    norms: Tensor, weight: Tensor | None, clip: Clip
) -> tuple[Tensor | None, Tensor | None]:
    """The factor of each example's gradient, w_j·min(1, C/‖g_j‖), and the bound C, from norms
    (U, B).

    The factor is None where it would be all ones. The median is over the real records of the batch
    whose norm is a number (the lower one of two); an empty batch has bound 0. A norm that is NaN
    makes its factor NaN: the caller selects such records away.
    """
    if clip is None:
        return weight, None
    if isinstance(clip, str):
        seen = norms if weight is None else norms.masked_fill(weight == 0, float("nan"))
        bound = seen.nanmedian(dim=1).values.nan_to_num(0.0).clamp_max_(BOUNDS[1])
    else:
        bound = clip
    used = torch.threshold(bound, BOUNDS[0], 0.0)
    factor = (used[:, None] / norms.clamp_min(SHORTEST)).clamp_max_(1.0)
    if weight is not None:
        factor *= weight
    return factor, bound
