"""The trade-off curve of a run: what any membership test can reach, against what a coin does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpscaffold.privacy import TradeOff
from dpscaffold.report.drawing import new_figure, save_figure


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
