"""Predictions for the rows of a file, batch by batch: memory does not grow with the file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch

from dpscaffold.atomic import whole_file
from dpscaffold.data.tables.cells import as_text
from dpscaffold.data.tables.files import Format
from dpscaffold.data.tables.raw import KINDS, RowBatch, file_kind
from dpscaffold.errors import BadInput
from dpscaffold.models.model import Model

PREDICTION, PROBABILITY = "prediction", "probability"


@dataclass(frozen=True)
class PredictionCounts:
    """How many rows were read, how many of them have no prediction, and why the first has none."""

    rows: int
    incomplete: int
    gap: str = ""


def predict_file(
    model: Model,
    data: Path,
    out: Path | IO[bytes],
    keep: Sequence[str] = (),
    probabilities: bool | None = None,
) -> PredictionCounts:
    """Write a prediction for every row of a CSV or Parquet file, in its order.

    ``out`` is a ``.csv`` or ``.parquet`` file, which appears whole or not at all, or a stream for
    CSV. The columns are those to ``keep``, ``prediction`` (the class's name, or the number) and one
    ``probability_NAME`` per class, in the order of ``model.classes``. With several labels there is
    one ``prediction_NAME`` per label, 1 where it holds and else 0, and one ``probability_NAME``.
    ``probabilities=False`` leaves out the probabilities.
    A row that the training would have left out or refused (a missing value, a category that it
    never saw) has an empty prediction.
    """
    answer = Answer(model, tuple(keep), probabilities)
    shape = answer.shape()
    if isinstance(out, Path):
        written_kind(out)
    parts = iter(model.parts(data, keep))
    first = list(islice(parts, 1))  # what is wrong with the file is found before anything is said
    with batch_writer(out, shape) as writer, one_thread():
        return answer.write(chain(first, parts), writer, shape)


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
                    f"--keep names '{name}', which is a column of the predictions; leave it out, "
                    f"or rename it in the rows"
                )
        texts = [(name, pa.string()) for name in (*before, *self.keep)]
        return pa.schema(texts + list(columns.items()))

    def write(
        self, parts: Iterable[RowBatch], writer: Any, shape: pa.Schema, *before: str
    ) -> PredictionCounts:
        """Write the rows of a file, with these texts ``before`` each, batch by batch."""
        columns = _columns(self.model, self.probabilities)
        rows, incomplete, gap = 0, 0, ""
        for part in parts:
            count = len(part.complete)
            arrays = [pa.repeat(pa.scalar(text, pa.string()), count) for text in before]
            arrays += [as_text(part.others.column(name), name)[0] for name in self.keep]
            arrays += _arrays(self.model, part, columns)
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=shape))
            rows += count
            incomplete += int((~part.complete).sum())
            gap = gap or part.gap
        return PredictionCounts(rows, incomplete, gap)


def _columns(model: Model, probabilities: bool | None) -> dict[str, pa.DataType]:
    """The columns of the predictions; every class name gives a name of its own."""
    if model.target.kind == "number":
        if probabilities is not None:
            raise BadInput(
                f"--{'' if probabilities else 'no-'}probabilities is given, but the model predicts "
                f"a number; leave it out"
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
    """A writer of batches; a file is written beside its name and moved there when it is whole."""
    if not isinstance(out, Path):
        with pa.csv.CSVWriter(out, shape) as writer:
            yield writer
        return
    kind = written_kind(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as partial, open_writer(partial, kind, shape) as writer:
            yield writer
    except OSError as problem:
        raise BadInput(f"{out} cannot be written: {problem.strerror or problem}") from None


def written_kind(out: Path) -> Format:
    """``csv`` or ``parquet``, of a file that is to be written."""
    if out.is_dir() or out.suffix.lower() in KINDS:
        return file_kind(out)
    raise BadInput(
        f"--out is {out}, and predictions are written as CSV or Parquet; name a .csv or .parquet "
        f"file (spreadsheets open .csv)"
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
