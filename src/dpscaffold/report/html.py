"""A report as one HTML file: no script, nothing from elsewhere, readable anywhere."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib.resources import files

from dpscaffold.report.blocks import (
    BarChart,
    Block,
    Bullets,
    Code,
    Curves,
    Page,
    Section,
    Table,
    Text,
)
from dpscaffold.report.svg import bars, curves

#: Cells of a table up to this length stay on one line.
SHORT = 10


@cache
def style() -> str:
    """The page's style sheet."""
    return files("dpscaffold.report").joinpath("page.css").read_text(encoding="utf-8")


def as_html(page: Page) -> str:
    """The page as a document.

    >>> as_html(Page("A & B", "", ())).count("A &amp; B")
    2
    """
    links = "".join(
        f'<li><a href="#{anchor(title)}">{escape(text)}</a></li>' for title, text in _links(page)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{escape(page.title)}</title>\n<style>\n{style()}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#content">Skip to the content</a>\n'
        f'<header>\n<h1>{escape(page.title)}</h1>\n<p class="subtitle">{escape(page.subtitle)}</p>'
        f'\n<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n<main id="content">\n'
        + "\n".join(_section(part) for part in page.sections)
        + "\n</main>\n<footer><p>Written by dpscaffold; this file contains everything it shows."
        "</p></footer>\n</body>\n</html>\n"
    )


def _links(page: Page) -> list[tuple[str, str]]:
    """Sections and their words in the list of contents: of those of one run among several, the
    first alone."""
    found: dict[str, str] = {}
    for part in page.sections:
        found.setdefault(part.of or part.title, part.title)
    return [(title, text) for text, title in found.items()]


def anchor(title: str) -> str:
    """The name of a section in links.

    >>> anchor("What ε means for one person")
    'what-means-for-one-person'
    """
    return "-".join(re.findall(r"[a-z0-9]+", title.lower()))


def _section(part: Section) -> str:
    name = anchor(part.title)
    inside = "\n".join(_block(block) for block in part.blocks)
    head = f'<h2 id="{name}">{escape(part.title)}</h2>'
    return f'<section aria-labelledby="{name}">\n{head}\n{inside}\n</section>'


def _block(block: Block) -> str:
    match block:
        case Text():
            kind = "strong" if block.strong else "warning" if block.warning else ""
            mark = f' class="{kind}"' if kind else ""
            return f"<p{mark}>{prose(block.text)}</p>"
        case Bullets():
            return "<ul>" + "".join(f"<li>{prose(item)}</li>" for item in block.items) + "</ul>"
        case Table():
            return _table(block)
        case Curves():
            return _figure(block.caption, curves(block))
        case BarChart():
            return _figure(block.caption, bars(block))
        case Code():
            code = f"<pre><code>{escape(block.text)}</code></pre>"
            return f"<details><summary>{escape(block.summary)}</summary>{code}</details>"


def _figure(caption: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{drawing}</figure>"


def _table(grid: Table) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in grid.head)
    rows = "".join(
        f'<tr><th scope="row">{prose(row[0])}</th>'
        + "".join(f"<td{_kept(cell)}>{prose(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in grid.rows
    )
    return (
        f'<div class="wide"><table><caption>{escape(grid.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _kept(cell: str) -> str:
    """A number is never broken over two lines, as 2.3e-05 would be at its sign."""
    return ' class="short"' if len(cell) <= SHORT else ""


def prose(text: str) -> str:
    """Text with its `names` as code; everything else as it stands.

    >>> prose("`cap` < 3")
    '<code>cap</code> &lt; 3'
    """
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text, quote=False))
