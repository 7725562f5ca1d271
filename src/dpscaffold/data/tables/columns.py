"""The columns of a CSV or Parquet file, read in batches, with every complaint turned into one
sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from dpscaffold.data.tables.files import TableFile
from dpscaffold.data.tables.marked import (
    NoNumber,
    Sightings,
    numbers_of,
    numbers_without_markers,
    tidy,
    without_markers,
)
from dpscaffold.data.tables.opening import csv_batches, csv_names, is_utf8
from dpscaffold.errors import BadInput, nearest


class NotNumbers(BadInput):
    """A column of numbers holds something else."""


class NotText(BadInput):
    """A file does not hold text in the encoding that was named or found."""


_BATCH_ROWS = 1 << 15


def column_names(file: TableFile) -> list[str]:
    """The file's columns, in order; a file that is missing, empty or names a column twice is
    refused."""
    path = file.path
    try:
        if file.table is not None:
            names = list(file.table.column_names)
        elif file.kind == "parquet":
            names = list(pa.parquet.read_schema(path).names)
        else:
            names = csv_names(file)
    except (UnicodeError, LookupError):
        raise NotText(_not_text(file)) from None
    except pa.ArrowException as problem:
        if "invalid UTF8" in str(problem):
            raise NotText(_not_text(file)) from None
        raise BadInput(_explained(path, problem, [])) from None
    except OSError as problem:
        raise BadInput(_unreadable(path, problem)) from None
    if any("\0" in name for name in names):
        raise BadInput(f"{path} holds zeros where letters should be; set encoding = 'auto'")
    names += [name for name, _ in file.constants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(f"{path} has two columns called '{twice[0]}'; give each its own name")
    return names


def common_columns(
    files: Sequence[TableFile],
    optional: Callable[[str], bool] = lambda name: False,
    needed: Collection[str | None] = (),
) -> tuple[tuple[TableFile, ...], list[str]]:
    """The files, each with the columns that it lacks, and the columns of all. A file is refused by
    name that lacks one which is not ``optional``, or which every record needs."""
    found = [column_names(file) for file in files]
    names = [*dict.fromkeys(name for each in found for name in each)]
    kept = (name for name in names if name in needed or not optional(name))
    differing = [name for name in kept if not all(name in each for each in found)]
    if differing:
        raise BadInput(_differing(files, found, differing, needed))
    return tuple(
        replace(file, lacks=tuple(name for name in names if name not in each))
        for file, each in zip(files, found, strict=True)
    ), names


def _differing(
    files: Sequence[TableFile],
    found: Sequence[Sequence[str]],
    differing: Sequence[str],
    needed: Collection[str | None],
) -> str:
    """Which file lacks the most common column that not all have, and what may be done."""
    name = max(differing, key=lambda name: sum(name in each for each in found))
    pairs = [*zip(files, found, strict=True)]
    lacking, other = next(pair for pair in pairs if name not in pair[1])
    owner = next(file for file, each in pairs if name in each)
    listed = json.dumps([name], ensure_ascii=False)
    own = [one for one in other if one in differing]
    said = f"{lacking.path} lacks the column '{name}' of {owner.path.name}{nearest(name, own)}"
    if name in needed:
        return f"{said}, which every record needs; add it there, or take the file away"
    return (
        f"{said}; if its values are missing there, write absent = {listed} in [data] (missing says "
        f"how they are filled), or leave the column out with exclude = {listed}"
    )


def split_tables(
    files: Sequence[TableFile],
) -> tuple[tuple[TableFile, ...], tuple[str, ...]]:
    """The files of a folder that are tables, and the names of those that are not: texts (.txt)
    beside CSV files, with none of their columns."""
    tables = [file for file in files if file.path.suffix.lower() != ".txt"]
    if not tables or len(tables) == len(files):
        return tuple(files), ()
    known = {name for file in tables for name in column_names(file)}
    kept = tuple(file for file in files if file in tables or known & {*column_names(file)})
    return kept, tuple(file.path.name for file in files if file not in kept)


def _not_text(file: TableFile) -> str:
    named = file.dialect.encoding
    if is_utf8(named):
        return (
            f"{file.path} is not UTF-8 text; name its encoding (encoding = 'cp1252', say, or "
            f"'auto')"
        )
    return f"{file.path} cannot be read as {named}; name its encoding, or encoding = 'auto'"


def require_column(path: Path, wanted: str, names: Sequence[str], role: str) -> None:
    """Refuse a column that is not there, with the nearest name that is."""
    if wanted not in names:
        raise BadInput(
            f"{path} has no {role} column '{wanted}'{nearest(wanted, names)}; it has "
            f"{_listed(names)}"
        )


def read_batches(
    file: TableFile,
    numbers: Sequence[str],
    texts: Sequence[str],
    names: Sequence[str],
    seen: Sightings | None = None,
) -> Iterator[pa.RecordBatch]:
    """Batches of some columns: ``numbers`` as float32, ``texts`` as strings, missing values and
    what the file's ``gaps`` name as nulls; ``seen`` is told which of these stand where.

    Memory is bounded by the batch, whatever the size of the file.
    """
    path, constants = file.path, _constants(file, seen)
    there = [name for name in names if name not in constants]
    inside = [name for name in numbers if name not in constants]
    written = [name for name in texts if name not in constants]
    try:
        if file.table is not None:
            chosen = file.table.select([*inside, *written] or there[:1])
            for batch in chosen.to_batches(max_chunksize=_BATCH_ROWS):
                cast = _cast(file, batch, inside, written, seen)
                yield _with_constants(cast, batch.num_rows, constants, numbers, texts)
        elif file.kind == "parquet":
            with pa.parquet.ParquetFile(path) as opened:
                for batch in opened.iter_batches(
                    batch_size=_BATCH_ROWS, columns=[*inside, *written]
                ):
                    cast = _cast(file, batch, inside, written, seen)
                    yield _with_constants(cast, batch.num_rows, constants, numbers, texts)
        else:
            # Markers are texts, so numbers beside which they may stand are read as texts first;
            # and so are numbers with a decimal comma, which may have points between thousands.
            comma = file.decimal != "."
            types = {
                name: pa.string() if comma or file.gaps.of(name) else pa.float32()
                for name in inside
            }
            types |= {name: pa.string() for name in written}
            convert = pa.csv.ConvertOptions(
                column_types=types,
                include_columns=[*inside, *written] or there[:1],
                strings_can_be_null=True,
            )
            for batch in csv_batches(file, convert):
                cast = _unmarked(file, batch, inside, written, seen)
                yield _with_constants(cast, batch.num_rows, constants, numbers, texts)
    except (UnicodeError, LookupError):
        raise NotText(_not_text(file)) from None
    except pa.ArrowException as problem:
        if "invalid UTF8" in str(problem):
            raise NotText(_not_text(file)) from None
        kind = NotNumbers if _NO_NUMBER.search(str(problem)) else BadInput
        raise kind(_explained(path, problem, names)) from None
    except OSError as problem:
        raise BadInput(_unreadable(path, problem)) from None


def _constants(file: TableFile, seen: Sightings | None) -> dict[str, str | None]:
    """The columns that the file's folders name, where a marker is none, too; and those that it
    lacks, without a value."""
    found: dict[str, str | None] = dict.fromkeys(file.lacks)
    for name, value in file.constants:
        told = None if seen is None else (seen, name)
        column = without_markers(pa.array([value], pa.string()), file.gaps.of(name), seen=told)
        found[name] = tidy(column)[0].as_py()
    return found


def _unmarked(
    file: TableFile,
    batch: pa.RecordBatch,
    numbers: Sequence[str],
    texts: Sequence[str],
    seen: Sightings | None,
) -> pa.RecordBatch:
    """A batch of a CSV file with nulls where a marker stands."""
    if file.decimal == "." and not any(file.gaps.of(name) for name in (*numbers, *texts)):
        return batch
    columns = [_numbers_in(file, batch.column(name), name, seen) for name in numbers]
    columns += [_texts_in(file, batch.column(name), name, seen) for name in texts]
    return pa.RecordBatch.from_arrays(columns, names=[*numbers, *texts])


def _texts_in(file: TableFile, column: pa.Array, name: str, seen: Sightings | None) -> pa.Array:
    """A column of texts with nulls where a marker stands."""
    told = None if seen is None else (seen, name)
    return without_markers(column, file.gaps.of(name), seen=told)


def _numbers_in(file: TableFile, column: pa.Array, name: str, seen: Sightings | None) -> pa.Array:
    """A column of numbers, typed or as texts, as float32 with nulls where a marker stands."""
    markers, told = file.gaps.of(name), None if seen is None else (seen, name)
    if not pa.types.is_string(column.type):
        return numbers_without_markers(column, markers, told).cast(pa.float32(), safe=False)
    try:
        return numbers_of(column, markers, file.decimal, told)
    except NoNumber as wrong:
        raise NotNumbers(_no_number(file.path, name, str(wrong))) from None


def _with_constants(
    batch: pa.RecordBatch,
    rows: int,
    constants: dict[str, str | None],
    numbers: Sequence[str],
    texts: Sequence[str],
) -> pa.RecordBatch:
    """The batch with the columns that the file's folders name."""
    if not constants:
        return batch
    columns = []
    for name, kind in [*((n, pa.float32()) for n in numbers), *((t, pa.string()) for t in texts)]:
        if name in constants:
            try:
                columns.append(pa.array([constants[name]] * rows, pa.string()).cast(kind))
            except pa.ArrowInvalid:
                raise BadInput(
                    f"the folder {name}={constants[name]} names no number; list {name} in "
                    f"categories or leave it out"
                ) from None
        else:
            columns.append(batch.column(name))
    return pa.RecordBatch.from_arrays(columns, names=[*numbers, *texts])


