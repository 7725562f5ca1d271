"""Figures as inline SVG: no script, no font from elsewhere; colours follow the page."""

from __future__ import annotations

import math
from html import escape

from dpscaffold.report.blocks import BarChart, Curves

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 76, 14, 34, 48
#: A line has a colour and a pattern, so that colour is never the only sign.
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4")
#: More points than this are thinned out.
MOST_POINTS = 300


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``count`` of them.

    >>> ticks(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if not high > low:
        return [low]
    raw = (high - low) / count
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * k for k in (1, 2, 5, 10) if size * k >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


class _Frame:
    """Maps numbers to places, and draws axes."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self.x, self.y = x, y

    def across(self, value: float) -> float:
        span = (self.x[1] - self.x[0]) or 1.0
        return LEFT + (value - self.x[0]) / span * (WIDTH - LEFT - RIGHT)

    def up(self, value: float) -> float:
        span = (self.y[1] - self.y[0]) or 1.0
        return HEIGHT - BOTTOM - (value - self.y[0]) / span * (HEIGHT - TOP - BOTTOM)

    def axes(self, across: str, up: str, numbers: bool = True) -> list[str]:
        parts = []
        for value in ticks(*self.y):
            y = self.up(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" ')
            parts.append(f'y2="{y:.1f}"/><text x="{LEFT - 6}" y="{y + 4:.1f}" ')
            parts.append(f'text-anchor="end">{value:g}</text>')
        for value in ticks(*self.x) if numbers else []:
            x = self.across(value)
            edge = x > WIDTH - RIGHT - 16  # a middle there would stand out of the figure
            place = f'x="{WIDTH - 2 if edge else x:.1f}" y="{HEIGHT - BOTTOM + 18}"'
            parts.append(f'<text {place} text-anchor="{"end" if edge else "middle"}">')
            parts.append(f"{value:g}</text>")
        parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" ')
        parts.append(f'text-anchor="middle">{escape(across)}</text>')
        # Along the top, not along the axis: there long numbers would run into it.
        parts.append(f'<text x="0" y="16">{escape(up)}</text>')
        return parts


def _svg(label: str, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">'
        + "".join(parts)
        + "</svg>"
    )


def curves(figure: Curves) -> str:
    """Lines over rounds, with their names below them."""
    points = [point for line in figure.lines for point in line.points]
    heights = [y for _, y in points] + [value for _, value in figure.levels]
    low, high = min(heights), max(heights)
    margin = 0.05 * ((high - low) or abs(high) or 1.0)
    floor = 0.0 if 0 <= low <= 0.5 * high else low - margin
    frame = _Frame((min(x for x, _ in points), max(x for x, _ in points)), (floor, high + margin))
    parts = frame.axes(figure.across, figure.up)
    for name, value in figure.levels:
        y = frame.up(value)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" ')
        parts.append(f'y2="{y:.1f}"/><text class="name" x="{WIDTH - RIGHT - 4}" ')
        parts.append(f'y="{y - 5:.1f}" text-anchor="end">{escape(name)}</text>')
    for k, line in enumerate(figure.lines):
        path = " ".join(
            f"{frame.across(x):.1f},{frame.up(y):.1f}" for x, y in _thinned(line.points)
        )
        dash = DASHES[k % len(DASHES)]
        parts.append(f'<polyline class="line c{k % 6}" stroke-dasharray="{dash}" points="{path}"/>')
    return _svg(_told(figure), parts) + _legend([line.name for line in figure.lines])


def _told(figure: Curves) -> str:
    """What a figure shows, for those who do not see it."""
    lines = [
        f"{line.name} goes from {line.points[0][1]:.4g} to {line.points[-1][1]:.4g}"
        for line in figure.lines
    ]
    levels = [f"{name} is {value:.4g}" for name, value in figure.levels]
    return f"{figure.caption}: {'; '.join(lines + levels)}."


def _thinned(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    step = math.ceil(len(points) / MOST_POINTS)
    kept = list(points[::step])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _legend(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(
        f'<li><svg viewBox="0 0 34 8" aria-hidden="true"><line class="line c{k % 6}" x1="1" x2="33"'
        f' y1="4" y2="4" stroke-dasharray="{DASHES[k % len(DASHES)]}"/></svg>{escape(name)}</li>'
        for k, name in enumerate(names)
    )
    return f'<ul class="legend">{items}</ul>'


def bars(figure: BarChart) -> str:
    """Counts by label."""
    count = len(figure.counts)
    high = max(value for _, value in figure.counts)
    frame = _Frame((0, count), (0.0, high * 1.05 or 1.0))
    parts = frame.axes(figure.across, figure.up, numbers=False)
    every = math.ceil(count / 16)
    for k, (name, value) in enumerate(figure.counts):
        x, top = frame.across(k + 0.1), frame.up(value)
        width = frame.across(k + 0.9) - x
        parts.append(f'<rect class="bar" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" ')
        parts.append(f'height="{max(0.0, frame.up(0) - top):.1f}"/>')
        if k % every == 0:
            parts.append(f'<text x="{frame.across(k + 0.5):.1f}" y="{HEIGHT - BOTTOM + 18}" ')
            parts.append(f'text-anchor="middle">{escape(name)}</text>')
    told = ", ".join(f"{name}: {value:g}" for name, value in figure.counts[:12])
    return _svg(f"{figure.caption}: {told}{', …' if count > 12 else ''}", parts)
