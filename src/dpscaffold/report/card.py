"""A report as Markdown: the model card."""

from __future__ import annotations

from dpscaffold.report.blocks import BarChart, Block, Bullets, Code, Curves, Page, Table, Text


def as_markdown(page: Page) -> str:
    """The page as Markdown; of a figure its first and last numbers.

    >>> as_markdown(Page("A", "b", ()))
    '# A\\n\\nb\\n'
    """
    parts = [f"# {page.title}", page.subtitle]
    for section in page.sections:
        parts += [f"## {section.title}", *(_block(block) for block in section.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> str:
    match block:
        case Text():
            return f"**{block.text}**" if block.strong or block.warning else block.text
        case Bullets():
            return "\n".join(f"- {item}" for item in block.items)
        case Table():
            rows = [block.head, ("---",) * len(block.head), *block.rows]
            table = "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)
            return f"{block.caption}\n\n{table}"
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


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
