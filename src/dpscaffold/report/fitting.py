"""Tables that fit a terminal: nothing wraps, and no two names are cut to the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

#: The least of a name that is shown.
LEAST = 8
#: Names are shortened to this before a column is left out.
COMFORT = 22


@dataclass(frozen=True)
class TextColumn:
    """A column of texts. ``importance`` says which goes first where there is no room; None stays.
    A ``name`` may be shortened, in its cells and its title."""

    title: str
    cells: tuple[str, ...]
    importance: int | None = None
    name: bool = False
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """The longest text."""
        return max(len(text) for text in (self.title, *self.cells))

    def within(self, width: int) -> TextColumn:
        """The column with its names cut to a width."""
        if not self.name or self.width <= width:
            return self
        title = self.title if len(self.title) <= width else shortened([self.title], width)[0]
        return replace(self, title=title, cells=tuple(shortened(self.cells, width)))


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Names of at most a width; those that differ still do.

    >>> shortened(["a long name of a run, first", "a long name of a run, second"], 12)
    ['a lon… first', 'a lo… second']
    >>> shortened(["abcdefghijkl-1-mnopqrstu", "abcdefghijkl-2-mnopqrstu"], 10)
    ['abcd…tu~1', 'abcd…tu~2']
    """
    cut = [_middle(name, width) for name in names]
    seen: dict[str, set[str]] = {}
    for name, short in zip(names, cut, strict=True):
        seen.setdefault(short, set()).add(name)
    order = {name: i + 1 for i, name in enumerate(dict.fromkeys(names))}
    return [
        short
        if len(seen[short]) == 1
        else f"{_middle(name, width - len(str(len(order))) - 2)}~{order[name]}"
        for name, short in zip(names, cut, strict=True)
    ]


def _middle(name: str, width: int) -> str:
    """A name with its middle left out, from a word's beginning on where there is one near."""
    if len(name) <= width:
        return name
    if width < 4:
        return name[:width]
    last = name.rfind(" ", len(name) - (2 * width) // 3)
    tail = name[last:] if last > 0 else name[-max(1, width // 3) :]
    return name[: width - len(tail) - 1] + "…" + tail


def _dropped_to(columns: Sequence[TextColumn], width: int) -> list[TextColumn]:
    """Leave out the least important columns while the others, with names of a comfortable length,
    are wider than ``width``."""
    kept = list(columns)
    droppable = [column for column in kept if column.importance is not None]
    for column in sorted(droppable, key=lambda c: c.importance or 0):
        if _needs([one.within(COMFORT) for one in kept]) <= width:
            break
        kept.remove(column)
    return kept


def _shortened_to(columns: Sequence[TextColumn], width: int) -> list[TextColumn]:
    """Shorten names, as little as suffices."""
    room = max((column.width for column in columns if column.name), default=0)
    if not room:
        return list(columns)
    while room > LEAST and _needs([column.within(room) for column in columns]) > width:
        room -= 1
    return [column.within(room) for column in columns]


def fitted(columns: Sequence[TextColumn], width: int, title: str = "") -> Table:
    """A table no wider than ``width``: names are shortened, then columns left out, the least
    important first, then names shortened more."""
    kept = _shortened_to(_dropped_to(columns, width), width)
    shown = shortened([title], min(width, _needs(kept)))[0] if title else None
    table = Table(
        title=Text(shown, style="italic") if shown else None,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    for column in kept:
        table.add_column(Text(column.title), justify=column.justify, no_wrap=True)
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*map(Text, row))
    return table


def _sentence(head: Sequence[str], row: Sequence[str]) -> str:
    """A row of a table in words, for a terminal that is too narrow for the table."""
    rest = ", ".join(f"{name} {cell}" for name, cell in zip(head[1:], row[1:], strict=True))
    return f"{head[0]} {row[0]}: {rest}"


def legible(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table | Text:
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
        return Text("\n".join(_sentence(head, row) for row in rows))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for k, name in enumerate(head):
        table.add_column(name, justify="left" if k == 0 else "right", min_width=longest[k])
    for row in rows:
        table.add_row(*row)
    return table


def _needs(columns: Sequence[TextColumn]) -> int:
    """The width of a table of these columns: three blanks between them."""
    return sum(column.width for column in columns) + 3 * (len(columns) - 1)


def shown_users(users: int, most: int) -> list[int]:
    """At most ``most`` users, evenly spaced, for tables and figures."""
    import torch

    return torch.linspace(0, users - 1, min(users, most)).round().long().tolist()
