"""A one-hidden-layer ReLU network, clipped from activations and output errors alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks.base import Batch, Clip, ClippedSum, stacked_scores
from dpscaffold.tasks.clipping import LayerOuter, clip_outer
from dpscaffold.tasks.linear import with_ones
from dpscaffold.tasks.losses import SOFTMAX, Loss


@dataclass(frozen=True)
class Mlp:
    """features → hidden ReLU units → classes, with biases (the paper's network has 60 → 200 → 10).

    The flat vector is the first layer (hidden × (features+1)) and then the second (classes ×
    (hidden+1)), each row followed by its bias. x⁰ is drawn from the seed, uniform in ±1/√(inputs)
    per layer, and is the same for every algorithm.

    For one example with input a, hidden activation h and backward errors δ₁, δ₂ the squared norm of
    the whole gradient is ‖δ₁‖²(‖a‖²+1) + ‖δ₂‖²(‖h‖²+1) (Goodfellow 2015): no per-example gradient
    is formed.

    Args:
        features: The number of features.
        classes: The number of scores: one per class, or 1 under a loss with one score per record.
        hidden: The number of hidden units.
        loss: The loss, such as ``LOSSES["softmax"]``.

    >>> Mlp(features=60, classes=10).parameters
    14210
    """

    features: int
    classes: int
    hidden: int = 200
    loss: Loss = SOFTMAX
    #: What comes of a user is the same next to any others, and in any thread.
    apart: ClassVar[bool] = True
    #: Sums are in float64 where a batch asks for it.
    exact: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.loss.check_outputs(self.classes)

    @property
    def name(self) -> str:
        """``mlp``, and the loss where it is not softmax."""
        return "mlp" if self.loss == SOFTMAX else f"mlp-{self.loss.name}"

    @property
    def convex(self) -> bool:
        """Never, whatever the loss."""
        return False

    @property
    def outputs(self) -> int:
        """Scores per record."""
        return self.classes

    @property
    def _first(self) -> int:
        """Numbers in the first layer."""
        return self.hidden * (self.features + 1)

    @property
    def parameters(self) -> int:
        """Both layers with their biases."""
        return self._first + self.classes * (self.hidden + 1)

    @property
    def width(self) -> int:
        """Numbers held per record: activations, errors and their squares."""
        return 4 * self.hidden + 4 * self.classes

    def prepare(self, features: Tensor) -> Tensor:
        """Add the column of ones."""
        return with_ones(features)

    def initial(self, seed: int) -> Tensor:
        """Uniform in ±1/√(inputs), layer by layer."""
        stream = Randomness(seed).weights()
        first = stream.uniform(-1, 1, self._first) / math.sqrt(self.features)
        second = stream.uniform(-1, 1, self.parameters - self._first) / math.sqrt(self.hidden)
        return torch.cat([torch.from_numpy(first), torch.from_numpy(second)]).float()

    def _layers(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """Views of (…, P) as (…, hidden, features+1) and (…, classes, hidden+1)."""
        lead = params.shape[:-1]
        first = params[..., : self._first].unflatten(-1, (self.hidden, self.features + 1))
        second = params[..., self._first :].reshape(*lead, self.classes, self.hidden + 1)
        return first, second

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """Scores (N, classes)."""
        first, second = self._layers(params)
        hidden = torch.relu(features @ first.T)
        return hidden @ second[:, :-1].T + second[:, -1]

    def scores_of(self, models: Tensor, features: Tensor) -> Tensor:
        """Scores (S, N, classes), one model after the other: each is two large products."""
        return stacked_scores(self, models, features)

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row, (N,)."""
        return self.loss.values(self.scores(params, features), labels)

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """Forward, backward and reweighting with everything laid out as (users, units, records)."""
        first, second = self._layers(params)
        inputs = batch.features.transpose(1, 2)
        hidden = torch.bmm(first, inputs).relu_()
        logits = torch.baddbmm(second[..., -1:], second[..., :-1], hidden)
        errors = self.loss.errors(logits, batch.labels)
        back = torch.bmm(second[..., :-1].transpose(1, 2), errors)
        back *= hidden > 0
        layers = [
            LayerOuter(back, inputs, batch.squares, tame=batch.tame, exact=batch.exact),
            LayerOuter(errors, hidden, bias=True, exact=batch.exact),
        ]
        bound = clip_outer(layers, batch.weight, clip)
        return ClippedSum(torch.cat([layer.total().flatten(1) for layer in layers], dim=1), bound)
