"""A run that was given more rounds: how its rounds were planned, part by part.

T is fixed before a run begins. Where a larger T is chosen later, perhaps after looking at what came
out, the rounds beyond the first T are a mechanism of their own, chosen adaptively: the ε and the δ
of the parts add (Rogers, Roth, Ullman, Vadhan 2016), as those of two runs do.
:mod:`dpscaffold.privacy.parts` adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dpscaffold.privacy import Ledger


@dataclass(frozen=True)
class RoundEntry:
    """One line of the journal: who took part in a round; ``again`` where fresh noise was drawn for
    a round that had already been recorded, ``ahead`` where the round is counted before it runs,
    because what comes out may decide whether it does."""

    round: int
    users: tuple[int, ...]
    again: bool
    ahead: bool = False


@dataclass(frozen=True)
class Parts:
    """The last round of every part, rising: T, and each larger T that was chosen later.

    >>> parts = Parts((100, 150))
    >>> parts.spans, parts.of(100), parts.of(101)
    (((1, 100), (101, 150)), 0, 1)
    """

    ends: tuple[int, ...]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The first and last round of every part."""
        starts = (0, *self.ends[:-1])
        return tuple((start + 1, end) for start, end in zip(starts, self.ends, strict=True))

    @property
    def several(self) -> bool:
        """Whether there is anything to add."""
        return len(self.ends) > 1

    def of(self, round: int) -> int:
        """Which part a round belongs to."""
        return next((k for k, end in enumerate(self.ends) if round <= end), len(self.ends) - 1)

    def extended(self, rounds: int) -> Parts:
        """With one part more, up to ``rounds``; the same where that is no further."""
        return Parts((*self.ends, rounds)) if rounds > self.ends[-1] else self

    def ledgers(self, whole: Ledger, entries: Iterable[RoundEntry]) -> tuple[Ledger, ...]:
        """Who took part in each part, its rounds counted from 1."""
        found = [
            Ledger(replace(whole.run, rounds=last - first + 1), whole.user_budget)
            for first, last in self.spans
        ]
        for entry in entries:
            place = self.of(entry.round)
            first = self.spans[place][0]
            found[place].record(entry.round - first + 1, entry.users, again=entry.again)
        return tuple(found)


#: ε of this many rounds of a part, of which so many were run again.
Price = Callable[[int, int, int], float]


def spent_in_parts(parts: Parts, whole: Ledger, price: Price, round: int) -> float:
    """ε once this round is over, with all that was released: the sum over the parts."""
    rounds, total = max(round, whole.rounds), []
    for k, (first, last) in enumerate(parts.spans):
        extra = whole.repeats(first, last)
        done = max(0, min(rounds, last) - first + 1)
        if done:
            total.append(price(k, done, extra))
    return math.fsum(total)
