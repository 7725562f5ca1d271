"""Which directions are the gradient plus something that stands still: a device may then take all K
steps in its own programs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpscaffold.algorithms.balanced import along_balanced, own_controls
from dpscaffold.algorithms.base import Algorithm, Participant
from dpscaffold.algorithms.fedavg import along_gradient
from dpscaffold.algorithms.fedprox import Proximal
from dpscaffold.algorithms.mean_regularised import Pulled
from dpscaffold.algorithms.scaffold import along_corrected
from dpscaffold.algorithms.scaffold_warm import stay

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Affine:
    """direction(g, y) = g + Σ ``shifts`` + ``pull``·(y − x), or zero where it ``moves`` not. The
    pull may differ between users, (U, 1).

    Added to g one after the other, the shifts round as the direction itself does.
    """

    shifts: tuple[Tensor, ...] = ()
    pull: float | Tensor = 0.0
    moves: bool = True

    @property
    def shift(self) -> Tensor | None:
        """What stands still, in one."""
        return functools.reduce(operator.add, self.shifts) if self.shifts else None


#: The fields of an algorithm that the fast paths for local steps take into account. Any other
#: field is a hook that they would ignore, so an algorithm that sets it takes plain steps.
FAST_FIELDS = frozenset(
    (
        *("name", "direction", "finish", "update", "announce", "remembers", "keeps", "numbers"),
        *("title", "mirrored", "noise_aware", "shows", "warm_up", "full_pass", "private"),
    )
)


def understood(algorithm: Algorithm, known: Collection[str] = FAST_FIELDS) -> bool:
    """Whether a fast path that knows these fields knows all of an algorithm, its warm-up too."""
    first = algorithm.warm_up
    own = not algorithm.in_use_beyond(known)
    return own and (first is None or understood(first, known))


def affine(
    algorithm: Algorithm, at: Participant, known: Collection[str] = FAST_FIELDS
) -> Affine | None:
    """An algorithm's direction in that form for one participation, or None where it is not known to
    have it, or the algorithm has fields that the caller does not know.

    The direction is recognised by the function itself, so that an algorithm with its direction
    replaced is never taken for the one it came from.

    >>> from dpscaffold import fedavg
    >>> affine(fedavg().replace(direction=lambda gradient, y, at: gradient.sign()), None) is None
    True
    """
    direction = algorithm.direction
    if not understood(algorithm, known):
        return None
    if direction is along_gradient:
        return Affine()
    if direction is stay:
        return Affine(moves=False)
    if type(direction) is Proximal:  # a subclass may move otherwise
        assert isinstance(direction, Proximal)
        return Affine(pull=direction.mu)
    if type(direction) is Pulled:
        return Affine(pull=direction.pull(at))
    if direction is along_corrected:
        return Affine((-at.memory["control"], at.broadcast.shared["control"]))
    if direction is along_balanced:
        control, seen = own_controls(at.memory)
        drift = seen * (at.broadcast.shared["cohort"] - control)
        return Affine((drift, at.broadcast.shared["common"]))
    return None
