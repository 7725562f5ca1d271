"""Predictions for the rows of files, batch by batch: memory does not grow with a file.

All rows go to one table, which names the file of each row if there are several.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch

from dpscaffold.atomic import atomic_file
from dpscaffold.data.tables.cells import as_text
from dpscaffold.data.tables.dialect import Format, TableFile, is_many
from dpscaffold.data.tables.rows import (
    KINDS,
    RowBatch,
    RowFiles,
    coding_of,
    differing_columns,
    file_kind,
    named_problem,
    require_columns,
    row_files,
    skipped_note,
    tables_among,
)
from dpscaffold.errors import BadInput
from dpscaffold.models.model import Model

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import csv, parquet
else:
    from dpscaffold.data.tables.arrow import csv, pa, parquet

PREDICTION, PROBABILITY = "prediction", "probability"
#: The column that says from which file a row comes.
FILE = "file"


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
        if both := {*self.keep} & {*before, *columns}:
            raise BadInput(
                "name-used-twice",
                f"--keep names '{min(both)}', which the predictions have too; rename it "
                f"in the rows",
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
        with csv.CSVWriter(out, shape) as writer:
            yield writer
        return
    make = parquet.ParquetWriter if written_kind(out) == "parquet" else csv.CSVWriter
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(out) as partial, make(partial, shape) as writer:
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
    """What became of one file: its name, and how many rows of it were predicted."""

    name: str
    predicted: PredictionCounts


@dataclass(frozen=True)
class FilesPredicted:
    """What became of all files, in their order; ``columns`` are those of the predictions,
    ``skipped`` the files of folders that are of another kind, ``notes`` what is worth a word."""

    files: tuple[FilePredicted, ...]
    columns: tuple[str, ...]
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
    never saw) has an empty prediction. The file that is written is complete or, if one that is
    read fails, does not appear; a stream gets the rows up to there. Memory is bounded by a batch of
    rows.

    Args:
        model: The model.
        data: A file, a folder, a pattern (``sites/*.csv``), or a list of them.
        out: A ``.csv`` or ``.parquet`` file, or a stream of CSV. Unless ``data`` is a file, the
            first column is ``file``, the file of each row.
        keep: Columns of the rows to copy.
        probabilities: Whether to write one probability per class; None: if there are classes.
    """
    answer = Answer(model, tuple(keep), probabilities)
    given = [data] if isinstance(data, str | Path) else list(data)
    before = (FILE,) if is_many_files(data) else ()
    # What is wrong with the question is said before files are looked at.
    shape = answer.shape(*before)
    out = Path(out) if isinstance(out, str) else out
    if isinstance(out, Path):
        written_kind(out)
    rows = tables_among(row_files(given), model.columns)
    coding = coding_of(model.preparation, model.columns)
    # What is wrong with a file's columns is said before any row is predicted.
    columns = [require_columns(file, coding, keep) for file in rows.files]
    notes = (skipped_note(rows.skipped), differing_columns(rows.names, columns))
    if isinstance(out, Path):
        _require_apart(out, given, rows)
    with batch_writer(out, shape) as writer, one_thread():
        done = tuple(
            FilePredicted(name, _written(answer, file, writer, shape, *[name for _ in before]))
            for file, name in zip(rows.files, rows.names, strict=True)
        )
    said = tuple(note for note in notes if note)
    return FilesPredicted(done, tuple(shape.names), rows.skipped, said)


def is_many_files(data: Path | str | Sequence[Path | str]) -> bool:
    """Whether the rows may come from several files: not where ``data`` is the path of one."""
    return is_many(Path(data)) if isinstance(data, str | Path) else True


def _written(
    answer: Answer, file: TableFile, writer: Any, shape: pa.Schema, *before: str
) -> PredictionCounts:
    """Write the rows of a file; what is wrong with them is said with its name."""
    try:
        return answer.write(answer.model.parts(file, answer.keep), writer, shape, *before)
    except BadInput as problem:
        raise named_problem(file.path, problem) from None


def _require_apart(out: Path, data: Sequence[Path | str], rows: RowFiles) -> None:
    """Refuse predictions that would be written over rows, or be read as rows the next time."""
    full = out.resolve()
    if full in {file.path.resolve() for file in rows.files}:
        raise BadInput(
            "overwrites-input", f"--out {out} would write over rows that are read; name another"
        )
    for path in map(Path, data):
        inside = (
            full.is_relative_to(path.resolve())
            if path.is_dir()
            else is_many(path) and full.match(os.path.abspath(path))
        )
        if inside:
            raise BadInput(
                "overwrites-input",
                f"--out {out} lies in {path}, whose files are read: its predictions would be rows "
                f"the next time; name another place",
            )
