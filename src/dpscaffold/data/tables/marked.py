"""Columns of a file without the texts that stand for a missing value, and which of these were seen.

The rules are those of :mod:`dpscaffold.data.tables.markers`; here they hold for whole columns of
Arrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from dpscaffold.data.tables.markers import (
    BLANKS,
    OTHERS,
    Markers,
    number_of,
    numbers_among,
    spellings,
)

#: A number as files write it.
NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"


#: A number with points between its thousands that can be nothing else.
GROUPED = r"^[+-]?[0-9]{1,3}((\.[0-9]{3})+,[0-9]*|(\.[0-9]{3}){2,})$"


class Sightings:
    """Which markers were found in which columns while files were read.

    >>> seen = Sightings()
    >>> seen.add("age", ["?"])
    >>> seen.notes(Markers((("*", ("?", "-")),)))
    ("gaps names '-', which no column holds",)
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def add(self, name: str, markers: Sequence[str]) -> None:
        """These markers stand in a column."""
        self._seen |= {(name, marker) for marker in markers}

    def notes(self, markers: Markers) -> tuple[str, ...]:
        """A sentence about each marker that stands nowhere: it may be misspelt. What every file
        means a gap by is found before markers are looked for."""
        own = {name for name, _ in markers.columns}
        lone = []
        for name, listed in markers.columns:
            for marker in listed:
                found = any(
                    marker == seen and (column == name or (name == OTHERS and column not in own))
                    for column, seen in self._seen
                )
                if not found and marker not in plain_gaps():
                    where = "which no column holds" if name == OTHERS else "which it never holds"
                    key = "gaps" if name == OTHERS else f"gaps.{name}"
                    lone.append(f"{key} names '{marker}', {where}")
        return tuple(lone)


@cache
def plain_gaps() -> tuple[str, ...]:
    """The texts that stand for a missing value in every CSV file."""
    return tuple(pyarrow.csv.ConvertOptions().null_values)


def trimmed(column: pa.Array) -> pa.Array:
    """A column of texts without the blanks around them."""
    return pc.utf8_trim(column, BLANKS)


def tidy(column: pa.Array) -> pa.Array:
    """A column of texts as a CSV file would say them, without blanks around them: nothing where
    only blanks stand, or a text that every file means a gap by. Sites, classes and categories that
    differ in blanks are one.

    >>> tidy(pa.array(["Bonn", "Bonn ", "  ", "NA"])).to_pylist()
    ['Bonn', 'Bonn', None, None]
    """
    text = trimmed(column)
    gone = pc.is_in(text, value_set=pa.array(plain_gaps(), pa.string()))
    return pc.if_else(gone, pa.scalar(None, pa.string()), text) if pc.any(gone).as_py() else text


def respelled(column: pa.Array, known: Mapping[str, str]) -> pa.Array:
    """A column of texts with one spelling of each value.

    >>> respelled(pa.array(["ja", "no", None]), {"ja": "yes"}).to_pylist()
    ['yes', 'no', None]
    """
    if not known:
        return column
    at = pc.index_in(column, value_set=pa.array([*known], pa.string()))
    return pc.coalesce(pa.array([*known.values()], pa.string()).take(at), column)


def pointed(text: pa.Array, decimal: str) -> pa.Array:
    """Numbers as texts with a decimal point. Beside a decimal comma, points between thousands are
    left out where nothing else can be meant (1.137,79 and 1.137.790); any other text with a point
    is no number: 1.137 may be either.

    >>> pointed(pa.array(["1.137,79", "3,5", "1.137"]), ",").to_pylist()
    ['1137.79', '3.5', '1no number137']
    """
    if decimal == ".":
        return text
    if pc.any(pc.match_substring(text, ".")).as_py():
        plain = pc.replace_substring(text, ".", "")
        text = pc.if_else(pc.match_substring_regex(text, GROUPED), plain, text)
    return pc.replace_substring(pc.replace_substring(text, ".", "no number"), decimal, ".")


