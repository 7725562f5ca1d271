"""How values show themselves in a notebook: short tables and a small curve, without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

#: Size of a small curve, and how many points it is drawn with at most.
WIDTH, HEIGHT, MOST = 220, 48, 120


def html_table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """A title and named values, as HTML.

    >>> html_table("A", [("b", "<c>")]).count("&lt;c&gt;")
    1
    """
    lines = "".join(
        f'<tr><th scope="row" style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{_cell(value)}</td></tr>'
        for name, value in rows
        if value is not None
    )
    return f"<table><caption><b>{escape(title)}</b></caption><tbody>{lines}</tbody></table>"


class RawHtml(str):
    """HTML that is already written."""


def _cell(value: Any) -> str:
    return value if isinstance(value, RawHtml) else escape(str(value))


def small_curve(values: Sequence[float], what: str) -> RawHtml | None:
    """A line through values, from left to right, with its ends in words."""
    if len(values) < 2:
        return None
    step = -(-len(values) // MOST)
    kept = [*values[::step], values[-1]]
    low, high = min(kept), max(kept)
    span = (high - low) or 1.0
    points = " ".join(
        f"{4 + k * (WIDTH - 8) / (len(kept) - 1):.1f},"
        f"{HEIGHT - 4 - (value - low) / span * (HEIGHT - 8):.1f}"
        for k, value in enumerate(kept)
    )
    label = escape(f"{what}: from {values[0]:.4g} to {values[-1]:.4g}", quote=True)
    return RawHtml(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{label}"><polyline fill="none" stroke="currentColor" stroke-width="1.5" '
        f'points="{points}"/></svg>'
    )
