"""Figures without a screen, and on disk whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpscaffold.atomic import atomic_file
from dpscaffold.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this many inches, drawn by no window."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, path: Path | str, dpi: int | None = None) -> None:
    """Write a figure; the ending of the name chooses PNG, SVG or PDF."""
    try:
        with atomic_file(path) as partial:
            figure.savefig(partial, dpi=dpi or figure.dpi)
    except (OSError, ValueError) as error:
        raise BadInput(
            "cannot-write",
            f"the figure cannot be written to {path} ({error}); give a writable .png, .svg or .pdf",
        ) from error
