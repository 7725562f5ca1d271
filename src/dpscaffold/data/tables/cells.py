"""How single columns of a table are read: texts, numbers and dates, whatever they are read for.

A column is an Arrow array, of texts or of typed values. Every cell is read by itself: no cell
changes how another one is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import permutations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dpscaffold.data.tables.missing import (
    NO_NA_STRINGS,
    NUMBER,
    NaStrings,
    SeenNaStrings,
    numbers_without_na,
    respelled,
    tidy,
    with_point,
    without_na,
)
from dpscaffold.data.tables.spellings import NO_SPELLINGS, Spellings
from dpscaffold.errors import BadInput

#: The form of a column's dates (strptime's codes), or several of them.
Forms = str | tuple[str, ...]


@dataclass(frozen=True)
class CellReader:
    """How the cells of a table are read: its NA strings, spellings and dates by column, and the
    decimal sign of its texts. ``seen`` collects the NA strings that were found.

    >>> reader = CellReader(NaStrings((("*", ("-9",)),)), decimal=",")
    >>> [part.tolist() for part in reader.numbers("age", pa.array([" 31,5", "-9,0", "x"]))]
    [[31.5, nan, nan], [False, False, True]]
    """

    na: NaStrings = NO_NA_STRINGS
    spellings: Spellings = NO_SPELLINGS
    dates: Mapping[str, Forms] = field(default_factory=dict)
    decimal: str = "."
    seen: SeenNaStrings | None = None

    def texts(self, name: str, column: pa.Array) -> tuple[pa.Array, np.ndarray]:
        """A column as texts without blanks around them and with one spelling of each value, null
        where a value is missing; and which cells are not text, (N,) bool."""
        text, wrong = as_text(column, name)
        plain = tidy(without_na(text, self.na.of(name), seen=self._seen(name)))
        return respelled(plain, self.spellings.of(name)), wrong

    def numbers(self, name: str, column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """A column of numbers or dates as float32 (N,), NaN where a value is missing or is no
        number; and which cells hold something else, (N,) bool."""
        form = self.dates.get(name)
        if form is not None:
            text, wrong = self.texts(name, column)
            values, strange = _read_days(text.to_pylist(), name, form)
            return values, wrong | strange
        column = _decoded(column)
        if _is_number(column.type):
            known = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
            known = numbers_without_na(known, self.na.of(name), self._seen(name))
            return _float32(known), np.zeros(len(column), dtype=bool)
        if not _is_text(column.type):
            raise BadInput(
                "not-numbers",
                f"column '{name}' holds {column.type}, and numbers are expected; list it in "
                f"categories or dates, or leave it out (exclude)",
            )
        text, wrong = as_text(column, name)
        plain = without_na(text, self.na.of(name), True, self.decimal, self._seen(name))
        plain = with_point(pc.utf8_trim_whitespace(tidy(plain)), self.decimal)
        right = pc.match_substring_regex(plain, NUMBER)
        values = _float32(pc.if_else(right, plain, pa.scalar(None, pa.string())))
        return values, wrong | ~right.fill_null(True).to_numpy(zero_copy_only=False)

    def _seen(self, name: str) -> tuple[SeenNaStrings, str] | None:
        return None if self.seen is None else (self.seen, name)


def as_text(column: pa.Array, name: str = "") -> tuple[pa.Array, np.ndarray]:
    """A column as texts, and which cells are bytes that are no text, (N,) bool; these are null."""
    if pa.types.is_dictionary(column.type):  # its values may be of a kind that cannot be taken
        column = column.dictionary.cast(pa.string()).take(column.indices)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("s"), safe=False)  # a form of dates has no more
    try:
        text = column.cast(pa.string())
        text.validate(full=True)
        return text, np.zeros(len(column), dtype=bool)
    except pa.ArrowInvalid:
        raw = pc.cast(column, pa.large_binary()).to_pylist()
    except pa.ArrowException:
        raise BadInput(
            "not-text",
            f"column '{name}' holds {column.type}, and texts are expected; leave it out (exclude)",
        ) from None
    texts = [None if value is None else _utf8(value) for value in raw]
    wrong = [text is None and value is not None for text, value in zip(texts, raw, strict=True)]
    return pa.array(texts, pa.string()), np.array(wrong, dtype=bool)


def _utf8(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_number(kind: pa.DataType) -> bool:
    tests = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_boolean,
        pa.types.is_null,
    )
    return any(test(kind) for test in tests)


def _is_text(kind: pa.DataType) -> bool:
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in tests)


def _float32(column: pa.Array) -> np.ndarray:
    values = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(values, dtype=np.float32)


def forms_in(forms: Forms) -> tuple[str, ...]:
    """The forms of a column, one or several."""
    return (forms,) if isinstance(forms, str) else forms


def refuse_two_readings(name: str, forms: Forms) -> None:
    """Refuse forms of a column that read the same text as different days.

    >>> refuse_two_readings("born", ("%d.%m.%Y", "%Y-%m-%d"))
    """
    for form, other in permutations(forms_in(forms), 2):
        text = _PROBE.strftime(form)
        try:
            read = (datetime.strptime(text, form), datetime.strptime(text, other))
        except ValueError:
            continue
        if read[0].date() != read[1].date():
            raise BadInput(
                "ambiguous-date",
                f"dates.{name} lists {form} and {other}, which read {text} as different days; "
                f"keep one of them, and write the dates of the other files in another form",
            )


#: A day whose day, month and year differ in every form.
_PROBE = datetime(2003, 2, 1)


def days(name: str, cells: Sequence[Any], form: Forms) -> np.ndarray:
    """Dates of a form (strptime's codes), or of the first of several that fits, as days since
    1970-01-01, (N,) float32, NaN where one is missing.

    >>> days("born", ["02.01.1970", None, "1970-01-03"], ("%d.%m.%Y", "%Y-%m-%d")).tolist()
    [1.0, nan, 2.0]
    """
    out = np.full(len(cells), np.nan, dtype=np.float32)
    first, forms = datetime(1970, 1, 1), forms_in(form)
    for row, value in enumerate(cells):
        if value is None:
            continue
        try:
            when = value if isinstance(value, datetime) else _when(str(value), forms)
        except ValueError:
            raise BadInput(
                "not-a-date",
                f"column '{name}' holds '{value}', which is no date of the form "
                f"{' or '.join(forms)}; correct the value, or add its form to dates.{name}",
            ) from None
        out[row] = (when.replace(tzinfo=None) - first).total_seconds() / 86400
    return out


#: How a typed time of a Parquet file or a data frame is written; it needs no form.
_TYPED = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?")


def _when(text: str, forms: tuple[str, ...]) -> datetime:
    """The day and time of the first form that fits."""
    if _TYPED.fullmatch(text):
        return datetime.fromisoformat(text)
    for form in forms[:-1]:
        try:
            return datetime.strptime(text, form)
        except ValueError:
            continue
    return datetime.strptime(text, forms[-1])


def _read_days(
    cells: Sequence[str | None], name: str, form: Forms
) -> tuple[np.ndarray, np.ndarray]:
    """Days since 1970, NaN where there is no date, and which cells hold something else."""
    wrong = np.zeros(len(cells), dtype=bool)
    try:
        return days(name, cells, form), wrong
    except BadInput:  # rare, so cells are read one by one only then
        pass
    values = np.full(len(cells), np.nan, dtype=np.float32)
    for row, cell in enumerate(cells):
        try:
            values[row] = days(name, [cell], form)[0]
        except BadInput:
            wrong[row] = True
    return values, wrong
