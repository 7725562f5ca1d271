"""Early stopping on a public validation set.

The rows are public, but what is looked at are the outputs of a private run: when a run stops is
chosen by them. Such a run therefore reserves all planned rounds before the first, and everything
that is stated of it counts T, never the rounds that it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dpscaffold.checks import whole
from dpscaffold.data.sources.arrays import class_numbers
from dpscaffold.errors import BadInput
from dpscaffold.federation.labels import pack
from dpscaffold.models.evaluate import score_file
from dpscaffold.models.model import Model, Raw
from dpscaffold.tasks.metrics import metrics_for


@dataclass(frozen=True)
class Stopping:
    """Stop when ``patience`` evaluations in a row have not improved on the best, on public rows.

    Args:
        rows: Raw public rows: a CSV or Parquet file with a column ``label``, or rows in any form
            that a model takes, with ``labels``. No private record may be among them.
        labels: Names of classes, numbers, or for several labels a row of 0 and 1 each.
        label: The label column of a file.
        patience: How many evaluations may pass without an improvement.

    >>> Stopping([[0.0, 1.0]], labels=["a"], patience=3).patience
    3
    """

    rows: Raw
    labels: Sequence[str | float | Sequence[int]] | None = None
    label: str | None = None
    patience: int = 5

    def __post_init__(self) -> None:
        whole("stopping.patience", self.patience, 1)
        if isinstance(self.rows, str | Path) == (self.labels is not None):
            raise BadInput(
                "missing-argument",
                "stopping needs a file of public rows, or public rows together with labels",
            )

    def value(self, model: Model) -> float:
        """The metric that represents a model, on the public rows; larger is better."""
        metric = metrics_for(model.target)[0]
        if isinstance(self.rows, str | Path):
            scored = score_file(model, Path(self.rows), self.label)
            scores, targets = scored.scores, scored.targets
        else:
            scores, targets = model.scores(self.rows), self._targets(model)
        found = metric.of(scores, targets)
        return found if metric.better == "higher" else -found

    def _targets(self, model: Model) -> torch.Tensor:
        labels = list(self.labels or ())
        if model.target.kind == "number":
            return torch.tensor([float(label) for label in labels])  # type: ignore[arg-type]
        if model.target.kind == "labels":
            return torch.from_numpy(pack(labels, "stopping.labels"))
        return torch.from_numpy(class_numbers(np.array([*map(str, labels)]), model.classes))

    def is_over(self, values: Sequence[float]) -> bool:
        """Whether the last ``patience`` values have not bettered the best before them.

        >>> stopping = Stopping([[0.0]], labels=["a"], patience=2)
        >>> stopping.is_over([0.5, 0.7, 0.6]), stopping.is_over([0.5, 0.7, 0.6, 0.7])
        (False, True)
        """
        before, last = values[: -self.patience], values[-self.patience :]
        return bool(before) and max(last) <= max(before)
