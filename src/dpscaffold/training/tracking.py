"""Runs followed in TensorBoard or MLflow: listeners of the typed events, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dpscaffold.checks import choice
from dpscaffold.config import Configuration
from dpscaffold.errors import BadInput
from dpscaffold.training.events import Ended, Event, Listener, RoundDone, silence

#: What a run can be followed in.
TRACKERS = ("tensorboard", "mlflow")


class Board(Protocol):
    """Where numbers go."""

    def number(self, name: str, value: float, round: int) -> None:
        """One number of a round."""
        ...

    def close(self, how: str) -> None:
        """The run is over."""
        ...


@dataclass(frozen=True)
class Tracker:
    """A listener that hands every number of every round to a board, and of an evaluated round all
    metrics."""

    board: Board

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, RoundDone):
            for name, value in event.rows[0].metrics.items():
                if value is not None:
                    self.board.number(name, float(value), event.round)
        elif isinstance(event, Ended):
            self.board.close(event.how)


def tracker(name: str | None, folder: Path, settings: Configuration) -> Listener:
    """The listener of this name; silence without one."""
    if name is None:
        return silence
    choice("--track", name, TRACKERS)
    make = _TensorBoard if name == "tensorboard" else _Mlflow
    try:
        return Tracker(make(folder, settings.model_dump(mode="json", exclude_none=True)))
    except ImportError:
        raise BadInput(
            "package-missing",
            f"--track {name} needs more packages; install them with: "
            f"pip install 'dpscaffold[track]'",
        ) from None


class _TensorBoard:
    """Event files in ``tensorboard/NAME`` next to the run folder: the folder itself is claimed by
    the run."""

    def __init__(self, folder: Path, tables: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder.parent / "tensorboard" / folder.name))
        self.writer.add_text("configuration", f"```\n{tables}\n```")

    def number(self, name: str, value: float, round: int) -> None:
        self.writer.add_scalar(name, value, round)

    def close(self, how: str) -> None:
        self.writer.add_text("ended", how)
        self.writer.close()


class _Mlflow:
    """One MLflow run, named after the folder; it begins with the first number, so that a run that
    is refused leaves none behind. Where it goes is MLflow's to say (``MLFLOW_TRACKING_URI``)."""

    def __init__(self, folder: Path, tables: Mapping[str, Any]) -> None:
        import mlflow

        self.mlflow: Any = mlflow
        self.name, self.tables, self.begun = folder.name, tables, False

    def _begin(self) -> None:
        self.begun = True
        self.mlflow.start_run(run_name=self.name)
        for table, values in self.tables.items():
            if isinstance(values, Mapping):
                given = {f"{table}.{key}": str(value)[:500] for key, value in values.items()}
                self.mlflow.log_params(given)

    def number(self, name: str, value: float, round: int) -> None:
        if not self.begun:
            self._begin()
        self.mlflow.log_metric(name, value, step=round)

    def close(self, how: str) -> None:
        if self.begun:
            self.mlflow.set_tag("ended", how)
            self.mlflow.end_run("KILLED" if how == "interrupted" else "FINISHED")
