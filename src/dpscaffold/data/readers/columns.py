"""The columns of a CSV or Parquet file, read in batches, with every complaint turned into one
sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from dpscaffold.errors import BadInput, nearest

_BATCH_BYTES = 1 << 21
_BATCH_ROWS = 1 << 15


def column_names(path: Path, kind: str, delimiter: str = ",") -> list[str]:
    """The file's columns, in order; a file that is missing, empty or names a column twice is
    refused."""
    try:
        if kind == "parquet":
            names = list(pa.parquet.read_schema(path).names)
        else:
            with pa.csv.open_csv(
                path,
                pa.csv.ReadOptions(use_threads=False),
                pa.csv.ParseOptions(delimiter=delimiter),
            ) as reader:
                names = list(reader.schema.names)
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except pa.ArrowInvalid as problem:
        raise BadInput(_explained(path, problem, [])) from None
    except OSError as problem:
        raise BadInput(
            f"{path} cannot be read: {problem.strerror or _first_line(problem)}"
        ) from None
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"{path} has two columns called '{twice[0]}'; give each its own name")
    return names


def require_column(path: Path, wanted: str, names: Sequence[str], role: str) -> None:
    """Refuse a column that is not there, with the nearest name that is."""
    if wanted not in names:
        raise BadInput(
            f"{path} has no {role} column '{wanted}'{nearest(wanted, names)}; it has "
            f"{_listed(names)}"
        )


def read_batches(
    path: Path,
    kind: str,
    numbers: Sequence[str],
    texts: Sequence[str],
    names: Sequence[str],
    delimiter: str = ",",
) -> Iterator[pa.RecordBatch]:
    """Batches of some columns: ``numbers`` as float32, ``texts`` as strings, missing values as
    nulls.

    Memory is bounded by the batch, whatever the size of the file.
    """
    try:
        if kind == "parquet":
            with pa.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[*numbers, *texts]):
                    yield _cast(path, batch, numbers, texts)
        else:
            types = {name: pa.float32() for name in numbers} | {name: pa.string() for name in texts}
            with pa.csv.open_csv(
                path,
                pa.csv.ReadOptions(use_threads=False, block_size=_BATCH_BYTES),
                pa.csv.ParseOptions(delimiter=delimiter),
                pa.csv.ConvertOptions(
                    column_types=types, include_columns=[*numbers, *texts], strings_can_be_null=True
                ),
            ) as reader:
                yield from reader
    except UnicodeDecodeError:
        raise BadInput(f"{path} is not UTF-8 text; save it as UTF-8") from None
    except pa.ArrowInvalid as problem:
        raise BadInput(_explained(path, problem, names)) from None
    except OSError as problem:
        raise BadInput(
            f"{path} cannot be read: {problem.strerror or _first_line(problem)}"
        ) from None


def _cast(
    path: Path, batch: pa.RecordBatch, numbers: Sequence[str], texts: Sequence[str]
) -> pa.RecordBatch:
    columns: list[Any] = []
    for name in numbers:
        column = batch.column(name)
        kind = column.type
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        elif not (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_decimal(kind)
            or pa.types.is_null(kind)
        ):
            raise BadInput(
                f"{path}: column '{name}' holds {kind}, and numbers are expected; list it in "
                f"categories or leave it out"
            )
        columns.append(column.cast(pa.float32(), safe=False))
    for name in texts:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        columns.append(column.cast(pa.string()))
    return pa.RecordBatch.from_arrays(columns, names=[*numbers, *texts])


def _explained(path: Path, problem: Exception, names: Sequence[str]) -> str:
    """One sentence for what Arrow found wrong with a file."""
    text = _first_line(problem)
    row = re.search(r"Row #(\d+)", text)
    where = f" (line {row[1]})" if row else ""
    if ragged := re.search(r"Expected (\d+) columns, got (\d+)", text):
        return (
            f"{path}{where}: a row has {ragged[2]} values, and the header names {ragged[1]} columns"
        )
    if wrong := re.search(r"column #(\d+):.*invalid value '(.*)'", text):
        column = (
            names[int(wrong[1])] if int(wrong[1]) < len(names) else f"number {int(wrong[1]) + 1}"
        )
        return (
            f"{path}{where}: column '{column}' holds '{wrong[2]}', and numbers are expected; "
            "list it in categories or leave it out"
        )
    if "Empty CSV file" in text:
        return f"{path} is empty"
    return f"{path} cannot be read: {text.rstrip('.')}"


def _first_line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
