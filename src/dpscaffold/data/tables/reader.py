"""CSV and Parquet files as batches of Arrow columns, with every problem as one sentence.

A CSV file is opened as UTF-8, without lines above the header, and with column names
that have no blanks around them. Arrow reads ahead in threads of its own, and a process that ends
while such a thread releases a Python object is aborted. So a file that needs changes is changed
here, some records at a time, and Arrow gets a copy of its own.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dpscaffold.data.tables.dialect import TableFile
from dpscaffold.errors import BadInput, nearest

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv
    from pyarrow import parquet
else:
    from dpscaffold.data.tables.arrow import csv as arrow_csv
    from dpscaffold.data.tables.arrow import pa, parquet

_BATCH_BYTES = 1 << 21
_BREAK = re.compile(r"\s*[\r\n]\s*")


def csv_names(file: TableFile) -> list[str]:
    """The names of a file's columns."""
    if _is_plain(file):
        with _arrow_reader(str(file.path), file, arrow_csv.ConvertOptions()) as reader:
            return list(reader.schema.names)
    with _text(file) as text:
        header, _ = _header(text, file)
    with _arrow_reader(_arrows_own(header), file, arrow_csv.ConvertOptions()) as reader:
        return list(reader.schema.names)


def csv_batches(file: TableFile, convert: arrow_csv.ConvertOptions) -> Iterator[pa.RecordBatch]:
    """The columns that are asked for, in batches of whole records."""
    convert.decimal_point = file.dialect.decimal
    if _is_plain(file):
        with _arrow_reader(str(file.path), file, convert) as reader:
            yield from reader
        return
    with _text(file) as text:
        header, read = _header(text, file)
        while lines := _records(text, file):
            part = pa.BufferReader((header + "".join(lines)).encode())
            try:
                with _arrow_reader(part, file, convert) as reader:
                    yield from reader
            except pa.ArrowInvalid as problem:
                raise pa.ArrowInvalid(_moved(str(problem), read - 1)) from None
            read += len(lines)


def is_utf8(name: str) -> bool:
    """Whether an encoding is UTF-8, with a mark or without."""
    return name.lower().replace("_", "-") in ("utf-8", "utf8", "utf-8-sig")


def trimmed(header: str, delimiter: str) -> str:
    """The line that names the columns, without blanks around the names, and with a blank for a
    line break within one.

    >>> trimmed("site , age", ",")
    'site,age'
    >>> trimmed('site,"blood\\npressure"', ",")
    'site,blood pressure'
    """
    names = next(csv.reader([header], delimiter=delimiter), [])
    plain = [_BREAK.sub(" ", name.strip()) for name in names]
    if plain == names:
        return header
    line = io.StringIO()
    csv.writer(line, delimiter=delimiter, lineterminator="").writerow(plain)
    return line.getvalue() + header[len(header.rstrip("\r\n")) :]


def goes_on(line: str, delimiter: str, inside: bool = False) -> bool:
    """Whether a value in quotes goes on in the next line; ``inside``: this line begins within one.
    A sign of quotes opens a value only where the value begins.

    >>> goes_on('31,"seen by', ","), goes_on('31,a 5" tube', ",")
    (True, False)
    """
    at = 0
    while True:
        if inside:
            end = line.find('"', at)
            if end < 0:
                return True
            at = end + 2
            if line[end + 1 : at] == '"':
                continue
            inside, at = False, end + 1
        if at == 0 and line.startswith('"'):
            inside, at = True, 1
            continue
        begin = line.find(delimiter + '"', at)
        if begin < 0:
            return False
        inside, at = True, begin + 2


def _arrow_reader(source: Any, file: TableFile, convert: arrow_csv.ConvertOptions) -> Any:
    return arrow_csv.open_csv(
        source,
        arrow_csv.ReadOptions(use_threads=False, block_size=_BATCH_BYTES),
        arrow_csv.ParseOptions(delimiter=file.dialect.delimiter, newlines_in_values=True),
        convert,
    )


