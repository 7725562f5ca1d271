"""A site's CSV file, one record per line: nothing in a line changes how another line is read.

A site counts its records, and the server may know their number. So the number must not depend on
what a record holds: every line after the header is one record, up to its line feed, and a quoted
value ends with its line. A line that cannot be read is a record without values. For the same reason
nothing about the file is guessed: delimiter and encoding are declared, and each line is decoded by
itself.
"""

from __future__ import annotations

import codecs
import csv
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from dpscaffold.data.tables.missing import BLANKS, default_na_strings

T = TypeVar("T")
#: A longer line (in bytes) is not read.
LONGEST = 1 << 20
#: How many lines are held as Python texts at a time, and how many bytes are read at a time.
_BLOCK, _BLOCK_BYTES = 1 << 15, 1 << 24
#: How many bytes one thread of Arrow's reads at a time.
_ARROW_BYTES = 1 << 21
#: Encodings in which every byte is a character, and those below 128 are ASCII's.
_CHARSETS = ("ascii", "iso8859-1", "iso8859-15", "cp1252")
#: What Arrow takes as a delimiter.
_DELIMITERS = frozenset(map(chr, (9, *range(32, 127)))) - {'"'}


@dataclass
class UnusedRecords:
    """Records that contribute nothing: for each reason, their numbers from 0. A record is listed
    once, under the first reason that was found."""

    found: dict[str, np.ndarray] = field(default_factory=dict)

    def add(self, reason: str, records: np.ndarray) -> None:
        """Add records (n,), given by their numbers."""
        known = np.concatenate([*self.found.values(), np.empty(0, np.int64)])
        fresh = np.setdiff1d(records, known)
        if len(fresh):
            before = self.found.get(reason, np.empty(0, np.int64))
            self.found[reason] = np.sort(np.concatenate([before, fresh]))

    def used(self, count: int) -> np.ndarray:
        """Which of ``count`` records contribute, (count,) bool."""
        used = np.ones(count, dtype=bool)
        for records in self.found.values():
            used[records] = False
        return used

    def sentences(self, lines: bool) -> list[str]:
        """What is wrong, for the site's own people; ``lines``: with the numbers of lines in a file
        whose first line is the header.

        >>> UnusedRecords({"'age' is not a number": np.array([0, 3])}).sentences(lines=True)
        ["2 records count but contribute nothing, as 'age' is not a number: lines 2, 5"]
        """
        word, first = ("line", 2) if lines else ("record", 1)
        said = []
        for reason, records in self.found.items():
            one = len(records) == 1
            many = f"{len(records)} records count but contribute"
            many = "1 record counts but contributes" if one else many
            shown = ", ".join(str(number + first) for number in records[:8])
            rest = f" and {len(records) - 8} more" if len(records) > 8 else ""
            said.append(f"{many} nothing, as {reason}: {word}{'' if one else 's'} {shown}{rest}")
        return said


@dataclass(frozen=True)
class Columns:
    """Columns of some records of a table by name: texts, or numbers (float32) where each cell of a
    column is one. ``faults`` are the records that have no values because they cannot be read, by
    their numbers in this part."""

    columns: dict[str, pa.Array]
    records: int
    faults: UnusedRecords


@dataclass(frozen=True)
class CsvForm:
    """How a site's CSV file is written, and what is asked of it: the ``wanted`` columns (None: all
    of them), of which ``numbers`` may be read as numbers at once."""

    delimiter: str = ","
    encoding: str = "utf-8"
    wanted: Sequence[str] | None = None
    numbers: Collection[str] = ()


def csv_parts(path: Path, form: CsvForm) -> Iterator[Columns]:
    """The wanted columns of a CSV file, some records at a time (at least one part, which may be
    empty), None where a line cannot be read. Columns that are not in the header, or twice, are left
    out.

    A block of lines in which nothing is quoted, empty or broken is read by Arrow, and every other
    one line by line (:class:`_Reader`), which is the definition.
    """
    with path.open("rb") as stream:
        if _is_bytewise(form.encoding):
            line = next(_byte_lines(stream), b"") or b""
            reader = _Reader(form, form.encoding, line)
            blocks: Iterator[bytes | list[bytes | None]] = _byte_blocks(stream)
        else:
            lines, encoding = _unit_lines(stream, form.encoding)
            reader = _Reader(form, encoding, next(lines, b"") or b"")
            blocks = _grouped(lines)
        empty = True
        for part in _ahead(reader.columns, blocks):
            yield part
            empty = False
        if empty:
            yield reader.columns([])


