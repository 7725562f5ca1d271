"""Draw architecture.svg from the tables of architecture.md: ``python docs/architecture.py``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PAGE = Path(__file__).with_name("architecture.md")
TEAL, PALE, GREY = "#00796b", "#e0f2f1", "#666666"


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table of the page, by the heading above it."""
    found: dict[str, list[list[str]]] = {}
    heading = ""
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("| ") and not line.startswith(("| layer ", "| step ")):
            found.setdefault(heading, []).append([cell.strip() for cell in line.split("|")[1:-1]])
    return found


def names(cell: str) -> list[str]:
    """The names in backquotes of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def box(axes: Axes, x: float, y: float, width: float, text: str) -> None:
    """A rounded box with a line of text."""
    style = "round,pad=0.02,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch((x, y), width, 0.62, boxstyle=style, facecolor=PALE, edgecolor=TEAL)
    )
    axes.text(x + width / 2, y + 0.31, text, ha="center", va="center", fontsize=8.5)


def draw_layers(axes: Axes, rows: Sequence[Sequence[str]]) -> None:
    """A row of boxes for each layer, the lowest at the bottom."""
    for height, (layer, cell, _) in enumerate(rows):
        axes.text(-0.2, height + 0.31, layer, ha="right", va="center", fontsize=8, color=GREY)
        packages = names(cell)
        width = 7.6 / len(packages)
        for place, package in enumerate(packages):
            box(axes, place * width, height, width - 0.15, package)
    axes.set_xlim(-2.7, 7.7)
    axes.set_ylim(-0.2, len(rows))
    axes.set_title("Packages, from low to high", fontsize=11)


def draw_path(axes: Axes, rows: Sequence[Sequence[str]], title: str) -> None:
    """One box for each step, from the top down, with an arrow to the next."""
    for step, (_, cell, says) in enumerate(rows):
        y = len(rows) - step - 1
        place, _, function = names(cell)[0].partition(":")
        box(axes, 0, y, 7.6, f"{place}: {function}")
        axes.text(7.75, y + 0.31, says, ha="left", va="center", fontsize=8, color=GREY)
        if y:
            arrow = {"arrowstyle": "->", "color": TEAL}
            axes.annotate("", (3.8, y - 0.36), (3.8, y - 0.02), arrowprops=arrow)
    axes.set_xlim(-0.1, 13.5)
    axes.set_ylim(-0.2, len(rows))
    axes.set_title(title, fontsize=11)


def main() -> None:
    """Write the picture next to the page."""
    found = tables(PAGE.read_text(encoding="utf-8"))
    (_, layers), *paths = found.items()
    heights = [len(layers), *(len(rows) for _, rows in paths)]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "dpscaffold"}):
        figure = Figure(figsize=(10.5, 0.36 * sum(heights) + 1.6), layout="constrained")
        panels = figure.subplots(len(heights), 1, height_ratios=heights)
        draw_layers(panels[0], layers)
        for axes, (title, rows) in zip(panels[1:], paths, strict=True):
            draw_path(axes, rows, title)
        for axes in panels:
            axes.axis("off")
        figure.savefig(PAGE.with_suffix(".svg"), facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()
