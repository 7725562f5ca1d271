"""RESULT.md: our numbers, the paper's, the difference, the settings, ε by view and bound, and the command."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscaffold.experiments.archive import Finished
from dpscaffold.experiments.definition import Experiment
from dpscaffold.experiments.epsilons import epsilons
from dpscaffold.experiments.published import caption, published, table
from dpscaffold.privacy.statement import round_up
from dpscaffold.report.progress import duration
from dpscaffold.report.reproduction import Place, Results, Run, Summary

TUNING = (
    "Choosing hyperparameters by looking at private records stands outside every privacy guarantee, here as in "
    "the paper."
)


@dataclass(frozen=True)
class Made:
    """What a result was made with: the command as typed, the scale, the optima's accuracies by federation, and
    the rows that were asked for where not all were."""

    command: str
    scale: float
    optima: dict[str, float]
    rows: tuple[str, ...] = ()


def write_result(results: Results, folder: Path, made: Made) -> str:
    """Write ``RESULT.md`` and return its name."""
    experiment = results.experiment
    parts = [
        f"# {title(experiment, made.scale)}",
        f"Beside the paper's {experiment.paper}." if _in_paper(experiment) else "This experiment is not in the paper.",
    ]
    if made.rows:
        every = ", ".join(row.label for row in experiment.rows)
        parts.append(f"**Only a part**: {', '.join(made.rows)} of the rows {every}.")
    if results.missing:
        parts.append(f"**{results.missing} runs are not finished yet**; the same command goes on with them.")
    parts += {"table": _table, "curves": _curves, "frontier": _frontier}[experiment.kind](results, made)
    parts += _privacy(results)
    parts += _settings(results, made)
    (folder / "RESULT.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return "RESULT.md"


def title(experiment: Experiment, scale: float) -> str:
    """The title, which says so where the experiment was scaled down."""
    small = f" (scaled down to {scale:g} of the users and rounds)" if scale != 1 else ""
    return f"{experiment.title}{small}"


def _in_paper(experiment: Experiment) -> bool:
    return not experiment.paper.startswith("beyond")


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; a column that is empty in every row is left out."""
    filled = [any(row[k] for row in rows) for k in range(len(header))]
    header, *rows = [[cell for cell, keep in zip(row, filled, strict=True) if keep] for row in (header, *rows)]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _percent(summary: Summary) -> str:
    if not summary.runs:
        return "diverged"
    if summary.runs == 1:
        return f"{100 * summary.mean:.2f}"
    return f"{100 * summary.mean:.2f} ± {100 * summary.deviation:.2f}"


def _table(results: Results, made: Made) -> list[str]:
    """Both outputs beside the paper's value, with the η₀ chosen in view of the test data and by validation."""
    cells = table(results.experiment.published or results.experiment.name)
    parts = ["## Test accuracy (%), ours and the paper's"]
    parts.append(
        "Mean ± deviation over the seeds. *Last*: mean over the last 10 % of rounds, as in the paper. *Average*: the "
        "model averaged over the last half of the rounds, which costs no privacy. η₀ was chosen for each cell **with "
        f"the test data in view**; {_validation(results)} " + TUNING
    )
    header = [
        "σ_g",
        "K",
        "T",
        "paper",
        "last",
        "− paper",
        "average",
        "− paper",
        "η₀ last, average",
        "last by validation",
        "average by validation",
        "η₀ by validation",
    ]
    rows = [_cell(results, row, column, cells) for row in results.rows for column in results.columns(row)]
    parts.append(_markdown(header, rows))
    parts += _best_of_rows(results, made, cells)
    return parts


def _validation(results: Results) -> str:
    """What became of the choice by cross-validation."""
    folds = f"{results.experiment.folds}-fold cross-validation on the training records"
    if results.folded:
        return f"the choice of {folds} stands beside it where it was run."
    return f"the choice of {folds} was **not run** here (leave `--no-folds` out to run it)."


def _cell(results: Results, row: str, column: str, cells: Any) -> list[str]:
    place: Place = (row, column, "")
    paper = cells[float(row), int(column)]
    ran = next(iter(results.places[place].values()))[0].finished.rounds
    shown = [row, column, str(ran), f"{paper.accuracy:.2f} ± {paper.deviation:.2f}"]
    rates = []
    for value in (_last, _average):
        choice = results.best(place, value)
        summary = results.summary(place, choice, value)
        shown += [_percent(summary), f"{100 * summary.mean - paper.accuracy:+.2f}"]
        rates.append(_rate(choice))
    shown.append(", ".join(rates))
    chosen = []
    for value in (_last, _average):
        choice_ = results.validated(place, value)
        shown.append("" if choice_ is None else _percent(results.summary(place, choice_, value)))
        chosen.append("" if choice_ is None else _rate(choice_))
    return [*shown, ", ".join(filter(None, chosen))]


