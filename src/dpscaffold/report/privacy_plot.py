"""The figures of ``dpscaffold privacy``: ε against rounds, one curve per view, and the trade-off
curve, which is what any membership test can reach, against what a coin does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dpscaffold.privacy import PAPER_THIRD_PARTY, VIEWS, Cost, Mechanism, TradeOff, bound_for
from dpscaffold.report.drawing import new_figure, save_figure


def epsilon_curves(
    run: Mechanism, points: int = 24, costs: Sequence[Cost] = (), colluders: int = 1
) -> dict[str, tuple[list[int], list[float]]]:
    """For each view, rounds and ε, other mechanisms on the same records included; the published
    number next to it where it is stated.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=8, local_steps=1, users=10, cohort_size=2, records=100,
    ...                batch_sizes=10, noise=4)
    >>> curves = epsilon_curves(run, points=3)
    >>> sorted(curves), curves["server"][0]
    (['paper_third_party', 'participant', 'server', 'third_party'], [1, 3, 8])
    """
    rounds = sorted({int(t) for t in np.geomspace(1, run.rounds, points).round()})
    bounds = {view: bound_for(run, view, colluders=colluders) for view in VIEWS}
    if PAPER_THIRD_PARTY.applies(run) is None:
        bounds["paper_third_party"] = PAPER_THIRD_PARTY
    return {
        view: (rounds, [bound.epsilon(run, t, costs) for t in rounds])
        for view, bound in bounds.items()
    }


def plot_epsilon(
    run: Mechanism, path: Path | str, costs: Sequence[Cost] = (), colluders: int = 1
) -> None:
    """Draw the curves to a file; its ending chooses the format."""
    figure = new_figure(6.4, 4.0)
    axes = figure.add_subplot()
    styles = {
        "server": ("-", "server"),
        "third_party": ("--", "third party"),
        "participant": ("-.", f"{colluders} participant{'s' * (colluders > 1)}"),
        "paper_third_party": (":", "as published"),
    }
    for view, (rounds, values) in epsilon_curves(run, costs=costs, colluders=colluders).items():
        line, label = styles[view]
        axes.plot(rounds, values, line, label=label, linewidth=2)
    axes.set_xlabel("rounds")
    axes.set_ylabel(f"ε at δ = {run.delta:.2g}")
    axes.set_yscale("log")
    axes.set_title(
        f"K = {run.local_steps}, m = {run.cohort_size} of {run.users}, σ_g = {run.noise:g}"
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_figure(figure, path)


def plot_tradeoff(curves: Mapping[str, TradeOff], path: Path | str, group: int = 5) -> None:
    """Draw f(α) on the left and 1 − f(α) at small α on the right; the file's ending is its format.

    ``curves`` are trade-off functions by label. The first is drawn for a ``group`` of its records
    too. No test reaches below a line on the left, nor above it on the right.
    """
    figure = new_figure(7.6, 3.6)
    left, right = figure.subplots(1, 2)
    whole, small = np.linspace(0.0, 1.0, 401), np.geomspace(1e-4, 1.0, 401)
    left.plot(whole, 1 - whole, color="0.6", linewidth=1, label="a coin")
    right.plot(small, small, color="0.6", linewidth=1)
    for k, (label, curve) in enumerate(curves.items()):
        style = {"linewidth": 2, "color": f"C{k}", "linestyle": ("-", "--", "-.", ":")[k % 4]}
        left.plot(whole, curve(whole), label=label, **style)
        right.plot(small, curve.power(small), **style)
    first = next(iter(curves.values()))
    left.plot(whole, first(whole, group), ":", color="C0", label=f"{group} together")
    right.plot(small, first.power(small, group), ":", color="C0")
    left.set(xlabel="false-positive rate α", ylabel="false-negative rate, at least f(α)")
    right.set(xlabel="false-positive rate α", ylabel="true-positive rate, at most 1 − f(α)")
    right.set(xscale="log", yscale="log", xlim=(1e-4, 1), ylim=(1e-4, 1.2))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend(frameon=False)
    save_figure(figure, path)
