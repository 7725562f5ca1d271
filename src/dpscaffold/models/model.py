"""A trained model with all that it needs to be used: from raw rows to classes or numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.checks import instance
from dpscaffold.data.prepared import prepare
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation
from dpscaffold.models.trained import Origin, TrainedParameters
from dpscaffold.privacy import Statement, line
from dpscaffold.report.notebook import html_table
from dpscaffold.tasks import Task
from dpscaffold.tasks.ridge import RidgeSums

if TYPE_CHECKING:
    from dpscaffold.data.tables.dialect import TableFile
    from dpscaffold.data.tables.rows import RowBatch
    from dpscaffold.models.module import WholeModel

#: Raw rows: a table (N, columns), columns by name (a data frame too), one mapping a row, or the
#: path of a CSV or Parquet file.
Raw = Tensor | np.ndarray | Mapping[str, Any] | Sequence[Any] | str | Path


@dataclass(frozen=True)
class Model(TrainedParameters):
    """A trained model, with the preparation of its features and its privacy statement.

    Raw rows are the data before preparation: a table (N, columns) in the order of ``columns``,
    columns by name (a data frame, an Arrow table), a list of mappings (one per row), or the path of
    a CSV or Parquet file.

    Args:
        task: The model and its loss.
        params: The parameters, (P,).
        preparation: The steps that turn raw rows into features.
        target: What is predicted.
        schema: What a row looks like.
        privacy: The statement of the run that trained it.
        origin: Where the model comes from.

    >>> from dpscaffold import Logistic, synthetic
    >>> federation = synthetic(users=3, records=20, dimension=4, classes=3)
    >>> model = Model.of(federation, Logistic(4, 3), torch.zeros(15))
    >>> model.probabilities(np.ones((2, 4))).shape, model.classes
    (torch.Size([2, 3]), ('0', '1', '2'))
    """

    @classmethod
    def of(
        cls,
        federation: Federation,
        task: Task,
        params: Tensor,
        privacy: Statement | None = None,
        origin: Origin | None = None,
    ) -> Model:
        """A model for the rows of a federation.

        Args:
            federation: The data, whose preparation and target are used.
            task: The model and its loss.
            params: The parameters, (P,).
            privacy: The statement of the run that trained it.
            origin: Where the model comes from.
        """
        if isinstance(task, RidgeSums):
            task, params = task.trained(params)
        parts = (task, params, federation.preparation, federation.target, federation.schema)
        return cls(*parts, privacy, origin or Origin(data=federation.title))

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by number, or of the labels; none where a number is
        predicted."""
        return self.target.classes

    def scores(self, rows: Raw, prepared: bool = False) -> Tensor:
        """Scores (N, outputs) of raw rows, or of rows that are ``prepared`` already."""
        if isinstance(rows, str | Path):
            return self._scores_of_file(Path(rows))
        table = as_table(rows, self.columns)
        if not prepared:
            self._require_width(table)
        features = _as_numbers(table) if prepared else prepare(table, self.preparation)
        return self.scores_of(features)

    def _require_width(self, table: np.ndarray) -> None:
        """Refuse raw rows of more or fewer columns than the model was trained on."""
        if table.shape[1] != len(self.columns):
            listed = ", ".join(self.columns[:8]) + (", …" if len(self.columns) > 8 else "")
            raise BadInput(
                "wrong-column-count",
                f"rows have {table.shape[1]} columns, and {len(self.columns)} are expected: "
                f"{listed}",
            )

    def _scores_of_file(self, path: Path) -> Tensor:
        parts = []
        for part in self.parts(path):
            if not part.complete.all():
                raise BadInput(
                    "missing-value",
                    f"{path}: {part.reason}, and the model was trained without such records; leave "
                    f"them out, or use 'dpscaffold predict', which marks them",
                )
            parts.append(self.scores_of(part.features))
        if not parts:
            raise BadInput("no-rows", f"{path} holds no row; give at least one")
        return torch.cat(parts)

    def parts(self, path: Path | TableFile, others: Sequence[str] = ()) -> Iterator[RowBatch]:
        """The prepared rows of a file, batch by batch; see :mod:`dpscaffold.data.tables.rows`."""
        from dpscaffold.data.tables.rows import raw_parts

        return raw_parts(path, self.preparation, self.columns, others)

    def scores_of(self, features: np.ndarray) -> Tensor:
        """Scores (N, outputs) of prepared features (N, d) float32, which must be finite; of a
        number with a range, the numbers in their own units."""
        if features.shape[1] != self.schema.dimension:
            raise BadInput(
                "wrong-column-count",
                f"rows have {features.shape[1]} features, and the model takes "
                f"{self.schema.dimension}",
            )
        if not np.isfinite(features.sum(dtype=np.float64)):
            row, column = np.argwhere(~np.isfinite(features))[0]
            raise BadInput(
                "not-finite",
                f"row {row} has no finite number in feature {column} after preparation; raw rows "
                f"must hold no NaN or infinity: leave such rows out or fill them",
            )
        device = self.params.device
        with torch.no_grad():
            rows = self.task.prepare(torch.from_numpy(features).to(device))
            return self.target.answers(self.task.scores(self.params, rows))

    def predict(self, rows: Raw, prepared: bool = False) -> Tensor:
        """The class number (N,) int64, or the number (N,) float32, of each raw row; of several
        labels 1 for each that holds, (N, labels) int64."""
        return self.predicted(self.scores(rows, prepared))

    def predicted(self, scores: Tensor) -> Tensor:
        """What scores (N, outputs) represent: a class number, or the number, (N,); of several
        labels 1 for each that holds, (N, labels)."""
        if self.target.kind == "number":
            return scores[:, 0]
        if self.target.kind == "labels":
            return (scores[:, : len(self.classes)] > 0).long()
        return (scores[:, 0] > 0).long() if scores.shape[1] == 1 else scores.argmax(dim=1)

    def named(self, rows: Raw, prepared: bool = False) -> list[str | tuple[str, ...]]:
        """The name of the class of each raw row; of several labels the names of those that hold."""
        self._require_classes()
        said = self.predict(rows, prepared).tolist()
        if self.target.kind == "labels":
            return [
                tuple(name for name, holds in zip(self.classes, row, strict=True) if holds)
                for row in said
            ]
        return [self.classes[number] for number in said]

    def probabilities(self, rows: Raw, prepared: bool = False) -> Tensor:
        """The probability of each class or label, (N, classes), of raw rows."""
        self._require_classes()
        return self.chances(self.scores(rows, prepared))

    def chances(self, scores: Tensor) -> Tensor:
        """The probability of each class or label, (N, classes), from scores (N, outputs)."""
        if self.target.kind == "labels":
            return scores[:, : len(self.classes)].sigmoid()
        if scores.shape[1] == 1:  # one score tells two classes apart: it is the second one's
            return torch.cat([torch.sigmoid(-scores), torch.sigmoid(scores)], dim=1)
        return scores[:, : len(self.classes)].softmax(dim=1)

    def to_module(self) -> WholeModel:
        """A plain ``torch.nn.Module``, the preparation included: raw rows (N, columns) → scores
        (N, outputs). See :class:`dpscaffold.models.module.WholeModel` for categorical columns."""
        from dpscaffold.models.module import whole_model

        return whole_model(self.task, self.params, self.preparation, self.columns, self.target)

    def save(self, folder: Path | str) -> Path:
        """Write the model to a folder, from which :func:`~dpscaffold.load_model` reads it: weights
        as safetensors, all else as JSON, and the privacy statement."""
        from dpscaffold.models.storage import save_model

        return save_model(self, Path(folder))

    def __repr__(self) -> str:
        return (
            f"Model({self.task.name}, {len(self.columns)} columns → {self.target}, "
            f"{self.origin.algorithm or 'untrained'})"
        )

    def _repr_html_(self) -> str:
        listed = ", ".join(self.columns[:8]) + (", …" if len(self.columns) > 8 else "")
        rows = [
            ("task", self.task.name),
            ("predicts", f"{self.target} {', '.join(self.classes[:8])}"),
            ("columns", listed),
            ("trained by", f"{self.origin.algorithm} on {self.origin.data}"),
            ("privacy", line(self.privacy) if self.privacy else None),
            ("leaves unprotected", " ".join(self.unprotected) or None),
        ]
        return html_table("Model", rows)

    def _require_classes(self) -> None:
        if self.target.kind == "number":
            raise BadInput(
                "wrong-target",
                "the model predicts a number, which has no classes; use predict for the number",
            )


