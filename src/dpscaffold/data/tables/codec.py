"""The table codec: columns of a table as features and labels, for everyone who reads a table.

Training (in memory or streamed), prediction, evaluation, exported modules and deployed sites use
these functions, so a table means the same to all of them. There are two halves:
:func:`read_cells` turns Arrow columns into one number per cell (a number, days since 1970, or the
number of a category), and :class:`FeatureLayout` turns these into features; an exported module
contains the second half. A policy decides what happens to a record with a cell that has no number:
training and arrays refuse it (:class:`RefuseRows`), prediction marks it (:class:`MarkRows`), and at
a site it counts and contributes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpscaffold.data.tables.cells import CellReader, Columns, Forms, Spellings, forms_in
from dpscaffold.data.tables.missing import BLANKS, NaStrings
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation.labels import pack
from dpscaffold.federation.schema import Target

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    from dpscaffold.data.tables.arrow import pa, pc

if TYPE_CHECKING:
    from torch import Tensor

    from dpscaffold.privacy import Cost, Protection


#: What a statement repeats where nobody said beforehand which classes there are.
#: How many columns a statement names in one sentence.
MOST_NAMED = 3
LABELS_READ = "The list of labels was read from the data."
#: How a file says that one of several labels holds, or does not.
HOLDS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False}


@dataclass(frozen=True)
class Labels:
    """Labels (N,) as a target's numbers, and which rows (N,) bool have one; the others are 0.
    ``problem`` says what is wrong with the first of them."""

    values: np.ndarray
    known: np.ndarray
    problem: str = ""

    def require(self) -> np.ndarray:
        """The labels; refused where a row has none."""
        if self.problem:
            raise BadInput("bad-labels", self.problem)
        return self.values


def read_labels(target: Target, columns: Mapping[str, pa.Array], reader: CellReader) -> Labels:
    """The labels in these columns: one of a class or number, several of a target of labels."""
    if target.kind == "labels":
        found = [_held(name, column, reader) for name, column in columns.items()]
        values = pack(np.stack([each.values for each in found], axis=1))
        known = np.logical_and.reduce([each.known for each in found])
        problem = next((each.problem for each in found if each.problem), "")
        return Labels(np.where(known, values, 0), known, problem)
    ((name, column),) = columns.items()
    if target.kind == "number":
        values, strange = reader.numbers(name, column)
        said = ", and numbers are expected"
        missing, strange = np.isnan(values) & ~strange, strange | np.isinf(values)
        return _labels(values, missing, strange, name, column, said)
    text, wrong = reader.texts(name, column)
    codes, gone = index_of(text, target.classes)
    said = f", which is no class of the model; its classes are {', '.join(target.classes[:10])}"
    return _labels(codes, gone & ~wrong, wrong | ((codes < 0) & ~gone), name, text, said)


def _held(name: str, column: pa.Array, reader: CellReader) -> Labels:
    """Whether one of several labels holds, (N,) bool."""
    text, wrong = reader.texts(name, column)
    codes, gone = index_of(pc.utf8_lower(text), tuple(HOLDS))
    said = (
        "; where there are several labels, each column holds 1 (or true) where its label holds "
        "and else 0 (or false)"
    )
    values, strange = np.array([*HOLDS.values(), False])[codes], wrong | ((codes < 0) & ~gone)
    return _labels(values, gone & ~wrong, strange, name, text, said, "label column")


def _labels(
    values: np.ndarray,
    missing: np.ndarray,
    strange: np.ndarray,
    name: str,
    cells: pa.Array,
    said: str,
    what: str = "column",
) -> Labels:
    known, problem = ~(missing | strange), ""
    if missing.any():
        problem = f"column '{name}' lacks a value; leave such rows out"
    elif strange.any():
        cell = cells[int(np.flatnonzero(strange)[0])].as_py()
        problem = f"{what} '{name}' holds '{cell}'{said}"
    return Labels(np.where(known, values, np.zeros((), values.dtype)), known, problem)


def index_of(text: pa.Array, known: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Which of the known values each text is, -1 for none of them, (N,) int64; and where there is
    no text, (N,) bool.

    >>> [part.tolist() for part in index_of(pa.array(["m", "x", None]), ("f", "m"))]
    [[1, -1, -1], [False, False, True]]
    """
    plain = pa.array([value.strip(BLANKS) for value in known], pa.string())
    found = pc.index_in(text, plain).fill_null(-1).to_numpy(zero_copy_only=False)
    return found.astype(np.int64), text.is_null().to_numpy(zero_copy_only=False)


