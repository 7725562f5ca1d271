"""Raw rows of a file, batch by batch, as the features that a trained model takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute

from dpscaffold.data.tables.columns import (
    NotNumbers,
    NotText,
    column_names,
    read_batches,
    require_column,
)
from dpscaffold.data.tables.files import UNKNOWN, Format, TableFile, opened
from dpscaffold.data.tables.marked import NUMBER, pointed, respelled, tidy, without_markers
from dpscaffold.data.tables.markers import BLANKS, Markers
from dpscaffold.data.tables.table_coding import Coding, Forms, days, forms_in
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation.schema import Prepared

#: The kind of file by the end of its name.
KINDS: dict[str, Format] = {
    ".csv": "csv",
    ".txt": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}


@dataclass(frozen=True)
class RowBatch:
    """Some rows of a file: the number of the first, features (N, d) float32 of those that are
    complete, which ones are (N,), other columns as text, and why the first of those that are not
    complete has no features (empty where all are). ``decimal`` is the sign before decimals in
    these texts."""

    first: int
    features: np.ndarray
    complete: np.ndarray
    others: pa.RecordBatch
    gap: str = ""
    decimal: str = "."


def file_kind(path: Path) -> Format:
    """``csv`` or ``parquet``.

    >>> file_kind(Path("new.parquet"))
    'parquet'
    """
    if path.is_dir():
        raise BadInput(f"{path} is a folder; name one of its files")
    found = KINDS.get(path.suffix.lower())
    if found is None:
        raise BadInput(f"{path} is neither a .csv nor a .parquet file; convert it to one")
    return found


def read_kind(path: Path) -> Format:
    """``csv`` or ``parquet``, of a file that is to be read: what is not there cannot be
    converted, and may be a folder whose name was mistyped."""
    if path.suffix.lower() not in KINDS and not path.exists():
        start = "" if path.is_absolute() else f"; relative paths start from {Path.cwd()}"
        raise BadInput(f"{path} cannot be read: there is no such file or folder{start}")
    return file_kind(path)


def file_columns(path: Path | TableFile) -> list[str]:
    """The columns of a CSV or Parquet file, in order."""
    file = _opened(path)
    with _decoding(file):
        return column_names(file)


def _opened(path: Path | TableFile) -> TableFile:
    return (
        path if isinstance(path, TableFile) else opened(TableFile(path, read_kind(path), UNKNOWN))
    )


def coding_of(preparation: Sequence[Prepared], columns: Sequence[str]) -> Coding:
    """How the columns of a file become numbers: as in training, or plainly where the training
    data were arrays."""
    found = next((step for step in preparation if isinstance(step, Coding)), None)
    return Coding(tuple(columns)) if found is None else found


def require_columns(file: TableFile, coding: Coding, others: Sequence[str]) -> list[str]:
    """The columns of a file, which must have those of the coding and ``others``; among them those
    that it may lack."""
    names = file_columns(file)
    for name in coding.columns:
        if name not in coding.absent:
            require_column(file.path, name, names, "feature")
    for name in others:
        require_column(file.path, name, names, "asked-for")
    return [*names, *(name for name in coding.absent if name not in names)]


def raw_parts(
    path: Path | TableFile,
    preparation: Sequence[Prepared],
    columns: Sequence[str],
    others: Sequence[str] = (),
) -> Iterator[RowBatch]:
    """The rows of a file after the preparation. Columns are found by name, whatever their order;
    ``others`` are handed on as they stand. Memory is bounded by a batch."""
    file = _opened(path)
    coding = coding_of(preparation, columns)
    names = require_columns(file, coding, others)
    rest = [step for step in preparation if not isinstance(step, Coding)]
    # A column that is kept and is a number too is read as text: nothing of it is rounded away.
    dated = [name for name, _ in coding.dates]
    numbers = [name for name in coding.numbers if name not in others and name not in dated]
    texts = list(dict.fromkeys([*(name for name, _ in coding.categories), *others, *dated]))
    texts += [name for name in coding.numbers if name in others and name not in texts]
    # Of texts only what is coded goes without markers: the others stay as they stand.
    lacks = tuple(name for name in coding.absent if name not in file_columns(file))
    file = replace(file, gaps=Markers(coding.markers.among(numbers)), lacks=lacks)
    first = 0
    for batch in _batches(file, numbers, texts, names):
        rows, gaps = code_batch(coding, batch, first, file.decimal)
        rows, complete = rows[gaps.complete], gaps.complete
        for step in rest:
            rows = step(rows)
        features = rows.astype(np.float32, copy=False)
        yield RowBatch(
            first, features, complete, batch.select(list(others)), gaps.said, file.decimal
        )
        first += batch.num_rows


def _batches(
    file: TableFile, numbers: list[str], texts: list[str], names: list[str]
) -> Iterator[pa.RecordBatch]:
    """Batches of a file. From the first value on that is no number, numbers are read as texts, so
    that single rows can be left without an answer."""
    done = 0
    with _decoding(file):
        try:
            for batch in read_batches(file, numbers, texts, names):
                yield batch
                done += batch.num_rows
            return
        except NotNumbers:
            pass
        for batch in read_batches(file, [], [*texts, *numbers], names):
            past = min(done, batch.num_rows)
            done -= past
            if past < batch.num_rows:
                yield batch.slice(past)


@contextmanager
def _decoding(file: TableFile) -> Iterator[None]:
    """Encodings of new rows are found, not named: advice to name one would lead nowhere."""
    try:
        yield
    except NotText:
        raise BadInput(
            f"{file.path} cannot be read as {file.dialect.encoding}, which it seemed to be; save "
            f"it as UTF-8"
        ) from None


class Gaps:
    """Which rows of a batch cannot be coded, and in words why the first of them cannot."""

    def __init__(self, rows: int, first: int) -> None:
        self.complete = np.ones(rows, dtype=bool)
        self.first, self.said = first, ""
        self._earliest = rows

    def add(self, wrong: np.ndarray, why: Callable[[int], str]) -> None:
        """Leave rows out; ``why`` ends the sentence "row N …" for the first, by its place."""
        if not wrong.any():
            return
        self.complete &= ~wrong
        row = int(np.flatnonzero(wrong)[0])
        if row < self._earliest:
            self._earliest, self.said = row, f"row {self.first + row} {why(row)}"


def code_batch(
    coding: Coding, batch: pa.RecordBatch, first: int, decimal: str = "."
) -> tuple[np.ndarray, Gaps]:
    """A batch as coded rows (N, d) float32, and which rows cannot be coded.

    Records that the training left out or refused (a missing value, a text where a number or a date
    should be, a category that it never saw, infinity) have no features here: whoever predicts
    leaves them without an answer.
    """
    count = batch.num_rows
    rows = np.zeros((count, coding.features), dtype=np.float32)
    gaps = Gaps(count, first)
    fills, forms, at = dict(coding.fills), dict(coding.dates), len(coding.numbers)
    for j, name in enumerate(coding.numbers):
        form = forms.get(name)
        column = unmarked(coding, batch.column(name), name, form is None, decimal)
        values, wrong = _numbers(column, name, form, decimal)
        what = "a number"
        if form is not None:
            what = f"a date of the form {' or '.join(forms_in(form))}"
        gaps.add(wrong, partial(_misread, column, name, what))
        gaps.add(np.isinf(values), _says(f"has no finite number in column '{name}'"))
        gone = np.isnan(values) & ~wrong
        if gone.any():
            if name not in fills and isinstance(coding.missing, str):
                gaps.add(gone, _says(f"lacks a value of column '{name}'"))
            values = np.where(gone, np.float32(fills.get(name, _fill(coding))), values)
        rows[:, j] = values
        if name in coding.indicators:
            rows[:, at + coding.indicators.index(name)] = gone
    at += len(coding.indicators)
    for name, known in coding.categories:
        column = unmarked(coding, batch.column(name), name)
        plain = pa.array([value.strip(BLANKS) for value in known], pa.string())
        index = pa.compute.index_in(column, plain)
        found = index.fill_null(-1).to_numpy(zero_copy_only=False)
        gone = column.is_null().to_numpy(zero_copy_only=False)
        if coding.unseen == "refuse":
            gaps.add((found < 0) & ~gone, partial(_never_seen, column, name, known))
        rows[:, at : at + len(known)] = found[:, None] == np.arange(len(known))
        at += len(known)
        if name in coding.own:
            rows[:, at] = gone
            at += 1
        elif isinstance(coding.missing, str):
            gaps.add(gone, _says(f"lacks a value of column '{name}'"))
    return rows, gaps


def unmarked(
    coding: Coding, column: pa.Array, name: str, number: bool = False, decimal: str = "."
) -> pa.Array:
    """A column of texts without blanks around them, with nulls where the training read a gap and
    one spelling of each value; numbers, which were read without them, as they are."""
    if not pa.types.is_string(column.type):
        return column
    plain = tidy(without_markers(column, coding.markers.of(name), number, decimal))
    return respelled(plain, coding.spellings.of(name))


def _numbers(
    column: pa.Array, name: str, form: Forms | None, decimal: str
) -> tuple[np.ndarray, np.ndarray]:
    """The values (N,) float32, NaN where one is missing, and which cells hold something else."""
    if form is not None:
        return _dates(column.to_pylist(), name, form)
    if not pa.types.is_string(column.type):
        return column.to_numpy(zero_copy_only=False), np.zeros(len(column), dtype=bool)
    text = pointed(pa.compute.utf8_trim_whitespace(column), decimal)
    right = pa.compute.match_substring_regex(text, NUMBER)
    values = pa.compute.if_else(right, text, pa.scalar(None, pa.string())).cast(pa.float32())
    return values.to_numpy(zero_copy_only=False), ~right.fill_null(True).to_numpy(False)


def _dates(cells: Sequence[str | None], name: str, form: Forms) -> tuple[np.ndarray, np.ndarray]:
    """Days since 1970, NaN where there is no date, and which cells hold something else."""
    wrong = np.zeros(len(cells), dtype=bool)
    try:
        return days(name, cells, form), wrong
    except BadInput:  # seldom, so only then one by one
        pass
    values = np.full(len(cells), np.nan, dtype=np.float32)
    for row, cell in enumerate(cells):
        try:
            values[row] = days(name, [cell], form)[0]
        except BadInput:
            wrong[row] = True
    return values, wrong


def _fill(coding: Coding) -> float:
    return float(0 if isinstance(coding.missing, str) else coding.missing)


def _says(text: str) -> Callable[[int], str]:
    return lambda _: text


def _misread(column: pa.Array, name: str, wanted: str, row: int) -> str:
    return f"holds '{str(column[row].as_py())[:40]}' in column '{name}', and {wanted} is expected"


def _never_seen(column: pa.Array, name: str, values: tuple[str, ...], row: int) -> str:
    text = column[row].as_py()
    return (
        f"holds '{text}'{nearest(text, values)} in column '{name}', which the training never saw; "
        f"its categories are {', '.join(values[:12])}{', …' if len(values) > 12 else ''}"
    )