def without_markers(
    column: pa.Array,
    markers: Sequence[str],
    number: bool = False,
    decimal: str = ".",
    seen: tuple[Sightings, str] | None = None,
) -> pa.Array:
    """A column of texts with nulls where a marker stands; of ``number`` columns by value too."""
    if not markers:
        return column
    text = trimmed(column)
    gone = pc.is_in(text, value_set=pa.array(spellings(markers), pa.string()))
    numbers = numbers_among(markers) if number else ()
    if numbers:
        values = _doubles(pointed(pc.if_else(gone, pa.scalar(None, pa.string()), text), decimal))
        gone = pc.or_(gone, pc.is_in(values, value_set=pa.array(numbers, pa.float64())))
    if not pc.any(gone).as_py():
        return column
    if seen is not None:
        found = {str(one) for one in text.filter(gone).unique().to_pylist()}
        held = numbers_among([pointed(pa.array([one]), decimal)[0].as_py() for one in found])
        _note(seen, markers, found, held if number else ())
    return pc.if_else(gone, pa.scalar(None, column.type), column)


def _doubles(text: pa.Array) -> pa.Array:
    """Texts as float64, null where one is no number."""
    try:
        return text.cast(pa.float64())
    except pa.ArrowInvalid:  # seldom, and looking at every text takes its time
        right = pc.match_substring_regex(text, NUMBER)
        return pc.if_else(right, text, pa.scalar(None, pa.string())).cast(pa.float64())


def numbers_without_markers(
    column: pa.Array, markers: Sequence[str], seen: tuple[Sightings, str] | None = None
) -> pa.Array:
    """A column of typed numbers with nulls where a marker that is a number stands."""
    numbers = numbers_among(markers)
    if not numbers:
        return column
    kind = column.type if pa.types.is_float32(column.type) else pa.float64()
    values = column.cast(kind, safe=False)
    wanted = pa.array(np.array(numbers).astype(kind.to_pandas_dtype()), kind)
    gone = pc.is_in(values, value_set=wanted)
    if not pc.any(gone).as_py():
        return column
    if seen is not None:
        held = {*values.filter(gone).unique().to_pylist()}
        alike = [n for n, w in zip(numbers, wanted.to_pylist(), strict=True) if w in held]
        _note(seen, markers, (), alike)
    return pc.if_else(gone, pa.scalar(None, column.type), column)


def _note(
    seen: tuple[Sightings, str],
    markers: Sequence[str],
    texts: Sequence[str] | set[str],
    numbers: Sequence[float],
) -> None:
    sightings, name = seen
    stand = [m for m in markers if {*spellings([m])} & {*texts} or number_of(m) in {*numbers}]
    sightings.add(name, stand)


class NoNumber(Exception):
    """A text that is no number, where numbers are expected."""


def numbers_of(
    column: pa.Array,
    markers: Sequence[str],
    decimal: str = ".",
    seen: tuple[Sightings, str] | None = None,
) -> pa.Array:
    """A column of texts as float32, null where a marker or nothing stands; as a CSV reader reads
    numbers, to the last bit."""
    text = trimmed(without_markers(column, markers, True, decimal, seen))
    empty = pc.is_in(text, value_set=pa.array(plain_gaps(), pa.string()))
    text = pointed(pc.if_else(empty, pa.scalar(None, pa.string()), text), decimal)
    try:
        return text.cast(pa.float32())
    except pa.ArrowInvalid:
        raise NoNumber(_first_strange(column, text)) from None


def _first_strange(column: pa.Array, text: pa.Array) -> str:
    """The first cell that is no number, as it stands in the file."""
    for row, one in enumerate(text.to_pylist()):
        try:
            pa.scalar(one, pa.string()).cast(pa.float32())
        except pa.ArrowInvalid:
            return str(column[row].as_py())
    return str(text)
