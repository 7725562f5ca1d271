"""Predictions for the rows of files, batch by batch: memory does not grow with a file.

All rows go to one table, which names the file of each row if there are several, or to a folder with
one table per file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch

from dpscaffold.atomic import atomic_file, draft_of, put_in_place
from dpscaffold.data.tables.cells import as_text
from dpscaffold.data.tables.dialect import Format, TableFile, is_many
from dpscaffold.data.tables.rows import (
    KINDS,
    RowBatch,
    RowFiles,
    coding_of,
    differing_columns,
    file_columns,
    file_kind,
    named_problem,
    require_columns,
    row_files,
    skipped_note,
    tables_among,
)
from dpscaffold.errors import BadInput
from dpscaffold.models.model import Model

PREDICTION, PROBABILITY = "prediction", "probability"
#: The column that says from which file a row comes.
FILE = "file"
#: Bytes of a printed table that are held in memory before they go to a temporary file.
SPOOLED = 1 << 23


@dataclass(frozen=True)
class PredictionCounts:
    """How many rows were read, how many of them have no prediction, and why the first has none."""

    rows: int
    incomplete: int
    reason: str = ""


@dataclass(frozen=True)
class Answer:
    """The table that is written for rows: the columns to ``keep`` and those of the predictions."""

    model: Model
    keep: tuple[str, ...] = ()
    probabilities: bool | None = None

    def shape(self, *before: str) -> pa.Schema:
        """Its columns; those ``before`` them are texts that are the same in all rows of a file."""
        columns = _columns(self.model, self.probabilities)
        for name in self.keep:
            if name in columns or name in before:
                raise BadInput(
                    "name-used-twice",
                    f"--keep names '{name}', which is a column of the predictions; leave it out, "
                    f"or rename it in the rows",
                )
        texts = [(name, pa.string()) for name in (*before, *self.keep)]
        return pa.schema(texts + list(columns.items()))

    def write(
        self, parts: Iterable[RowBatch], writer: Any, shape: pa.Schema, *before: str
    ) -> PredictionCounts:
        """Write the rows of a file, with these texts ``before`` each, batch by batch."""
        columns = _columns(self.model, self.probabilities)
        rows, incomplete, reason = 0, 0, ""
        for part in parts:
            count = len(part.complete)
            arrays = [pa.repeat(pa.scalar(text, pa.string()), count) for text in before]
            arrays += [as_text(part.others.column(name), name)[0] for name in self.keep]
            arrays += _arrays(self.model, part, columns)
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=shape))
            rows += count
            incomplete += int((~part.complete).sum())
            reason = reason or part.reason
        return PredictionCounts(rows, incomplete, reason)


def _columns(model: Model, probabilities: bool | None) -> dict[str, pa.DataType]:
    """The columns of the predictions; every class name gives a name of its own."""
    if model.target.kind == "number":
        if probabilities is not None:
            raise BadInput(
                "wrong-target",
                f"--{'' if probabilities else 'no-'}probabilities is given, but the model predicts "
                f"a number; leave it out",
            )
        return {PREDICTION: pa.float32()}
    wanted = probabilities is not False
    named = [f"{PROBABILITY}_{name}" for name in model.classes] if wanted else []
    if model.target.kind == "labels":
        held = [f"{PREDICTION}_{name}" for name in model.classes]
        return dict.fromkeys(held, pa.int8()) | dict.fromkeys(named, pa.float32())
    return {PREDICTION: pa.string()} | dict.fromkeys(named, pa.float32())


def _arrays(model: Model, part: RowBatch, columns: dict[str, pa.DataType]) -> list[pa.Array]:
    """The columns of the predictions, empty in the rows that have none."""
    if not part.complete.any():
        return [pa.nulls(len(part.complete), kind) for kind in columns.values()]
    filled = _filled(model, part)[: len(columns)]
    return [
        pa.array(_spread(values, part.complete), kind, mask=~part.complete)
        for kind, values in zip(columns.values(), filled, strict=True)
    ]


def _filled(model: Model, part: RowBatch) -> list[np.ndarray]:
    """Predictions of the complete rows, and after them the probability of each class."""
    scores = model.scores_of(part.features)
    predicted = model.predicted(scores)
    if model.target.kind == "number":
        return [predicted.numpy()]
    chances = [column.numpy() for column in model.chances(scores).T.contiguous()]
    if model.target.kind == "labels":
        return [column.numpy() for column in predicted.to(torch.int8).T.contiguous()] + chances
    return [np.array(model.classes, dtype=object)[predicted.numpy()], *chances]


def _spread(values: np.ndarray, complete: np.ndarray) -> np.ndarray:
    """Values of the complete rows at their places among all rows."""
    if complete.all():
        return values
    out = np.zeros(len(complete), dtype=values.dtype)
    out[complete] = values
    return out


@contextmanager
def batch_writer(out: Path | IO[bytes], shape: pa.Schema) -> Iterator[Any]:
    """A writer of batches; a file is written next to its name and moved there when it is whole."""
    if not isinstance(out, Path):
        with pa.csv.CSVWriter(out, shape) as writer:
            yield writer
        return
    kind = written_kind(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as partial, open_writer(partial, kind, shape) as writer:
            yield writer
    except OSError as problem:
        raise BadInput(
            "cannot-write", f"{out} cannot be written: {problem.strerror or problem}"
        ) from None


def written_kind(out: Path) -> Format:
    """``csv`` or ``parquet``, of a file that is to be written."""
    if out.is_dir() or out.suffix.lower() in KINDS:
        return file_kind(out)
    raise BadInput(
        "wrong-file-type",
        f"--out is {out}, and predictions are written as CSV or Parquet; name a .csv or .parquet "
        f"file (spreadsheets open .csv)",
    )


def open_writer(path: Path, kind: Format, shape: pa.Schema) -> Any:
    """Arrow's writer of batches into a file."""
    make = pa.parquet.ParquetWriter if kind == "parquet" else pa.csv.CSVWriter
    return make(path, shape)


