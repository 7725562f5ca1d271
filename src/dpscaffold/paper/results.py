"""From finished runs to results: the tidy rows, and the choice of a hyperparameter where there is
one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from dpscaffold.atomic import atomic_file
from dpscaffold.paper.archive import Archive, FinishedRun
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment, Place
from dpscaffold.runs.history import MetricValues

#: The file of the tidy rows.
TIDY = "results.parquet"

#: The outputs of a run, as the tidy rows name them; see also :func:`averaged`.
LATE, ITERATE = "last iterates, mean of the last 10 %", "iterate"
METRICS = (
    "test_accuracy",
    "train_loss",
    "log10_gap",
    "gradient_dissimilarity",
    "gradient_log_dissimilarity",
)


@dataclass(frozen=True)
class CaseResult:
    """A case and what became of it."""

    case: Case
    finished: FinishedRun

    @property
    def last(self) -> float | None:
        """Test accuracy over the last 10 % of rounds."""
        return self.finished.late("test_accuracy")

    @property
    def average(self) -> float | None:
        """Test accuracy of the average of the last iterates, the share that the plan asks for."""
        return self.finished.average.get("test_accuracy")


@dataclass(frozen=True)
class SeedSummary:
    """Mean and standard deviation over seeds; ``runs`` were finite, ``diverged`` were not."""

    mean: float
    deviation: float
    runs: int
    diverged: int = 0

    @classmethod
    def of(cls, values: Sequence[float | None]) -> SeedSummary:
        """Over the finite values. The deviation is the population's, as for three runs of one plan.

        >>> SeedSummary.of([1.0, 3.0, None])
        SeedSummary(mean=2.0, deviation=1.0, runs=2, diverged=1)
        """
        finite = [v for v in values if v is not None and math.isfinite(v)]
        if not finite:
            return cls(math.nan, math.nan, 0, len(values))
        mean = sum(finite) / len(finite)
        spread = math.sqrt(sum((v - mean) ** 2 for v in finite) / len(finite))
        return cls(mean, spread, len(finite), len(values) - len(finite))

    @property
    def rank(self) -> float:
        """The mean, and the least where no run was finite."""
        return self.mean if self.runs else -math.inf


Value = Callable[[CaseResult], float | None]


class Results:
    """The finished runs of an experiment by place (row, column, line) and choice."""

    def __init__(
        self,
        experiment: Experiment,
        cases: Sequence[Case],
        folded: Sequence[Case],
        archive: Archive,
    ) -> None:
        self.experiment = experiment
        self.runs = _finished(cases, archive)
        self.folded = _finished(folded, archive)
        self.missing = len(cases) - len(self.runs)
        self.missing_folds = len(folded) - len(self.folded)
        self._asked = list(dict.fromkeys(_place(case) for case in cases))
        self.places: dict[Place, dict[str, list[CaseResult]]] = _by_place(self.runs)
        self.fold_places = _by_place(self.folded)
        self._folds_asked = Counter(_place(case) for case in folded)

    @property
    def rows(self) -> list[str]:
        """Row labels in the definition's order."""
        return self._labels(0)

    def columns(self, row: str) -> list[str]:
        """Column labels of a row in order."""
        return self._labels(1, row)

    def lines(self, row: str | None = None) -> list[str]:
        """Line labels in order, of a row or of all."""
        return self._labels(2, row)

    def _labels(self, axis: int, row: str | None = None) -> list[str]:
        """What has a finished run, ordered as it was asked for: a missing run moves nothing."""
        there = {place[axis] for place in self.places if row in (None, place[0])}
        return [
            label for label in dict.fromkeys(place[axis] for place in self._asked) if label in there
        ]

    def summary(self, place: Place, choice: str, value: Value) -> SeedSummary:
        """Mean and deviation over seeds of one place and choice."""
        return SeedSummary.of([value(run) for run in self.places[place][choice]])

    def best(self, place: Place, value: Value) -> str:
        """The choice with the largest mean at this place; one that diverged in any seed comes
        last."""
        return self._best(self.places[place], value)

    def validated(self, place: Place, value: Value) -> str | None:
        """The choice that cross-validation makes; None without one, and while some of its runs are
        missing."""
        found = self.fold_places.get(place, {})
        if not found or sum(map(len, found.values())) < self._folds_asked[place]:
            return None
        return self._best(found, value)

    @staticmethod
    def _best(choices: dict[str, list[CaseResult]], value: Value) -> str:
        def key(choice: str) -> tuple[bool, float]:
            summary = SeedSummary.of([value(run) for run in choices[choice]])
            return summary.diverged == 0, summary.rank

        return max(choices, key=key)

    def chosen(self, place: Place) -> str:
        """The choice that a figure shows: made at the lowest heterogeneity and kept, where one is
        named."""
        level = self.experiment.tuned_at
        value = average if self.experiment.kind == "frontier" else last
        if level is None:
            return self.best(place, value)
        row, _, line = place
        for other in self.places:
            if other[0] == row and other[2] == line and level in (other[1], self._level(other)):
                return self.best(other, value)
        return self.best(place, value)

    def _level(self, place: Place) -> str:
        first = next(iter(self.places[place].values()))[0]
        return str(first.case.labels["level"])

    def shown(self, place: Place) -> list[CaseResult]:
        """The runs, one per seed, that a figure shows."""
        return self.places[place][self.chosen(place)]

    def tidy(self) -> list[dict[str, Any]]:
        """One row per run and evaluated round; of choices that are not shown only the late
        summary."""
        rows: list[dict[str, Any]] = []
        for place, choices in self.places.items():
            shown = self.chosen(place)
            for choice, runs in choices.items():
                for run in runs:
                    rows += _tidy(self.experiment.name, run, choice == shown)
        for run in self.folded:
            rows += _tidy(self.experiment.name, run, False)
        return rows


