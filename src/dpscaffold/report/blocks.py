"""What a report consists of, before it is a page: sections of text, lists, tables and figures.

One structure, written as HTML (:mod:`~dpscaffold.report.html`) and as Markdown
(:mod:`~dpscaffold.report.card`), so that the two never say different things.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A paragraph; ``strong`` is the sentence to quote, ``warning`` one not to miss."""

    text: str
    strong: bool = False
    warning: bool = False


@dataclass(frozen=True)
class Prose:
    """Text with headings, lists or tables of its own, as Markdown."""

    markdown: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table: its caption, the heads of its columns, and rows whose first cell is their head."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Line:
    """A line of a figure."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curves:
    """A figure of lines over rounds; ``levels`` are named horizontal lines."""

    caption: str
    across: str
    up: str
    lines: tuple[Line, ...]
    levels: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class BarChart:
    """A figure of counts by label."""

    caption: str
    across: str
    up: str
    counts: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Code:
    """Text to be copied as it stands, under a summary that can be opened."""

    summary: str
    text: str


Block = Text | Prose | Bullets | Table | Curves | BarChart | Code


@dataclass(frozen=True)
class Section:
    """A part of the report; ``of`` is the run that it is about, where there are several."""

    title: str
    blocks: tuple[Block, ...]
    of: str = ""


@dataclass(frozen=True)
class Page:
    """A whole report."""

    title: str
    subtitle: str
    sections: tuple[Section, ...]


def section(title: str, blocks: Sequence[Block | None]) -> Section:
    """A section of the blocks that there are."""
    return Section(title, tuple(block for block in blocks if block is not None))
