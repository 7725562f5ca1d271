"""Runs followed in TensorBoard or MLflow: callbacks for ``on_round``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpscaffold.checks import choice
from dpscaffold.config import Configuration
from dpscaffold.errors import BadInput
from dpscaffold.runs.history import HistoryRow

#: What a run can be followed in.
TRACKERS = ("tensorboard", "mlflow")


def tracker(name: str, folder: Path, settings: Configuration) -> TensorBoard | Mlflow:
    """The tracker of this name."""
    choice("--track", name, TRACKERS)
    make = TensorBoard if name == "tensorboard" else Mlflow
    try:
        return make(folder, settings.model_dump(mode="json", exclude_none=True))
    except ImportError:
        raise BadInput(
            "package-missing",
            f"--track {name} needs more packages; install them with: "
            f"pip install 'dpscaffold[track]'",
        ) from None


class TensorBoard:
    """Event files in ``tensorboard/NAME`` next to the run folder: the folder itself is claimed by
    the run."""

    def __init__(self, folder: Path, tables: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder.parent / "tensorboard" / folder.name))
        self.writer.add_text("configuration", f"```\n{tables}\n```")

    def __call__(self, row: HistoryRow) -> None:
        """Write the numbers of a round."""
        for name, value in row.metrics.items():
            if value is not None:
                self.writer.add_scalar(name, value, row.round)

    def close(self, how: str) -> None:
        """Write how the run ended."""
        self.writer.add_text("ended", how)
        self.writer.close()


class Mlflow:
    """One MLflow run, named after the folder; it begins with the first round, so that a run that
    is refused leaves none behind. Where it goes is MLflow's to say (``MLFLOW_TRACKING_URI``)."""

    def __init__(self, folder: Path, tables: Mapping[str, Any]) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        self.name, self.tables, self.begun = folder.name, tables, False

    def __call__(self, row: HistoryRow) -> None:
        """Log the numbers of a round."""
        if not self.begun:
            self._begin()
        known = {name: value for name, value in row.metrics.items() if value is not None}
        self.mlflow.log_metrics(known, step=row.round)

    def _begin(self) -> None:
        self.begun = True
        self.mlflow.start_run(run_name=self.name)
        for table, values in self.tables.items():
            given = values.items() if isinstance(values, Mapping) else ()
            self.mlflow.log_params({f"{table}.{key}": str(value)[:500] for key, value in given})

    def close(self, how: str) -> None:
        """Tag the run with how it ended."""
        if self.begun:
            self.mlflow.set_tag("ended", how)
            self.mlflow.end_run("KILLED" if how == "interrupted" else "FINISHED")
