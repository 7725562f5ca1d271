"""Figures in the paper's arrangement: one panel per row and column, one line per algorithm."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from dpscaffold.algorithms import ALGORITHMS
from dpscaffold.atomic import atomic_file
from dpscaffold.paper.published import caption
from dpscaffold.paper.results import CaseResult, Results, SeedSummary, average, last
from dpscaffold.report.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: One for each family of algorithms, in the order of the registry.
PALETTE = ("#d1495b", "#5a8f3c", "#8e6bbf", "#1b6ca8", "#c98a1b", "#3c8f8a", "#7a5c48")
SHADES = (1.0, 0.65, 0.4)

#: A variant that stands next to the one it is named after in a figure, and so has its own colour.
APART = "SCAFFOLD-balanced"


def draw(results: Results, folder: Path, title: str) -> list[str]:
    """Write ``figure.png`` and ``figure.svg``; the names that were written."""
    from matplotlib import rc_context

    kinds = {"curves": _curves, "table": _table, "frontier": _frontier, "sweep": _sweep}
    figure = kinds[results.experiment.kind](results)
    figure.suptitle(
        "\n".join(wrap(title + _published(results), int(11 * figure.get_figwidth()))), fontsize=11
    )
    for name in ("figure.png", "figure.svg"):
        dated = {"Date": None} if name.endswith("svg") else None
        with atomic_file(folder / name) as partial, rc_context({"svg.hashsalt": "dpscaffold"}):
            figure.savefig(partial, dpi=130, metadata=dated)
    return ["figure.png", "figure.svg"]


def _published(results: Results) -> str:
    """The ε of the paper's caption, named as what it is."""
    epsilon = caption(results.experiment.name).get("epsilon")
    if isinstance(epsilon, dict):
        epsilon = ", ".join(f"{value:g} on {name}" for name, value in epsilon.items())
    return (
        f" (ε = {epsilon:g} as published)"
        if isinstance(epsilon, float)
        else (f" (ε as published: {epsilon})" if epsilon else "")
    )


def _colours() -> dict[str, str]:
    """Colours by title; a variant (SCAFFOLD-warm) has the colour of the one it is named after."""
    families: list[str] = []
    for make in ALGORITHMS.values():
        shown = make().shown
        if shown == APART or not any(known in shown for known in families):
            families.append(shown)
    return dict(zip(families, cycle(PALETTE), strict=False))


def _family(line: str, colours: dict[str, str]) -> str:
    """The longest name of an algorithm that a line's label holds."""
    return max((name for name in colours if name in line), key=len, default="")


def style(line: str, lines: list[str]) -> dict[str, Any]:
    """Colour by algorithm, dashes without privacy, shades where one algorithm has several lines."""
    colours = _colours()
    family = _family(line, colours)
    kin = [
        other
        for other in lines
        if _family(other, colours) == family and other.startswith("DP-") == line.startswith("DP-")
    ]
    shade = SHADES[kin.index(line) % len(SHADES)]
    return {
        "color": colours.get(family, "0.4"),
        "alpha": shade,
        "linestyle": "-" if line.startswith("DP-") else "--",
        "linewidth": 1.5,
    }


def _curves(results: Results) -> Figure:
    rows = results.rows
    widest = max(len(results.columns(row)) for row in rows)
    figure = new_figure(3.6 * widest + 0.6, 2.8 * len(rows) + 1.2)
    axes = figure.subplots(len(rows), widest, squeeze=False)
    for r, row in enumerate(rows):
        for c, column in enumerate(results.columns(row)):
            axis = axes[r][c]
            for line in results.lines(row):
                if (row, column, line) in results.places:
                    _curve(axis, results, (row, column, line), style(line, results.lines(row)))
            axis.set_title(f"{row}, {column}", fontsize=10)
            axis.grid(alpha=0.3)
            axis.set_xlabel("round")
        axes[r][0].set_ylabel(results.experiment.label, fontsize=9)
    _legend(figure, axes)
    return figure