def _cast(
    file: TableFile,
    batch: pa.RecordBatch,
    numbers: Sequence[str],
    texts: Sequence[str],
    seen: Sightings | None,
) -> pa.RecordBatch:
    path = file.path
    columns: list[Any] = []
    for name in numbers:
        column = _as_texts(batch.column(name))
        kind = column.type
        if pa.types.is_boolean(kind):
            column = column.cast(pa.int8())
        elif not (
            pa.types.is_integer(kind)
            or pa.types.is_floating(kind)
            or pa.types.is_decimal(kind)
            or pa.types.is_null(kind)
            or pa.types.is_string(kind)  # numbers, perhaps beside markers of gaps
        ):
            raise NotNumbers(
                f"{path}: column '{name}' holds {kind}, and numbers are expected; list it in "
                f"categories or dates, or leave it out (exclude)"
            )
        columns.append(_numbers_in(file, column, name, seen))
    for name in texts:
        column = batch.column(name)
        if pa.types.is_dictionary(column.type):  # its values may be of a kind that cannot be taken
            column = column.dictionary.cast(pa.string()).take(column.indices)
        if pa.types.is_timestamp(column.type):
            column = column.cast(pa.timestamp("s"), safe=False)  # a form of dates has no more
        try:
            columns.append(_texts_in(file, column.cast(pa.string()), name, seen))
        except pa.ArrowException:
            raise BadInput(
                f"{path}: column '{name}' holds {column.type}, and texts are expected; leave it "
                f"out (exclude)"
            ) from None
    return pa.RecordBatch.from_arrays(columns, names=[*numbers, *texts])


