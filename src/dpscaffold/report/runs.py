"""Tables and figures of finished (or running) run folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.table import Table
from rich.text import Text

from dpscaffold.errors import BadInput
from dpscaffold.privacy import Statement, line
from dpscaffold.privacy.numbers import round_up
from dpscaffold.report.drawing import new_figure, save_figure
from dpscaffold.report.fitting import legible
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.summary import Summary
from dpscaffold.tasks.metrics import titled
from dpscaffold.training.progress import duration

#: The panels of a comparison: metric, label, whether to draw it only if every run has it.
PANELS = (
    ("test_accuracy", "test accuracy"),
    ("test_rmse", "test RMSE"),
    ("log10_gap", "log₁₀(F(x) − F(x*))"),
    ("gradient_dissimilarity", "gradient dissimilarity"),
)


@dataclass(frozen=True)
class RunRecord:
    """A run folder as read back; with ``repeats`` the mean of runs that differ in their seed."""

    folder: Path
    summary: Summary
    history: list[HistoryRow]
    privacy: Statement | None
    repeats: tuple[RunRecord, ...] = ()

    def deviation(self, metric: str) -> float | None:
        """The standard deviation of a number of the table over the repeats."""
        found = [run.row().get(metric) for run in self.repeats]
        values = [float(value) for value in found if value is not None]
        return stdev(values) if values and len(values) == len(found) else None

    @property
    def label(self) -> str:
        """The folder's name and its algorithm, without saying the same twice."""
        algorithm = self.summary.algorithm or self.folder.name
        return (
            algorithm
            if self.folder.name.lower() == algorithm.lower()
            else f"{self.folder.name} ({algorithm})"
        )

    @property
    def metric(self) -> str:
        """The metric that represents the run."""
        return self.summary.metric or _shown_in(self.history)

    @property
    def private(self) -> bool:
        """Whether the run clips gradients and adds noise."""
        return self.privacy is not None and bool(self.privacy.parts)

    def row(self) -> dict[str, Any]:
        """The numbers of the table."""
        metric = self.metric
        final = self.summary.final or (self.history[-1] if self.history else {})
        said = self.privacy
        return {
            "run": self.label,
            "data": self.summary.data,
            "ended": self.summary.ended,
            "rounds": final.get("round"),
            metric: self.summary.number(f"late_{metric}", final.get(metric)),
            "train_loss": self.summary.number("late_train_loss", final.get("train_loss")),
            "log10_gap": final.get("log10_gap"),
            "gradient_dissimilarity": final.get("gradient_dissimilarity"),
            "simulated": said is not None and said.seeded,
            "epsilon": said.epsilon if said else None,
            "epsilon_server": said.towards("server").epsilon if said else None,
            "delta": said.delta if said else None,
            "theorem": said.towards("server").theorem if said else None,
            "seconds": self.summary.seconds,
            f"optimum_{metric}": self.summary.number(f"optimum_{metric}"),
            **self._deviations(metric),
        }

    def _deviations(self, metric: str) -> dict[str, Any]:
        if not self.repeats:
            return {}
        names = (metric, "train_loss")
        found = {f"{name}_deviation": self.deviation(name) for name in names}
        return {"seeds": len(self.repeats), **found}


def _shown_in(history: list[HistoryRow]) -> str:
    """The first test metric of a history: the one that is shown."""
    names = (name for row in history for name in row.metrics if name.startswith("test_"))
    return next(names, "test_accuracy")


def read_run(path: Path) -> RunRecord:
    """Read a run folder, or one with runs of several seeds (``train --seeds``), as their mean. One
    that holds no run, or no evaluated round, is refused."""
    folder = RunFolder(path)
    seeds = sorted(path.glob("seed-*")) if not folder.holds_run else []
    if seeds:
        return mean_of(path, [read_run(seed) for seed in seeds])
    if not folder.holds_run:
        raise BadInput(
            "not-a-run",
            f"{path} holds no run (no config.toml); name a folder written by dpscaffold train",
        )
    history = folder.metrics()
    if not history:
        raise BadInput("no-history", _why_no_history(folder))
    return RunRecord(path, folder.summary(), history, folder.statement())


