"""Slots of users that another rank computes in a round.

Users belong to ranks in ranges of their numbers, so one rank may have more participants of a round
than another. Where every rank has all records, participants are divided evenly: a rank sends the
slots of some of its users to the rank that computes them, and gets the new ones back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Slots
from dpscaffold.engines.fast.ordered import Chunks
from dpscaffold.engines.memories import Memories
from dpscaffold.engines.ranks import Ranks


class Loans:
    """The slots of one round's users at the rank that computes them: its own and lent ones.

    Args:
        ranks: This process among the others.
        own: The slots of this rank's users.
        lent: Where those of other users are held, empty at first.
        users: The participants, sorted.
        owned: Which of them belong to each rank.
        computed: Which of them each rank computes.
    """

    def __init__(
        self,
        ranks: Ranks,
        own: Memories,
        lent: Memories,
        users: np.ndarray,
        owned: Chunks,
        computed: Chunks,
    ) -> None:
        self.ranks, self.own, self.lent = ranks, own, lent
        self._widths = {name: value.shape[1] for name, value in own.recall([]).items()}
        self._gives = self._shared(users, owned.own(ranks.rank), computed)
        self._takes = self._shared(users, computed.own(ranks.rank), owned)

    def _shared(self, users: np.ndarray, mine: range, others: Chunks) -> dict[int, list[int]]:
        """The users among those of ``mine`` that each other rank has, where there are any."""
        found = {}
        for rank in range(self.ranks.count):
            theirs = others.own(rank)
            start, stop = max(mine.start, theirs.start), min(mine.stop, theirs.stop)
            if rank != self.ranks.rank and start < stop and self._widths:
                found[rank] = users[start:stop].tolist()
        return found

    def lend(self) -> None:
        """Send slots to the ranks that compute their users."""
        self._exchange(self._gives, self.own, self._takes, self.lent)

    def give_back(self) -> None:
        """Return the new slots to the ranks that the users belong to."""
        self._exchange(self._takes, self.lent, self._gives, self.own)

    def _exchange(
        self,
        given: dict[int, list[int]],
        source: Memories,
        taken: dict[int, list[int]],
        target: Memories,
    ) -> None:
        sent: list[Callable[[], None]] = []
        for rank, users in given.items():
            rows = torch.cat(list(source.recall(users).values()), dim=1)
            sent.append(self.ranks.send(list(rows), rank))
        widths = list(self._widths.values())
        for rank, users in taken.items():
            rows = self.ranks.receive(len(users), sum(widths), rank)
            target.keep(users, dict(zip(self._widths, rows.split(widths, dim=1), strict=True)))
        for arrived in sent:
            arrived()

    def recall(self, users: Sequence[int]) -> dict[str, Tensor]:
        """The slots of these users, (U, P) or (U, 1)."""
        found, there = self.own.recall(users), self.lent.seen(users).nonzero()[:, 0]
        if len(there):
            others = self.lent.recall([users[k] for k in there.tolist()])
            for name, value in others.items():
                found[name][there] = value
        return found

    def keep(self, users: Sequence[int], slots: Slots) -> None:
        """Store the slots of these users."""
        lent = self.lent.seen(users)
        for memories, chosen in ((self.lent, lent), (self.own, ~lent)):
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                values = {name: value[rows] for name, value in slots.items()}
                memories.keep([users[k] for k in rows.tolist()], values)
