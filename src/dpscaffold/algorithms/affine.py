"""Which directions are the gradient plus something that stands still: a device may then take all K
steps in its own programs."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpscaffold.algorithms.balanced import along_balanced, own_controls
from dpscaffold.algorithms.base import Direction, Participant
from dpscaffold.algorithms.fedavg import along_gradient
from dpscaffold.algorithms.fedprox import Proximal
from dpscaffold.algorithms.scaffold import along_corrected
from dpscaffold.algorithms.scaffold_warm import stay

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Affine:
    """direction(g, y) = g + Σ ``shifts`` + ``pull``·(y − x), or zero where it ``moves`` not.

    Added to g one after the other, the shifts round as the direction itself does.
    """

    shifts: tuple[Tensor, ...] = ()
    pull: float = 0.0
    moves: bool = True

    @property
    def shift(self) -> Tensor | None:
        """What stands still, in one."""
        return functools.reduce(operator.add, self.shifts) if self.shifts else None


def affine(direction: Direction, at: Participant) -> Affine | None:
    """A direction in that form for one participation, or None where it is not known to have it.

    Known by the function itself, so that an algorithm with its direction replaced is never taken
    for the one it came from.

    >>> affine(lambda gradient, y, at: gradient.sign(), None) is None
    True
    """
    if direction is along_gradient:
        return Affine()
    if direction is stay:
        return Affine(moves=False)
    if isinstance(direction, Proximal):
        return Affine(pull=direction.mu)
    if direction is along_corrected:
        return Affine((-at.memory["control"], at.broadcast.shared["control"]))
    if direction is along_balanced:
        control, seen = own_controls(at.memory)
        drift = seen * (at.broadcast.shared["cohort"] - control)
        return Affine((drift, at.broadcast.shared["common"]))
    return None