def by_value(text: str) -> tuple[int, float, str]:
    """The order of classes, categories and users: numbers by value, then texts by letter.

    >>> sorted(["b", "10", "9"], key=by_value)
    ['9', '10', 'b']
    """
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)


@dataclass(frozen=True)
class Coding:
    """Raw rows (N, columns) of numbers and texts ↦ features (N, d) float32.

    ``columns`` are the raw columns in order. Those in ``categories`` (name, values) become one
    feature for each value, after all numbers; the rest are numbers. ``missing`` is the number that
    represents a missing one (a missing category is zero everywhere), or ``"refuse"`` or ``"drop"``:
    then a row that lacks a value cannot be coded. ``unseen`` says what a category is that is not
    among the values: refused, or zero everywhere. ``read_off`` are the categorical columns whose
    values were computed from private records.

    ``dates`` (name, form) are read as days since 1970-01-01. Columns may have rules of their own:
    ``fills`` (name, number) represents a missing number, ``indicators`` add a feature that is 1
    where the number is missing (after all numbers), and ``own`` are categorical columns whose
    absence is one category more, the last. ``na_values`` (name, NA strings) are texts and numbers
    that represent a missing value in a column, label and user among them; ``values`` (name, (value,
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
    na_values: tuple[tuple[str, tuple[str, ...]], ...] = ()
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
            names = " and ".join(f"'{name}'" for name in self.read_off[:MOST_NAMED])
            left = len(self.read_off) - MOST_NAMED
            more = f" and {left} more" if left > 0 else ""
            several = "s" if len(self.read_off) > 1 else ""
            return f"The categories of column{several} {names}{more} were read from the data."
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

    def reader(self, decimal: str = ".") -> CellReader:
        """How the cells of its columns are read, the label's among them."""
        return CellReader(
            NaStrings(self.na_values), Spellings(self.values), dict(self.dates), decimal
        )

    def fill_of(self, name: str) -> float | None:
        """The number for a missing value of a column; None where such a record has no features.
        For a category any number means zeros."""
        fill = dict(self.fills).get(name, self.missing)
        return None if isinstance(fill, str) else float(fill)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The columns that are numbers."""
        coded = {name for name, _ in self.categories}
        return tuple(name for name in self.columns if name not in coded)

    @cached_property
    def layout(self) -> FeatureLayout:
        """Where the features of each column are."""
        at = {name: j for j, name in enumerate(self.columns)}
        fills = {name: self.fill_of(name) for name in self.columns}
        return FeatureLayout(
            tuple(at[name] for name in self.numbers),
            tuple(math.nan if (f := fills[name]) is None else f for name in self.numbers),
            tuple(at[name] for name in self.indicators),
            tuple(
                OneHot(at[name], len(values), name in self.own, fills[name] is not None)
                for name, values in self.categories
            ),
            self.unseen == "zero",
        )

    def encode(
        self, columns: Mapping[str, pa.Array], policy: CellPolicy, reader: CellReader | None = None
    ) -> np.ndarray:
        """Columns as features (N, d) float32; rows with a problem have some NaN or zeros."""
        return self.layout.encode(read_cells(self, columns, policy, reader))

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        if rows.shape[1] != len(self.columns):
            raise BadInput(
                "wrong-column-count",
                f"rows have {rows.shape[1]} columns, and {len(self.columns)} are expected: "
                f"{', '.join(self.columns[:8])}{', …' if len(self.columns) > 8 else ''}",
            )
        known = dict(self.categories)
        columns = {
            name: _as_arrow(rows[:, j], name, known.get(name), name in dict(self.dates))
            for j, name in enumerate(self.columns)
        }
        return self.encode(columns, RefuseRows(f"'{self.missing}'"))


@dataclass(frozen=True)
class OneHot:
    """A categorical column: its place, how many values it has, whether a missing value is one more
    (``own``), and whether a record without it has features (``filled``)."""

    column: int
    values: int
    own: bool
    filled: bool


@dataclass(frozen=True)
class FeatureLayout:
    """Cells (N, columns) as numbers ↦ features (N, d): numbers, indicators, then categories.

    A categorical cell holds the number of its category; NaN is a missing value, and any other
    number an unknown category. A record that has no features gets NaN.
    """

    numbers: tuple[int, ...]
    fills: tuple[float, ...]
    indicators: tuple[int, ...]
    categories: tuple[OneHot, ...]
    lenient: bool

    def encode(self, cells: np.ndarray) -> np.ndarray:
        """The features of cells (N, columns) float32."""
        import torch

        found = self.features(torch.from_numpy(cells), torch.tensor(self.fills))
        return found.numpy()

    def features(self, cells: Tensor, fills: Tensor) -> Tensor:
        """The features of cells; ``fills`` are those of the layout, as a tensor."""
        import torch

        parts = []
        if self.numbers:
            numbers = cells[:, list(self.numbers)]
            parts.append(torch.where(torch.isnan(numbers), fills.to(cells.dtype), numbers))
        if self.indicators:
            parts.append(torch.isnan(cells[:, list(self.indicators)]).to(cells.dtype))
        parts += [self._one_hot(cells, category) for category in self.categories]
        return torch.cat(parts, dim=1)

    def _one_hot(self, cells: Tensor, category: OneHot) -> Tensor:
        import torch

        codes, count = cells[:, category.column : category.column + 1], category.values
        if category.own:
            codes = torch.where(torch.isnan(codes), float(count), codes)
            count = count + 1
        one = (codes == torch.arange(count, dtype=cells.dtype)).to(cells.dtype)
        if self.lenient and category.filled:
            return one
        fine = one.sum(dim=1, keepdim=True) > 0
        if self.lenient:
            fine = fine | ~torch.isnan(codes)
        if category.filled:
            fine = fine | torch.isnan(codes)
        return torch.where(fine, one, torch.full_like(one, math.nan))


@dataclass(frozen=True)
class CellProblem:
    """Cells of a column that have no number: in which ``rows`` (N,) bool they are, what is wrong,
    and which ``form`` of dates or ``known`` categories were expected."""

    column: str
    kind: Literal["missing", "unreadable", "infinite", "unseen"]
    rows: np.ndarray
    cells: pa.Array
    form: Forms | None = None
    known: tuple[str, ...] = ()

    @property
    def first(self) -> int:
        """The first such row."""
        return int(np.flatnonzero(self.rows)[0])

    @property
    def text(self) -> str:
        """What its cell holds."""
        return str(self.cells[self.first].as_py())

    def unseen(self) -> str:
        """Which categories there are."""
        more = ", …" if len(self.known) > 12 else ""
        return (
            f"which the training never saw; its categories are {', '.join(self.known[:12])}{more}"
        )

    def unreadable(self) -> str:
        """What was expected in place of a text."""
        if self.form is None:
            return f"and {'texts' if self.known else 'numbers'} are expected"
        return (
            f"which is no date of the form {' or '.join(forms_in(self.form))}; correct the value, "
            f"or add its form to dates.{self.column}"
        )


#: Decides what happens to the records of a problem.
CellPolicy = Callable[[CellProblem], None]


class RefuseRows:
    """The policy for arrays and data frames: the first problem refuses all rows. ``rule`` is the
    rule for missing values that the message names."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    def __call__(self, problem: CellProblem) -> None:
        name, row = problem.column, problem.first
        if problem.kind == "missing":
            raise BadInput(
                "missing-value",
                f"column '{name}' lacks a value in row {row}, and the data were read with missing "
                f"= {self.rule}; leave such rows out",
            )
        if problem.kind == "unseen":
            raise BadInput(
                "unknown-category",
                f"column '{name}' holds '{problem.text}'{nearest(problem.text, problem.known)} in "
                f"row {row}, {problem.unseen()}",
            )
        if problem.kind == "unreadable":
            raise BadInput(
                "unreadable-value",
                f"column '{name}' holds '{problem.text}', {problem.unreadable()}",
            )


