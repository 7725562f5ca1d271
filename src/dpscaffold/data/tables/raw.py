"""Raw rows of a file, batch by batch, as the features that a trained model takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from dpscaffold.data.tables.codec import Coding, MarkRows
from dpscaffold.data.tables.columns import (
    NotNumbers,
    NotText,
    column_names,
    read_batches,
    require_column,
)
from dpscaffold.data.tables.files import UNKNOWN, Format, TableFile, opened
from dpscaffold.data.tables.missing import NaStrings
from dpscaffold.errors import BadInput
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
    complete, which ones are (N,), other columns as they are in the file, and why the first of those
    that are not complete has no features (empty where all are). ``decimal`` is the decimal sign of
    its texts."""

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
    lacks = tuple(name for name in coding.absent if name not in file_columns(file))
    file = replace(file, gaps=NaStrings(coding.gaps), lacks=lacks)
    first, reader = 0, coding.reader(file.decimal)
    for batch in _batches(file, numbers, texts, names):
        marked = MarkRows(batch.num_rows, first)
        cells = {name: batch.column(name) for name in coding.columns}
        rows = coding.encode(cells, marked, reader)[marked.complete]
        for step in rest:
            rows = step(rows)
        features = rows.astype(np.float32, copy=False)
        kept = batch.select(list(others))
        yield RowBatch(first, features, marked.complete, kept, marked.gap, file.decimal)
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
