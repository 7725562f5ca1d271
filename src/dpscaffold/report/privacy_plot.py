"""ε against rounds, one curve per view."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpscaffold.privacy import PAPER_THIRD_PARTY, VIEWS, Cost, Mechanism, bound_for
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