def _curve(axis: Axes, results: Results, place: tuple[str, str, str], look: dict[str, Any]) -> None:
    """Mean over seeds with its deviation as a band; in trade-offs a vertical line where the run
    ends."""
    metric = results.experiment.metric
    by_round: dict[int, list[float]] = {}
    for run in results.shown(place):
        for entry in run.finished.history:
            value = entry.metrics.get(metric)
            if value is not None:
                by_round.setdefault(entry.round, []).append(value)
    if not by_round:
        return
    rounds = sorted(by_round)
    points = [SeedSummary.of(by_round[t]) for t in rounds]
    mean = [p.mean for p in points]
    axis.plot(rounds, mean, label=place[2], **look)
    low, high = [p.mean - p.deviation for p in points], [p.mean + p.deviation for p in points]
    axis.fill_between(rounds, low, high, color=look["color"], alpha=0.15, linewidth=0)
    if results.experiment.name.startswith("tradeoff"):
        axis.axvline(rounds[-1], color="#c1121f", linewidth=0.6, alpha=0.5)


#: Both outputs of a run, and what a panel calls them.
OUTPUTS = (("last 10 % of iterates", last), ("average of the last half", average))


def _table(results: Results) -> Figure:
    """The table as curves over K, one panel per output and line, ours solid and the paper's
    dotted."""
    lines = results.lines()
    figure = new_figure(9.5, 3.4 * len(lines) + 0.8)
    axes = figure.subplots(len(lines), 2, sharey="row", squeeze=False)
    for line, pair in zip(lines, axes, strict=True):
        for axis, (name, value) in zip(pair, OUTPUTS, strict=True):
            for k, row in enumerate(results.rows):
                _over_k(axis, results, row, line, value, _hue(k, len(results.rows)))
            axis.set_title(f"{line}, {name}" if line else name, fontsize=10)
            axis.set_xlabel("K (T from the published bound at ε = 3)")
            axis.grid(alpha=0.3)
        pair[0].set_ylabel("test accuracy (%); dotted: the paper's", fontsize=9)
    _legend(figure, axes)
    return figure


def _over_k(axis: Axes, results: Results, row: str, line: str, value: Any, colour: Any) -> None:
    """One σ_g: ours with its deviations, and the paper's."""
    from dpscaffold.paper.published import table

    published = table(results.experiment.published or results.experiment.name)
    columns = [column for column in results.columns(row) if (row, column, line) in results.places]
    best = [results.best((row, c, line), value) for c in columns]
    ours = [results.summary((row, c, line), b, value) for c, b in zip(columns, best, strict=True)]
    means, spreads = [100 * s.mean for s in ours], [100 * s.deviation for s in ours]
    look = {"color": colour, "marker": "o", "markersize": 4, "capsize": 2}
    axis.errorbar(columns, means, spreads, label=f"σ_g = {row}", **look)
    paper = [published[float(row), int(c)].accuracy for c in columns]
    axis.plot(columns, paper, color=colour, linestyle=":", marker="x", markersize=4)


def _sweep(results: Results) -> Figure:
    """Accuracy over η₀, one curve per clip: the average solid, the last iterates dashed."""
    rows = results.rows
    widest = max(len(results.columns(row)) for row in rows)
    figure = new_figure(4.2 * widest + 0.6, 3.0 * len(rows) + 1.0)
    axes = figure.subplots(len(rows), widest, sharey=True, squeeze=False)
    for r, row in enumerate(rows):
        for c, column in enumerate(results.columns(row)):
            _over_rates(axes[r][c], results, (row, column, ""))
            axes[r][c].set_title(f"{row}, {column}", fontsize=10)
            axes[r][c].set_xlabel("η₀")
            axes[r][c].grid(alpha=0.3)
        axes[r][0].set_ylabel("test accuracy (%)\nsolid: average, dashed: last", fontsize=9)
    _legend(figure, axes)
    return figure


