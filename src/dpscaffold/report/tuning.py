"""What tuning found: a table, a figure, the best configuration, and what it cost in privacy."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dpscaffold.atomic import atomic_file, write_text
from dpscaffold.report.drawing import new_figure, save_figure
from dpscaffold.report.fitting import legible
from dpscaffold.runs.written import to_toml
from dpscaffold.tuning.tuning import Score, TuningResult


def tuning_table(tuned: TuningResult, width: int = 80) -> Table | Text:
    """One line per point of the grid, the best one marked."""
    table = tuned.tune
    title = (
        f"validation {tuned.metric.title} on {tuned.title}, {table.folds} folds ({tuned.output})"
    )
    rows = [[*_row(score), "best" if score is tuned.best else ""] for score in tuned.scores]
    return legible([*table.grid, tuned.metric.title, "± folds", ""], rows, width, title)


def write_tuning(tuned: TuningResult, folder: Path, command: str) -> list[str]:
    """``tuning.csv``, ``tuning.png`` (where matplotlib is installed), ``best.toml`` and
    ``TUNING.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_csv(tuned, folder / "tuning.csv")
    drawn = []
    if find_spec("matplotlib") is not None:
        _draw(tuned, folder / "tuning.png")
        drawn = ["tuning.png"]
    note = "\n".join(f"# {line}" for line in (_sentence(tuned), tuned.privacy_note))
    write_text(folder / "best.toml", f"{note}\n\n{to_toml(tuned.best_tables())}")
    write_text(folder / "TUNING.md", _markdown(tuned, command))
    return ["tuning.csv", *drawn, "best.toml", "TUNING.md"]


def _sentence(tuned: TuningResult) -> str:
    values = ", ".join(f"{key} = {_text(value)}" for key, value in tuned.best.values.items())
    folds = f"{tuned.tune.folds} folds"
    return (
        f"Chosen by cross-validation ({folds}): {values}, validation {tuned.metric.title} "
        f"{tuned.best.mean:.4f}."
    )


def _write_csv(tuned: TuningResult, path: Path) -> None:
    with atomic_file(path) as partial, partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow([*tuned.tune.grid, "mean", "deviation", "diverged_folds", "folds"])
        for score in tuned.scores:
            folds = " ".join(f"{a:.6f}" for a in score.accuracies)
            numbers = (
                ["", ""] if score.diverged else [f"{score.mean:.6f}", f"{score.deviation:.6f}"]
            )
            writer.writerow([*score.values.values(), *numbers, score.diverged, folds])


def _markdown(tuned: TuningResult, command: str) -> str:
    header = [*tuned.tune.grid, f"validation {tuned.metric.title}", "± folds"]
    lines = ["# Tuning", _sentence(tuned), tuned.privacy_note]
    if tuned.at_edge:
        lines.append(
            f"The best value of {', '.join(tuned.at_edge)} is at the edge of the grid: widen it "
            f"to be sure."
        )
    rows = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    rows += ["| " + " | ".join(_row(score)) + " |" for score in tuned.scores]
    return "\n\n".join([*lines, "\n".join(rows), f"Command: `{command}`"]) + "\n"


def _row(score: Score) -> list[str]:
    numbers = (
        ["diverged", ""] if score.diverged else [f"{score.mean:.4f}", f"{score.deviation:.4f}"]
    )
    return [*(_text(value) for value in score.values.values()), *numbers]


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _span_scales(values: Sequence[object]) -> bool:
    """Whether these are positive numbers over such a range that a logarithmic axis suits them."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < len(values) or min(numbers) <= 0:
        return False
    return max(numbers) > 5 * min(numbers)


def _draw(tuned: TuningResult, path: Path) -> None:
    """Accuracy over the first key of the grid, one line per value of the others."""
    key, *others = tuned.tune.grid
    figure = new_figure(5.2, 3.6)
    axis = figure.subplots()
    lines: dict[str, list[Score]] = {}
    for score in tuned.scores:
        name = ", ".join(f"{other} = {_text(score.values[other])}" for other in others)
        lines.setdefault(name, []).append(score)
    for name, scores in lines.items():
        points = [(s.values[key], s.mean, s.deviation) for s in scores if not s.diverged]
        places, means, deviations = zip(*points, strict=True) if points else ((), (), ())
        axis.errorbar(places, means, deviations, marker="o", capsize=2, label=name or None)
    if _span_scales(tuned.tune.grid[key]):
        axis.set_xscale("log")
    axis.set_xlabel(key)
    axis.set_ylabel(f"validation {tuned.metric.title}")
    axis.set_title(tuned.title, fontsize=10)
    axis.grid(alpha=0.3)
    if others:
        axis.legend(fontsize=8, frameon=False)
    save_figure(figure, path, 130)