def last(run: CaseResult) -> float | None:
    """Test accuracy over the last 10 % of rounds: one output of a run."""
    return run.last


def average(run: CaseResult) -> float | None:
    """Test accuracy of the averaged model: the other output."""
    return run.average


def _finished(cases: Sequence[Case], archive: Archive) -> list[CaseResult]:
    found = ((case, archive.get(case)) for case in cases)
    return [CaseResult(case, finished) for case, finished in found if finished is not None]


def _by_place(runs: Sequence[CaseResult]) -> dict[Place, dict[str, list[CaseResult]]]:
    places: dict[Place, dict[str, list[CaseResult]]] = {}
    for run in runs:
        places.setdefault(_place(run.case), {}).setdefault(run.case.labels["choice"], []).append(
            run
        )
    return places


def _place(case: Case) -> Place:
    return case.labels["row"], case.labels["column"], case.labels["line"]


def averaged(tail: float) -> str:
    """How the tidy rows name the average over the last ``tail`` of the rounds.

    >>> averaged(0.5), averaged(0.2), averaged(1.0)
    ('average of the last half', 'average of the last 0.2', 'average of all')
    """
    names = {0.125: "the last eighth", 0.25: "the last quarter", 0.5: "the last half", 1.0: "all"}
    return f"average of {names.get(tail, f'the last {tail:g}')}"


def _tidy(name: str, run: CaseResult, shown: bool) -> list[dict[str, Any]]:
    settings, finished = run.case.settings, run.finished
    labels = run.case.labels
    base = {
        "experiment": name,
        "row": labels["row"],
        "column": labels["column"],
        "line": labels["line"],
        "shown": shown,
        "seed": labels["seed"],
        "fold": run.case.fold and run.case.fold[0],
        "learning_rate": settings.plan.learning_rate,
        "regularisation": settings.plan.regularisation,
        "rounds": finished.rounds,
        "local_steps": settings.plan.local_steps,
        "noise": finished.made.get("noise"),
        "clip": str(settings.privacy.clip) if settings.privacy else None,
        "tail": settings.plan.averaged_share,
        "diverged": finished.diverged,
    }

    def row(output: str, round: int | None, values: MetricValues) -> dict[str, Any]:
        return (
            base
            | {"output": output, "round": round}
            | {metric: values.get(metric) for metric in METRICS}
        )

    rows = [
        row(LATE, None, {m: finished.late(m) for m in METRICS}),
    ]
    if finished.average:
        rows.append(row(averaged(settings.plan.averaged_share), finished.rounds, finished.average))
    if shown:
        rows += [row(ITERATE, entry.round, entry.metrics) for entry in finished.history]
    return rows


def write_tidy(rows: Sequence[dict[str, Any]], folder: Path) -> str:
    """Write the rows to ``results.parquet``; the name of the file."""
    with atomic_file(folder / TIDY) as partial:
        parquet.write_table(pa.Table.from_pylist(list(rows)), partial)
    return TIDY


def read_tidy(folder: Path) -> list[dict[str, Any]]:
    """The tidy rows that were written; empty while there are none."""
    path = folder / TIDY
    return list(parquet.read_table(path).to_pylist()) if path.is_file() else []
