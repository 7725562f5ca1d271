"""A CSV file opened for Arrow: as UTF-8, without comments and what stands above the header, and
with names of columns that have no blanks around them.

Arrow reads ahead in threads of its own, and a process that ends while such a thread lets go of
something of Python's is aborted. So a file that has to be mended is mended here, some records at a
time, and Arrow gets a copy that is its own.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv

from dpscaffold.data.tables.files import TableFile

_BATCH_BYTES = 1 << 21
_BREAK = re.compile(r"\s*[\r\n]\s*")


def csv_names(file: TableFile) -> list[str]:
    """The names of a file's columns."""
    if _is_plain(file):
        with _arrow_reader(str(file.path), file, pa.csv.ConvertOptions()) as reader:
            return list(reader.schema.names)
    with _text(file) as text:
        header, _ = _header(text, file)
    with _arrow_reader(_arrows_own(header), file, pa.csv.ConvertOptions()) as reader:
        return list(reader.schema.names)


def csv_batches(file: TableFile, convert: pa.csv.ConvertOptions) -> Iterator[pa.RecordBatch]:
    """The columns that are asked for, in batches of whole records."""
    convert.decimal_point = file.dialect.decimal
    if _is_plain(file):
        with _arrow_reader(str(file.path), file, convert) as reader:
            yield from reader
        return
    with _text(file) as text:
        header, read = _header(text, file)
        while lines := _records(text, file):
            body = "".join(line for line in lines if line)
            try:
                with _arrow_reader(
                    pa.BufferReader((header + body).encode()), file, convert
                ) as reader:
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


def _arrow_reader(source: Any, file: TableFile, convert: pa.csv.ConvertOptions) -> Any:
    return pa.csv.open_csv(
        source,
        pa.csv.ReadOptions(use_threads=False, block_size=_BATCH_BYTES),
        pa.csv.ParseOptions(delimiter=file.dialect.delimiter, newlines_in_values=True),
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
    if dialect.comment or dialect.header != 1 or not is_utf8(dialect.encoding):
        return False
    with file.path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
        header, _ = _header(text, file, trim=False)
    return trimmed(header, dialect.delimiter) == header


def _header(text: IO[str], file: TableFile, trim: bool = True) -> tuple[str, int]:
    """The line that names the columns (more, where a name in quotes has some), and how many lines
    were read."""
    dialect, read = file.dialect, int(file.dialect.header) - 1
    for _ in range(read):
        text.readline()
    while line := text.readline():
        read += 1
        line = line.lstrip("\ufeff")
        if line.strip() and not (dialect.comment and line.startswith(dialect.comment)):
            break
    while line and goes_on(line, dialect.delimiter) and (more := text.readline()):
        line, read = line + more, read + 1
    return trimmed(line, dialect.delimiter) if trim else line, read


def _records(text: IO[str], file: TableFile) -> list[str]:
    """Lines that end with a record, empty in place of comments; none at the end of the file."""
    lines = text.readlines(_BATCH_BYTES)
    kept, inside, at = [], False, 0
    while at < len(lines):
        line = lines[at]
        sign = file.dialect.comment
        comment = not inside and bool(sign) and line.startswith(sign)
        kept.append("" if comment else line)
        if not comment and (inside or '"' in line):
            inside = goes_on(line, file.dialect.delimiter, inside)
        at += 1
        if at == len(lines) and inside:
            lines += text.readlines(_BATCH_BYTES)
    return kept


def _moved(problem: str, lines: int) -> str:
    """Arrow's complaint with the number of the line in the file."""
    return re.sub(r"Row #(\d+)", lambda row: f"Row #{int(row[1]) + lines}", problem)
