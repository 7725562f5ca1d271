"""New rows for a trained model: which files people mean, and their rows as features, in batches.

A folder of new rows is read as a training folder is: hidden files are skipped, folders such as
``site=north`` name a column, and files come in the order of their names. The ending of a name says
of which kind a file is, since sites send what they have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpscaffold.data.tables.codec import Coding, MarkRows
from dpscaffold.data.tables.dialect import (
    UNKNOWN,
    Format,
    TableFile,
    fixed_part,
    folder_columns,
    is_about,
    is_many,
    opened,
)
from dpscaffold.data.tables.missing import NaStrings
from dpscaffold.data.tables.reader import (
    NotNumbers,
    NotText,
    column_names,
    read_batches,
    require_column,
)
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared

if TYPE_CHECKING:
    import pyarrow as pa
else:
    from dpscaffold.data.tables.arrow import pa

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
    reason: str = ""
    decimal: str = "."


def file_kind(path: Path) -> Format:
    """``csv`` or ``parquet``.

    >>> file_kind(Path("new.parquet"))
    'parquet'
    """
    if path.is_dir():
        raise BadInput("not-a-file", f"{path} is a folder; name one of its files")
    found = KINDS.get(path.suffix.lower())
    if found is None:
        raise BadInput(
            "wrong-file-type", f"{path} is neither a .csv nor a .parquet file; convert it to one"
        )
    return found


def read_kind(path: Path) -> Format:
    """``csv`` or ``parquet``, of a file that is to be read: what is not there cannot be
    converted, and may be a folder whose name was mistyped."""
    if path.suffix.lower() not in KINDS and not path.exists():
        start = "" if path.is_absolute() else f"; relative paths start from {Path.cwd()}"
        raise BadInput(
            "file-not-found", f"{path} cannot be read: there is no such file or folder{start}"
        )
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
    file = replace(file, na_values=NaStrings(coding.na_values), lacks=lacks)
    first, reader = 0, coding.reader(file.decimal)
    for batch in _batches(file, numbers, texts, names):
        marked = MarkRows(batch.num_rows, first)
        cells = {name: batch.column(name) for name in coding.columns}
        rows = coding.encode(cells, marked, reader)[marked.complete]
        for step in rest:
            rows = step(rows)
        features = rows.astype(np.float32, copy=False)
        kept = batch.select(list(others))
        yield RowBatch(first, features, marked.complete, kept, marked.reason, file.decimal)
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
            "wrong-encoding",
            f"{file.path} cannot be read as {file.dialect.encoding}, which it seemed to be; save "
            f"it as UTF-8",
        ) from None


#: How many files one sentence names.
NAMED = 4


@dataclass(frozen=True)
class RowFiles:
    """Files of new rows, in order, and what each is called: its way from the folder that was
    given. ``skipped`` are the files of folders that are of another kind. A file's ``user`` is whose
    it is where files are sites, as in training."""

    files: tuple[TableFile, ...]
    names: tuple[str, ...]
    skipped: tuple[str, ...] = ()


def row_files(given: Sequence[Path | str]) -> RowFiles:
    """The files that paths and patterns represent, each with its own dialect.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> for name in ("south.csv", "north.csv", "notes.docx"):
    ...     _ = (place / name).write_text("age;stay\\n31;4,5\\n")
    >>> found = row_files([place])
    >>> found.names, found.skipped, found.files[0].dialect.decimal
    (('north.csv', 'south.csv'), ('notes.docx',), ',')
    """
    paths, bases, skipped = [], [], []
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
            raise BadInput("no-files", _nothing(path, others))
        paths += tables
        bases += [base] * len(tables)
        skipped += others
    if not paths:
        raise BadInput(
            "missing-argument", "no file of rows is given; name a file, a folder or a pattern"
        )
    _require_once(paths)
    names = _names(paths, bases)
    users = _users(names)
    files = tuple(
        opened(TableFile(path, file_kind(path), UNKNOWN, user, folder_columns(path, base)))
        for path, base, user in zip(paths, bases, users, strict=True)
    )
    return RowFiles(files, tuple(names), tuple(dict.fromkeys(skipped)))


def tables_among(rows: RowFiles, columns: Sequence[str]) -> RowFiles:
    """The files that are tables: a text (.txt) next to other files that has none of the columns of
    a model is left out."""
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
        (*rows.skipped, *(rows.names[k] for k in texts)),
    )


def skipped_note(skipped: Sequence[str]) -> str:
    """A word about the files of a folder that are not read; empty where there are none.

    >>> skipped_note(["north.xlsx"])
    'warning: no table of .csv or .parquet, so skipped: north.xlsx'
    """
    return f"warning: no table of .csv or .parquet, so skipped: {named(skipped)}" if skipped else ""


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
    return problem if str(path) in said else BadInput(problem.code, f"{path}: {said}")


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
            raise BadInput(
                "file-named-twice",
                f"{path} is named twice; its rows would count twice: name it once",
            )
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
    """The site of each file, as in training: its name without folders and ending, where all of
    these differ."""
    stems = [Path(name).stem for name in names]
    return stems if len({*stems}) == len(stems) else [_stemmed(name) for name in names]


def _stemmed(name: str) -> str:
    return Path(name).with_suffix("").as_posix()