def _ahead(work: Callable[[T], Columns], items: Iterable[T]) -> Iterator[Columns]:
    """``work`` of each item, in order; the next one is done while the last one is used."""
    with ThreadPoolExecutor(1) as pool:
        coming: Future[Columns] | None = None
        for item in items:
            done, coming = coming, pool.submit(work, item)
            if done is not None:
                yield done.result()
        if coming is not None:
            yield coming.result()


def _is_bytewise(encoding: str) -> bool:
    """Whether a line feed is one byte."""
    return "\n".encode(encoding) == b"\n"


def _byte_lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    while line := stream.readline(LONGEST):
        if line.endswith(b"\n") or len(line) < LONGEST:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
            continue
        _skip_line(stream, line)
        yield None


def _skip_line(stream: IO[bytes], line: bytes) -> None:
    """Read on to the end of a line that is too long to be held."""
    while line and not line.endswith(b"\n"):
        line = stream.readline(LONGEST)


def _byte_blocks(stream: IO[bytes]) -> Iterator[bytes | list[bytes | None]]:
    """Whole lines, some at a time; a line that is too long to be held is None."""
    while block := stream.read(_BLOCK_BYTES):
        last = b"" if block.endswith(b"\n") else stream.readline(LONGEST)
        block += last
        if len(last) < LONGEST or last.endswith(b"\n"):
            yield block
            continue
        _skip_line(stream, last)
        if begun := block.rfind(b"\n") + 1:
            yield block[:begun]
        yield [None]


def _cut(block: bytes) -> list[bytes | None]:
    """The lines of a block without their ends, None for one that is too long."""
    lines = block.removesuffix(b"\n").split(b"\n")
    return [line.removesuffix(b"\r") if len(line) < LONGEST else None for line in lines]


def _grouped(lines: Iterator[bytes | None]) -> Iterator[list[bytes | None]]:
    while group := list(islice(lines, _BLOCK)):
        yield group


def _unit_lines(stream: IO[bytes], encoding: str) -> tuple[Iterator[bytes | None], str]:
    """The lines of a file whose characters have two bytes, and the encoding of each."""
    if encoding == "utf-16":
        mark = stream.read(2)
        encoding = "utf-16-be" if mark == codecs.BOM_UTF16_BE else "utf-16-le"
        if mark not in (codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE):
            stream.seek(0)
    return _cut_units(stream, np.dtype(">u2" if encoding.endswith("be") else "<u2")), encoding


