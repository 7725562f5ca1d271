"""Which files a table consists of, and how each is written: one file, a folder, or a pattern.

Hospitals send one file per site, each written by its own spreadsheet. What a site's file uses
(its encoding, the delimiter, the decimal comma) can be given for all, or found file by
file (``"auto"``): that looks at the form of the first lines, not at what they say.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mode
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote

from dpscaffold.data.tables.missing import NO_NA_STRINGS, NaStrings
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    import pyarrow as pa
else:
    from dpscaffold.data.tables.arrow import pa

Format = Literal["csv", "parquet"]
AUTO = "auto"
#: How much of a file is looked at to find how it is written.
SAMPLE = 1 << 16
#: Among how many lines at the beginning of a file its header is looked for.
MOST_TITLES = 30
_SUFFIXES = {"csv": (".csv", ".tsv", ".txt"), "parquet": (".parquet", ".pq")}
#: Endings under which tables go that are not read: somebody's records may be in them.
_PACKED = (".gz", ".zip", ".bz2", ".xz", ".zst", ".7z")
_FOREIGN = (".xlsx", ".xls", ".ods", ".sav", ".dta", ".sas7bdat", ".feather", ".arrow", ".json")
_BINARY = (".xlsm", ".xlsb", ".npy", ".pkl", ".pickle", ".h5", ".hdf5", ".mat", ".rds", ".rdata")
OTHERS = (*_PACKED, *_FOREIGN, *_BINARY)
#: How files are called that tell about the tables of their folder, in several languages.
_ABOUT = re.compile(
    r"(read[ _-]?me|liesmich|lies[ _-]?mich|lisez[ _-]?moi|leeme|leggimi|leesmij|licen[cs]e|lizenz|"
    r"copying|changelog|changes|about)\b.*",
    re.IGNORECASE,
)
_DELIMITERS = (",", ";", "\t", "|")
_COMMA, _POINT = re.compile(r"-?(\d+|\d{1,3}(\.\d{3})+),\d+"), re.compile(r"-?\d+\.\d+")


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written. ``header`` is the line that names the columns, counted from 1; it
    is looked for in every file."""

    delimiter: str = ","
    encoding: str = "utf-8"
    decimal: str = "."
    header: int = 1


#: How a file is written that nobody described.
UNKNOWN = Dialect(AUTO, AUTO, AUTO)


@dataclass(frozen=True)
class TableFile:
    """One file: ``user`` is its name where files are users, ``constants`` are the columns that its
    folders name (``site=north/``), ``na_values`` the texts that represent a missing value. Of a
    table that is held in memory ``path`` is only its name. ``lacks`` are columns that other files
    have and that count as missing values here."""

    path: Path
    kind: Format | Literal["held"]
    dialect: Dialect = Dialect()
    user: str = ""
    constants: tuple[tuple[str, str], ...] = ()
    table: pa.Table | None = None
    na_values: NaStrings = NO_NA_STRINGS
    lacks: tuple[str, ...] = ()

    @property
    def decimal(self) -> str:
        """The sign before decimals in its texts; only CSV files have one of their own."""
        return self.dialect.decimal if self.kind == "csv" else "."


def is_many(path: Path) -> bool:
    """Whether a path represents several files: a folder or a pattern."""
    return path.is_dir() or (not path.exists() and any(sign in str(path) for sign in "*?["))


def table_files(
    path: Path, kind: Format, dialect: Dialect, needed: Collection[str] = ()
) -> tuple[TableFile, ...]:
    """The files of a table in the order of their names, each with its own dialect; ``needed`` are
    columns that every file has."""
    if not is_many(path):
        return (opened(TableFile(path, kind, dialect), needed),)
    found = _listed(path, kind)
    if not found:
        wanted = " or ".join(_SUFFIXES[kind])
        raise BadInput(
            "no-files", f"{path} holds no {kind} file; name a folder with {wanted} files"
        )
    base = path if path.is_dir() else fixed_part(path)
    stems = [folder_columns(file, base) for file in found]
    names = user_names(found, base)
    return tuple(
        opened(TableFile(file, kind, dialect, name, constants), needed)
        for file, name, constants in zip(found, names, stems, strict=True)
    )


def is_about(path: Path) -> bool:
    """Whether a text file tells about tables and is none, by its name.

    >>> is_about(Path("README.txt")), is_about(Path("aachen.txt"))
    (True, False)
    """
    return path.suffix.lower() == ".txt" and _ABOUT.fullmatch(path.stem) is not None