def _over_rates(axis: Axes, results: Results, place: tuple[str, str, str]) -> None:
    by_clip: dict[float, list[tuple[float, str]]] = {}
    for choice, runs in results.places[place].items():
        settings = runs[0].case.settings
        assert settings.privacy is not None and settings.plan.learning_rate is not None
        entries = by_clip.setdefault(float(settings.privacy.clip), [])
        entries.append((settings.plan.learning_rate, choice))
    for k, (clip, entries) in enumerate(sorted(by_clip.items())):
        rates = [rate for rate, _ in sorted(entries)]
        for (_, value), dashes in zip(OUTPUTS, ("--", "-"), strict=True):
            means = [
                100 * results.summary(place, choice, value).mean for _, choice in sorted(entries)
            ]
            label = f"C = {clip:g}" if dashes == "-" else None
            look = {"marker": "o", "markersize": 3, "color": _hue(k, len(by_clip))}
            axis.plot(rates, means, linestyle=dashes, label=label, **look)
    axis.set_xscale("log")
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=8)
    axis.minorticks_off()


def _hue(place: int, count: int) -> Any:
    """A colour of its own for each of this many curves, from dark to light."""
    from matplotlib import colormaps

    return colormaps["viridis"](place / max(1, count - 0.5))


def _frontier(results: Results) -> Figure:
    """One panel per dataset, in one row or, beyond three, in two."""
    rows = results.rows
    down = 1 if len(rows) <= 3 else 2
    across = -(-len(rows) // down)
    figure = new_figure(max(12.0, 4.6 * across), 3.4 * down + 0.9)
    axes = figure.subplots(down, across, squeeze=False)
    for axis in axes.flat[len(rows) :]:
        axis.set_visible(False)
    for axis, row in zip(axes.flat, rows, strict=False):
        for line in results.lines(row):
            _frontier_lines(axis, results, row, line)
        _widen(axis)
        axis.set_xscale("log")
        axis.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
        axis.minorticks_off()
        axis.set_title(row, fontsize=10)
        axis.set_xlabel("ε towards the server")
        axis.grid(alpha=0.3)
    for first in axes[:, 0]:
        first.set_ylabel(results.experiment.label)
    _legend(figure, axes)
    return figure


def _widen(axis: Axes, span: float = 0.05) -> None:
    """Show at least ``span`` of accuracy, so that noise between runs does not look like a trend."""
    low, high = axis.get_ylim()
    if high - low < span:
        axis.set_ylim((low + high - span) / 2, (low + high + span) / 2)


def _frontier_lines(axis: Axes, results: Results, row: str, line: str) -> None:
    look = style(line, [line])
    look.pop("linestyle")
    for sampling, dashes, marker in (("poisson", "-", "o"), ("fixed", "--", "s")):
        points = []
        for column in results.columns(row):
            epsilon, _, kind = column.partition(" ")
            if kind == sampling and (row, column, line) in results.places:
                points.append((float(epsilon), _mean_average(results.shown((row, column, line)))))
        if points:
            points.sort()
            label = (
                f"DP-{line}, "
                f"{'Poisson, zero-out' if sampling == 'poisson' else 'fixed size, replace-one'}"
            )
            axis.plot(
                *zip(*points, strict=True),
                linestyle=dashes,
                marker=marker,
                markersize=4,
                label=label,
                **look,
            )
    if (row, "none", line) in results.places:
        ceiling = _mean_average(results.shown((row, "none", line)))
        axis.axhline(
            ceiling, linestyle=":", label=f"{line}, not private", **(look | {"linewidth": 1})
        )


def _mean_average(runs: list[CaseResult]) -> float:
    return SeedSummary.of([run.average for run in runs]).mean


def _legend(figure: Any, axes: Any) -> None:
    """One legend below all panels."""
    seen: dict[str, Any] = {}
    for row in axes:
        for axis in row:
            seen |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(
        seen.values(),
        seen.keys(),
        loc="outside lower center",
        ncol=_columns(len(seen)),
        frameon=False,
        fontsize=8,
    )


def _columns(entries: int) -> int:
    """Columns of a legend: one line for up to six entries, else four to a line."""
    return 4 if entries > 6 else max(1, entries)