def _as_texts(column: pa.Array) -> pa.Array:
    """A column of texts of any kind as plain ones; other columns as they are."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    wide = pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return column.cast(pa.string()) if wide else column


#: Arrow's complaint of a value that is no number.
_NO_NUMBER = re.compile(r"column #(\d+):.*invalid value '(.*)'")


def _explained(path: Path, problem: Exception, names: Sequence[str]) -> str:
    """One sentence for what Arrow found wrong with a file."""
    text = _first_line(problem)
    row = re.search(r"Row #(\d+)", text)
    where = f" (line {row[1]})" if row else ""
    if ragged := re.search(r"Expected (\d+) columns, got (\d+)", text):
        return (
            f"{path}{where}: a row has {ragged[2]} values, and the header names {ragged[1]} "
            f"columns; mend it, or name the sign between columns (delimiter) or the line of their "
            f"names (header)"
        )
    if wrong := _NO_NUMBER.search(text):
        column = (
            names[int(wrong[1])] if int(wrong[1]) < len(names) else f"number {int(wrong[1]) + 1}"
        )
        return _no_number(path, column, wrong[2], where)
    if "Empty CSV file" in text:
        alone = " but for one line" if path.exists() and path.stat().st_size > 3 else ""
        return f"{path} is empty{alone}; fill it, or take it away"
    return f"{path} cannot be read: {text.rstrip('.')}"


def _no_number(path: Path, column: str, wrong: str, where: str = "") -> str:
    """What may be done about a text among numbers: whoever knows what it means decides."""
    if re.fullmatch(r"[+-]?\d{1,3}\.\d{3}", wrong):
        plain = wrong.replace(".", "")
        more = (
            f"leave it out (exclude), or write {plain} or {wrong.replace('.', ',')}, since beside "
            f"decimal commas it may be either"
        )
    elif re.fullmatch(r"-?\d+,\d+", wrong):
        more = "leave it out (exclude) or set decimal = ','"
    else:
        more = f"leave it out (exclude) or, if '{wrong}' means missing, name that in gaps"
    return (
        f"{path}{where}: column '{column}' holds '{wrong}', and numbers are expected; list it in "
        f"categories or dates, {more}"
    )


def _unreadable(path: Path, problem: OSError) -> str:
    if not path.exists():
        start = "" if path.is_absolute() else f"; relative paths start from {Path.cwd()}"
        return f"{path} cannot be read: there is no such file{start}"
    return f"{path} cannot be read: {problem.strerror or _first_line(problem)}"


def _first_line(problem: Exception) -> str:
    return str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return " ".join(", ".join(names[:most]).splitlines()) + more
