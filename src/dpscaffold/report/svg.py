"""Figures as images inside a page: SVG by matplotlib, no script, nothing from elsewhere."""

from __future__ import annotations

import io
import math
from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING, Any

from dpscaffold.report.blocks import BarChart, Curves
from dpscaffold.report.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The colours of lines, of words and of the grid, each clear on white.
COLOURS = ("#0b57a4", "#b3400b", "#1a7f37", "#8250df", "#9a6700", "#bf3989")
SOFT, RULE = "#57606a", "#d0d7de"
#: A line has a colour and a pattern, so that colour is never the only sign.
PATTERNS = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (7, 2)))


def curves(figure: Curves) -> str:
    """Lines over rounds, with their names below them."""
    drawing, axes = _axes(figure.across, figure.up)
    for name, value in figure.levels:
        axes.axhline(value, color=SOFT, linestyle=PATTERNS[2], linewidth=1, clip_on=False)
        place: dict[str, Any] = {
            "xycoords": ("axes fraction", "data"),
            "va": "bottom",
            "ha": "right",
        }
        axes.annotate(_plain(name), (1, value), color=SOFT, fontsize=11, **place)
    for k, line in enumerate(figure.lines):
        style: dict[str, Any] = {"color": COLOURS[k % 6], "linestyle": PATTERNS[k % len(PATTERNS)]}
        xs, ys = zip(*line.points, strict=True)
        axes.plot(xs, ys, label=_plain(line.name), linewidth=2.2, clip_on=False, **style)
    low, high = axes.get_ylim()
    axes.set_ylim(0.0 if 0 <= low <= 0.5 * high else low, high)
    axes.margins(x=0)
    axes.locator_params(axis="x", integer=True)
    if len(figure.lines) > 1:
        drawing.legend(loc="outside lower left", frameon=False, labelcolor=SOFT, fontsize=12)
    lines = [
        f"{line.name} goes from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}"
        for line in figure.lines
    ]
    levels = [f"{name} is {value:.4g}" for name, value in figure.levels]
    return _image(drawing, f"{figure.caption}: {'; '.join(lines + levels)}.")


def bars(figure: BarChart) -> str:
    """Counts by label."""
    drawing, axes = _axes(figure.across, figure.up)
    places = range(len(figure.counts))
    axes.bar(places, [value for _, value in figure.counts], color=COLOURS[0], clip_on=False)
    every = math.ceil(len(figure.counts) / 16)
    axes.set_xticks(places[::every], [_plain(name) for name, _ in figure.counts[::every]])
    said = ", ".join(f"{name}: {value:g}" for name, value in figure.counts[:12])
    return _image(drawing, f"{figure.caption}: {said}{', …' if len(figure.counts) > 12 else ''}")


def _axes(across: str, up: str) -> tuple[Figure, Axes]:
    """Empty axes; the name of the upright one stands above it, where long numbers leave room."""
    drawing = new_figure(640 / 72, 300 / 72)
    axes = drawing.add_subplot()
    axes.set_xlabel(_plain(across), color=SOFT, fontsize=12)
    axes.set_title(_plain(up), loc="left", color=SOFT, fontsize=12)
    axes.spines[:].set_visible(False)
    axes.tick_params(bottom=False, left=False, labelcolor=SOFT, labelsize=12)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=RULE, clip_on=False)
    return drawing, axes


def _plain(text: str) -> str:
    """Text that is no formula."""
    return text.replace("$", r"\$")


def _image(drawing: Figure, label: str) -> str:
    """The figure as an element of a page, with its contents in words."""
    from matplotlib import rc_context

    stream = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "", "path.simplify_threshold": 1.0}):
        drawing.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    data = b64encode(stream.getvalue()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(label, quote=True)}">'