class MarkRows:
    """The policy for predictions: rows with a problem are marked, and the first is explained.

    ``complete`` (N,) says which rows have features, ``reason`` why the first of the others has
    none; ``first`` is the number of the first row.
    """

    def __init__(self, rows: int, first: int) -> None:
        self.complete = np.ones(rows, dtype=bool)
        self.first, self.reason = first, ""
        self._earliest = rows

    def __call__(self, problem: CellProblem) -> None:
        self.complete &= ~problem.rows
        if problem.first < self._earliest:
            self._earliest = problem.first
            self.reason = f"row {self.first + problem.first} {_why(problem)}"


def _why(problem: CellProblem) -> str:
    name = problem.column
    if problem.kind == "missing":
        return f"lacks a value of column '{name}'"
    if problem.kind == "infinite":
        return f"has no finite number in column '{name}'"
    if problem.kind == "unseen":
        near = nearest(problem.text, problem.known)
        return f"holds '{problem.text}'{near} in column '{name}', {problem.unseen()}"
    expected = "a number"
    if problem.form is not None:
        expected = f"a date of the form {' or '.join(forms_in(problem.form))}"
    return f"holds '{problem.text[:40]}' in column '{name}', and {expected} is expected"


def read_cells(
    coding: Coding,
    columns: Mapping[str, pa.Array],
    policy: CellPolicy,
    reader: CellReader | None = None,
) -> np.ndarray:
    """Columns as one number per cell, (N, columns) float32: a number, days, or the number of a
    category (-1 if it is unknown); NaN where a value is missing. ``policy`` learns of every cell
    that leaves its record without features."""
    reader = reader or coding.reader()
    known, found = dict(coding.categories), []
    for name in coding.columns:
        column = columns[name]
        if name in known:
            found.append(_categories(coding, reader, name, known[name], column, policy))
        else:
            found.append(_numbers(coding, reader, name, column, policy))
    return np.stack(found, axis=1)