@contextmanager
def one_thread() -> Iterator[None]:
    """The products of a batch are small and the reading takes the time: more threads only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class FilePredicted:
    """What became of one file: its name, how many rows of it were predicted, and, where each file
    has predictions of its own, where these are."""

    name: str
    predicted: PredictionCounts
    out: Path | None = None


@dataclass(frozen=True)
class FilesPredicted:
    """What became of all files, in their order; ``skipped`` are the files of folders that are of
    another kind, ``notes`` what is worth a word."""

    files: tuple[FilePredicted, ...]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of all files."""
        return sum(file.predicted.rows for file in self.files)

    @property
    def incomplete(self) -> int:
        """Rows of all files that have no prediction."""
        return sum(file.predicted.incomplete for file in self.files)

    @property
    def reason(self) -> str:
        """Why the first of these has none, with its file if there are several."""
        several = len(self.files) > 1
        found = ((f.name, f.predicted.reason) for f in self.files if f.predicted.reason)
        return next((f"{name}, {why}" if several else why for name, why in found), "")


def predict_files(
    model: Model,
    data: Path | str | Sequence[Path | str],
    out: Path | str | IO[bytes],
    keep: Sequence[str] = (),
    probabilities: bool | None = None,
) -> FilesPredicted:
    """Write a prediction for every row of CSV and Parquet files, in the order of files and rows.

    The columns are those to ``keep``, ``prediction`` (the class's name, or the number) and one
    ``probability_NAME`` per class, in the order of ``model.classes``. With several labels there is
    one ``prediction_NAME`` per label, 1 where it holds and else 0, and one ``probability_NAME``.
    A row that the training would have left out or refused (a missing value, a category that it
    never saw) has an empty prediction. The output is complete or, if one file fails, does not
    appear. Memory is bounded by a batch of rows.

    Args:
        model: The model.
        data: A file, a folder, a pattern (``sites/*.csv``), or a list of them.
        out: A ``.csv`` or ``.parquet`` file or a stream gets all rows. Unless ``data`` is a file,
            its first column is ``file``, the file of each row. Any other name is a folder, with one
            table per input file, of the same name.
        keep: Columns of the rows to copy.
        probabilities: Whether to write one probability per class; None: if there are classes.
    """
    answer = Answer(model, tuple(keep), probabilities)
    answer.shape()  # what is wrong with the question is said before files are looked at
    given = [data] if isinstance(data, str | Path) else list(data)
    before = (FILE,) if is_many_files(data) else ()
    out = Path(out) if isinstance(out, str) else out
    folder = bool(before) and isinstance(out, Path) and is_folder(out)
    if isinstance(out, Path) and not folder:
        written_kind(out)
    rows = tables_among(row_files(given), model.columns)
    coding = coding_of(model.preparation, model.columns)
    # What is wrong with a file's columns is said before any row is predicted.
    columns = [require_columns(file, coding, keep) for file in rows.files]
    notes = (skipped_note(rows.skipped), differing_columns(rows.names, columns))
    if not isinstance(out, Path):
        done = _printed(answer, rows, out, before)
    elif folder:
        _require_apart(out, [out / name for name in rows.names], given, rows)
        done = _into_folder(answer, rows, out)
    else:
        _require_apart(out, [out], given, rows)
        done = _table(answer, rows, out, before)
    return FilesPredicted(done, rows.skipped, tuple(note for note in notes if note))


