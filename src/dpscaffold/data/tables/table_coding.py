"""The columns of a table as features: numbers as they are, categories one-hot, missing values by a
rule."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from itertools import permutations
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpscaffold.data.tables.markers import BLANKS, Markers, is_gap, number_gaps
from dpscaffold.data.tables.spellings import Columns, Spellings
from dpscaffold.errors import BadInput, nearest

if TYPE_CHECKING:
    from dpscaffold.privacy import Cost, Protection


#: What a statement repeats where nobody said beforehand which classes there are.
LABELS_READ_OFF = "The list of labels was read off the data: outside the guarantee."


@dataclass(frozen=True)
class Coding:
    """Raw rows (N, columns) of numbers and texts ↦ features (N, d) float32.

    ``columns`` are the raw columns in order. Those in ``categories`` (name, values) become one
    feature for each value, after all numbers; the rest are numbers. ``missing`` is the number that
    stands for a missing one (a missing category is zero everywhere), or ``"refuse"`` or ``"drop"``:
    then a row that lacks a value cannot be coded. ``unseen`` says what a category is that is not
    among the values: refused, or zero everywhere. ``read_off`` are the categorical columns whose
    values were read off private records.

    ``dates`` (name, form) are read as days since 1970-01-01. Columns may have rules of their own:
    ``fills`` (name, number) stands for a missing number, ``indicators`` add a feature that is 1
    where the number is missing (after all numbers), and ``own`` are categorical columns whose
    absence is one category more, the last. ``gaps`` (name, markers) are the texts and numbers that
    stand for a missing value in a column, label and user among them; ``values`` (name, (value,
    spellings)) are the other spellings of values, of the label, too. A file may lack the columns
    ``absent``: their values are missing there.

    A cell that is text is read as a file's would be, to the last bit.

    >>> coding = Coding(("age", "sex"), (("sex", ("f", "m")),))
    >>> coding(np.array([[31, "m"], ["58", "f"]], dtype=object)).tolist()
    [[31.0, 0.0, 1.0], [58.0, 1.0, 0.0]]
    """

    columns: tuple[str, ...]
    categories: tuple[tuple[str, tuple[str, ...]], ...] = ()
    missing: Literal["refuse", "drop"] | float = "refuse"
    read_off: tuple[str, ...] = ()
    unseen: Literal["refuse", "zero"] = "refuse"
    dates: tuple[tuple[str, Forms], ...] = ()
    fills: tuple[tuple[str, float], ...] = ()
    indicators: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    gaps: tuple[tuple[str, tuple[str, ...]], ...] = ()
    values: Columns = ()
    absent: tuple[str, ...] = ()
    cost: ClassVar[Cost | None] = None

    def __post_init__(self) -> None:
        _ = self.protection, self.sentence  # said once, where it is made

    @cached_property
    def protection(self) -> Protection:
        """Whether private records decided which features there are."""
        if self.read_off:
            return "unprotected"
        return "public" if self.categories else "none needed"

    @cached_property
    def sentence(self) -> str:
        """What was done, for people."""
        if self.read_off:
            names = " and ".join(f"'{name}'" for name in self.read_off)
            return (
                f"The categories of column{'s' if len(self.read_off) > 1 else ''} {names} were "
                f"read off the data: outside the guarantee."
            )
        if self.categories:
            return "Columns were coded by categories given beforehand (no private record was read)."
        return "Columns were read as numbers, record by record (no fit)."

    @property
    def width(self) -> int:
        """How many raw columns it takes."""
        return len(self.columns)

    @property
    def features(self) -> int:
        """d, how many features it makes: numbers, indicators, then the values of categories."""
        coded = sum(len(values) + (name in self.own) for name, values in self.categories)
        return len(self.numbers) + len(self.indicators) + coded

    @property
    def markers(self) -> Markers:
        """What stands for a missing value, by column."""
        return Markers(self.gaps)

    @property
    def spellings(self) -> Spellings:
        """The other spellings of values, by column."""
        return Spellings(self.values)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns that are numbers."""
        coded = {name for name, _ in self.categories}
        return tuple(name for name in self.columns if name not in coded)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[1] != len(self.columns):
            raise BadInput(
                f"rows have {rows.shape[1]} columns, and {len(self.columns)} are expected: "
                f"{', '.join(self.columns[:8])}{', …' if len(self.columns) > 8 else ''}"
            )
        at = {name: j for j, name in enumerate(self.columns)}
        read = {name: self._read(name, rows[:, at[name]]) for name in self.numbers}
        parts = [self._filled(name, read[name])[:, None] for name in self.numbers]
        parts += [np.isnan(read[name])[:, None].astype(np.float32) for name in self.indicators]
        parts += [
            self._one_hot(name, values, rows[:, at[name]]) for name, values in self.categories
        ]
        return np.concatenate(parts, axis=1)

    def _read(self, name: str, column: np.ndarray) -> np.ndarray:
        """A column as numbers, NaN where one is missing."""
        form = dict(self.dates).get(name)
        if form is not None:
            return days(name, self._cells(name, column, number=False), form)
        if column.dtype.kind in "OUS":
            return _numbers(name, self._cells(name, column, number=True))
        values = column.astype(np.float32)
        markers = self.markers.of(name)
        return np.where(number_gaps(column, markers), np.float32(np.nan), values)

    def _cells(self, name: str, column: np.ndarray, number: bool) -> list[Any]:
        """Raw values, None where one is missing or a marker of its column."""
        markers, cells = self.markers.of(name), [_cell(value) for value in column]
        if not markers:
            return cells
        return [None if cell is None or is_gap(cell, markers, number) else cell for cell in cells]

    def _filled(self, name: str, values: np.ndarray) -> np.ndarray:
        gone = np.isnan(values)
        if not gone.any():
            return values
        fill = dict(self.fills).get(name, self.missing)
        if isinstance(fill, str):
            self._refuse(name, int(np.flatnonzero(gone)[0]))
        return np.where(gone, np.float32(fill), values)

    def _one_hot(self, name: str, values: tuple[str, ...], column: np.ndarray) -> np.ndarray:
        index = {value.strip(BLANKS): i for i, value in reversed([*enumerate(values)])}
        other = self.spellings.of(name)
        own = name in self.own
        out = np.zeros((len(column), len(values) + own), dtype=np.float32)
        for row, cell in enumerate(self._cells(name, column, number=False)):
            text = _category(cell, index)
            text = text if text is None else other.get(text, text)
            if text is None:
                if own:
                    out[row, -1] = 1.0
                elif isinstance(self.missing, str):
                    self._refuse(name, row)
            elif text not in index and self.unseen == "zero":
                continue
            elif text not in index:
                raise BadInput(
                    f"column '{name}' holds '{text}'{nearest(text, values)} in row {row}, which "
                    f"the training never saw; its categories are "
                    f"{', '.join(values[:12])}{', …' if len(values) > 12 else ''}"
                )
            else:
                out[row, index[text]] = 1.0
        return out

    def _refuse(self, name: str, row: int) -> None:
        raise BadInput(
            f"column '{name}' lacks a value in row {row}, and the data were read with missing = "
            f"'{self.missing}'; leave such rows out"
        )


