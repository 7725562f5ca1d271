"""NA strings: texts that mean a missing value ("?", "-", "k. A.", "-9"), and numbers in texts.

Which text means that nothing was measured is for people to say, column by column where needed: -9
is missing as a weight and a value as a temperature. Blanks around a text do not count. In a column
of numbers an NA string that is a number means its value, however a file writes it (-9, -9.0,
"-9,0"); in every other column the text counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpscaffold.errors import BadInput, BadValue

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyarrow import csv
else:
    from dpscaffold.data.tables.arrow import csv, pa, pc

#: What may stand around a text without being part of it.
BLANKS = " \t\u00a0"
#: The key of all columns that a table by column does not name.
OTHERS = "*"
#: What happens to a record that lacks the value of a column.
Rule = Literal["refuse", "drop", "indicator", "category"] | float
_PLAIN = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
#: How a day is written that a Parquet file or a data frame holds as a time.
_MIDNIGHT = " 00:00:00"


@dataclass(frozen=True)
class NaStrings:
    """The NA strings of every column; those of ``"*"`` hold where a column has no list of its own.

    >>> marked = NaStrings((("weight", ("-9",)), ("rhesus", ()), ("*", ("?", "-"))))
    >>> marked.of("weight"), marked.of("rhesus"), marked.of("age")
    (('-9',), (), ('?', '-'))
    """

    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def given(cls, na_values: Sequence[str] | Mapping[str, Sequence[str]] | None) -> NaStrings:
        """Those of ``data.na_values``: a list for all columns, or a table of lists by column."""
        table = na_values if isinstance(na_values, Mapping) else {OTHERS: na_values or ()}
        return cls(tuple((name, tuple(na)) for name, na in table.items()))

    def of(self, name: str) -> tuple[str, ...]:
        """The NA strings of one column."""
        known = dict(self.columns)
        return known.get(name, known.get(OTHERS, ()))

    def among(self, names: Iterable[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """These columns with the NA strings of each; columns that have none are left out."""
        return tuple((name, na) for name in names if (na := self.of(name)))


#: Only the texts that mean a missing value in every file.
NO_NA_STRINGS = NaStrings()


def checked_na_strings(given: Any) -> Any:
    """NA strings as they are given, without blanks around them; refused where no cell can hold
    one."""
    if given is None:
        return None
    if isinstance(given, dict):
        return {name: _checked(f"na_values.{name}", listed) for name, listed in given.items()}
    return _checked("na_values", given)


def _checked(key: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list | tuple):
        raise BadValue("not-a-list", f"{key} is {given!r}; give a list of texts, as in ['?', '-']")
    for one in given:
        if not isinstance(one, str):
            raise BadValue(
                "not-text", f"{key} holds {one!r}, which is no text; write it as '{one}'"
            )
        if not one.strip(BLANKS):
            raise BadValue(
                "empty-text", f"{key} holds an empty text; empty cells mean missing: leave it out"
            )
        if not one.strip(BLANKS).isprintable():
            raise BadValue(
                "unseen-text", f"{key} holds {one!r}, which no cell shows; give a plain text"
            )
    return tuple(dict.fromkeys(one.strip(BLANKS) for one in given))


def refuse_declared(
    na: NaStrings,
    categories: Mapping[str, Sequence[str]],
    classes: Mapping[str, Sequence[str]],
) -> None:
    """Refuse an NA string that is a declared value of its column: nobody could tell which is
    meant."""
    for what, table in (("category", categories), ("class", classes)):
        for name, values in table.items():
            both = next((one for one in na.of(name) if one in values), None)
            if both is not None:
                raise BadInput(
                    "value-named-twice",
                    f"na_values names '{both}', which is a {what} of column '{name}'; take it out "
                    f"of one of them, or name the columns: na_values = {{ age = ['{both}'] }}",
                )


def number_of(one: str) -> float | None:
    """The number that an NA string means in columns of numbers, if it is one.

    >>> number_of("-9"), number_of("?")
    (-9.0, None)
    """
    return float(one) if _PLAIN.fullmatch(one) else None


def numbers_among(na: Sequence[str]) -> tuple[float, ...]:
    """The numbers among NA strings."""
    return tuple(number for one in na if (number := number_of(one)) is not None)


def na_texts(na: Sequence[str]) -> tuple[str, ...]:
    """The texts that a cell may hold for these NA strings; a day may be held as a time."""
    return (*na, *(f"{one}{_MIDNIGHT}" for one in na))


#: A number as files write it, and as Arrow reads it.
NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$|^[+-]?(?i:nan|inf|infinity)$"
#: A number with points between its thousands that can be nothing else.
GROUPED = r"^[+-]?[0-9]{1,3}((\.[0-9]{3})+,[0-9]*|(\.[0-9]{3}){2,})$"


class SeenNaStrings:
    """Which NA strings were found in which columns while files were read.

    >>> seen = SeenNaStrings()
    >>> seen.add("age", ["?"])
    >>> seen.notes(NaStrings((("*", ("?", "-")),)))
    ("na_values names '-', which no column holds",)
    """

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def add(self, name: str, na: Sequence[str]) -> None:
        """These NA strings are in a column."""
        self._seen |= {(name, one) for one in na}

    def notes(self, na: NaStrings) -> tuple[str, ...]:
        """A sentence about each NA string that no cell holds: it may be misspelt. Those of every
        file are found before."""
        own = {name for name, _ in na.columns}
        lone = []
        for name, listed in na.columns:
            for one in listed:
                found = any(
                    one == seen and (column == name or (name == OTHERS and column not in own))
                    for column, seen in self._seen
                )
                if not found and one not in default_na_strings():
                    where = "which no column holds" if name == OTHERS else "which it never holds"
                    key = "na_values" if name == OTHERS else f"na_values.{name}"
                    lone.append(f"{key} names '{one}', {where}")
        return tuple(lone)


@cache
def default_na_strings() -> tuple[str, ...]:
    """The texts that mean a missing value in every CSV file."""
    return tuple(csv.ConvertOptions().null_values)


def trimmed(column: pa.Array) -> pa.Array:
    """A column of texts without the blanks around them."""
    return pc.utf8_trim(column, BLANKS)


def tidy(column: pa.Array) -> pa.Array:
    """A column of texts without blanks around them, null where only blanks are left or a text that
    means a missing value in every file. So values that differ in blanks only are one value.

    >>> tidy(pa.array(["Bonn", "Bonn ", "  ", "NA"])).to_pylist()
    ['Bonn', 'Bonn', None, None]
    """
    text = trimmed(column)
    gone = pc.is_in(text, value_set=pa.array(default_na_strings(), pa.string()))
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


def with_point(text: pa.Array, decimal: str) -> pa.Array:
    """Numbers as texts with a decimal point. With a decimal comma, points between thousands are
    removed where nothing else can be meant (1.137,79 and 1.137.790); any other text with a point
    is no number: 1.137 may be either.

    >>> with_point(pa.array(["1.137,79", "3,5", "1.137"]), ",").to_pylist()
    ['1137.79', '3.5', '1no number137']
    """
    if decimal == ".":
        return text
    if pc.any(pc.match_substring(text, ".")).as_py():
        plain = pc.replace_substring(text, ".", "")
        text = pc.if_else(pc.match_substring_regex(text, GROUPED), plain, text)
    return pc.replace_substring(pc.replace_substring(text, ".", "no number"), decimal, ".")


def without_na(
    column: pa.Array,
    na: Sequence[str],
    number: bool = False,
    decimal: str = ".",
    seen: tuple[SeenNaStrings, str] | None = None,
) -> pa.Array:
    """A column of texts with nulls in place of NA strings; of ``number`` columns by value too."""
    if not na:
        return column
    text = trimmed(column)
    gone = pc.is_in(text, value_set=pa.array(na_texts(na), pa.string()))
    numbers = numbers_among(na) if number else ()
    if numbers:
        values = _doubles(with_point(pc.if_else(gone, pa.scalar(None, pa.string()), text), decimal))
        gone = pc.or_(gone, pc.is_in(values, value_set=pa.array(numbers, pa.float64())))
    if not pc.any(gone).as_py():
        return column
    if seen is not None:
        found = {str(one) for one in text.filter(gone).unique().to_pylist()}
        held = numbers_among([with_point(pa.array([one]), decimal)[0].as_py() for one in found])
        _note(seen, na, found, held if number else ())
    return pc.if_else(gone, pa.scalar(None, column.type), column)


def _doubles(text: pa.Array) -> pa.Array:
    """Texts as float64, null where one is no number."""
    try:
        return text.cast(pa.float64())
    except pa.ArrowInvalid:  # seldom, and looking at every text takes its time
        right = pc.match_substring_regex(text, NUMBER)
        return pc.if_else(right, text, pa.scalar(None, pa.string())).cast(pa.float64())


def numbers_without_na(
    column: pa.Array, na: Sequence[str], seen: tuple[SeenNaStrings, str] | None = None
) -> pa.Array:
    """A column of typed numbers with nulls in place of NA strings that are numbers."""
    numbers = numbers_among(na)
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
        _note(seen, na, (), alike)
    return pc.if_else(gone, pa.scalar(None, column.type), column)


def _note(
    seen: tuple[SeenNaStrings, str],
    na: Sequence[str],
    texts: Sequence[str] | set[str],
    numbers: Sequence[float],
) -> None:
    found_in, name = seen
    stand = [m for m in na if {*na_texts([m])} & {*texts} or number_of(m) in {*numbers}]
    found_in.add(name, stand)
