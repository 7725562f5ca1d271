"""Mistakes at random: every place of a file where one can be planted, by its syntax.

A mistake is one of: a comparison, an operator, ``and`` and ``or``, or a function that becomes its
neighbour (``min`` and ``max``); a number or truth value that changes; a ``not`` that goes; a branch
that is never taken; the first two arguments of a call that change places. None is planted in what
only people or type checkers read: docstrings, texts, annotations, refusals' sentences, logging.
"""

from __future__ import annotations

import ast
import copy
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: What stands for what: each operator becomes its likeliest confusion.
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
NEIGHBOURS = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor"}
#: Calls whose arguments only people read, by the last part of the name.
TOLD = {"debug", "info", "warning", "warn", "error", "exception", "log", "print", "echo", "secho"}
TOLD |= {"getLogger", "Field", "Option", "Argument", "add_argument", "TypeVar", "cast"}
#: Nothing is planted in programs for a GPU: no test runs them here.
LEFT_OUT = ("engine/programs.py",)


@dataclass(frozen=True)
class Mistake:
    """In ``file`` of the package, the characters from ``start`` to ``end`` become ``after``."""

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def planted(self, text: str) -> str:
        """The source with the mistake in it."""
        raw = text.encode()
        return (raw[: self.start] + self.after.encode() + raw[self.end :]).decode()


class _Places(ast.NodeVisitor):
    """Walk through a file and note (kind, node, what it becomes)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, ast.expr | ast.stmt, ast.AST]] = []

    def note(self, kind: str, node: ast.expr | ast.stmt, changed: ast.AST) -> None:
        self.found.append((kind, node, changed))

    # What only people or type checkers read.

    def visit_Raise(self, node: ast.Raise) -> None:
        return

    def visit_Assert(self, node: ast.Assert) -> None:
        self.visit(node.test)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        return

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        return

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        if not any(name.startswith("__") for name in names):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    # Where a mistake can be.

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            return
        self.note("branch", node.test, ast.Constant(False))
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.note("branch", node, node.orelse)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        changed = copy.deepcopy(node)
        changed.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[assignment]
        self.note("comparison", node, changed)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        self.note("and or", node, changed)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in SWAPS and not _has_text(node):
            changed = copy.deepcopy(node)
            changed.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
            self.note("operator", node, changed)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in SWAPS and not _has_text(node.value):
            changed = copy.deepcopy(node)
            changed.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
            self.note("operator", node, changed)
        self.visit(node.value)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.note("not", node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.note("constant", node, ast.Constant(not value))
        elif isinstance(value, int):
            self.note("constant", node, ast.Constant(value + 1))
        elif isinstance(value, float):
            self.note("constant", node, ast.Constant(1.5 * value if value else 1.0))

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name in TOLD:
            return
        if name in NEIGHBOURS:
            changed = copy.deepcopy(node)
            if isinstance(changed.func, ast.Attribute):
                changed.func.attr = NEIGHBOURS[name]
            else:
                changed.func = ast.Name(NEIGHBOURS[name])
            self.note("operator", node, changed)
        swappable = name not in ("isinstance", "issubclass", "min", "max")
        if swappable and len(node.args) >= 2 and not any(_starred(one) for one in node.args[:2]):
            changed = copy.deepcopy(node)
            changed.args[0], changed.args[1] = changed.args[1], changed.args[0]
            if ast.dump(changed) != ast.dump(node):
                self.note("arguments", node, changed)
        self.generic_visit(node)


def _starred(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred)


def _has_text(node: ast.expr) -> bool:
    """Whether it adds texts up, as sentences do."""
    return any(
        isinstance(one, ast.JoinedStr)
        or (isinstance(one, ast.Constant) and isinstance(one.value, str))
        for one in ast.walk(node)
    )


def mistakes(root: Path, file: str) -> Iterator[Mistake]:
    """Every mistake that can be planted in a file of the package at ``root``."""
    text = (root / file).read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    places = _Places()
    places.visit(ast.parse(text))
    for kind, node, changed in places.found:
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        after = ast.unparse(changed)
        if isinstance(node, ast.expr):
            after = f"({after})"
        before = text.encode()[start:end].decode()
        yield Mistake(file, node.lineno, kind, start, end, before, after)


def chosen(root: Path, package: str, count: int, seed: int) -> Sequence[Mistake]:
    """``count`` mistakes of a package, all kinds equally likely, the same for the same code."""
    kinds: defaultdict[str, list[Mistake]] = defaultdict(list)
    for path in sorted((root / package).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if file not in LEFT_OUT:
            for mistake in mistakes(root, file):
                kinds[mistake.kind].append(mistake)
    draw = random.Random(f"{seed} {package}")
    for one in kinds.values():
        draw.shuffle(one)
    found: list[Mistake] = []
    while len(found) < count and any(kinds.values()):
        found.append(kinds[draw.choice(sorted(kind for kind, left in kinds.items() if left))].pop())
    return found
