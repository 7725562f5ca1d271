"""One round of bounded sums over all records, in place of gradients: ridge regression, and what
preparation is fitted on."""

import math
from dataclasses import replace
from typing import Any

from dpscaffold.algorithms.base import Algorithm, MomentKind, Partial
from dpscaffold.algorithms.fedavg import fedavg
from dpscaffold.checks import above, at_least, fraction


def ridge_sums(
    share: float,
    strength: float,
    task: Any,
    schema: Any,
    relation: Any,
    bound: float,
    noise: float,
) -> Any:
    """The sums of a linear task, with the penalty that the noise asks for."""
    from dpscaffold.tasks.ridge import ridge_task  # imports torch

    made = ridge_task(task, share, relation, bound)
    penalty = strength * math.sqrt(2 * made.inputs) * noise / made.scales.gram
    return replace(made, penalty=penalty)


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
    fraction("algorithm.share", above("algorithm.share", share, 0))
    at_least("algorithm.strength", strength, 0)
    return fedavg().replace(
        name="ridge",
        title="Ridge",
        numbers={"share": share, "strength": strength},
        sums=Partial(ridge_sums, (share, strength)),
    )


def moment_sums(
    kind: MomentKind,
    norm_bound: float,
    task: Any,
    schema: Any,
    relation: Any,
    bound: float,
    noise: float,
) -> Any:
    """The sums themselves: no model is made of them."""
    from dpscaffold.tasks.moments import MomentSums  # imports torch

    outputs = max(1, len(schema.target.classes))
    return MomentSums(schema.dimension, kind, norm_bound, relation, bound, outputs)


def moments(kind: MomentKind, norm_bound: float) -> Algorithm:
    """One noised sum over all records: no model, so no configuration names it as its algorithm.

    Args:
        kind: ``"mean"``, ``"moments"`` (mean and squares) or ``"gram"``.
        norm_bound: B, the largest norm of a row, known without looking at the records.

    >>> moments("mean", 2.0).sums.first
    ('mean', 2.0)
    """
    rule = Partial(moment_sums, (kind, norm_bound))
    return fedavg().replace(name="moments", title="Preparation", sums=rule)
