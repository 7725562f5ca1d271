"""The next round's batches, drawn by a background thread while this round computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from dpscaffold.engines.participation.drawing import Indices, Kind, Row, distinct, indices
from dpscaffold.randomness.streams import in_background


class NextBatches:
    """Holds at most one round's batches. Streams are keyed, not consumed, so a draw that turns out
    not to be wanted (a user declined) changes nothing: it is made again for the rows that are.

    ``expected`` gives the rows of a round, or None where there is no such round or it does not fit.
    """

    def __init__(self, expected: Callable[[int], list[Row] | None]) -> None:
        self.expected = expected
        self._held: tuple[int, list[Kind], Future[Indices]] | None = None

    def indices(self, round: int, rows: Sequence[Row]) -> Indices:
        """The batches of these rows, drawn ahead if they were; the next round's are then begun."""
        firsts, _ = distinct(rows)
        kinds = [row.kind for row in firsts]
        found = None
        if self._held is not None and self._held[:2] == (round, kinds):
            found = self._held[2].result()
        self._held = None
        found = found or indices(round, firsts)
        self._begin(round + 1)
        return found

    def _begin(self, round: int) -> None:
        rows = self.expected(round)
        if rows is None:
            return
        firsts, _ = distinct(rows)
        kinds = [row.kind for row in firsts]
        self._held = (round, kinds, in_background(lambda: indices(round, firsts)))
