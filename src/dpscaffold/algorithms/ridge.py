"""Ridge regression in one round: noised sums of x xᵀ and x yᵀ, and one linear system."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpscaffold.algorithms.base import (
    Algorithm,
    Local,
    Participant,
    Slots,
    Upload,
    proved_linear,
)
from dpscaffold.algorithms.fedavg import add_mean_move, along_gradient
from dpscaffold.checks import number
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class RidgeRule:
    """How ridge regression divides its budget and chooses its penalty."""

    share: float
    strength: float

    def task(self, task: Any, schema: Any, relation: Any, bound: float, noise: float) -> Any:
        """The sums of a linear task, with the penalty that the noise asks for."""
        from dpscaffold.tasks.ridge import ridge_task  # imports torch

        made = ridge_task(task, self.share, relation, bound)
        penalty = self.strength * math.sqrt(2 * made.inputs) * noise / made.scales.gram
        return replace(made, penalty=penalty)


@proved_linear
def send_sums(local: Local, at: Participant) -> tuple[Upload, Slots]:
    """The noised mean of the sums, in the precision of x. Sums are in float64 until the noise is
    added: float32 would round them differently for neighbouring datasets."""
    x: Tensor = at.broadcast.params
    return Upload((local.params - x).to(x.dtype)), {}


def ridge(share: float = 0.3, strength: float = 0.3) -> Algorithm:
    """Linear least squares in one round, for classes or a number, from noised sums over all
    records: G = Σ x xᵀ and B = Σ x yᵀ.

    The model is W = (G₊ + λI)⁻¹B, where G₊ is G with its negative eigenvalues set to 0 and λ is
    ``strength`` times the norm that the noise on G is expected to have. It does not depend on how
    the records are distributed over the users. It minimises the squared loss: where the logistic
    loss gives a much better model without privacy, train in rounds instead.

    Args:
        share: The share of the privacy budget μ² that G gets by itself; B gets the rest. Value: a
            number above 0 and below 1. Example: ``0.3``
        strength: λ in units of the expected norm of the noise on G. Value: a number, 0 or more.
            Example: ``0.3``

    >>> ridge().numbers
    {'share': 0.3, 'strength': 0.3}
    """
    if not 0 < number("algorithm.share", share) < 1:
        raise BadInput(
            "out-of-range", f"algorithm.share is {share}; give a number above 0 and below 1"
        )
    if number("algorithm.strength", strength) < 0:
        raise BadInput(
            "out-of-range", f"algorithm.strength is {strength}; give a number, 0 or more"
        )
    numbers = {"share": share, "strength": strength}
    return Algorithm(
        "ridge",
        along_gradient,
        send_sums,
        add_mean_move,
        title="Ridge",
        numbers=numbers,
        sums=RidgeRule(share, strength),
    )