def _listed(path: Path, kind: Format) -> list[Path]:
    if path.is_dir():
        inside = (
            file
            for file in path.rglob("*")
            if file.suffix.lower() in _SUFFIXES[kind] and not is_about(file)
        )
        shown = (f for f in inside if not any(p.startswith(".") for p in f.relative_to(path).parts))
        return sorted(file for file in shown if file.is_file())
    base = fixed_part(path)
    return sorted(file for file in base.glob(str(path.relative_to(base))) if file.is_file())


def other_files_note(path: Path, kind: Format, most: int = 4) -> str:
    """Which files of a folder look like tables and are not read: a site that sent another kind of
    file would be left out without a word."""
    if not path.is_dir():
        return ""
    wanted = {*_SUFFIXES["csv"], *_SUFFIXES["parquet"], *OTHERS} - {*_SUFFIXES[kind]}
    inside = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    found = sorted(
        file.as_posix()
        for file in inside
        if (file.suffix.lower() in wanted or is_about(file))
        and not any(p.startswith(".") for p in file.parts)
    )
    more = f" and {len(found) - most} more" if len(found) > most else ""
    named = ", ".join(found[:most])
    return f"warning: no {kind} tables, so skipped: {named}{more}" if found else ""


def no_tables(names: Sequence[str]) -> str:
    """A note about texts that are no tables; empty where there are none.

    >>> no_tables(["notes.txt"])
    'warning: none of the columns of the other files, so skipped: notes.txt'
    """
    listed = ", ".join(names)
    said = f"warning: none of the columns of the other files, so skipped: {listed}"
    return said if names else ""


def fixed_part(pattern: Path) -> Path:
    """The folders of a pattern before its first sign of one."""
    fixed = Path(pattern.anchor)
    for part in pattern.parts[len(fixed.parts) :]:
        if any(sign in part for sign in "*?["):
            break
        fixed = fixed / part
    return fixed


def folder_columns(file: Path, base: Path) -> tuple[tuple[str, str], ...]:
    """The columns that folders name: ``site=north/part-0.parquet`` has a column site."""
    folders = file.relative_to(base).parts[:-1]
    pairs = (part.partition("=") for part in folders)
    return tuple((unquote(name), _hive(value)) for name, sign, value in pairs if sign and name)


def _hive(value: str) -> str:
    """A value as a folder's name writes it: signs in percents, and a word for nothing."""
    return "" if value == "__HIVE_DEFAULT_PARTITION__" else unquote(value)


def user_names(files: Sequence[Path], base: Path) -> list[str]:
    """A file's name without its ending, with its folders where two are alike."""
    stems = [file.stem for file in files]
    if len(set(stems)) == len(stems):
        return stems
    return [file.relative_to(base).with_suffix("").as_posix() for file in files]


def opened(file: TableFile, needed: Collection[str] = ()) -> TableFile:
    """The file with its header, and with its dialect found where it was left open. A file that
    cannot be read is refused by whoever reads it."""
    if file.kind != "csv":
        return file
    dialect = file.dialect
    try:
        with file.path.open("rb") as stream:
            begun = stream.read(SAMPLE)
    except OSError:
        return replace(file, dialect=Dialect())
    if dialect.encoding == AUTO:
        dialect = replace(dialect, encoding=guess_encoding(file.path))
    try:
        written = sample_lines(begun, dialect.encoding)
    except (LookupError, UnicodeError):
        raise BadInput(
            "wrong-encoding",
            f"{file.path} cannot be read as {dialect.encoding}; name its encoding, or encoding = "
            f"'auto'",
        ) from None
    if dialect.delimiter == AUTO:
        dialect = replace(dialect, delimiter=guess_delimiter(filled_lines(written)))
    if needed:
        own = {*needed} - {name for name, _ in file.constants}
        header = named_header(written, dialect.delimiter, own)
    else:
        header = guess_header(written, dialect.delimiter)
    below = filled_lines(written[header - 1 :])
    if dialect.decimal == AUTO:
        dialect = replace(dialect, decimal=guess_decimal(below, dialect.delimiter, file.path))
    return replace(file, dialect=replace(dialect, header=header))


