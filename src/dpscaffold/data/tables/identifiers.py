"""A word about columns of numbers that may name people or visits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

#: Records from which on a column is judged, and those that are looked at: enough to tell an
#: identifier, and memory stays bounded however long a table is.
LEAST, MOST = 20, 200_000
#: From here on float32 does not tell neighbouring whole numbers apart.
COARSE = 1 << 24


class Identifiers:
    """Finds whole-number columns in which no two records agree, block by block, and those whose
    numbers are too long to be told apart, as identifiers are.

    >>> found = Identifiers({0: "visit", 1: "age", 2: "insurance"})
    >>> n = np.arange(30.0)
    >>> found.add(np.stack([n, n % 7, 4e9 + 100 * n], axis=1).astype(np.float32))
    >>> [name for name, _ in found.named()]
    ['visit', 'insurance']
    """

    def __init__(self, columns: Mapping[int, str]) -> None:
        self._open = dict(columns)  # the places of columns that may still be identifiers
        self._seen: dict[int, list[np.ndarray]] = {place: [] for place in columns}
        self._rows = 0

    def add(self, rows: np.ndarray) -> None:
        """Look at further records, (N, d)."""
        rows = rows[: MOST - self._rows]
        if not len(rows):
            return
        self._rows += len(rows)
        for place in list(self._open):
            column = rows[:, place]
            whole = bool(np.isfinite(column).all() and (column == np.floor(column)).all())
            unique = len(np.unique(column)) == len(column)
            if whole and (unique or _coarse(column)):
                self._seen[place].append(column.copy())
            else:
                del self._open[place], self._seen[place]

    def named(self) -> Iterator[tuple[str, str]]:
        """Each such column and what is said of it."""
        for place, name in self._open.items() if self._rows >= LEAST else ():
            column = np.concatenate(self._seen[place])
            if len(np.unique(column)) == len(column):
                yield name, "has a number of its own for every record"
            elif _coarse(column) and len(np.unique(column)) > 1:
                yield name, f"holds whole numbers beyond {COARSE}, which a model cannot tell apart"

    def notes(self) -> tuple[str, ...]:
        """A sentence about each."""
        advice = "if it names people or visits, exclude it"
        return tuple(f"warning: column '{name}' {said}; {advice}" for name, said in self.named())


def _coarse(column: np.ndarray) -> bool:
    """Whether most numbers are too long for float32."""
    return bool((np.abs(column) > COARSE).mean() > 0.5)