def _best_of_rows(results: Results, made: Made, cells: Any) -> list[str]:
    """The best K of each σ_g, and its distance to the central optimum."""
    optimum = next(iter(made.optima.values()), math.nan)
    rows = []
    for row in results.rows:
        line = [row]
        best_paper = max(cells[float(row), int(c)].accuracy for c in results.columns(row))
        line.append(f"{best_paper:.2f}")
        for value in (_last, _average):
            found = [
                (results.summary((row, c, ""), results.best((row, c, ""), value), value), c)
                for c in results.columns(row)
            ]
            summary, column = max(found, key=lambda pair: pair[0].mean if pair[0].runs else -1)
            line += [f"{_percent(summary)} (K = {column})", f"{100 * (optimum - summary.mean):.2f}"]
        rows.append(line)
    return [
        "## Best of each row",
        f"The central optimum x* (all data in one place, no privacy) has {100 * optimum:.2f} % test accuracy.",
        _markdown(["σ_g", "paper", "last", "points below x*", "average", "points below x*"], rows),
    ]


def _curves(results: Results, made: Made) -> list[str]:
    """The end of every curve."""
    experiment = results.experiment
    said = caption(experiment.name)
    parts = ["## The end of every curve"]
    how = (
        "Means ± deviations over the seeds and the last 10 % of rounds; *average*: test accuracy of the model "
        "averaged over the last half."
    )
    if any(len(choices) > 1 for choices in results.places.values()):
        how += (
            f" η₀ was chosen for each algorithm at {_lowest(experiment)} by **test** accuracy and kept for the "
            "others, as the paper keeps its choice; *best* shows the best η₀ of the sweep for that panel alone, "
            "of both outputs. " + TUNING
        )
    parts.append(how)
    header = ["panel", "algorithm", "η₀", "T", "test accuracy (%)", "average (%)", "best (%)", "log₁₀ gap"]
    header.append("dissimilarity")
    rows = [_end(results, place) for place in results.places]
    parts.append(_markdown(header, rows))
    if said:
        parts.append("## What the paper says")
        parts.append(f"{said.pop('where')}. Its figures are curves without printed values; what it prints:")
        parts.append("\n".join(f"- {key.replace('_', ' ')}: {_spelled(value)}" for key, value in said.items()))
    parts += _gaps(results)
    return parts


def _spelled(value: Any) -> str:
    """A printed value, or several by name."""
    return "; ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def _lowest(experiment: Experiment) -> str:
    """Where a choice was made, in words."""
    level = experiment.tuned_at
    return "the lowest heterogeneity" if level in (None, "low") else f"{level} (the lowest heterogeneity)"


def _end(results: Results, place: Place) -> list[str]:
    choice = results.chosen(place)
    runs = results.places[place][choice]

    def late(metric: str, pattern: str) -> str:
        summary = Summary.of([run.finished.late(metric) for run in runs])
        return f"{summary.mean:{pattern}} ± {summary.deviation:{pattern}}" if summary.runs else ""

    best = max(
        ((results.summary(place, c, v), c) for c in results.places[place] for v in (_last, _average)),
        key=lambda pair: pair[0].mean if pair[0].runs else -1,
    )
    rates = len(results.places[place]) > 1
    return [
        f"{place[0]}, {place[1]}",
        place[2],
        f"{runs[0].case.settings.plan.learning_rate:g}",
        str(runs[0].finished.rounds),
        _percent(results.summary(place, choice, _last)),
        _percent(results.summary(place, choice, _average)),
        f"{_percent(best[0])} ({_rate(best[1])})" if rates else "",
        late("log10_gap", ".2f"),
        late("gradient_dissimilarity", ".3g"),
    ]


def _gaps(results: Results) -> list[str]:
    """How far DP-SCAFFOLD is ahead of DP-FedAvg in each panel."""
    rows = []
    for row in results.rows:
        for column in results.columns(row):
            for line in results.lines(row):
                other = line.replace("SCAFFOLD-warm", "FedAvg").replace("SCAFFOLD", "FedAvg")
                here, there = (row, column, line), (row, column, other)
                if line == other or here not in results.places or there not in results.places:
                    continue
                ours = results.summary(here, results.chosen(here), _last).mean
                theirs = results.summary(there, results.chosen(there), _last).mean
                rows.append([f"{row}, {column}", line, other, f"{100 * (ours - theirs):+.2f}"])
    header = ["panel", "algorithm", "against", "points of test accuracy"]
    return ["## SCAFFOLD against FedAvg", _markdown(header, rows)] if rows else []