def found_in(values: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Every value that a key of a dialect has in some file, and the names of those files.

    >>> found_in([("a.csv", ","), ("b.csv", ";"), ("c.csv", ",")])
    {',': ['a.csv', 'c.csv'], ';': ['b.csv']}
    """
    found: dict[str, list[str]] = {}
    for name, value in values:
        found.setdefault(value, []).append(name)
    return found


def guess_encoding(path: Path) -> str:
    """UTF-8 where the whole file is, UTF-16 where a mark or every other byte says so, else
    Windows-1252."""
    with path.open("rb") as stream:
        begun = stream.read(SAMPLE)
    if begun[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    for encoding, high in (("utf-16-le", begun[1::2]), ("utf-16-be", begun[::2])):
        if high.count(0) > len(begun) // 4:
            return encoding
    if _decodes(path, "utf-8"):
        return "utf-8"
    _refuse_damaged_utf8(path)
    if _decodes(path, "cp1252"):
        return "cp1252"
    raise BadInput(
        "wrong-encoding",
        f"{path} is neither UTF-8 nor UTF-16 nor Windows-1252; save it as UTF-8, or name "
        f"its encoding (encoding = 'latin-1', say)",
    )


def _decodes(path: Path, encoding: str) -> bool:
    try:
        with path.open(encoding=encoding) as text:
            while text.read(1 << 20):
                pass
        return True
    except UnicodeDecodeError:
        return False


def _refuse_damaged_utf8(path: Path) -> None:
    """Refuse a file whose lines with accents are mostly UTF-8: read as Windows-1252 for the sake of
    one bad byte, Köln would become KÃ¶ln in all of them."""
    first, bad, good = 0, 0, 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.isascii():
                continue
            try:
                line.decode("utf-8")
                good += 1
            except UnicodeDecodeError:
                first = first or number
                bad += 1
    if good >= bad:
        raise BadInput(
            "wrong-encoding",
            f"{path}, line {first}: a character is not UTF-8, and the other lines are; correct it, "
            f"or name the encoding of the file (encoding = 'cp1252', say)",
        )


def sample_lines(begun: bytes, encoding: str) -> list[str]:
    """The whole lines of a file's beginning."""
    lines = begun.decode(encoding, errors="replace").lstrip("\ufeff").splitlines()
    return lines[:-1] if len(begun) >= SAMPLE else lines


def filled_lines(lines: Sequence[str]) -> list[str]:
    """The lines that hold something."""
    return [line for line in lines if line]


def named_header(lines: Sequence[str], delimiter: str, needed: Collection[str]) -> int:
    """The line that names the columns: the first that has all that are ``needed``, below titles
    that fill fewer cells; the first line where there is none. Records stand below it, so none of
    them can change what is found.

    >>> named_header(["Export of March;", "age;stay;ill", "31;4;no"], ";", ["ill"])
    2
    >>> named_header(["age;stay;ill", "31;4;no"], ";", ["no"])
    1
    """
    reader = csv.reader(lines[:MOST_TITLES], delimiter=delimiter)
    at, widest = 1, 0
    for row in reader:
        cells = {cell.strip() for cell in row}
        filled = sum(bool(cell.strip()) for cell in row)
        if filled > widest and cells.issuperset(needed):
            return at
        widest = max(widest, filled)
        at = reader.line_num + 1
    return 1


def guess_header(lines: Sequence[str], delimiter: str) -> int:
    """The line that names columns which nobody knows: the first that fills more than half of them.
    Titles above it fill fewer; empty lines are passed over anyhow.

    >>> guess_header(["Export of March", "", "age;stay;ill", "31;4;no"], ";")
    3
    """
    counts = [len(row) for row in csv.reader(filled_lines(lines)[:50], delimiter=delimiter)]
    usual = mode(counts) if counts else 1
    reader, at = csv.reader(lines[:MOST_TITLES], delimiter=delimiter), 1
    for row in reader:
        filled = sum(bool(cell.strip()) for cell in row)
        enough = len(row) == usual if usual < 3 else 2 * filled > usual
        if filled and enough:
            return at
        at = reader.line_num + 1
    return 1


def guess_delimiter(lines: Sequence[str]) -> str:
    """The sign that cuts lines into the largest number of columns, and then most lines alike.

    >>> guess_delimiter(["age;stay", "31;4,5", "58;2,0"])
    ';'
    """

    def columns(delimiter: str) -> tuple[int, int]:
        counts = [len(row) for row in csv.reader(lines[:50], delimiter=delimiter)]
        usual = mode(counts)
        return usual, counts.count(usual)

    return max(_DELIMITERS, key=columns) if lines else ","


def guess_decimal(lines: Sequence[str], delimiter: str, path: Path) -> str:
    """The sign before the decimals; a file that uses both is refused.

    >>> guess_decimal(["age;stay", "31; 4,5 "], ";", Path("a.csv"))
    ','
    """
    rows = csv.reader(lines[1:], delimiter=delimiter)
    cells = [cell.strip() for row in rows for cell in row]
    commas, points = (any(map(sign.fullmatch, cells)) for sign in (_COMMA, _POINT))
    if commas and points and delimiter != ",":
        raise BadInput(
            "ambiguous-decimal",
            f"{path} writes decimals with a comma and with a point; say which with decimal = ','",
        )
    return "," if commas and not points else "."
