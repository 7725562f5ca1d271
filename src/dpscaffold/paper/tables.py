"""The tables of RESULT.md: ours next to the paper's, and every choice of a sweep."""

from __future__ import annotations

from typing import Any

from dpscaffold.paper.definition import Place
from dpscaffold.paper.published import table
from dpscaffold.paper.results import Results, SeedSummary, Value, average, last
from dpscaffold.paper.text import (
    OUTPUTS,
    TUNING,
    Objective,
    Provenance,
    markdown,
    percent,
    rate,
)

_HOW = (
    "Mean ± deviation over the seeds. *Last*: mean over the last 10 % of rounds, as in the paper. "
    "*Average*: the model averaged over the last half of the rounds, which costs no privacy."
)


def table_parts(results: Results, made: Provenance) -> list[str]:
    """Both outputs next to the paper's value, with the choices made in view of the test data and by
    validation."""
    parts = ["## Test accuracy (%), ours and the paper's"]
    parts.append(
        f"{_HOW} η₀ was chosen for each cell **with the test data in view**; "
        f"{_validation(results)} {TUNING}"
    )
    cells = table(results.experiment.published or results.experiment.name)
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
    for line in results.lines():
        if line:
            parts.append(f"### {line}")
        places = [(row, column, line) for row in results.rows for column in results.columns(row)]
        parts.append(
            markdown(
                header,
                [_cell(results, place, cells) for place in places if place in results.places],
            )
        )
        parts += _best_of_rows(results, made, cells, line)
    return parts


def _validation(results: Results) -> str:
    """What became of the choice by cross-validation."""
    if not results.experiment.folds:
        return "no cross-validation is next to it."
    folds = f"{results.experiment.folds}-fold cross-validation on the training records"
    return f"the choice of {folds} is next to it where it was run."


def _cell(results: Results, place: Place, cells: Any) -> list[str]:
    row, column, _ = place
    paper = cells[float(row), int(column)]
    ran = next(iter(results.places[place].values()))[0].finished.rounds
    shown = [row, column, str(ran), f"{paper.accuracy:.2f} ± {paper.deviation:.2f}"]
    rates = []
    for value in (last, average):
        choice = results.best(place, value)
        summary = results.summary(place, choice, value)
        shown += [
            percent(summary),
            f"{100 * summary.mean - paper.accuracy:+.2f}" if summary.runs else "",
        ]
        rates.append(rate(choice))
    shown.append(", ".join(rates))
    chosen = []
    for value in (last, average):
        choice_ = results.validated(place, value)
        made = choice_ if choice_ in results.places[place] else None
        shown.append("" if made is None else percent(results.summary(place, made, value)))
        chosen.append("" if made is None else rate(made))
    return [*shown, ", ".join(filter(None, chosen))]


def _points_below(optimum: float | None, summary: SeedSummary) -> str:
    return f"{100 * (optimum - summary.mean):.2f}" if optimum is not None and summary.runs else ""


def _best_of_rows(results: Results, made: Provenance, cells: Any, line: str) -> list[str]:
    """The best K of each σ_g, and its distance to the central optimum of the objective that was
    trained."""
    rows, optimum = [], None
    for row in results.rows:
        columns = [
            column for column in results.columns(row) if (row, column, line) in results.places
        ]
        if not columns:
            continue
        optimum = made.optima.get(_objective(results, (row, columns[0], line)))
        shown = [row, f"{max(cells[float(row), int(c)].accuracy for c in columns):.2f}"]
        for value, _ in OUTPUTS:
            found = [
                (results.summary((row, c, line), results.best((row, c, line), value), value), c)
                for c in columns
            ]
            summary, column = max(found, key=lambda pair: pair[0].mean if pair[0].runs else -1)
            shown += [f"{percent(summary)} (K = {column})", _points_below(optimum, summary)]
        rows.append(shown)
    return [
        f"Best K of each row.{_optimum(optimum)}",
        markdown(["σ_g", "paper", "last", "points below x*", "average", "points below x*"], rows),
    ]


def _optimum(accuracy: float | None) -> str:
    """The central optimum in words, where it was solved for."""
    if accuracy is None:
        return ""
    return (
        " The central optimum x* of this objective (all data in one place, no privacy) has "
        f"{100 * accuracy:.2f} % test accuracy."
    )


def _objective(results: Results, place: Place) -> Objective:
    """Which optimum stands next to a place."""
    return next(iter(results.places[place].values()))[0].case.objective


def sweep_parts(results: Results, made: Provenance) -> list[str]:
    """Every choice of every panel: one table per panel, clips down and step sizes across."""
    parts = ["## Test accuracy (%) of every choice"]
    parts.append(
        f"{_HOW} Each entry is *last / average*, the mean over the seeds; the best of each output "
        f"is bold, and was found **with the test data in view**. {TUNING}"
    )
    for row in results.rows:
        for column in results.columns(row):
            place: Place = (row, column, "")
            best: dict[Value, str] = {value: results.best(place, value) for value, _ in OUTPUTS}
            optimum = made.optima.get(_objective(results, place))
            heads = [
                f"{name} {percent(results.summary(place, best[v], v))} ({best[v]})"
                for v, name in OUTPUTS
            ]
            parts += [
                f"### {row}, {column}",
                f"Best: {', '.join(heads)}.{_optimum(optimum)}",
                _grid(results, place, best),
            ]
    return parts


def _marked(summary: SeedSummary, best: bool) -> str:
    text = f"{100 * summary.mean:.1f}" if summary.runs else "diverged"
    return f"**{text}**" if best else text


def _grid(results: Results, place: Place, best: dict[Value, str]) -> str:
    """C down, η₀ across."""
    by_clip: dict[float, dict[float, str]] = {}
    for choice, runs in results.places[place].items():
        settings = runs[0].case.settings
        entry = [_marked(results.summary(place, choice, v), best[v] == choice) for v, _ in OUTPUTS]
        assert settings.privacy is not None and settings.plan.learning_rate is not None
        entries = by_clip.setdefault(float(settings.privacy.clip), {})
        entries[settings.plan.learning_rate] = " / ".join(entry)
    rates = sorted({rate for entries in by_clip.values() for rate in entries})
    rows = [
        [f"C = {clip:g}", *(entries.get(rate, "") for rate in rates)]
        for clip, entries in sorted(by_clip.items())
    ]
    return markdown([" ", *(f"η₀ = {rate:g}" for rate in rates)], rows)
