"""A report as Markdown: the model card."""

from __future__ import annotations

from dpscaffold.report.blocks import (
    BarChart,
    Block,
    Bullets,
    Code,
    Curves,
    Page,
    Prose,
    Table,
    Text,
)


def as_markdown(page: Page) -> str:
    """The page as Markdown; of a figure its first and last numbers.

    >>> as_markdown(Page("A", "b", ()))
    '# A\\n\\nb\\n'
    """
    parts = [f"# {page.title}", page.subtitle]
    for section in page.sections:
        parts += [f"## {section.title}", *map(block_text, section.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def block_text(block: Block) -> str:
    """A part of a page as Markdown."""
    match block:
        case Text():
            return f"**{block.text}**" if block.strong or block.warning else block.text
        case Prose():
            return block.markdown
        case Bullets():
            return "\n".join(f"- {item}" for item in block.items)
        case Table():
            return f"{block.caption}\n\n{table_text(block)}"
        case Curves():
            ends = [
                f"- {line.name}: {line.points[0][1]:.4g} in round {line.points[0][0]:g}, "
                f"{line.points[-1][1]:.4g} in round {line.points[-1][0]:g}"
                for line in block.lines
            ]
            levels = [f"- {name}: {value:.4g}" for name, value in block.levels]
            return "\n".join([f"{block.caption}:", "", *ends, *levels])
        case BarChart():
            counts = ", ".join(f"{name}: {value:g}" for name, value in block.counts[:40])
            return f"{block.caption} ({block.across}: {block.up}): {counts}."
        case Code():
            return f"{block.summary}:\n\n```\n{block.text.rstrip()}\n```"


def table_text(table: Table) -> str:
    """A table as Markdown, without its caption."""
    rows = [table.head, ("---",) * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
