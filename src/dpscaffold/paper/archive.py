"""Finished runs on disk: one line of JSON each, found again by the digest of their
configuration."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscaffold.paper.cases import Case
from dpscaffold.runs.history import HistoryRow, MetricValues
from dpscaffold.runs.written import plain
from dpscaffold.training.evaluator import Metrics, late
from dpscaffold.training.stack import Outcome

#: The file that an experiment's finished runs are appended to.
FILE = "runs.jsonl"

#: Digits that are kept of a metric.
DIGITS = 6


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: evaluated rounds, the metrics of the averaged model, and what made it."""

    digest: str
    history: list[HistoryRow]
    average: Metrics
    diverged: int | None
    seconds: float
    made: dict[str, Any]

    @property
    def rounds(self) -> int:
        """T."""
        return int(self.made["rounds"])

    @property
    def metrics(self) -> int:
        """How many metrics its last evaluation has."""
        if not self.history:
            return 0
        return 1 + sum(value is not None for value in self.history[-1].metrics.values())

    def late(self, metric: str, fraction: float = 0.1) -> float | None:
        """The mean over the last 10 % of rounds; None for a run that diverged."""
        return late(self.history, metric, self.rounds, fraction, self.diverged)


class Archive:
    """The finished runs of one reproduction: written to the experiment's own file, read from all
    next to it.

    A line cut short by a crash is skipped, so its run is done again and nothing else. Where two
    files hold the same run, the one with more metrics counts: one figure may have asked for the gap
    to x* and another not.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / name
        self.path = self.folder / FILE
        self.finished: dict[str, FinishedRun] = {}
        for path in sorted(root.glob(f"*/{FILE}")):
            for run in _read(path):
                known = self.finished.get(run.digest)
                if known is None or run.metrics >= known.metrics:
                    self.finished[run.digest] = run

    def __contains__(self, case: Case) -> bool:
        return self.get(case) is not None

    def get(self, case: Case) -> FinishedRun | None:
        """The finished run of a case, or None."""
        return self.finished.get(case.digest)

    def add(self, cases: Iterable[Case], outcomes: Iterable[Outcome], made: dict[str, Any]) -> None:
        """Append the runs of a finished stack."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for run in _finished(cases, outcomes, made):
            self.finished[run.digest] = run
            lines.append(json.dumps(plain(vars(run))) + "\n")
        cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(("\n" if cut else "") + "".join(lines))


def _finished(
    cases: Iterable[Case], outcomes: Iterable[Outcome], made: dict[str, Any]
) -> list[FinishedRun]:
    """The runs of a finished stack, as an archive keeps them."""
    runs = []
    for case, outcome in zip(cases, outcomes, strict=True):
        privacy = outcome.setting.privacy
        about = {
            "rounds": outcome.setting.plan.rounds,
            "label": outcome.setting.label,
            "noise": privacy.noise if privacy else None,
        }
        finished = FinishedRun(
            case.digest,
            [HistoryRow(row.round, _short(row.metrics)) for row in outcome.history],
            _short(outcome.average),
            outcome.diverged,
            round(outcome.seconds, 3),
            made | about,
        )
        runs.append(finished)
    return runs


def _read(path: Path) -> Iterable[FinishedRun]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
            history = [HistoryRow.from_json(row) for row in values.pop("history")]
            yield FinishedRun(history=history, **values)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue


def _short(metrics: MetricValues) -> Metrics:
    """Metrics with few digits: results are to be read and kept, not continued from."""
    return {
        key: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for key, value in metrics.items()
    }