def _why_no_history(folder: RunFolder) -> str:
    written = folder.file("metrics.jsonl")
    if written.exists() and b"\n" in written.read_bytes():
        return f"{written} is damaged; restore it or start a new run"
    return (
        f"the run in {folder.path} has no evaluated round yet; let it reach one, or lower "
        f"plan.evaluate_every"
    )


def _mean_history(runs: Sequence[RunRecord]) -> list[HistoryRow]:
    """The means of the rounds that all runs have."""
    by_round: dict[int, list[HistoryRow]] = {}
    for run in runs:
        for row in run.history:
            by_round.setdefault(row.round, []).append(row)
    return [
        HistoryRow(round, _mean([row.metrics for row in rows]))
        for round, rows in by_round.items()
        if len(rows) == len(runs)
    ]


def mean_of(folder: Path, runs: Sequence[RunRecord]) -> RunRecord:
    """Runs that differ in their seed as one: the mean of every number, by round too."""
    stated = [run.privacy for run in runs if run.privacy is not None]
    privacy = max(stated, key=lambda said: said.epsilon or 0.0, default=None)
    history = _mean_history(runs)
    summary = _mean([run.summary.to_json() for run in runs])
    finals = [run.summary.final for run in runs if run.summary.final]
    summary |= {"final": _mean(finals)} if len(finals) == len(runs) else {}
    if any(run.summary.ended != "completed" for run in runs):
        summary["ended"] = "unfinished"
    return RunRecord(folder, Summary.from_json(summary, str(folder)), history, privacy, tuple(runs))


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Numbers that all rows have, averaged; other values of the first row where all agree."""
    found: dict[str, Any] = {}
    for key, first in rows[0].items():
        values: list[Any] = [row.get(key) for row in rows]
        if all(isinstance(value, int | float) for value in values):
            found[key] = first if len(set(values)) == 1 else fmean(values)
        elif all(value == first for value in values):
            found[key] = first
    return found


def _table_line(
    name: str, run: RunRecord, row: Mapping[str, Any], metrics: Sequence[str]
) -> list[str]:
    return [
        name if row["ended"] == "completed" else f"{name} [{row['ended']}]",
        str(row["data"] or ""),
        str(row["rounds"]),
        *(_spread(run, metric) for metric in metrics),
        _spread(run, "train_loss"),
        _shown(row["log10_gap"], 2),
        _epsilon(run, row),
        duration(row["seconds"]) if row["seconds"] is not None else "",
    ]


def _optimum_lines(
    runs: list[RunRecord], rows: list[dict[str, Any]], metrics: Sequence[str]
) -> list[list[str]]:
    lines = []
    for (data, metric), (value, loss) in _optima(runs, rows).items():
        values = [_shown(value if name == metric else None, 4) for name in metrics]
        lines.append(["central optimum", data, "", *values, _shown(loss, 4), "", "", ""])
    return lines


def comparison_table(runs: list[RunRecord], width: int = 80) -> Table | Text:
    """One row per run, and the central optimum where it was solved."""
    rows = [run.row() for run in runs]
    several = len({row["data"] for row in rows}) > 1
    of_data = "" if several else f", {rows[0]['data']}"
    metrics = list(dict.fromkeys(run.metric for run in runs))
    lines = [
        _table_line(name, run, row, metrics)
        for name, run, row in zip(labels(runs), runs, rows, strict=True)
    ]
    lines += _optimum_lines(runs, rows, metrics)
    shown = map(titled, metrics)
    head = ["run", "data", "rounds", *shown, "loss", "log₁₀ gap", "ε server", "time"]
    kept = [
        k
        for k, name in enumerate(head)
        if any(line[k] for line in lines) and (several or name != "data")
    ]
    cells = [[line[k] for k in kept] for line in lines]
    title = f"means over the last 10 % of rounds{of_data}"
    return legible([head[k] for k in kept], cells, width, title)


def labels(runs: list[RunRecord]) -> list[str]:
    """What each run is called; where two would be called the same, by their paths."""
    called = [run.label for run in runs]
    return [
        name if called.count(name) == 1 else f"{run.folder} ({run.summary.algorithm or name})"
        for name, run in zip(called, runs, strict=True)
    ]


def _epsilon(run: RunRecord, row: Mapping[str, Any]) -> str:
    each = run.privacy.by_group if run.privacy else ()
    if each:
        return f"{round_up(min(each))}–{round_up(max(each))}"
    if row["epsilon_server"] is not None:
        return round_up(row["epsilon_server"])
    return "none" if run.private else "not private"


def _optima(
    runs: list[RunRecord], rows: list[dict[str, Any]]
) -> dict[tuple[str, str], tuple[float, Any]]:
    """The central optimum's metric and loss by data and metric, where it was solved."""
    return {
        (str(row["data"]), run.metric): (
            row[f"optimum_{run.metric}"],
            run.summary.number("optimum_loss"),
        )
        for run, row in zip(runs, rows, strict=True)
        if row[f"optimum_{run.metric}"] is not None
    }


