"""Texts that stand for a missing value: "?", "-", "k. A.", "-9", as hospitals write them.

Which text means that nothing was measured is for people to say, column by column where need be: -9
is a gap of a weight and a value of a temperature. Blanks around a text do not count. In a column of
numbers a marker that is a number stands for its value, however a file writes it (-9, -9.0, "-9,0");
in every other column it is the text that counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpscaffold.errors import BadInput

#: What may stand around a text without being part of it.
BLANKS = " \t\u00a0"
#: What stands for all columns that a table of markers does not name.
OTHERS = "*"
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
#: How a day is written that a Parquet file or a data frame holds as a time.
_MIDNIGHT = " 00:00:00"


@dataclass(frozen=True)
class Markers:
    """The markers of every column; those of ``"*"`` hold where a column has no list of its own.

    >>> marked = Markers((("weight", ("-9",)), ("rhesus", ()), ("*", ("?", "-"))))
    >>> marked.of("weight"), marked.of("rhesus"), marked.of("age")
    (('-9',), (), ('?', '-'))
    """

    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def given(cls, gaps: Sequence[str] | Mapping[str, Sequence[str]] | None) -> Markers:
        """Those of ``data.gaps``: a list for all columns, or a table of lists by column."""
        table = gaps if isinstance(gaps, Mapping) else {OTHERS: gaps or ()}
        return cls(tuple((name, tuple(markers)) for name, markers in table.items()))

    def of(self, name: str) -> tuple[str, ...]:
        """The markers of one column."""
        known = dict(self.columns)
        return known.get(name, known.get(OTHERS, ()))

    def among(self, names: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """These columns with the markers of each; columns without markers are left out."""
        return tuple((name, markers) for name in names if (markers := self.of(name)))


#: Only what every file means a gap by.
NO_MARKERS = Markers()


def checked_markers(given: Any, key: str = "gaps") -> Any:
    """Markers as they are given, without blanks around them; refused where a text is none that a
    cell can hold."""
    if given is None:
        return None
    if isinstance(given, dict):
        return {name: _checked(f"{key}.{name}", listed) for name, listed in given.items()}
    return _checked(key, given)


def _checked(key: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list | tuple):
        raise BadInput(f"{key} is {given!r}; give a list of texts, as in ['?', '-']")
    for marker in given:
        if not isinstance(marker, str):
            raise BadInput(f"{key} holds {marker!r}, which is no text; write it as '{marker}'")
        if not marker.strip(BLANKS):
            raise BadInput(f"{key} holds an empty text; empty cells are gaps already: leave it out")
        if not marker.strip(BLANKS).isprintable():
            raise BadInput(f"{key} holds {marker!r}, which no cell shows; give a plain text")
    return tuple(dict.fromkeys(marker.strip(BLANKS) for marker in given))


def refuse_declared(
    markers: Markers,
    categories: Mapping[str, Sequence[str]],
    classes: Mapping[str, Sequence[str]],
) -> None:
    """Refuse a marker that is a declared value of its column: nobody could tell which is meant."""
    for what, table in (("category", categories), ("class", classes)):
        for name, values in table.items():
            both = next((marker for marker in markers.of(name) if marker in values), None)
            if both is not None:
                raise BadInput(
                    f"gaps names '{both}', which is a {what} of column '{name}'; take it out of "
                    f"one of them, or name the columns: gaps = {{ age = ['{both}'] }}"
                )


def number_of(marker: str) -> float | None:
    """The number that a marker stands for in columns of numbers, if it is one.

    >>> number_of("-9"), number_of("?")
    (-9.0, None)
    """
    return float(marker) if _NUMBER.fullmatch(marker) else None


def numbers_among(markers: Sequence[str]) -> tuple[float, ...]:
    """The numbers that are markers."""
    return tuple(number for marker in markers if (number := number_of(marker)) is not None)


def spellings(markers: Sequence[str]) -> tuple[str, ...]:
    """The texts that a cell may hold for these markers; a day may be held as a time."""
    return (*markers, *(f"{marker}{_MIDNIGHT}" for marker in markers))


def is_gap(value: Any, markers: Sequence[str], number: bool) -> bool:
    """Whether a raw value is one of the markers; ``number``: its column holds numbers.

    >>> is_gap(" ? ", ("?",), number=True), is_gap("-9.0", ("-9",), number=True)
    (True, True)
    >>> is_gap("-9.0", ("-9",), number=False), is_gap(-9, ("-9",), number=False)
    (False, True)
    """
    if isinstance(value, str):
        text = value.strip(BLANKS)
        found = number_of(text) if number else None
        return text in spellings(markers) or (found is not None and found in numbers_among(markers))
    if isinstance(value, bool | np.bool_):
        value = int(value) if number else str(bool(value)).lower()
    if isinstance(value, int | float | np.number):
        if number:
            return any(value == _alike(marker, value) for marker in numbers_among(markers))
        return bool({str(value), f"{value:g}"} & {*markers})
    return str(value) in spellings(markers)


def _alike(number: float, value: Any) -> Any:
    """A number in the precision of another, so that single precision finds its own."""
    return type(value)(number) if isinstance(value, np.floating) else number


def number_gaps(values: np.ndarray, markers: Sequence[str]) -> np.ndarray:
    """Which of some numbers (N,) are markers, (N,) bool, in their own precision."""
    kind = values.dtype if values.dtype.kind == "f" else np.dtype(np.float64)
    return np.isin(values.astype(kind), np.array(numbers_among(markers)).astype(kind))
