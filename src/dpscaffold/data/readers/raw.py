"""Raw rows of a file, batch by batch, as the features that a trained model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    complete, which ones are (N,), and other columns as text."""

    first: int
    features: np.ndarray
    complete: np.ndarray
    others: pa.RecordBatch


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
        rows, complete = code_batch(coding, batch, path, first)
        rows = rows[complete]
        for step in rest:
            rows = step(rows)
        yield Part(first, rows.astype(np.float32, copy=False), complete, batch.select(list(others)))
        first += batch.num_rows


def code_batch(
    coding: Coding, batch: pa.RecordBatch, path: Path, first: int
) -> tuple[np.ndarray, np.ndarray]:
    """A batch as coded rows (N, d) float32, and which rows lack nothing, (N,).

    Where the training left incomplete records out, they are left out here too; where it refused
    them, they are refused.
    """
    count = batch.num_rows
    rows = np.zeros((count, coding.features), dtype=np.float32)
    complete = np.ones(count, dtype=bool)
    fills, forms, at = dict(coding.fills), dict(coding.dates), len(coding.numbers)
    for j, name in enumerate(coding.numbers):
        values = _numbers(batch.column(name), name, path, forms.get(name))
        gone = np.isnan(values)
        if gone.any():
            if name not in fills:
                complete &= _missing(coding, name, gone, path, first)
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
        unknown = np.flatnonzero((found < 0) & ~gone)
        if len(unknown) and coding.unseen == "refuse":
            _refuse_category(path, name, known, column[int(unknown[0])].as_py(), first, unknown)
        rows[:, at : at + len(known)] = found[:, None] == np.arange(len(known))
        at += len(known)
        if name in coding.own:
            rows[:, at] = gone
            at += 1
        elif gone.any():
            complete &= _missing(coding, name, gone, path, first)
    return rows, complete


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
    wild = np.flatnonzero(np.isinf(values))
    if len(wild):
        raise BadInput(f"{path}: column '{name}' holds an infinite number (row {wild[0]})")
    return values


def _fill(coding: Coding) -> float:
    return float(0 if isinstance(coding.missing, str) else coding.missing)


def _missing(coding: Coding, name: str, gone: np.ndarray, path: Path, first: int) -> np.ndarray:
    """Which rows stay when some lack a value of this column."""
    if coding.missing == "refuse":
        raise BadInput(
            f"{path}: column '{name}' lacks a value in row {first + int(np.flatnonzero(gone)[0])}, "
            f"and the model was trained with missing = 'refuse'; leave such rows out or fill them"
        )
    return ~gone if coding.missing == "drop" else np.ones(len(gone), dtype=bool)


def _refuse_category(
    path: Path, name: str, values: tuple[str, ...], text: str, first: int, rows: np.ndarray
) -> None:
    raise BadInput(
        f"{path}: column '{name}' holds '{text}'{nearest(text, values)} in row "
        f"{first + int(rows[0])}, which the training never saw; its categories are "
        f"{', '.join(values[:12])}{', …' if len(values) > 12 else ''}"
    )
