"""Write tests/messages.txt: every sentence that the package raises, by its code, for review.

A change of wording shows as a change of one line. ``python tests/list_messages.py`` writes the file
again, and a test says when it must be.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TREE = Path(__file__).parents[1]
LIST = Path(__file__).with_name("messages.txt")
#: The errors whose first argument is a code.
CODED = ("BadInput", "BadValue", "NotNumbers", "NotText", "PrivacyError", "Refused")


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


def refusals(source: str) -> Iterator[ast.Call]:
    """The calls in a source that build an error: those that are raised, and refusals returned."""
    tree = ast.parse(source)
    raised = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (node in raised or ast.unparse(node.func) in CODED):
            yield node


def codes(node: ast.expr) -> list[str]:
    """The codes that an expression gives as a literal, or as a choice between literals."""
    if isinstance(node, ast.IfExp):
        return codes(node.body) + codes(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def messages(source: str) -> Iterator[str]:
    """The sentences of the errors of a source, each after its code, or else its class."""
    for call in refusals(source):
        name = ast.unparse(call.func)
        code = " or ".join(codes(call.args[0])) if name in CODED and call.args else ""
        for argument in call.args:
            found = " ".join(sentence(argument).split())
            if " " in found:
                yield f"{code or name}: {found}"


def listed(root: Path = TREE / "src" / "dpscaffold") -> str:
    """All sentences, each once, in order."""
    found = {one for path in root.rglob("*.py") for one in messages(path.read_text("utf-8"))}
    return "\n".join(sorted(found)) + "\n"


if __name__ == "__main__":
    LIST.write_text(listed(), encoding="utf-8")
