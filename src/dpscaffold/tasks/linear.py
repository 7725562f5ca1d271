"""Linear models, clipped without ever materialising a per-example gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dpscaffold.tasks.base import Batch, Clip, ClippedSum
from dpscaffold.tasks.clipping import LayerOuter, clip_outer
from dpscaffold.tasks.losses import SOFTMAX, Loss


def with_ones(features: Tensor) -> Tensor:
    """Features (…, d) with a column of ones, (…, d+1), so that the bias is one more weight."""
    return torch.cat([features, features.new_ones(*features.shape[:-1], 1)], dim=-1)


@dataclass(frozen=True)
class Linear:
    """Scores z = Wa + w₀ under any loss: f(x; (a, t)) = loss(Wa + w₀, t).

    ``outputs`` is the number of scores: one a class for softmax, 1 for the other losses. The flat
    vector is W (outputs × features) row by row, each row followed by its bias. x⁰ = 0.

    The gradient of one example is δaᵀ with δ = ∂loss/∂z, of norm ‖δ‖·‖a‖, so clipping only
    reweights the columns of one matrix product. Scores are laid out as (users, outputs, records):
    sums over outputs then run over the middle axis, along which the machine vectorises.

    >>> from dpscaffold.tasks.losses import LOSSES
    >>> task = Linear(features=2, outputs=1, loss=LOSSES["squared"])
    >>> task.parameters
    3
    """

    features: int
    outputs: int
    loss: Loss = SOFTMAX
    #: outputs·(features + 1).
    parameters: int = field(init=False, repr=False, compare=False)
    #: Numbers held per record: scores, errors and their squares.
    width: int = field(init=False, repr=False, compare=False)
    #: What comes of a user is the same next to any others, and in any thread.
    apart: ClassVar[bool] = True
    #: Sums are in float64 where a batch asks for it.
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.loss.check_outputs(self.outputs)
        object.__setattr__(self, "parameters", self.outputs * (self.features + 1))
        object.__setattr__(self, "width", 4 * self.outputs)

    @property
    def name(self) -> str:
        """``linear`` and the loss: results of different losses are never taken for one another."""
        return f"linear-{self.loss.name}"

    @property
    def convex(self) -> bool:
        """Whether the loss is."""
        return self.loss.convex

    def prepare(self, features: Tensor) -> Tensor:
        """Add the column of ones."""
        return with_ones(features)

    def initial(self, seed: int) -> Tensor:
        """Zero: the same start for every seed."""
        return torch.zeros(self.parameters)

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """Scores (N, outputs)."""
        return features @ params.view(self.outputs, -1).T

    def scores_of(self, models: Tensor, features: Tensor) -> Tensor:
        """Scores (S, N, outputs) of S models (S, P), in one product.

        They lie in memory as (S, outputs, N): a maximum over the outputs is faster so on a CPU.
        """
        scores = models.view(len(models) * self.outputs, -1) @ features.T
        return scores.view(len(models), self.outputs, -1).transpose(1, 2)

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row, (N,)."""
        return self.loss.values(self.scores(params, features), labels)

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """Two batched products and a reweighting; see the class."""
        users, inputs = params.shape[0], batch.features.transpose(1, 2)
        weights = params.view(users, self.outputs, self.features + 1)
        errors = self.loss.errors(torch.bmm(weights, inputs), batch.labels)
        gradients = LayerOuter(errors, inputs, batch.squares, tame=batch.tame, exact=batch.exact)
        bound = clip_outer([gradients], batch.weight, clip)
        return ClippedSum(gradients.total().view(users, -1), bound)