def _arrows_own(text: str) -> pa.BufferReader:
    """A text as bytes in memory of Arrow's."""
    sink = pa.BufferOutputStream()
    sink.write(text.encode())
    return pa.BufferReader(sink.getvalue())


def _text(file: TableFile) -> IO[str]:
    encoding = "utf-8-sig" if is_utf8(file.dialect.encoding) else file.dialect.encoding
    return file.path.open(encoding=encoding, newline="")


def _is_plain(file: TableFile) -> bool:
    """Whether Arrow can read the file as it is."""
    dialect = file.dialect
    if dialect.header != 1 or not is_utf8(dialect.encoding):
        return False
    with file.path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        header, _ = _header(text, file, trim=False)
    return trimmed(header, dialect.delimiter) == header


def _header(text: IO[str], file: TableFile, trim: bool = True) -> tuple[str, int]:
    """The line that names the columns (more, where a name in quotes has some), and how many lines
    were read."""
    dialect, read = file.dialect, file.dialect.header - 1
    for _ in range(read):
        text.readline()
    while line := text.readline():
        read += 1
        line = line.lstrip("\ufeff")
        if line.strip():
            break
    while line and goes_on(line, dialect.delimiter) and (more := text.readline()):
        line, read = line + more, read + 1
    return trimmed(line, dialect.delimiter) if trim else line, read


def _records(text: IO[str], file: TableFile) -> list[str]:
    """Lines that end with a record; none at the end of the file."""
    lines = text.readlines(_BATCH_BYTES)
    inside, at = False, 0
    while at < len(lines):
        if inside or '"' in lines[at]:
            inside = goes_on(lines[at], file.dialect.delimiter, inside)
        at += 1
        if at == len(lines) and inside:
            lines += text.readlines(_BATCH_BYTES)
    return lines