def as_table(rows: Any, columns: Sequence[str]) -> np.ndarray:
    """Raw rows as an array (N, columns); columns that have names are put in order.

    >>> as_table({"age": [31, 58], "sex": ["f", "m"]}, ("sex", "age")).tolist()
    [['f', 31], ['m', 58]]
    """
    if isinstance(rows, Tensor):
        return _two_dimensional(rows.detach().cpu().numpy())
    if isinstance(rows, np.ndarray):
        return _two_dimensional(rows)
    if isinstance(rows, Sequence) and rows and isinstance(rows[0], Mapping):
        keys = dict.fromkeys(key for row in rows for key in row)
        rows = {key: [row.get(key) for row in rows] for key in keys}
    if hasattr(rows, "column_names") and hasattr(rows, "to_pydict"):  # an Arrow table
        rows = {name: rows.column(name).to_pylist() for name in rows.column_names}
    if isinstance(rows, Mapping) or hasattr(rows, "columns"):
        return _by_name(rows, columns)
    instance("rows", rows, Iterable, "a table, columns by name, or a list of rows")
    try:
        return _two_dimensional(np.array(rows, dtype=object))
    except ValueError:
        raise BadInput(
            "rows-differ", "rows differ in length; give one value per column in each"
        ) from None


def _two_dimensional(table: np.ndarray) -> np.ndarray:
    if table.ndim < 2:
        raise BadInput("wrong-shape", f"rows have shape {table.shape}; expected (records, columns)")
    return table.reshape(len(table), math.prod(table.shape[1:]))


