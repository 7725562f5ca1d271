"""Multinomial logistic regression, clipped without ever materialising a per-example gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from dpscaffold.tasks.base import Batch, Clip, ClippedSum, cross_entropy
from dpscaffold.tasks.clipping import Outer, clip_outer


def with_ones(features: Tensor) -> Tensor:
    """Features (…, d) with a column of ones, (…, d+1), so that the bias is one more weight."""
    return torch.cat([features, features.new_ones(*features.shape[:-1], 1)], dim=-1)


def output_errors(logits: Tensor, labels: Tensor) -> Tensor:
    """δ = softmax(z) − onehot(label), in place on logits (U, classes, B) with labels (U, B)."""
    errors = logits.sub_(logits.amax(1, keepdim=True)).exp_()
    errors /= errors.sum(1, keepdim=True)
    errors.scatter_add_(
        1, labels[:, None, :], errors.new_full((), -1.0).expand(labels.shape)[:, None, :]
    )
    return errors


class Logistic:
    """Softmax regression with a bias: f(x; (a, y)) = −log softmax(Wa + w₀)_y.

    The flat vector is W (classes × features) row by row, each row followed by its bias. x⁰ = 0.

    The gradient of one example is δaᵀ, of norm ‖δ‖·‖a‖, so clipping only reweights the columns of
    one matrix product. Logits are laid out as (users, classes, records): the softmax then runs over
    the middle axis, along which the machine vectorises. On unit-norm rows ‖a‖ = √2 with the bias
    and ‖δ‖ ≤ √2: no per-example gradient is longer than 2.

    >>> task = Logistic(features=2, classes=3)
    >>> task.parameters
    9
    """

    convex = True
    name = "logistic"

    def __init__(self, features: int, classes: int) -> None:
        self.features = features
        self.classes = classes
        self.parameters = classes * (features + 1)
        self.width = 4 * classes

    def prepare(self, features: Tensor) -> Tensor:
        """Add the column of ones."""
        return with_ones(features)

    def initial(self, seed: int) -> Tensor:
        """Zero: the same start for every seed."""
        return torch.zeros(self.parameters)

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """Logits (N, classes)."""
        return features @ params.view(self.classes, -1).T

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each row, (N,)."""
        return cross_entropy(self.scores(params, features), labels)

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """Two batched products and a reweighting; see the class."""
        users, inputs = params.shape[0], batch.features.transpose(1, 2)
        weights = params.view(users, self.classes, self.features + 1)
        errors = output_errors(torch.bmm(weights, inputs), batch.labels)
        gradients = Outer(errors, inputs, batch.squares)
        bound = clip_outer([gradients], batch.weight, clip)
        return ClippedSum(gradients.total().view(users, -1), bound)
