"""Which files of new rows people mean: files, folders and patterns, CSV and Parquet mixed.

A folder of new rows is read as a training folder is: hidden files are passed over, folders such as
``site=north`` name a column, and files come in the order of their names. The kind of each file is
told by its ending, since sites send what they have.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpscaffold.data.tables.files import (
    UNKNOWN,
    TableFile,
    fixed_part,
    folder_columns,
    is_about,
    is_many,
    opened,
)
from dpscaffold.data.tables.raw import KINDS, file_columns, file_kind, read_kind
from dpscaffold.errors import BadInput

#: How many files one sentence names.
NAMED = 4


@dataclass(frozen=True)
class RowFiles:
    """Files of new rows, in order, and what each is called: its way from the folder that was
    given. ``aside`` are the files of folders that are of another kind. A file's ``user`` is whose
    it is where files are sites, as in training."""

    files: tuple[TableFile, ...]
    names: tuple[str, ...]
    aside: tuple[str, ...] = ()


def row_files(given: Sequence[Path | str]) -> RowFiles:
    """The files that paths and patterns stand for, each with its own dialect.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> for name in ("south.csv", "north.csv", "notes.docx"):
    ...     _ = (place / name).write_text("age;stay\\n31;4,5\\n")
    >>> found = row_files([place])
    >>> found.names, found.aside, found.files[0].dialect.decimal
    (('north.csv', 'south.csv'), ('notes.docx',), ',')
    """
    paths, bases, aside = [], [], []
    for path in map(Path, given):
        if not is_many(path):
            read_kind(path)
            paths.append(path)
            bases.append(path.parent)
            continue
        base = path if path.is_dir() else fixed_part(path)
        inside = _inside(path, base)
        tables = [f for f in inside if f.suffix.lower() in KINDS and not is_about(f)]
        others = [f.relative_to(base).as_posix() for f in inside if f not in tables]
        if not tables:
            raise BadInput(_nothing(path, others))
        paths += tables
        bases += [base] * len(tables)
        aside += others
    if not paths:
        raise BadInput("no file of rows is given; name a file, a folder or a pattern")
    _require_once(paths)
    names = _names(paths, bases)
    users = _users(names)
    files = tuple(
        opened(TableFile(path, file_kind(path), UNKNOWN, user, folder_columns(path, base)))
        for path, base, user in zip(paths, bases, users, strict=True)
    )
    return RowFiles(files, tuple(names), tuple(dict.fromkeys(aside)))


def tables_among(rows: RowFiles, columns: Sequence[str]) -> RowFiles:
    """The files that are tables: a text (.txt) beside other files that has none of the columns of a
    model is left aside."""
    texts = [
        k
        for k, file in enumerate(rows.files)
        if file.path.suffix.lower() == ".txt" and not {*columns} & {*file_columns(file)}
    ]
    if not texts or all(file.path.suffix.lower() == ".txt" for file in rows.files):
        return rows
    kept = [k for k in range(len(rows.files)) if k not in texts]
    return RowFiles(
        tuple(rows.files[k] for k in kept),
        tuple(rows.names[k] for k in kept),
        (*rows.aside, *(rows.names[k] for k in texts)),
    )


def left_aside_note(aside: Sequence[str]) -> str:
    """A word about the files of a folder that are not read; empty where there are none.

    >>> left_aside_note(["north.xlsx"])
    'warning: no table of .csv or .parquet, so left aside: north.xlsx'
    """
    return f"warning: no table of .csv or .parquet, so left aside: {named(aside)}" if aside else ""


def differing_columns(names: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """Which file has other columns than the first; empty where all have the same. A column that a
    model does not ask for is no reason to refuse a file, but it is said.

    >>> differing_columns(["north.csv", "south.csv"], [["age", "ill"], ["age"]])
    "warning: south.csv lacks the column 'ill' of north.csv; it is not needed"
    """
    first = {*columns[0]}
    odd = [k for k, found in enumerate(columns) if {*found} != first]
    if not odd:
        return ""
    less, more = sorted(first - {*columns[odd[0]]}), sorted({*columns[odd[0]]} - first)
    what = (
        f"lacks the column '{less[0]}' of {names[0]}"
        if less
        else f"has a column '{more[0]}' that {names[0]} lacks"
    )
    others = f" ({len(odd) - 1} more differ from it)" if len(odd) > 1 else ""
    return f"warning: {names[odd[0]]} {what}{others}; it is not needed"


def named(names: Sequence[str]) -> str:
    """Names for a sentence: the first few, and how many more.

    >>> named(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more'
    """
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def named_problem(path: Path, problem: BadInput) -> BadInput:
    """A sentence about a file's rows, with the file where it is not in it."""
    said = str(problem)
    return problem if str(path) in said else BadInput(f"{path}: {said}")


def _inside(path: Path, base: Path) -> list[Path]:
    """The files of a folder or a pattern in the order of their names, but hidden ones."""
    found = path.rglob("*") if path.is_dir() else base.glob(str(path.relative_to(base)))
    return sorted(
        file
        for file in found
        if file.is_file() and not any(p.startswith(".") for p in file.relative_to(base).parts)
    )


def _nothing(path: Path, others: Sequence[str]) -> str:
    what = "holds" if path.is_dir() else "matches"
    if others:
        return f"{path} {what} no .csv or .parquet file, only {named(others)}; save them as CSV"
    if path.is_dir():
        return f"{path} holds no .csv or .parquet file; name a folder with such files"
    return f"{path} matches no file; relative patterns start from {Path.cwd()}"


def _require_once(paths: Sequence[Path]) -> None:
    seen: set[Path] = set()
    for path in paths:
        real = path.resolve()
        if real in seen:
            raise BadInput(f"{path} is named twice; its rows would count twice: name it once")
        seen.add(real)


def _names(paths: Sequence[Path], bases: Sequence[Path]) -> list[str]:
    """The way to each file from the folder that was given; where that makes two alike, from the
    folder that all have in common."""
    names = [path.relative_to(base).as_posix() for path, base in zip(paths, bases, strict=True)]
    if len({*names}) == len(names):
        return names
    full = [Path(os.path.abspath(path)) for path in paths]
    common = os.path.commonpath([path.parent for path in full])
    return [path.relative_to(common).as_posix() for path in full]


def _users(names: Sequence[str]) -> list[str]:
    """Whose each file is, as in training: its name without folders and ending, where all of these
    differ."""
    stems = [Path(name).stem for name in names]
    return stems if len({*stems}) == len(stems) else [_stemmed(name) for name in names]


def _stemmed(name: str) -> str:
    return Path(name).with_suffix("").as_posix()