def _as_numbers(table: np.ndarray) -> np.ndarray:
    try:
        return table.astype(np.float32)
    except (TypeError, ValueError):
        raise BadInput(
            "not-numbers", "prepared rows must be numbers; give raw rows without prepared"
        ) from None


def _by_name(rows: Any, columns: Sequence[str]) -> np.ndarray:
    """A mapping or a data frame as an array, its columns in order."""
    given = list(rows.columns if hasattr(rows, "columns") else rows)
    for name in columns:
        if name not in given:
            raise BadInput(
                "unknown-column",
                f"rows have no column '{name}'{nearest(name, [str(key) for key in given])}; the "
                f"model was trained on {', '.join(columns[:8])}{', …' if len(columns) > 8 else ''}",
            )
    found = [_column(rows[name]) for name in columns]
    if len({len(column) for column in found}) > 1:
        raise BadInput(
            "rows-differ", "the columns of the rows differ in length; give one value a row in each"
        )
    if all(isinstance(column, np.ndarray) for column in found):
        return np.column_stack(found)
    table = np.empty((len(found[0]), len(columns)), dtype=object)
    for j, column in enumerate(found):
        table[:, j] = column
    return table


def _column(values: Any) -> Any:
    """A column as numbers where it holds nothing else, else as a list."""
    kind = getattr(values, "dtype", None)
    if isinstance(kind, np.dtype) and kind.kind in "fiub":
        return np.asarray(values)
    return list(values)
