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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from dpscaffold.data.tables.missing import BLANKS

#: A longer line (in bytes) is not read.
LONGEST = 1 << 20
#: How many lines are held as Python texts at a time.
_BLOCK = 1 << 15


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
    """Columns of a table by name, each as long as there are records, and the records that have no
    values because they cannot be read."""

    columns: dict[str, pa.ChunkedArray]
    records: int
    faults: UnusedRecords


def read_csv(
    path: Path, delimiter: str, wanted: Sequence[str] | None = None, encoding: str = "utf-8"
) -> Columns:
    """The wanted columns of a CSV file (all of them by default) as texts, None where a line cannot
    be read. Columns that are not in the header, or twice, are left out."""
    with path.open("rb") as stream:
        lines, encoding = _lines(stream, encoding)
        header = (next(lines, b"") or b"").decode(encoding, errors="replace").removeprefix("\ufeff")
        names = [name.strip(BLANKS) for name in next(csv.reader([header], delimiter=delimiter), [])]
        kept = [n for n in dict.fromkeys(names) if names.count(n) == 1]
        kept = [name for name in kept if wanted is None or name in wanted]
        reader = _Reader(delimiter, encoding, len(names), [names.index(name) for name in kept])
        blocks: list[list[pa.Array]] = [[] for _ in kept]
        held: list[list[str | None]] = [[] for _ in kept]
        for number, line in enumerate(lines):
            values = reader.values(number, line)
            for cells, value in zip(held, values, strict=True):
                cells.append(value)
            if (number + 1) % _BLOCK == 0:
                _flush(held, blocks)
        _flush(held, blocks)
    faults = UnusedRecords()
    for reason, records in reader.bad.items():
        faults.add(reason, np.array(records, np.int64))
    columns = {
        name: pa.chunked_array(parts, pa.string()) for name, parts in zip(kept, blocks, strict=True)
    }
    return Columns(columns, reader.count, faults)


def _flush(held: list[list[str | None]], blocks: list[list[pa.Array]]) -> None:
    for cells, parts in zip(held, blocks, strict=True):
        parts.append(pa.array(cells, pa.string()))
        cells.clear()


def _lines(stream: IO[bytes], encoding: str) -> tuple[Iterator[bytes | None], str]:
    """The lines without their ends, None for one that is too long, and the encoding of each. A
    file whose characters have two bytes is cut between them."""
    if "\n".encode(encoding)[-1:] == b"\n" and len("\n".encode(encoding)) == 1:
        return _byte_lines(stream), encoding
    if encoding == "utf-16":
        mark = stream.read(2)
        encoding = "utf-16-be" if mark == codecs.BOM_UTF16_BE else "utf-16-le"
        if mark not in (codecs.BOM_UTF16_BE, codecs.BOM_UTF16_LE):
            stream.seek(0)
    return _unit_lines(stream, np.dtype(">u2" if encoding.endswith("be") else "<u2")), encoding


def _byte_lines(stream: IO[bytes]) -> Iterator[bytes | None]:
    while line := stream.readline(LONGEST):
        if line.endswith(b"\n") or len(line) < LONGEST:
            yield line.removesuffix(b"\n").removesuffix(b"\r")
            continue
        while line and not line.endswith(b"\n"):
            line = stream.readline(LONGEST)
        yield None


def _unit_lines(stream: IO[bytes], unit: np.dtype[Any]) -> Iterator[bytes | None]:
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
    """Reads lines one by one, and notes those that it cannot read."""

    def __init__(self, delimiter: str, encoding: str, fields: int, places: Sequence[int]) -> None:
        self.delimiter, self.encoding, self.fields, self.places = (
            delimiter,
            encoding,
            fields,
            places,
        )
        self.nothing: list[str | None] = [None] * len(places)
        self.bad: dict[str, list[int]] = {}
        self.count = 0

    def values(self, number: int, line: bytes | None) -> Sequence[str | None]:
        """The wanted values of a line, all None where it cannot be read."""
        self.count += 1
        try:
            return self._values(line)
        except ValueError as fault:
            self.bad.setdefault(str(fault), []).append(number)
            return self.nothing

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
