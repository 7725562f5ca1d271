"""An extension of mkdocstrings: docstrings as they are written here, for a site in Markdown.

Examples (``>>>``) become code, and roles such as ``:class:`~dpscaffold.config.plan.Plan``` plain
names.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`(?P<short>~?)(?P<name>[^`]+)`")


class Docstrings(griffe.Extension):
    """Rewrites every docstring once it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """A docstring with fenced examples and without roles.

    >>> markdown("See :class:`~a.b.C`.\\n\\n>>> 1 + 1\\n2")
    'See ``C``.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    text = ROLE.sub(lambda match: f"``{_name(match['short'], match['name'])}``", text)
    lines, inside = [], False
    for line in text.split("\n"):
        if line.lstrip().startswith(">>>") and not inside:
            lines.append(_indent(line) + "```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append(_indent(lines[-1]) + "```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)


def _name(short: str, name: str) -> str:
    return name.rpartition(".")[2] if short else name


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]
