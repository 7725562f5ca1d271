"""Raw rows of a file, batch by batch, as the features that a trained model takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute

from dpscaffold.data.readers.columns import column_names, read_batches, require_column
from dpscaffold.data.readers.files import AUTO, Dialect, Format, TableFile, table_files
from dpscaffold.data.table_coding import Coding, days
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
class Part:
    """Some rows of a file: the number of the first, features (N, d) float32 of those that are
    complete, which ones are (N,), other columns as text, and why the first of those that are not
    complete has no features (empty where all are)."""

    first: int
    features: np.ndarray
    complete: np.ndarray
    others: pa.RecordBatch
    gap: str = ""


def file_kind(path: Path) -> Format:
    """``csv`` or ``parquet``.

    >>> file_kind(Path("new.parquet"))
    'parquet'
    """
    found = KINDS.get(path.suffix.lower())
    if found is None:
        raise BadInput(f"{path} is neither a .csv nor a .parquet file; convert it to one")
    return found


def file_columns(path: Path) -> list[str]:
    """The columns of a CSV or Parquet file, in order."""
    return column_names(_opened(path))


def _opened(path: Path) -> TableFile:
    return table_files(path, file_kind(path), Dialect(AUTO, AUTO, AUTO))[0]


def coding_of(preparation: Sequence[Prepared], columns: Sequence[str]) -> Coding:
    """How the columns of a file become numbers: as in training, or plainly where the training
    data were arrays."""
    found = next((step for step in preparation if isinstance(step, Coding)), None)
    return Coding(tuple(columns)) if found is None else found


def raw_parts(
    path: Path, preparation: Sequence[Prepared], columns: Sequence[str], others: Sequence[str] = ()
) -> Iterator[Part]:
    """The rows of a file after the preparation. Columns are found by name, whatever their order;
    ``others`` are handed on as they stand. Memory is bounded by a batch."""
    file = _opened(path)
    names = column_names(file)
    coding = coding_of(preparation, columns)
    rest = [step for step in preparation if not isinstance(step, Coding)]
    for name in coding.columns:
        require_column(path, name, names, "feature")
    for name in others:
        require_column(path, name, names, "asked-for")
    # A column that is kept and is a number too is read as text: nothing of it is rounded away.
    dated = [name for name, _ in coding.dates]
    numbers = [name for name in coding.numbers if name not in others and name not in dated]
    texts = list(dict.fromkeys([*(name for name, _ in coding.categories), *others, *dated]))
    texts += [name for name in coding.numbers if name in others and name not in texts]
    first = 0
    for batch in read_batches(file, numbers, texts, names):
        rows, gaps = code_batch(coding, batch, path, first)
        rows, complete = rows[gaps.complete], gaps.complete
        for step in rest:
            rows = step(rows)
        features = rows.astype(np.float32, copy=False)
        yield Part(first, features, complete, batch.select(list(others)), gaps.said)
        first += batch.num_rows


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
    coding: Coding, batch: pa.RecordBatch, path: Path, first: int
) -> tuple[np.ndarray, Gaps]:
    """A batch as coded rows (N, d) float32, and which rows cannot be coded.

    Records that the training left out or refused (a missing value, a category that it never saw,
    infinity) have no features here: whoever predicts leaves them without an answer.
    """
    count = batch.num_rows
    rows = np.zeros((count, coding.features), dtype=np.float32)
    gaps = Gaps(count, first)
    fills, forms, at = dict(coding.fills), dict(coding.dates), len(coding.numbers)
    for j, name in enumerate(coding.numbers):
        values = _numbers(batch.column(name), name, path, forms.get(name))
        gaps.add(np.isinf(values), _says(f"has no finite number in column '{name}'"))
        gone = np.isnan(values)
        if gone.any():
            if name not in fills and isinstance(coding.missing, str):
                gaps.add(gone, _says(f"lacks a value of column '{name}'"))
            values = np.where(gone, np.float32(fills.get(name, _fill(coding))), values)
        rows[:, j] = values
        if name in coding.indicators:
            rows[:, at + coding.indicators.index(name)] = gone
    at += len(coding.indicators)
    for name, known in coding.categories:
        column = batch.column(name)
        index = pa.compute.index_in(column, pa.array(known, pa.string()))
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


def _numbers(column: pa.Array, name: str, path: Path, form: str | None = None) -> np.ndarray:
    if form is not None:
        try:
            return days(name, column.to_pylist(), form)
        except BadInput as problem:
            raise BadInput(f"{path}: {problem}") from None
    if pa.types.is_string(column.type):
        try:
            column = column.cast(pa.float32())
        except pa.ArrowInvalid as problem:
            what = str(problem).splitlines()[0]
            raise BadInput(f"{path}: column '{name}' should hold numbers ({what})") from None
    values: np.ndarray = column.to_numpy(zero_copy_only=False)
    return values


def _fill(coding: Coding) -> float:
    return float(0 if isinstance(coding.missing, str) else coding.missing)


def _says(text: str) -> Callable[[int], str]:
    return lambda _: text


def _never_seen(column: pa.Array, name: str, values: tuple[str, ...], row: int) -> str:
    text = column[row].as_py()
    return (
        f"holds '{text}'{nearest(text, values)} in column '{name}', which the training never saw; "
        f"its categories are {', '.join(values[:12])}{', …' if len(values) > 12 else ''}"
    )
