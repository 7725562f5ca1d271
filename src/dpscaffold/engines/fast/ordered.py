"""Sums over the rows of several ranks, in the order in which one process adds them.

Floating-point sums depend on their order. The users of a round are sorted, and the ranks hold
consecutive ranges of users, so the order of one process visits the ranks one after the other. Each
rank adds its rows to the running sum that it receives, and passes it on: a few vectors travel,
however many rows there are, and no bit differs. What can be added before the running sum arrives is
added before: chunks that one rank has alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from dpscaffold.engines.aggregate import chained, weighted_sum
from dpscaffold.engines.ranks import Ranks

#: From the last multiple of this number of columns on, ``values.sum(0)`` adds in another order.
COLUMNS = 64

#: How many columns are passed on together, so that ranks work at the same time.
_BLOCK = 1 << 18

#: The levels of running sums in ``values.sum(0)``.
_LEVELS = 4


class RunningSum:
    """``values.sum(0)`` of a (count, C) table, from rows that come a few at a time.

    PyTorch adds groups of 16 rows (more in very long tables), groups of groups, and so on, so that
    rounding errors stay small. ``levels`` are these sums so far; None where one is empty.

    >>> rows = torch.randn(40, 64)
    >>> sum = RunningSum(40)
    >>> sum.add(rows[:25])
    >>> sum.add(rows[25:])
    >>> torch.equal(sum.total(), rows.sum(0))
    True
    """

    def __init__(self, count: int, done: int = 0) -> None:
        self.done = done
        self._power = max(4, (count - 1).bit_length() // _LEVELS)
        self.levels: list[Tensor | None] = [None] * _LEVELS

    def filled(self, done: int) -> list[int]:
        """Which levels are not empty after this many rows."""
        steps = [done >> (level * self._power) for level in range(_LEVELS)]
        full = 1 << self._power
        return [level for level, n in enumerate(steps) if (n if level == _LEVELS - 1 else n % full)]

    def add(self, rows: Tensor) -> None:
        """The next rows, (U, C)."""
        group = 1 << self._power
        while len(rows):
            here = rows[: group - self.done % group]
            start = rows.new_zeros(rows.shape[1]) if self.levels[0] is None else self.levels[0]
            self.levels[0] = chained(start, here.new_ones(len(here)), here)
            self.done += len(here)
            rows = rows[len(here) :]
            if self.done % group == 0:
                self._carry()

    def _carry(self) -> None:
        """A group is full: its sum goes to the next level, and so on."""
        for level in range(1, _LEVELS):
            lower, upper = self.levels[level - 1], self.levels[level]
            assert lower is not None
            self.levels[level] = lower if upper is None else upper + lower
            self.levels[level - 1] = None
            if (self.done >> (level * self._power)) % (1 << self._power):
                return

    def total(self) -> Tensor:
        """The sum of all rows, (C,)."""
        found = [level for level in self.levels if level is not None]
        whole = found[0]
        for level in found[1:]:
            whole = whole + level
        return whole


@cache
def keeps_order(threads: int) -> bool:
    """Whether ``values.sum(0)`` of this machine adds in the order that :class:`RunningSum` does.

    It is tried with numbers of rows and columns that take all ways through the code. Where it does
    not hold, rows are gathered by rank 0, and nothing but the time differs.
    """
    random = torch.Generator().manual_seed(0)
    for count in (1, 2, 5, 15, 16, 17, 40, 300):
        for columns in (COLUMNS, 13 * COLUMNS):
            rows, sum = torch.randn(count, columns, generator=random), RunningSum(count)
            sum.add(rows[: count // 3])
            sum.add(rows[count // 3 :])
            if not torch.equal(sum.total(), rows.sum(0)):
                return False
    return True


@dataclass(frozen=True)
class Chunks:
    """A round's rows: ``count`` of them, of which ``size`` at a time are added together, and where
    the rows of each rank end."""

    count: int
    size: int
    ends: Sequence[int]

    def own(self, rank: int) -> range:
        """The rows of a rank."""
        return range(self.ends[rank - 1] if rank else 0, self.ends[rank])

    def length(self, row: int) -> int:
        """The number of rows in the chunk of a row."""
        start = row // self.size * self.size
        return min(self.size, self.count - start)

    def pieces(self, rank: int) -> list[range]:
        """The rows of a rank, cut where chunks end."""
        own, found = self.own(rank), []
        start = own.start
        while start < own.stop:
            end = min(own.stop, (start // self.size + 1) * self.size)
            found.append(range(start, end))
            start = end
        return found

    def shared(self, piece: range) -> bool:
        """Whether other ranks have rows in the chunk of this piece."""
        return len(piece) < self.length(piece.start)

    def cut_at(self, row: int) -> bool:
        """Whether the rows before this one end in the middle of a chunk."""
        return row % self.size != 0 and row < self.count

    def owners(self) -> list[int]:
        """The ranks that have rows, in their order."""
        return [rank for rank in range(len(self.ends)) if len(self.own(rank))]


@dataclass
class _VectorSums:
    """One vector of the uploads at this rank: what is known before the running sum arrives."""

    #: Whether it is a weighted mean (else a plain sum).
    weighted: bool
    #: Rows of a chunk that begins at another rank, and their weights.
    head: Tensor | None = None
    weights: Tensor | None = None
    #: The sums of chunks that end here and began here.
    sums: list[Tensor] = field(default_factory=list)
    #: The running sum of the chunk that goes on at another rank: a vector, or its levels.
    tail: list[Tensor] = field(default_factory=list)


class OrderedSums:
    """The vectors of a round's uploads, added in the order of one process."""

    def __init__(self, ranks: Ranks, chunks: Chunks) -> None:
        self.ranks, self.chunks = ranks, chunks
        self._columns: dict[str, _VectorSums] = {}

    def add(self, piece: range, name: str, rows: Tensor, weights: Tensor | None) -> None:
        """The rows (U, C) of one vector of a piece; with ``weights`` (U,), of a mean."""
        chunks = self.chunks
        column = self._columns.setdefault(name, _VectorSums(weights is not None))
        if piece.start % chunks.size:
            column.head, column.weights = rows, weights
        elif not chunks.cut_at(piece.stop):
            column.sums.append(rows.sum(0) if weights is None else weighted_sum(weights, rows))
        elif weights is not None:
            column.tail = [chained(rows.new_zeros(rows.shape[1]), weights, rows)]
        else:
            sum = RunningSum(chunks.length(piece.start))
            sum.add(rows)
            column.tail = [level for level in sum.levels if level is not None]

    def totals(self, widths: Mapping[str, int]) -> dict[str, Tensor]:
        """Rank 0: the sums of all ranks, by name; every rank calls it. ``widths`` are the numbers
        of columns of each vector. Elsewhere nothing is returned."""
        ranks, owners = self.ranks, self.chunks.owners()
        last, sent = owners[-1], []
        found = {name: torch.empty(width if ranks.leads else 0) for name, width in widths.items()}
        parts = [(name, block) for name, width in widths.items() for block in _blocks(width)]
        if ranks.rank in owners:
            following = [*owners, 0][owners.index(ranks.rank) + 1]
            for name, block in parts:
                made = self._passed(self._columns[name], block, owners)
                if following == ranks.rank:  # rank 0 has all rows
                    found[name][block] = made[0]
                else:
                    sent.append(ranks.send(made, following))
        if ranks.leads and last != 0:
            for name, block in parts:
                found[name][block] = ranks.receive(1, block.stop - block.start, last)[0]
        for arrived in sent:
            arrived()
        return found if ranks.leads else {}

    def _passed(self, column: _VectorSums, block: slice, owners: Sequence[int]) -> list[Tensor]:
        """The running sums of some columns after this rank's rows."""
        ranks, chunks = self.ranks, self.chunks
        own, place = chunks.own(ranks.rank), owners.index(ranks.rank)
        kinds = self._kinds(own.start, column.weighted)
        received: list[Tensor] = []
        if place:
            width = block.stop - block.start
            received = list(ranks.receive(len(kinds), width, owners[place - 1]))
        by_kind = dict(zip(kinds, received, strict=True))
        whole = by_kind.pop("whole", None)
        if column.head is not None:
            whole, by_kind = self._headed(column, block, whole, by_kind)
        for sum in column.sums:
            part = sum[block]
            whole = (torch.zeros_like(part) if whole is None else whole) + part
        if column.tail:
            tail = [level[block] for level in column.tail]
            by_kind = dict(zip(self._levels(own.stop, column.weighted), tail, strict=True))
        elif not chunks.cut_at(own.stop):
            by_kind = {}
        return [*([] if whole is None else [whole]), *by_kind.values()]

    def _headed(
        self, column: _VectorSums, block: slice, whole: Tensor | None, levels: dict[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The sums after the rows of a chunk that began at another rank."""
        assert column.head is not None
        start = self.chunks.own(self.ranks.rank).start
        rows = column.head[:, block]
        end = start + len(rows)
        part: Tensor | None
        if column.weights is not None:
            part = chained(levels["level 0"], column.weights, rows)
            after = {"level 0": part}
        else:
            sum = RunningSum(self.chunks.length(start), start % self.chunks.size)
            for name, value in levels.items():
                sum.levels[int(name.removeprefix("level "))] = value
            sum.add(rows)
            after = {f"level {k}": v for k, v in enumerate(sum.levels) if v is not None}
            part = None if self.chunks.cut_at(end) else sum.total()
        if self.chunks.cut_at(end):
            return whole, after
        assert part is not None
        return (torch.zeros_like(part) if whole is None else whole) + part, {}

    def _levels(self, row: int, weighted: bool) -> list[str]:
        """The running sums of an unfinished chunk that ends before this row."""
        if not self.chunks.cut_at(row):
            return []
        if weighted:
            return ["level 0"]
        sum = RunningSum(self.chunks.length(row))
        return [f"level {level}" for level in sum.filled(row % self.chunks.size)]

    def _kinds(self, row: int, weighted: bool) -> list[str]:
        """What is passed on before this row."""
        whole = ["whole"] if row >= self.chunks.size else []
        return whole + self._levels(row, weighted)


def _blocks(width: int) -> list[slice]:
    return [slice(k, min(k + _BLOCK, width)) for k in range(0, width, _BLOCK)]


def narrow_sum(rows: Tensor, chunks: Chunks, alone: bool) -> Tensor:
    """The sum of gathered rows (m, T), chunk by chunk; of a column that is not ``alone``, as the
    last of a wide table, which is added in another order."""
    if rows.shape[1] == 1 and not alone:
        return narrow_sum(torch.cat([rows, torch.zeros_like(rows)], dim=1), chunks, True)[:1]
    total = rows.new_zeros(rows.shape[1])
    for start in range(0, chunks.count, chunks.size):
        total = total + rows[start : start + chunks.size].sum(0)
    return total


def passed_columns(width: int) -> int:
    """How many columns of a sum are passed on; the others are gathered row by row."""
    return width // COLUMNS * COLUMNS
