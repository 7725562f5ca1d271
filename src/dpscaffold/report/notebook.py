"""How values show themselves in a notebook: short tables, without scripts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any


def html_table(title: str, rows: Iterable[tuple[str, Any]]) -> str:
    """A title and named values, as HTML.

    >>> html_table("A", [("b", "<c>")]).count("&lt;c&gt;")
    1
    """
    lines = "".join(
        f'<tr><th scope="row" style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows
        if value is not None
    )
    return f"<table><caption><b>{escape(title)}</b></caption><tbody>{lines}</tbody></table>"
