"""The sums that ridge regression is made of, as a task whose parameters are the sums themselves.

A record with features a (norm at most C, longer ones are scaled down) and target y (norm at most 1)
is x = (a/C, 1)/√2, of norm at most 1, and contributes f = (√a·x xᵀ, √b·x yᵀ), which moves the sum
over all records by at most 2 (replace-one) or 1 (zero-out, add-remove): see
:mod:`dpscaffold.privacy.sums`. Times C this takes the place of a clipped gradient, so that noise,
accounting, journals and transports are those of every other run.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dpscaffold.errors import BadInput
from dpscaffold.privacy.mechanism import Relation
from dpscaffold.privacy.sums import ROUNDING_ROOM, JointScales, joint_scales
from dpscaffold.tasks.base import Batch, Clip, ClippedSum, Task, stacked_scores
from dpscaffold.tasks.exact import UNITS, exact_products, unit_numbers, unit_rows
from dpscaffold.tasks.linear import Linear
from dpscaffold.tasks.logistic import Logistic
from dpscaffold.tasks.losses import LOSSES, SOFTMAX

#: Eigenvalues below this share of the largest one count as 0 where nothing is added to them.
SMALLEST = 1e-12


@dataclass(frozen=True)
class RidgeSums:
    """The parameters are G's upper triangle row by row, off its diagonal times √2 (so that equal
    noise on each is the noise (Z + Zᵀ)/2 on G), then B row by row: means over the records.

    ``classes`` is 0 where a number is predicted, which has the range [−1, 1]. ``bound`` is C and
    ``penalty`` λ for the means, both public. Scores are those of the ridge regression that the sums
    give. With k classes a score is k times the least squares estimate, so that softmax agrees with
    the estimates to first order around equal chances.

    >>> RidgeSums(features=2, classes=3).parameters
    15
    """

    features: int
    classes: int
    share: float = 0.3
    relation: Relation = "replace-one"
    bound: float = 1.0
    penalty: float = 0.0
    #: p(p + 1)/2 + p·outputs with p = features + 1.
    parameters: int = field(init=False, repr=False, compare=False)
    #: Numbers held per record, in float64.
    width: int = field(init=False, repr=False, compare=False)
    scales: JointScales = field(init=False, repr=False, compare=False)

    name = "ridge-sums"
    convex = False  # in its own parameters there is nothing to minimise
    apart = True
    scores_of = stacked_scores
    _solved: dict[bytes, Tensor] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        p = self.inputs
        for name, value in (
            ("parameters", p * (p + 1) // 2 + p * self.outputs),
            ("width", 4 * (p + self.outputs)),
            ("scales", joint_scales(self.share, self.relation)),
        ):
            object.__setattr__(self, name, value)

    @property
    def inputs(self) -> int:
        """p: the features and the constant."""
        return self.features + 1

    @property
    def outputs(self) -> int:
        """One score a class, or one."""
        return self.classes or 1

    def prepare(self, features: Tensor) -> Tensor:
        """Features as they are."""
        return features

    def initial(self, seed: int) -> Tensor:
        """No sums yet."""
        return torch.zeros(self.parameters)

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """Scores (N, outputs) of the ridge regression."""
        task, weights = self.trained(params)
        return task.scores(weights.to(features), task.prepare(features))

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The losses of the ridge regression, (N,)."""
        task, weights = self.trained(params)
        return task.losses(weights.to(features), task.prepare(features), labels)

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """−C·Σ_j w_j·f_j, (U, P) in float64: the gradient of what a step of size 1 adds up.

        A record that is not finite adds exactly zero. Rows are scaled down to C wherever there is
        privacy; C is then ``bound``.
        """
        if clip is None:
            x, y = self.vectors(batch.features, batch.labels, clipped=False)
            weighted = x if batch.weight is None else x * batch.weight.double()[..., None]
            gram, products = weighted.transpose(1, 2) @ x, weighted.transpose(1, 2) @ y
        else:
            gram, products = self._exactly(batch)
        total = torch.cat([self._packed(gram), self.scales.products * products.flatten(1)], dim=1)
        return ClippedSum(-self._unit * total, clip if isinstance(clip, Tensor) else None)

    def _exactly(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Σ x xᵀ (U, p, p) and Σ x yᵀ (U, p, outputs) over the records whose weight is not 0:
        exact, and rounded once to float64."""
        rows, numbers = self._whole(batch.features, batch.labels)
        if batch.weight is not None:
            rows.masked_fill_((batch.weight == 0)[..., None], 0.0)
        total = exact_products(rows, torch.cat([rows, numbers], dim=-1))
        gram, products = total.split([self.inputs, self.outputs], dim=2)
        of_y = 1.0 if self.classes else UNITS
        return gram / (2 * UNITS**2), products / (math.sqrt(2) * UNITS * of_y)

    def _whole(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """√2·x (…, p) in units of 2⁻²⁰, and y (…, outputs): 0 and 1 for classes, else in units."""
        rows = unit_rows(features, self.bound, columns=1)
        if self.classes:
            return rows, torch.nn.functional.one_hot(labels, self.classes).to(rows)
        known = labels.isfinite()[..., None]
        return rows.masked_fill_(~known, 0.0), unit_numbers(labels.nan_to_num())[..., None]

    @property
    def _unit(self) -> float:
        """What a record's sums are multiplied by: C, with room for rounding."""
        return self.bound * ROUNDING_ROOM

    def contributions(self, features: Tensor, labels: Tensor, clipped: bool) -> Tensor:
        """What each record (N, d) adds to :meth:`clipped_sum`, (N, P): the plain definition."""
        x, y = self.vectors(features, labels, clipped)
        grams, products = x[:, :, None] * x[:, None, :], x[:, :, None] * y[:, None, :]
        parts = [self._packed(grams), self.scales.products * products.flatten(1)]
        return -self._unit * torch.cat(parts, dim=1)

    def vectors(self, features: Tensor, labels: Tensor, clipped: bool) -> tuple[Tensor, Tensor]:
        """x (…, p) and y (…, outputs) in float64, of norm at most 1; zeros for a record that is not
        finite. Clipped ones are rounded to multiples of 2⁻²⁰, as sums of them are exact then."""
        if clipped:
            whole, y = self._whole(features, labels)
            return whole / (UNITS * math.sqrt(2)), y if self.classes else y / UNITS
        rows = features.double() / self.bound
        finite = rows.isfinite().all(-1, keepdim=True)
        if self.classes:
            y = torch.nn.functional.one_hot(labels, self.classes).to(rows)
        else:
            finite &= labels.isfinite()[..., None]
            y = labels.double()[..., None].clamp(-1.0, 1.0)
        x = torch.cat([rows, torch.ones_like(finite, dtype=rows.dtype)], dim=-1) / math.sqrt(2)
        return x.where(finite, 0.0), y.where(finite, 0.0)

    def _packed(self, grams: Tensor) -> Tensor:
        """√a times the upper triangles of symmetric matrices (…, p, p), (…, p(p + 1)/2)."""
        row, column = torch.triu_indices(self.inputs, self.inputs, device=grams.device)
        factor = torch.where(row == column, 1.0, math.sqrt(2)).to(grams)
        return self.scales.gram * factor * grams[..., row, column]

    def matrices(self, params: Tensor) -> tuple[Tensor, Tensor]:
        """G (p, p) and B (p, outputs) of the parameters, in float64."""
        p = self.inputs
        row, column = torch.triu_indices(p, p)
        packed, products = params.double().cpu().split([len(row), p * self.outputs])
        factor = torch.where(row == column, 1.0, 1 / math.sqrt(2)).double()
        gram = torch.zeros(p, p, dtype=torch.float64)
        gram[row, column] = gram[column, row] = packed * factor / (self._unit * self.scales.gram)
        products = products.view(p, self.outputs) / (self._unit * self.scales.products)
        return gram, products

    def trained(self, params: Tensor) -> tuple[Linear, Tensor]:
        """The linear model that the sums give, and its parameters: W = (G₊ + λI)⁻¹B."""
        key = hashlib.blake2b(params.detach().cpu().numpy().tobytes()).digest()
        if key not in self._solved:
            self._solved.clear()  # the last one is asked for again, block by block
            self._solved[key] = self._weights(params)
        if self.classes:
            return Logistic(self.features, self.classes), self._solved[key]
        return Linear(self.features, 1, LOSSES["squared"]), self._solved[key]

    def _weights(self, params: Tensor) -> Tensor:
        gram, products = self.matrices(params)
        values, vectors = torch.linalg.eigh(gram)
        raised = values.clamp_min(0.0) + self.penalty
        kept = raised > SMALLEST * raised.max()
        inverse = torch.where(kept, 1 / raised.where(kept, 1.0), 0.0)
        solved = vectors @ (inverse[:, None] * (vectors.T @ products))
        # Back to a row of features and the constant: x = (a/C, 1)/√2.
        scaled = solved / math.sqrt(2) * max(1, self.classes)
        scaled[:-1] /= self.bound
        weights: Tensor = scaled.T.flatten().float()
        return weights


def ridge_task(
    task: Task, share: float, relation: Relation, bound: float, penalty: float = 0.0
) -> RidgeSums:
    """The sums of a linear task: softmax regression for classes, squared loss for a number."""
    if isinstance(task, RidgeSums):
        classes = task.classes
    elif isinstance(task, Linear) and task.loss in (SOFTMAX, LOSSES["squared"]):
        classes = 0 if task.loss.kind == "number" else task.outputs
    else:
        raise BadInput(
            "not-a-sum",
            f"the task is {task.name!r}, and ridge regression is linear; give task.kind = "
            f"'logistic' for classes, or 'linear' with the squared loss for a number",
        )
    return RidgeSums(task.features, classes, share, relation, bound, penalty)