def _cut_units(stream: IO[bytes], unit: np.dtype[Any]) -> Iterator[bytes | None]:
    raw = stream.read()
    units = np.frombuffer(raw[: len(raw) // 2 * 2], unit)
    start = 0
    for end in [*np.flatnonzero(units == ord("\n")), len(units)]:
        line = units[start:end]
        if len(line) and line[-1] == ord("\r"):
            line = line[:-1]
        if end < len(units) or len(line):
            yield line.tobytes() if 2 * len(line) < LONGEST else None
        start = end + 1


class _Reader:
    """Reads blocks of lines, and notes the lines that it cannot read. The header names the
    columns."""

    def __init__(self, form: CsvForm, encoding: str, header: bytes) -> None:
        self.delimiter, self.encoding = form.delimiter, encoding
        text = header.decode(encoding, errors="replace").removeprefix("\ufeff")
        found = next(csv.reader([text], delimiter=form.delimiter), [])
        names = [name.strip(BLANKS) for name in found]
        kept = [n for n in dict.fromkeys(names) if names.count(n) == 1]
        self.kept = [name for name in kept if form.wanted is None or name in form.wanted]
        self.fields, self.places = len(names), [names.index(name) for name in self.kept]
        self.numbers = {self.kept.index(name) for name in form.numbers if name in self.kept}
        self.nothing: list[str | None] = [None] * len(self.kept)

    def columns(self, block: bytes | list[bytes | None]) -> Columns:
        """The wanted columns of some lines."""
        if isinstance(block, bytes):
            read = self._by_arrow(block)
            if read is not None:
                return read
            block = _cut(block)
        return self._line_by_line(block)

    def _line_by_line(self, lines: Sequence[bytes | None]) -> Columns:
        held: list[list[str | None]] = [[] for _ in self.kept]
        bad: dict[str, list[int]] = {}
        for number, line in enumerate(lines):
            try:
                values: Sequence[str | None] = self._values(line)
            except ValueError as fault:
                bad.setdefault(str(fault), []).append(number)
                values = self.nothing
            for cells, value in zip(held, values, strict=True):
                cells.append(value)
        faults = UnusedRecords({why: np.array(found, np.int64) for why, found in bad.items()})
        texts = [pa.array(cells, pa.string()) for cells in held]
        return Columns(dict(zip(self.kept, texts, strict=True)), len(lines), faults)

    def _by_arrow(self, block: bytes) -> Columns | None:
        """The same from Arrow's reader, or None where it might read something otherwise."""
        plain = self._plain(block)
        if plain is None or not self.kept:
            return None
        for numbers in (self.numbers, set[int]()) if self.numbers else (set[int](),):
            try:
                table = self._table(plain, numbers)
            except pa.ArrowException:
                continue
            if table.num_rows != plain.count(b"\n") + (not plain.endswith(b"\n")):
                return None
            if not any(pc.any(pc.is_nan(table.column(k))).as_py() for k in numbers):
                columns = [column.combine_chunks() for column in table.columns]
                named = dict(zip(self.kept, columns, strict=True))
                return Columns(named, table.num_rows, UnusedRecords())
        return None

    def _plain(self, block: bytes) -> bytes | None:
        """The block in UTF-8, if its lines are nothing but values between delimiters."""
        if self.delimiter not in _DELIMITERS or not _is_plain(block, self.delimiter):
            return None
        known = codecs.lookup(self.encoding).name
        if known == "utf-8" or (known in _CHARSETS and block.isascii()):
            return block
        try:
            return block.decode(known).encode() if known in _CHARSETS else None
        except UnicodeError:
            return None

    def _table(self, block: bytes, numbers: set[int]) -> pa.Table:
        names = [str(place) for place in range(self.fields)]
        wanted = [names[place] for place in self.places]
        # Memory of Arrow's own: its threads must not release an object of Python's.
        copy = pa.BufferOutputStream()
        copy.write(block)
        kinds = [pa.float32() if k in numbers else pa.string() for k in range(len(wanted))]
        return pa.csv.read_csv(
            pa.BufferReader(copy.getvalue()),
            pa.csv.ReadOptions(column_names=names, block_size=_ARROW_BYTES),
            pa.csv.ParseOptions(delimiter=self.delimiter),
            pa.csv.ConvertOptions(
                column_types=dict(zip(wanted, kinds, strict=True)),
                include_columns=wanted,
                null_values=default_na_strings(),
            ),
        )

    def _values(self, line: bytes | None) -> list[str | None]:
        if line is None:
            raise ValueError(f"the line is longer than {LONGEST} bytes")
        if not line:
            raise ValueError("the line is empty")
        try:
            text = line.decode(self.encoding, errors="surrogateescape")
        except UnicodeError:
            raise ValueError(f"the line is not {self.encoding.upper()}") from None
        found = self._split(text)
        if len(found) != self.fields:
            raise ValueError("the line does not have as many values as the header has names")
        wanted: list[str | None] = [found[place] for place in self.places]
        if not text.isascii() and not all(map(_is_decoded, wanted)):
            raise ValueError(f"the line is not {self.encoding.upper()}")
        return wanted

    def _split(self, text: str) -> list[str]:
        if '"' not in text:
            return text.split(self.delimiter)
        try:
            return next(csv.reader([text], delimiter=self.delimiter, strict=True))
        except (csv.Error, StopIteration):
            raise ValueError("a quote is open at the end of the line, or misplaced") from None


def _is_decoded(text: str | None) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text or "")


def _is_plain(block: bytes, delimiter: str) -> bool:
    """Whether lines have no other ends than the usual ones and none is very long, and quotes are
    around whole values and nowhere else. (Empty lines and values over several lines show in the
    number of rows.)"""
    if b"\r" in block and block.count(b"\r") != block.count(b"\r\n"):
        return False
    if b"\0" in block or block.startswith(codecs.BOM_UTF8):
        return False
    if b'"' not in block:
        return _has_short_lines(block, LONGEST)
    longest = min(LONGEST, csv.field_size_limit())
    return _has_short_lines(block, longest) and _quotes_values(block, delimiter)


def _quotes_values(block: bytes, delimiter: str) -> bool:
    """Whether every second quote begins a value, and the next one ends it."""
    signs = np.frombuffer(block, np.uint8)
    quotes = np.flatnonzero(signs == ord('"'))
    if len(quotes) % 2:
        return False
    opening, closing = quotes[::2], quotes[1::2]
    before, after = signs[opening - 1], signs[(closing + 1) % len(signs)]
    begins = (before == ord(delimiter)) | (before == ord("\n")) | (opening == 0)
    ends = (after == ord(delimiter)) | (after == ord("\n")) | (after == ord("\r"))
    return bool((begins & (ends | (closing == len(signs) - 1))).all())


def _has_short_lines(block: bytes, longest: int) -> bool:
    """Whether every half of the longest allowed line has an end of a line in it."""
    half = longest // 2
    places = range(0, len(block) - half, half)
    return all(block.find(b"\n", at, at + half) >= 0 for at in places)