def _moved(problem: str, lines: int) -> str:
    """Arrow's complaint with the number of the line in the file."""
    return re.sub(r"Row #(\d+)", lambda row: f"Row #{int(row[1]) + lines}", problem)


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
            names = list(parquet.read_schema(path).names)
        else:
            names = csv_names(file)
    except (UnicodeError, LookupError):
        raise NotText("wrong-encoding", _not_text(file)) from None
    except pa.ArrowException as problem:
        if "invalid UTF8" in str(problem):
            raise NotText("wrong-encoding", _not_text(file)) from None
        raise BadInput(*_explained(path, problem, [])) from None
    except OSError as problem:
        raise BadInput("file-unreadable", _unreadable(path, problem)) from None
    if any("\0" in name for name in names):
        raise BadInput(
            "wrong-encoding", f"{path} contains NUL bytes (is it UTF-16?); set encoding = 'auto'"
        )
    names += [name for name, _ in file.constants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise BadInput(
            "duplicate-column",
            f"{path} has two columns called '{twice[0]}'; give each its own name",
        )
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
        raise BadInput("columns-differ", _differing(files, found, differing, needed))
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
    next to CSV files, with none of their columns."""
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
            "unknown-column",
            f"{path} has no {role} column '{wanted}'{nearest(wanted, names)}; it has "
            f"{_listed(names)}",
        )


def read_batches(
    file: TableFile,
    numbers: Sequence[str],
    texts: Sequence[str],
    names: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Batches of some columns as they are in the file: typed (Parquet, tables in memory) or texts
    (CSV), where ``numbers`` without NA strings and decimal comma are float32. Columns that the file
    lacks, or that its folders name, are constants.

    Memory is bounded by the batch, whatever the size of the file.
    """
    constants: dict[str, str | None] = dict.fromkeys(file.lacks) | dict(file.constants)
    wanted = [name for name in dict.fromkeys((*numbers, *texts)) if name not in constants]
    there = [name for name in names if name not in constants]
    try:
        for batch in _batches(file, wanted or there[:1], numbers):
            yield _with_constants(batch, constants, (*numbers, *texts))
    except (UnicodeError, LookupError):
        raise NotText("wrong-encoding", _not_text(file)) from None
    except pa.ArrowException as problem:
        if "invalid UTF8" in str(problem):
            raise NotText("wrong-encoding", _not_text(file)) from None
        kind = NotNumbers if _NO_NUMBER.search(str(problem)) else BadInput
        raise kind(*_explained(file.path, problem, names)) from None
    except OSError as problem:
        raise BadInput("file-unreadable", _unreadable(file.path, problem)) from None


def _batches(
    file: TableFile, wanted: Sequence[str], numbers: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    if file.table is not None:
        yield from file.table.select(wanted).to_batches(max_chunksize=_BATCH_ROWS)
    elif file.kind == "parquet":
        with parquet.ParquetFile(file.path) as opened:
            yield from opened.iter_batches(batch_size=_BATCH_ROWS, columns=list(wanted))
    else:
        typed = {n for n in numbers if file.decimal == "." and not file.na_values.of(n)}
        types = {name: pa.float32() if name in typed else pa.string() for name in wanted}
        convert = arrow_csv.ConvertOptions(
            column_types=types, include_columns=list(wanted), strings_can_be_null=True
        )
        yield from csv_batches(file, convert)


def _with_constants(
    batch: pa.RecordBatch, constants: Mapping[str, str | None], wanted: Sequence[str]
) -> pa.RecordBatch:
    """The batch with the columns that the file's folders name, or that it lacks."""
    rows = batch.num_rows
    columns = [
        pa.repeat(pa.scalar(constants[name], pa.string()), rows)
        if name in constants
        else batch.column(name)
        for name in wanted
    ]
    return pa.RecordBatch.from_arrays(columns, names=list(wanted)) if constants else batch


#: Arrow's complaint of a value that is no number.
_NO_NUMBER = re.compile(r"column #(\d+):.*invalid value '(.*)'")


def _explained(path: Path, problem: Exception, names: Sequence[str]) -> tuple[str, str]:
    """A code and one sentence for what Arrow found wrong with a file."""
    text = _first_line(problem)
    row = re.search(r"Row #(\d+)", text)
    where = f" (line {row[1]})" if row else ""
    if ragged := re.search(r"Expected (\d+) columns, got (\d+)", text):
        comment = re.search(r"got \d+: *#", text) is not None
        advice = "take lines of comments out" if comment else "fix the row, or set delimiter"
        return (
            "row-length-differs",
            f"{path}{where}: a row has {ragged[2]} values, and the header names {ragged[1]} "
            f"columns; {advice}",
        )
    if wrong := _NO_NUMBER.search(text):
        column = (
            names[int(wrong[1])] if int(wrong[1]) < len(names) else f"number {int(wrong[1]) + 1}"
        )
        return "not-numbers", no_number(path, column, wrong[2], where)
    if "Empty CSV file" in text:
        alone = " but for one line" if path.exists() and path.stat().st_size > 3 else ""
        return "empty-file", f"{path} is empty{alone}; fill it, or take it away"
    return "file-unreadable", f"{path} cannot be read: {text.rstrip('.')}"


def no_number(path: Path, column: str, wrong: str, where: str = "") -> str:
    """What may be done about a text among numbers: whoever knows what it means decides."""
    if re.fullmatch(r"[+-]?\d{1,3}\.\d{3}", wrong):
        plain = wrong.replace(".", "")
        more = (
            f"leave it out (exclude), or write {plain} or {wrong.replace('.', ',')}, since with "
            f"decimal commas it may be either"
        )
    elif re.fullmatch(r"-?\d+,\d+", wrong):
        more = "leave it out (exclude) or set decimal = ','"
    else:
        more = f"leave it out (exclude) or, if '{wrong}' means missing, name that in na_values"
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
