"""Noised sums for preparation, in one round: a mean, second moments, a Gram matrix."""

from __future__ import annotations

from dpscaffold.algorithms.base import Algorithm, MomentKind, MomentRule
from dpscaffold.algorithms.fedavg import add_mean_move, along_gradient
from dpscaffold.algorithms.ridge import send_sums


def moments(kind: MomentKind, norm_bound: float) -> Algorithm:
    """One noised sum over all records: no model, so no configuration names it as its algorithm.

    Args:
        kind: ``"mean"``, ``"moments"`` (mean and squares) or ``"gram"``.
        norm_bound: B, the largest norm of a row, known without looking at the records.

    >>> moments("mean", 2.0).sums
    MomentRule(kind='mean', norm_bound=2.0)
    """
    rule = MomentRule(kind, norm_bound)
    return Algorithm(
        "moments", along_gradient, send_sums, add_mean_move, title="Preparation", sums=rule
    )
