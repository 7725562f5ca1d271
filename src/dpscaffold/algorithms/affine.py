"""Which algorithms a device may take all K steps of in a program of its own."""

from collections.abc import Collection

from dpscaffold.algorithms.base import (
    PROVED_FIELDS,
    Affine,
    AffineDirection,
    Algorithm,
    Participant,
)

#: The fields of an algorithm that the fast paths for local steps take into account. Any other
#: field is a hook that they would ignore, so an algorithm that sets it takes plain steps.
FAST_FIELDS = PROVED_FIELDS - {"sums", "begin_at"}


def affine(
    algorithm: Algorithm, at: Participant, known: Collection[str] = FAST_FIELDS
) -> Affine | None:
    """The form of an algorithm's direction for one participation, or None where it has none, or
    the algorithm has fields that the caller does not know.

    A subclass of :class:`~dpscaffold.algorithms.base.AffineDirection` may move otherwise, so only
    the class itself is believed.

    >>> from dpscaffold import fedavg
    >>> affine(fedavg().replace(direction=lambda gradient, y, at: gradient.sign()), None) is None
    True
    """
    direction = algorithm.direction
    if type(direction) is not AffineDirection or algorithm.in_use_beyond(known):
        return None
    return direction.form(at)