#: How a file says that one of several labels holds, or does not.
HOLDS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


def held_labels(cells: Sequence[str], name: str) -> np.ndarray:
    """Whether a label holds, (N,) bool, from the texts of its column: 0 and 1, or true and false.

    >>> held_labels(["1", "0", "True"], "fever").tolist()
    [True, False, True]
    """
    known: dict[str, bool] = {}
    for text in dict.fromkeys(cells):
        found = HOLDS.get(text.lower())
        if found is None:
            raise BadInput(
                f"label column '{name}' holds '{text}'; where there are several labels, each "
                f"column holds 1 (or true) where its label holds and else 0 (or false)"
            )
        known[text] = found
    return np.array([known[text] for text in cells], dtype=bool)


#: The form of a column's dates (strptime's codes), or several of them.
Forms = str | tuple[str, ...]


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
                f"dates.{name} lists {form} and {other}, which read {text} as different days; "
                f"keep one of them, and write the dates of the other files in another form"
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
                f"column '{name}' holds '{value}', which is no date of the form "
                f"{' or '.join(forms)}; correct the value, or add its form to dates.{name}"
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


@cache
def _nulls() -> frozenset[str]:
    """The texts that stand for a missing value in a file."""
    import pyarrow.csv

    return frozenset(pyarrow.csv.ConvertOptions().null_values)


def _cell(value: Any) -> Any:
    """A raw value as text, number, or None where it is missing."""
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str):
        text = value.strip(BLANKS)
        return None if text in _nulls() else text
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return None
    return value


def _numbers(name: str, cells: Sequence[Any]) -> np.ndarray:
    """Cells as float32, NaN where they are missing; texts are read as a file's are."""
    out = np.full(len(cells), np.nan, dtype=np.float32)
    texts = [row for row, value in enumerate(cells) if isinstance(value, str)]
    for row, value in enumerate(cells):
        if value is not None and not isinstance(value, str):
            try:
                out[row] = value
            except (TypeError, ValueError):
                raise BadInput(
                    f"column '{name}' holds {value!r}, and numbers are expected"
                ) from None
    if texts:
        import pyarrow as pa

        try:
            read = pa.array([cells[row] for row in texts], pa.string()).cast(pa.float32())
        except pa.ArrowInvalid:
            wrong = next(cells[row] for row in texts if not _is_number(cells[row]))
            raise BadInput(f"column '{name}' holds '{wrong}', and numbers are expected") from None
        out[texts] = read.to_numpy(zero_copy_only=False)
    return out


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _category(value: Any, known: dict[str, int]) -> str | None:
    """A value as the text that a file holds for it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    text = str(value)
    return f"{value:g}" if text not in known and isinstance(value, float | np.floating) else text


def by_value(text: str) -> tuple[int, float, str]:
    """The order of classes, categories and users: numbers by value, then texts by letter.

    >>> sorted(["b", "10", "9"], key=by_value)
    ['9', '10', 'b']
    """
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