def epsilon_note(runs: list[RunRecord]) -> str:
    """What the ε column means: δ, neighbours and adversary, one line for runs of which the same is
    said."""
    named: dict[str, list[str]] = {}
    for name, run in zip(labels(runs), runs, strict=True):
        if run.privacy is not None and run.privacy.guarantee:
            named.setdefault(line(run.privacy), []).append(name)
    return "\n".join(f"{', '.join(names)}: {said}" for said, names in named.items())


def _shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _spread(run: RunRecord, metric: str) -> str:
    """A number of the table, with ± its standard deviation over seeds where there are several."""
    shown, deviation = _shown(run.row().get(metric), 4), run.deviation(metric)
    return shown if deviation is None or not shown else f"{shown} ± {deviation:.4f}"


def _panels(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """The metrics that some run has, with their labels; the loss where no optimum is known."""
    rows = [row.metrics for run in runs for row in run.history]
    panels = [(m, label) for m, label in PANELS if any(row.get(m) is not None for row in rows)]
    if not any(metric == "log10_gap" for metric, _ in panels):
        panels.insert(1, ("train_loss", "train loss F(x)"))
    return panels


def _by_round(run: RunRecord, metric: str) -> dict[int, float]:
    found = {row.round: row.metrics.get(metric) for row in run.history}
    return {round: value for round, value in found.items() if value is not None}


def _draw_run(axis: Any, run: RunRecord, metric: str, colour: str) -> None:
    points = _by_round(run, metric)
    if points:
        style = "-" if run.private else "--"
        axis.plot(
            *zip(*points.items(), strict=True), label=run.label, color=colour, linestyle=style
        )
        _draw_band(axis, run, metric, colour)


def draw_comparison(runs: list[RunRecord], path: Path) -> None:
    """Test accuracy, gap to the optimum and dissimilarity against rounds, one line per run."""
    panels = _panels(runs)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise BadInput("wrong-file-type", f"--out is {path}; name a .png, .svg or .pdf file")
    figure = new_figure(4.6 * len(panels), 3.8)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (metric, label) in zip(axes, panels, strict=True):
        for k, run in enumerate(runs):
            _draw_run(axis, run, metric, f"C{k}")
        if metric in ("test_accuracy", "test_rmse"):
            optima = {run.summary.number(f"optimum_{metric}") for run in runs}
            for value in sorted(float(value) for value in optima if value is not None):
                axis.axhline(
                    value, color="0.4", linewidth=1, linestyle=":", label="central optimum x*"
                )
        axis.set_xlabel("round")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncol=min(5, len(labels)), frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path, 150)


def _draw_band(axis: Any, run: RunRecord, metric: str, colour: str) -> None:
    """One standard deviation over seeds on either side of the mean."""
    values = [_by_round(one, metric) for one in run.repeats]
    rounds = sorted(set.intersection(*(set(one) for one in values))) if values else []
    if rounds:
        columns = [[one[number] for one in values] for number in rounds]
        low = [fmean(column) - stdev(column) for column in columns]
        high = [fmean(column) + stdev(column) for column in columns]
        axis.fill_between(rounds, low, high, color=colour, alpha=0.15, linewidth=0)
