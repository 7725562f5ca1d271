"""Write tests/messages.txt: every sentence that the package raises, for review.

A change of wording shows as a change of one line. ``python tests/list_messages.py`` writes the file
again, and a test says when it must be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).parents[1]
LIST = Path(__file__).with_name("messages.txt")


def sentence(node: ast.expr) -> str:
    """A literal or formatted text, with its expressions as they are written; else nothing."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = [
            "{" + ast.unparse(part.value) + "}"
            if isinstance(part, ast.FormattedValue)
            else sentence(part)
            for part in node.values
        ]
        return "".join(parts)
    return ""


def messages(source: str) -> Iterator[str]:
    """The sentences of the raise statements of a source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for argument in node.exc.args:
                found = " ".join(sentence(argument).split())
                if " " in found:
                    yield f"{ast.unparse(node.exc.func)}: {found}"


def listed(root: Path = TREE / "src" / "dpscaffold") -> str:
    """All sentences, each once, in order."""
    found = {one for path in root.rglob("*.py") for one in messages(path.read_text("utf-8"))}
    return "\n".join(sorted(found)) + "\n"


if __name__ == "__main__":
    LIST.write_text(listed(), encoding="utf-8")
