"""The sums that preparation is fitted on, as a task whose parameters are the sums themselves.

A row is divided by its public bound B, and longer rows are scaled down to it, so that x has norm at
most 1. It contributes f(x), which moves the sum over all records by at most 2 (replace-one) or 1
(zero-out, add-remove): see :mod:`dpscaffold.privacy.sums`. Times C this takes the place of a
clipped gradient, as in :mod:`dpscaffold.tasks.ridge`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms.base import MomentKind
from dpscaffold.privacy.mechanism import Relation
from dpscaffold.privacy.sums import ROUNDING_ROOM, gram_scale, moment_scales
from dpscaffold.tasks.base import Batch, Clip, ClippedSum, stacked_scores
from dpscaffold.tasks.exact import UNITS, exact_products, exact_sum, unit_rows


@dataclass(frozen=True)
class MomentSums:
    """The means over all records of x (``mean``), of x and x² (``moments``), or of the upper
    triangle of x xᵀ (``gram``; off its diagonal times √2, so that equal noise on each entry is the
    noise (Z + Zᵀ)/2 on the matrix), each times its scale.

    >>> MomentSums(features=3, kind="gram", norm_bound=1.0).parameters
    6
    """

    features: int
    kind: MomentKind
    norm_bound: float
    relation: Relation = "replace-one"
    bound: float = 1.0
    outputs: int = 1
    parameters: int = field(init=False, repr=False, compare=False)
    #: Numbers held per record, in float64.
    width: int = field(init=False, repr=False, compare=False)

    name = "moment-sums"
    convex = False  # in its own parameters there is nothing to minimise
    apart = True
    scores_of = stacked_scores

    def __post_init__(self) -> None:
        d = self.features
        sizes = {"mean": d, "moments": 2 * d, "gram": d * (d + 1) // 2}
        object.__setattr__(self, "parameters", sizes[self.kind])
        object.__setattr__(self, "width", 4 * d)

    def prepare(self, features: Tensor) -> Tensor:
        """Features as they are."""
        return features

    def initial(self, seed: int) -> Tensor:
        """No sums yet."""
        return torch.zeros(self.parameters)

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """Nothing is predicted: zeros (N, outputs)."""
        return features.new_zeros(len(features), self.outputs)

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """Nothing is predicted: zeros (N,)."""
        return features.new_zeros(len(features))

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """−C·Σ_j w_j·f_j, (U, P) in float64. A record that is not finite adds exactly zero."""
        rows = unit_rows(batch.features, self.norm_bound)
        if batch.weight is not None:
            rows.masked_fill_((batch.weight == 0)[..., None], 0.0)
        if self.kind == "gram":
            total = self._packed(exact_products(rows, rows) / UNITS**2)
        else:
            scales = moment_scales(self.relation)
            parts = [exact_sum(rows) / UNITS]
            if self.kind == "moments":
                squares = exact_sum(rows.square_()) / UNITS**2
                parts = [scales.mean * parts[0], scales.squares * squares]
            total = torch.cat(parts, dim=1)
        return ClippedSum(-self._unit * total, clip if isinstance(clip, Tensor) else None)

    @property
    def _unit(self) -> float:
        """What a record's sums are multiplied by: C, with room for rounding."""
        return self.bound * ROUNDING_ROOM

    def _packed(self, grams: Tensor) -> Tensor:
        row, column = torch.triu_indices(self.features, self.features, device=grams.device)
        factor = torch.where(row == column, 1.0, math.sqrt(2)).to(grams)
        return gram_scale(self.relation) * factor * grams[..., row, column]

    def mean(self, params: Tensor) -> np.ndarray:
        """The mean row, (d,) float64."""
        scale = moment_scales(self.relation).mean if self.kind == "moments" else 1.0
        return self._numbers(params)[: self.features] * (self.norm_bound / scale)

    def squares(self, params: Tensor) -> np.ndarray:
        """The mean of the squares, (d,) float64."""
        return self._numbers(params)[self.features :] * self._square_unit

    def matrix(self, params: Tensor) -> np.ndarray:
        """The mean of x xᵀ, (d, d) float64."""
        d = self.features
        row, column = np.triu_indices(d)
        factor = np.where(row == column, 1.0, math.sqrt(0.5)) * self._square_unit
        found = np.zeros((d, d))
        found[row, column] = found[column, row] = self._numbers(params) * factor
        return found

    @property
    def _square_unit(self) -> float:
        scale = gram_scale(self.relation)
        if self.kind == "moments":
            scale = moment_scales(self.relation).squares
        return self.norm_bound**2 / scale

    def square_noise(self, deviation: float) -> float:
        """The standard deviation of the noise on the mean of a square, where that on each of the
        parameters is ``deviation``."""
        return deviation / self._unit * self._square_unit

    def _numbers(self, params: Tensor) -> np.ndarray:
        return np.asarray(params.detach().double().cpu().numpy() / self._unit)
