"""Noised sums for preparation, in one round: a mean, second moments, a Gram matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpscaffold.algorithms.base import Algorithm, MomentKind
from dpscaffold.algorithms.fedavg import add_mean_move, along_gradient
from dpscaffold.algorithms.ridge import send_sums


@dataclass(frozen=True)
class MomentRule:
    """Which sums of rows preparation asks for, and the largest norm of a row."""

    kind: MomentKind
    norm_bound: float

    def task(self, task: Any, schema: Any, relation: Any, bound: float, noise: float) -> Any:
        """The sums themselves: no model is made of them."""
        from dpscaffold.tasks.moments import MomentSums  # imports torch

        outputs = max(1, len(schema.target.classes))
        return MomentSums(schema.dimension, self.kind, self.norm_bound, relation, bound, outputs)


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
