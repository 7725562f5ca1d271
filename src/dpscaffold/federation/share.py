"""The users of one process, where several processes share a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from dpscaffold.federation.records import Records
from dpscaffold.federation.tables import Federation


def user_ranges(users: int, ranks: int) -> list[range]:
    """The users of each rank: consecutive numbers, and nearly the same number for every rank.

    >>> user_ranges(10, 3)
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    ends = [users * rank // ranks for rank in range(ranks + 1)]
    return [range(first, end) for first, end in pairwise(ends)]


@dataclass(frozen=True)
class UserShare:
    """The records of some users of a federation, and what their process must know of the others.

    Args:
        federation: The users of this share and their records.
        users: Their numbers in the whole federation.
        all_users: M, the number of users of the whole federation.
        largest: The number of training records of the user that has most of them.
    """

    federation: Federation
    users: range
    all_users: int
    largest: int

    @classmethod
    def of(cls, federation: Federation, users: range) -> UserShare:
        """The share of these users. Its tables are views of the federation's."""
        train = federation.train
        return cls(
            _part(federation, users),
            users,
            federation.users,
            int(train.sizes.max()),
        )


def _part(federation: Federation, users: range) -> Federation:
    """A federation of some consecutive users alone."""
    chosen = slice(users.start, users.stop)
    return replace(
        federation,
        train=_rows(federation.train, users),
        test=_rows(federation.test, users),
        names=federation.names[chosen],
        declared_sizes=federation.declared_sizes[chosen],
    )


def _rows(records: Records, users: range) -> Records:
    offsets = records.offsets[users.start : users.stop + 1]
    rows = slice(int(offsets[0]), int(offsets[-1]))
    return Records(records.features[rows], records.labels[rows], offsets - offsets[0])