def is_many_files(data: Path | str | Sequence[Path | str]) -> bool:
    """Whether the rows may come from several files: not where ``data`` is the path of one."""
    return is_many(Path(data)) if isinstance(data, str | Path) else True


def is_folder(out: Path) -> bool:
    """Whether predictions of many files go to a folder of files, or all to one.

    >>> is_folder(Path("said")), is_folder(Path("said.parquet"))
    (True, False)
    """
    if out.is_dir() or not out.suffix:
        if out.exists() and not out.is_dir():
            raise BadInput(
                "not-a-folder", f"{out} is a file; name a folder, or a .csv or .parquet file"
            )
        return True
    if out.suffix.lower() not in KINDS:
        raise BadInput(
            "wrong-file-type",
            f"--out is {out}, and predictions are written as CSV or Parquet; name a .csv or "
            f".parquet file for one table, or a folder (a name without an ending) for one file per "
            f"file of rows",
        )
    return False


def _table(
    answer: Answer, rows: RowFiles, out: Path | IO[bytes], before: Sequence[str]
) -> tuple[FilePredicted, ...]:
    """All rows in one table; ``before`` is empty or the column with the file of each row."""
    shape = answer.shape(*before)
    with batch_writer(out, shape) as writer, one_thread():
        return tuple(
            FilePredicted(name, _written(answer, file, writer, shape, *[name for _ in before]))
            for file, name in zip(rows.files, rows.names, strict=True)
        )


def _printed(
    answer: Answer, rows: RowFiles, out: IO[bytes], before: Sequence[str]
) -> tuple[FilePredicted, ...]:
    """All rows in one table, of which nothing is printed before the last file has been read."""
    with SpooledTemporaryFile(SPOOLED) as spool:
        try:
            done = _table(answer, rows, spool, before)
            spool.seek(0)
        except OSError as problem:
            raise BadInput(
                "cannot-write",
                f"a temporary file cannot be written: {problem.strerror or problem}; name a file "
                f"with --out",
            ) from None
        shutil.copyfileobj(spool, out)
    return done


def _into_folder(answer: Answer, rows: RowFiles, out: Path) -> tuple[FilePredicted, ...]:
    """A file of predictions for each, in a folder that takes its name when all are whole."""
    place, shape, done = out.resolve(), answer.shape(), []
    _require_only(out, rows.names, shape.names)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _draft(place) as draft, one_thread():
            for file, name in zip(rows.files, rows.names, strict=True):
                target = draft / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with open_writer(target, file_kind(target), shape) as writer:
                    found = _written(answer, file, writer, shape)
                done.append(FilePredicted(name, found, out / name))
            put_in_place(draft, place)
    except OSError as problem:
        raise BadInput(
            "cannot-write", f"{out} cannot be written: {problem.strerror or problem}"
        ) from None
    return tuple(done)


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """A folder to fill next to ``folder``; it is gone afterwards, unless it was put in place."""
    draft = draft_of(folder)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _written(
    answer: Answer, file: TableFile, writer: Any, shape: pa.Schema, *before: str
) -> PredictionCounts:
    """Write the rows of a file; what is wrong with them is said with its name."""
    try:
        return answer.write(answer.model.parts(file, answer.keep), writer, shape, *before)
    except BadInput as problem:
        raise named_problem(file.path, problem) from None


def _require_apart(
    out: Path, targets: Sequence[Path], data: Sequence[Path | str], rows: RowFiles
) -> None:
    """Refuse predictions that would be written over rows, or be read as rows the next time."""
    read = {file.path.resolve(): file.path for file in rows.files}
    many = [path for path in map(Path, data) if is_many(path)]
    for target in targets:
        full = target.resolve()
        if full in read:
            raise BadInput(
                "overwrites-input",
                f"--out {out} would write over {read[full]}, which is read; name another",
            )
        for path in many:
            inside = (
                full.is_relative_to(path.resolve())
                if path.is_dir()
                else full.match(os.path.abspath(path))
            )
            if inside:
                raise BadInput(
                    "overwrites-input",
                    f"--out {out} lies in {path}, whose files are read: its predictions would be "
                    f"rows the next time; name another place",
                )


def _require_only(out: Path, names: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse a folder that holds anything but earlier predictions of these files: it is replaced
    whole, and files of the same names may be somebody's records."""
    if not out.is_dir():
        return
    for path in sorted(path for path in out.rglob("*") if not path.is_dir()):
        name = path.relative_to(out).as_posix()
        if name not in names or not _has_columns(path, columns):
            raise BadInput(
                "folder-not-empty",
                f"--out {out} holds {name}, which is no earlier prediction of these rows; name a "
                f"new or an empty folder",
            )


def _has_columns(path: Path, columns: Sequence[str]) -> bool:
    try:
        return file_columns(path) == list(columns)
    except BadInput:
        return False
