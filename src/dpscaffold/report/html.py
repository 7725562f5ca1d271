"""A report as one HTML file: no script, nothing from elsewhere, readable anywhere.

The words are the Markdown of :mod:`~dpscaffold.report.card`, turned into HTML by markdown-it.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from markdown_it import MarkdownIt
from markdown_it.token import Token

from dpscaffold.report.blocks import (
    BarChart,
    Block,
    Code,
    Curves,
    Page,
    Prose,
    Section,
    Table,
    Text,
)
from dpscaffold.report.card import block_text, table_text
from dpscaffold.report.svg import bars, curves

#: Cells of a table up to this length stay on one line.
SHORT = 10

#: What the table of a privacy statement is called.
PROMISED = "What is promised, and to whom"

#: Lists, tables and `names` alone: whatever else a text contains is shown as it is.
_MARKDOWN = MarkdownIt("zero").enable(["list", "table", "backticks"])
#: The same, for pages of our own words.
_PROSE = MarkdownIt("zero").enable(["list", "table", "backticks", "emphasis"])


@cache
def _resource(name: str) -> str:
    return files("dpscaffold.report").joinpath(name).read_text(encoding="utf-8")


def style() -> str:
    """The page's style sheet."""
    return _resource("page.css")


def as_html(page: Page) -> str:
    """The page as a document.

    >>> as_html(Page("A & B", "", ())).count("A &amp; B")
    2
    """
    links = (
        f'<li><a href="#{anchor(title)}">{escape(text)}</a></li>' for title, text in _links(page)
    )
    return Template(_resource("page.html")).substitute(
        title=escape(page.title),
        subtitle=escape(page.subtitle),
        style=style(),
        links="".join(links),
        sections="\n".join(map(_section, page.sections)),
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
    name, inside = anchor(part.title), "\n".join(map(_block, part.blocks))
    head = f'<h2 id="{name}">{escape(part.title)}</h2>'
    return f'<section aria-labelledby="{name}">\n{head}\n{inside}\n</section>'


def _block(block: Block) -> str:
    match block:
        case Text():
            kind = "strong" if block.strong else "warning" if block.warning else "plain"
            return f'<p class="{kind}">{_MARKDOWN.renderInline(block.text)}</p>'
        case Table():
            return _with_heads(_MARKDOWN.parse(table_text(block)), block.caption)
        case Prose():
            return _with_heads(_PROSE.parse(block_text(block)), PROMISED)
        case Curves() | BarChart():
            drawn = curves(block) if isinstance(block, Curves) else bars(block)
            caption = f"<figcaption>{escape(block.caption)}</figcaption>"
            return f"<figure>{caption}{drawn}</figure>"
        case Code():
            code = f"<pre><code>{escape(block.text)}</code></pre>"
            return f"<details><summary>{escape(block.summary)}</summary>{code}</details>"
        case _:
            return str(_MARKDOWN.render(block_text(block)))


def _with_heads(tokens: list[Token], caption: str) -> str:
    """A text whose table has a caption, and heads of its columns and rows. A short cell is never
    broken over two lines, as 2.3e-05 would be at its sign."""
    first = False
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        first = first or token.type == "tr_open"
        if token.type == "th_open":
            token.attrSet("scope", "col")
        elif token.type.startswith("td_") and first:
            token.tag = "th"
            if token.nesting == 1:
                token.attrSet("scope", "row")
            first = token.nesting == 1
        elif token.type == "td_open" and after is not None and len(after.content) <= SHORT:
            token.attrSet("class", "short")
    drawn = str(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))
    head = f"<table><caption>{escape(caption)}</caption>"
    return f'<div class="wide">{drawn.replace("<table>", head, 1)}</div>'
