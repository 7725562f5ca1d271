"""Tables that fit a terminal: where one does not, a sentence stands for each row."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def _sentence(head: Sequence[str], row: Sequence[str]) -> str:
    """A row of a table in words, for a terminal that is too narrow for the table."""
    pairs = zip(head[1:], row[1:], strict=True)
    rest = ", ".join(f"{name} {cell}".strip() for name, cell in pairs if cell)
    return f"{head[0]} {row[0]}: {rest}"


def legible(
    head: Sequence[str], rows: Sequence[Sequence[str]], width: int, title: str = ""
) -> Table | Text:
    """A table in which no word is cut, the first column's titles to the left; where the terminal
    is too narrow for one, a sentence per row.

    >>> print(legible(("view", "ε"), [("server", "1.000")], 10))
    view server: ε 1.000
    """
    longest = [
        max([*map(len, name.split()), *(len(row[k]) for row in rows)], default=0)
        for k, name in enumerate(head)
    ]
    if sum(longest) + 3 * (len(head) - 1) > width:
        sentences = [_sentence(head, row) for row in rows]
        return Text("\n".join([title, *sentences] if title else sentences))
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for k, name in enumerate(head):
        table.add_column(name, justify="left" if k == 0 else "right", min_width=longest[k])
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def shown_users(users: int, most: int) -> list[int]:
    """At most ``most`` users, evenly spaced, for tables and figures."""
    import torch

    return torch.linspace(0, users - 1, min(users, most)).round().long().tolist()
