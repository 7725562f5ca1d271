"""Figures as inline SVG, drawn by matplotlib: no script, no font from elsewhere; colours follow the
page."""

from __future__ import annotations

import io
import math
import re
from html import escape
from typing import TYPE_CHECKING, Any

from dpscaffold.report.blocks import BarChart, Curves
from dpscaffold.report.drawing import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Colours that represent the variables of the page's style sheet, which differ in the dark.
VARIABLES = {f"#ab010{k}": f"var(--c{k})" for k in range(6)}
VARIABLES |= {"#ab0106": "var(--soft)", "#ab0107": "var(--rule)"}
COLOURS, SOFT, RULE = [*VARIABLES][:6], "#ab0106", "#ab0107"
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
    return _svg(drawing, f"{figure.caption}: {'; '.join(lines + levels)}.")


def bars(figure: BarChart) -> str:
    """Counts by label."""
    drawing, axes = _axes(figure.across, figure.up)
    places = range(len(figure.counts))
    axes.bar(places, [value for _, value in figure.counts], color=COLOURS[0], clip_on=False)
    every = math.ceil(len(figure.counts) / 16)
    axes.set_xticks(places[::every], [_plain(name) for name, _ in figure.counts[::every]])
    said = ", ".join(f"{name}: {value:g}" for name, value in figure.counts[:12])
    return _svg(drawing, f"{figure.caption}: {said}{', …' if len(figure.counts) > 12 else ''}")


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


def _svg(drawing: Figure, label: str) -> str:
    """The figure as an element of a page: its words are text, and it has no names of its own."""
    from matplotlib import rc_context

    stream = io.StringIO()
    with rc_context({"svg.fonttype": "none", "path.simplify_threshold": 1.0}):
        drawing.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    drawn = stream.getvalue()
    size = re.search(r'viewBox="([^"]+)"', drawn)
    assert size is not None
    inside = drawn[drawn.index("</defs>") + len("</defs>") :]  # style and descriptions before it
    for pattern, new in (
        (r' id="[^"]*"', ""),
        (r' transform="rotate\(-0 [^"]*"', ""),
        (r" font-family: [^;\"]*;", ""),
        (r"<!--.*?-->|\n\s*", ""),
    ):
        inside = re.sub(pattern, new, inside)
    for colour, variable in VARIABLES.items():
        inside = inside.replace(colour, variable)
    start = f'<svg viewBox="{size[1]}" role="img" aria-label="{escape(label, quote=True)}">'
    return start + inside.strip()
