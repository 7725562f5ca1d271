"""The frontier in one figure: accuracy against ε, four lines for each dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from dpscaffold.atomic import atomic_file
from dpscaffold.paper.definition import experiment
from dpscaffold.paper.results import read_tidy
from dpscaffold.report.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The experiments that the figure is drawn from; its file is in the folder of the first.
SOURCES = ("frontier", "frontier-secure", "frontier-hog")
FILE = "summary.png"

#: Each panel and the rows of the three experiments that it shows: own features, then HOG.
PANELS = {
    "synthetic (5, 5), λ = 0": ("synthetic (5, 5), λ = 0",),
    "FEMNIST, γ = 0 %": ("FEMNIST, γ = 0 %", "FEMNIST, HOG, γ = 0 %"),
    "MNIST, γ = 0 %": ("MNIST, γ = 0 %", "MNIST, HOG, γ = 0 %"),
}
_PAPER = "SCAFFOLD"
_EPSILONS = (0.1, 0.3, 1, 3)

Who = Literal["nobody", "sums", "uploads", "paper"]
#: The mean accuracy of every entry: by what the server sees, row and ε (0 without privacy).
Means = dict[tuple[Who, str, float], float]


def draw_summary(root: Path) -> list[str]:
    """Write the figure where all three experiments are finished; the names that were written."""
    tables = [read_tidy(root / name) for name in SOURCES]
    if not all(tables):
        return []
    means = _means(row for table in tables for row in table)
    figure = new_figure(12.0, 4.3)
    axes = figure.subplots(1, len(PANELS), squeeze=False)[0]
    for axis, (title, rows) in zip(axes, PANELS.items(), strict=True):
        _panel(axis, means, rows)
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("test accuracy")
    figure.legend(
        *axes[-1].get_legend_handles_labels(), loc="outside lower center", ncol=4, frameon=False
    )
    figure.suptitle("Accuracy against ε towards the server (best choices, test data in view)")
    with atomic_file(root / SOURCES[0] / FILE) as partial:
        figure.savefig(partial, dpi=130)
    return [FILE]


def _panel(axis: Axes, means: Means, rows: tuple[str, ...]) -> None:
    """The four lines of a dataset, each the better of the features that were tried."""
    ceiling = _best(means, "nobody", rows, 0.0)
    if ceiling is not None:
        axis.axhline(ceiling, color="0.35", linestyle=":", label="no privacy")
    lines: tuple[tuple[Who, str, str, tuple[str, ...]], ...] = (
        ("sums", "#1b6ca8", "server sees only sums", rows),
        ("uploads", "#5a8f3c", "server sees uploads", rows),
        ("paper", "#d1495b", "the paper's DP-SCAFFOLD and features", rows[:1]),
    )
    for who, colour, label, shown in lines:
        points = [(e, _best(means, who, shown, float(e))) for e in _EPSILONS]
        known = [(e, value) for e, value in points if value is not None]
        axis.plot(*zip(*known, strict=True), color=colour, marker="o", markersize=4, label=label)
    axis.set_xscale("log")
    axis.set_xticks(_EPSILONS, [f"{e:g}" for e in _EPSILONS])
    axis.minorticks_off()
    axis.set_xlabel("ε")
    axis.grid(alpha=0.3)


def _best(means: Means, who: Who, rows: tuple[str, ...], epsilon: float) -> float | None:
    found = [means[who, row, epsilon] for row in rows if (who, row, epsilon) in means]
    return max(found, default=None)


def _means(rows: Iterable[Mapping[str, Any]]) -> Means:
    """Of every row and ε the best algorithm, as the mean over seeds of its averaged model."""
    seeds: dict[tuple[str, str, str, str], list[float]] = {}
    lines = {name: {line.label for line in experiment(name).lines} for name in SOURCES}
    for row in rows:
        shown = str(row["shown"]) == "True" and row["line"] in lines[row["experiment"]]
        if shown and row["output"].startswith("average of"):
            place = (row["experiment"], row["row"], row["column"], row["line"])
            seeds.setdefault(place, []).append(float(row["test_accuracy"]))
    found: Means = {}
    for (source, name, column, line), values in seeds.items():
        epsilon, _, sampling = column.partition(" ")
        if sampling == "fixed":
            continue
        at = 0.0 if epsilon == "none" else float(epsilon)
        for who in _kinds(source, line, at):
            found[who, name, at] = max(found.get((who, name, at), 0.0), fmean(values))
    return found


def _kinds(source: str, line: str, epsilon: float) -> list[Who]:
    """The lines of the figure that an entry belongs to."""
    if not epsilon:
        return ["nobody"]
    if source == "frontier-secure":
        return ["sums"]
    return ["uploads", "paper"] if (source, line) == ("frontier", _PAPER) else ["uploads"]
