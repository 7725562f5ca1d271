"""Early stopping on a public validation set.

The rows are public, but what is looked at are the outputs of a private run: when a run stops is
chosen by them. Such a run therefore reserves all planned rounds before the first, and everything
that is stated of it counts T, never the rounds that it ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpscaffold.checks import whole
from dpscaffold.models.evaluate import score_file
from dpscaffold.models.model import Model
from dpscaffold.tasks.metrics import metrics_for


@dataclass(frozen=True)
class Stopping:
    """Stop when ``patience`` evaluations in a row have not improved on the best, on public rows.

    Args:
        path: A CSV or Parquet file of raw public rows. No private record may be among them.
        label: The label column; None for several labels, which are found by their names.
        patience: How many evaluations may pass without an improvement.

    >>> Stopping("public.csv", label="outcome", patience=3).patience
    3
    """

    path: Path | str
    label: str | None = "label"
    patience: int = 5

    def __post_init__(self) -> None:
        whole("stopping.patience", self.patience, 1)

    def value(self, model: Model) -> float:
        """The metric that represents a model, on the public rows; larger is better."""
        metric = metrics_for(model.target)[0]
        scored = score_file(model, Path(self.path), self.label)
        found = metric.of(scored.scores, scored.targets)
        return found if metric.better == "higher" else -found

    def is_over(self, values: Sequence[float]) -> bool:
        """Whether the last ``patience`` values have not bettered the best before them.

        >>> stopping = Stopping("public.csv", patience=2)
        >>> stopping.is_over([0.5, 0.7, 0.6]), stopping.is_over([0.5, 0.7, 0.6, 0.7])
        (False, True)
        """
        before, last = values[: -self.patience], values[-self.patience :]
        return bool(before) and max(last) <= max(before)