def _frontier(results: Results, made: Made) -> list[str]:
    parts = ["## Test accuracy (%) of the averaged model by ε towards the server"]
    parts.append(
        "The model averaged over the last half of the rounds, and in brackets the last iterates of the same runs (mean "
        "of the last 10 % of rounds). η₀ was chosen for each entry by the averaged model **with the test data in "
        "view**, among those of the definition; σ_g and η₀ are listed in the order of the algorithms. " + TUNING
    )
    for row in results.rows:
        columns = results.columns(row)
        lines = results.lines(row)
        header = ["ε", "batches, neighbours", *lines, "σ_g", "η₀"]
        rows = []
        for column in columns:
            epsilon, _, sampling = column.partition(" ")
            entries = [(row, column, line) for line in lines if (row, column, line) in results.places]
            if not entries:
                continue
            how = {"poisson": "Poisson, add/remove", "fixed": "fixed size, replace-one"}.get(sampling, "not private")
            noises = [_noise(results.shown(p)[0].finished) for p in entries]
            rates = [_rate(results.chosen(p)) for p in entries]
            values = [_both(results, p) for p in entries]
            rows.append([epsilon, how, *values, ", ".join(filter(None, noises)), ", ".join(rates)])
        parts += [f"### {row}", _markdown(header, rows)]
    return parts


def _both(results: Results, place: Place) -> str:
    """The averaged model's accuracy, and in brackets that of the last iterates of the same choice."""
    choice = results.chosen(place)
    average, last = (results.summary(place, choice, value) for value in (_average, _last))
    return f"{_percent(average)} ({_percent(last)})"


def _noise(finished: Finished) -> str:
    noise = finished.made.get("noise")
    return "" if noise is None else f"{noise:.3g}"


def _privacy(results: Results) -> list[str]:
    """ε by view and bound of every distinct private plan."""
    if results.experiment.kind == "frontier":
        text = "ε is the target towards the server, by random participation (PLD); the noise was solved for it."
        return ["## Privacy", text]
    seen: dict[str, tuple[str, dict[str, float | None]]] = {}
    for place, choices in results.places.items():
        case = next(iter(choices.values()))[0].case
        settings = case.settings
        if settings.privacy is None:
            continue
        # Users who share their noise let anyone subtract it: no bound applies.
        found = dict.fromkeys(epsilons(settings)) if case.engine == "loop-same-noise" else epsilons(settings)
        plan = f"σ_g = {settings.privacy.noise:g}, K = {settings.plan.local_steps}, T = {settings.plan.rounds}"
        who = "" if results.experiment.kind == "table" else f"{place[0]}, {place[2]}: "
        ratios = f"l = {settings.plan.user_ratio:g}, s = {settings.plan.data_ratio:g}"
        seen.setdefault(f"{who}{plan}, {ratios}", (who, found))
    if not seen:
        return []
    names = list(dict.fromkeys(name for _, found in seen.values() for name in found))
    rows = [
        [plan, *(round_up(found.get(name)) if name in found else "" for name in names)]
        for plan, (_, found) in seen.items()
    ]
    note = (
        "ε at δ = 1/(all training records). The server's holds against everyone who sees every upload; the column "
        "*as published* is the paper's number, for comparison only: it is not a theorem for every loss."
    )
    if any(case.engine == "loop-same-noise" for case in (run.case for run in results.runs)):
        note += (
            " Users who all add the **same noise have no guarantee at all** towards the server: the difference of two "
            "uploads holds no noise."
        )
    return ["## Privacy: ε by view and bound", note, _markdown(["plan", *names], rows)]


def _settings(results: Results, made: Made) -> list[str]:
    """Everything needed to do it again."""
    experiment = results.experiment
    runs = results.runs
    first = runs[0].finished.made
    devices = sorted({str(run.finished.made.get("device")) for run in runs})
    seconds = sum(run.finished.seconds for run in [*runs, *results.folded])
    seeds = sorted({run.case.labels["seed"] for run in runs})
    part = "some of its runs" if "cpu" in devices else "its runs"
    elsewhere = f"; {part} were made on a GPU, with `--device cuda --only-runs`" if devices != ["cpu"] else ""
    lines = [
        f"- command: `{made.command}`{elsewhere}",
        f"- seeds: {', '.join(map(str, seeds))}; runs: {len(runs)}"
        + (f", and {len(results.folded)} of the cross-validation" if results.folded else ""),
        f"- device: {', '.join(devices)}; time of these runs: {duration(seconds)}",
        "- versions: " + ", ".join(f"{k} {first[k]}" for k in ("dpscaffold", "python", "torch", "numpy") if k in first),
        f"- definition: `experiments/paper/{experiment.name}.toml` inside the package",
        "- base configuration: "
        + "; ".join(f"{name}.{key} = {value}" for name, part in experiment.base.items() for key, value in part.items()),
    ]
    for name, accuracy in made.optima.items():
        lines.append(f"- test accuracy of the central optimum x* on {name}: {100 * accuracy:.2f} %")
    if _in_paper(experiment):
        lines.append(f"- the paper: {published()['source']}")
    lines += [f"- {note}" for note in experiment.notes]
    return ["## How it was made", "\n".join(lines)]


def _rate(choice: str) -> str:
    return choice.removeprefix("η₀ = ")


def _last(run: Run) -> float | None:
    return run.last


def _average(run: Run) -> float | None:
    return run.average


Value = Callable[[Run], float | None]
