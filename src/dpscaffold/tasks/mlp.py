"""A one-hidden-layer ReLU network, clipped from activations and output errors alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpscaffold.randomness import Randomness
from dpscaffold.tasks.base import Batch, Clip, ClippedSum, cross_entropy
from dpscaffold.tasks.clipping import Outer, clip_outer
from dpscaffold.tasks.logistic import output_errors, with_ones


class Mlp:
    """features → hidden ReLU units → classes, with biases (the paper's network has 60 → 200 → 10).

    The flat vector is the first layer (hidden × (features+1)) and then the second (classes ×
    (hidden+1)), each row followed by its bias. x⁰ is drawn from the seed, uniform in ±1/√(inputs)
    per layer, and is the same for every algorithm.

    For one example with input a, hidden activation h and backward errors δ₁, δ₂ the squared norm of
    the whole gradient is ‖δ₁‖²(‖a‖²+1) + ‖δ₂‖²(‖h‖²+1) (Goodfellow 2015): no per-example gradient
    is formed.
    """

    convex = False
    name = "mlp"

    def __init__(self, features: int, classes: int, hidden: int = 200) -> None:
        self.features, self.classes, self.hidden = features, classes, hidden
        self._first = hidden * (features + 1)
        self.parameters = self._first + classes * (hidden + 1)
        self.width = 4 * hidden + 4 * classes

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
        """Logits (N, classes)."""
        first, second = self._layers(params)
        hidden = torch.relu(features @ first.T)
        return hidden @ second[:, :-1].T + second[:, -1]

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each row, (N,)."""
        return cross_entropy(self.scores(params, features), labels)

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """Forward, backward and reweighting with everything laid out as (users, units, records)."""
        first, second = self._layers(params)
        inputs = batch.features.transpose(1, 2)
        hidden = torch.bmm(first, inputs).relu_()
        logits = torch.baddbmm(second[..., -1:], second[..., :-1], hidden)
        errors = output_errors(logits, batch.labels)
        back = torch.bmm(second[..., :-1].transpose(1, 2), errors)
        back *= hidden > 0
        layers = [
            Outer(back, inputs, batch.squares),
            Outer(errors, hidden, bias=True),
        ]
        bound = clip_outer(layers, batch.weight, clip)
        return ClippedSum(torch.cat([layer.total().flatten(1) for layer in layers], dim=1), bound)