def _numbers(
    coding: Coding, reader: CellReader, name: str, column: pa.Array, policy: CellPolicy
) -> np.ndarray:
    values, wrong = reader.numbers(name, column)
    report(policy, name, "unreadable", wrong, column, reader.dates.get(name))
    report(policy, name, "infinite", np.isinf(values), column)
    if coding.fill_of(name) is None:
        report(policy, name, "missing", np.isnan(values) & ~wrong, column)
    return values


def _categories(
    coding: Coding,
    reader: CellReader,
    name: str,
    known: tuple[str, ...],
    column: pa.Array,
    policy: CellPolicy,
) -> np.ndarray:
    text, wrong = reader.texts(name, column)
    codes, gone = index_of(text, known)
    report(policy, name, "unreadable", wrong, column, known=known)
    if coding.unseen == "refuse":
        report(policy, name, "unseen", (codes < 0) & ~gone & ~wrong, text, known=known)
    if name not in coding.own and coding.fill_of(name) is None:
        report(policy, name, "missing", gone & ~wrong, column)
    return np.where(gone, np.float32(np.nan), codes.astype(np.float32))


def report(
    policy: CellPolicy,
    name: str,
    kind: Literal["missing", "unreadable", "infinite", "unseen"],
    rows: np.ndarray,
    cells: pa.Array,
    form: Forms | None = None,
    known: tuple[str, ...] = (),
) -> None:
    """Tell a policy of cells that have no number, if there are any."""
    if rows.any():
        policy(CellProblem(name, kind, rows, cells, form, known))


def _as_arrow(
    column: np.ndarray, name: str, known: tuple[str, ...] | None, dated: bool
) -> pa.Array:
    """A column of an array as Arrow holds it; cells of several kinds become the texts that a file
    holds for them."""
    if column.dtype.kind in "fiub" and known is None and not dated:
        return pa.array(column)
    cells = [_plain_cell(value) for value in column]
    if known is not None:
        values = {value.strip(BLANKS) for value in known}
        return pa.array([_category(cell, values) for cell in cells], pa.string())
    if dated:
        return pa.array([None if cell is None else _date_text(cell) for cell in cells], pa.string())
    if not any(isinstance(cell, str) for cell in cells):
        single = all(cell is None or isinstance(cell, np.float32) for cell in cells)
        kind = pa.float32() if single else pa.float64()
        try:
            return pa.array([None if cell is None else float(cell) for cell in cells], kind)
        except (TypeError, ValueError):
            pass
    return pa.array([_number_text(cell, name) for cell in cells], pa.string())


def _plain_cell(value: Any) -> Any:
    """A raw value, None where it is missing."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        return None
    return value


def _date_text(value: Any) -> str:
    """A date as a text; a time of any zone as it shows."""
    return str(value.replace(tzinfo=None) if isinstance(value, datetime) else value)


def _number_text(value: Any, name: str) -> str | None:
    """A number as a text that is read as the same float32."""
    if value is None or isinstance(value, str):
        return value
    try:
        return str(np.float32(value))
    except (TypeError, ValueError):
        raise BadInput(
            "not-a-number", f"column '{name}' holds {value!r}, and numbers are expected"
        ) from None


def _category(value: Any, known: set[str]) -> str | None:
    """A value as the text that a file holds for it."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    text = str(value)
    return f"{value:g}" if text not in known and isinstance(value, float | np.floating) else text
