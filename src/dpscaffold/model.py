"""A trained model with all that it needs to be used: from raw rows to classes or numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscaffold.data.prepared import prepare
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation
from dpscaffold.schema import Prepared, Schema, Target
from dpscaffold.tasks import Task

#: Raw rows: a table (N, columns), columns by name (a data frame too), or one mapping a row.
Raw = Tensor | np.ndarray | Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True)
class Model:
    """Parameters (P,) of a task, the preparation of its features, and what its scores stand for.

    Raw rows are what the data were before preparation: a table (N, columns) in the order of
    ``columns``, columns by name, or a list of mappings, one a row.

    >>> from dpscaffold import Logistic, synthetic
    >>> federation = synthetic(users=3, records=20, dimension=4, classes=3)
    >>> model = Model.of(federation, Logistic(4, 3), torch.zeros(15))
    >>> model.probabilities(np.ones((2, 4))).shape, model.classes
    (torch.Size([2, 3]), ('0', '1', '2'))
    """

    task: Task
    params: Tensor
    preparation: tuple[Prepared, ...]
    target: Target
    schema: Schema

    @classmethod
    def of(cls, federation: Federation, task: Task, params: Tensor) -> Model:
        """The model of a federation that these parameters make of a task."""
        return cls(task, params, federation.preparation, federation.target, federation.schema)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by number; none where a number is predicted."""
        return self.target.classes

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns, in order; numbers, as text, where they have no names."""
        return self.schema.columns

    def scores(self, rows: Raw, prepared: bool = False) -> Tensor:
        """Scores (N, outputs) of raw rows, or of rows that are ``prepared`` already."""
        table = as_table(rows, self.columns)
        features = table.astype(np.float32) if prepared else prepare(table, self.preparation)
        if features.shape[1] != self.schema.dimension:
            raise BadInput(
                f"rows have {features.shape[1]} features, and the model takes "
                f"{self.schema.dimension}"
            )
        device = self.params.device
        with torch.no_grad():
            return self.task.scores(
                self.params, self.task.prepare(torch.from_numpy(features).to(device))
            )

    def predict(self, rows: Raw, prepared: bool = False) -> Tensor:
        """The class number (N,) int64, or the number (N,) float32, of each raw row."""
        scores = self.scores(rows, prepared)
        if self.target.kind == "number":
            return scores[:, 0]
        return (scores[:, 0] > 0).long() if scores.shape[1] == 1 else scores.argmax(dim=1)

    def named(self, rows: Raw, prepared: bool = False) -> list[str]:
        """The name of the class of each raw row."""
        self._require_classes()
        return [self.classes[number] for number in self.predict(rows, prepared).tolist()]

    def probabilities(self, rows: Raw, prepared: bool = False) -> Tensor:
        """The probability of each class, (N, classes), of raw rows."""
        self._require_classes()
        scores = self.scores(rows, prepared)
        if scores.shape[1] == 1:  # one score tells two classes apart: it is the second one's
            return torch.cat([torch.sigmoid(-scores), torch.sigmoid(scores)], dim=1)
        return scores[:, : len(self.classes)].softmax(dim=1)

    def _require_classes(self) -> None:
        if self.target.kind == "number":
            raise BadInput(
                "the model predicts a number, which has no classes; use predict for the number"
            )


def as_table(rows: Raw, columns: Sequence[str]) -> np.ndarray:
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
    if isinstance(rows, Mapping) or hasattr(rows, "columns"):
        return _by_name(rows, columns)
    return _two_dimensional(np.array(rows, dtype=object))


def _two_dimensional(table: np.ndarray) -> np.ndarray:
    if table.ndim < 2:
        raise BadInput(f"rows have shape {table.shape}; expected (records, columns)")
    return table.reshape(len(table), math.prod(table.shape[1:]))


def _by_name(rows: Any, columns: Sequence[str]) -> np.ndarray:
    """A mapping or a data frame as an array, its columns in order."""
    given = list(rows.columns if hasattr(rows, "columns") else rows)
    for name in columns:
        if name not in given:
            raise BadInput(
                f"rows have no column '{name}'{nearest(name, [str(key) for key in given])}; the "
                f"model was trained on {', '.join(columns[:8])}{', …' if len(columns) > 8 else ''}"
            )
    found = [list(rows[name]) for name in columns]
    if len({len(column) for column in found}) > 1:
        raise BadInput("the columns of the rows differ in length; give one value a row in each")
    table = np.empty((len(found[0]), len(columns)), dtype=object)
    for j, column in enumerate(found):
        table[:, j] = column
    return table
