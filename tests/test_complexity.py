"""Functions stay simple: few have a cyclomatic complexity above 10, counted as radon counts it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dpscaffold

ROOT = Path(dpscaffold.__file__).parent

#: The most that one function should have, and the share of functions that may have more.
SIMPLE, MOST = 10, 0.025

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.Assert)
LOOPS = (ast.For, ast.AsyncFor, ast.While)


def decisions(node: ast.AST) -> int:
    """The decisions in a node; those of functions and classes within it are not its own."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return 0
    found = isinstance(node, BRANCHES)
    if isinstance(node, LOOPS):
        found += 1 + bool(node.orelse)
    elif isinstance(node, ast.BoolOp):
        found += len(node.values) - 1
    elif isinstance(node, ast.comprehension):
        found += 1 + len(node.ifs)
    elif isinstance(node, ast.Try):
        found += len(node.handlers) + bool(node.orelse)
    elif isinstance(node, ast.Match):
        wildcard = [getattr(case.pattern, "pattern", False) is None for case in node.cases]
        found += len(node.cases) - any(wildcard)
    within = () if isinstance(node, ast.Assert) else ast.iter_child_nodes(node)
    return found + sum(map(decisions, within))


def complexities(node: ast.AST, name: str) -> Iterator[tuple[int, str]]:
    """The complexity of every function and method of a module."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            yield 1 + sum(map(decisions, child.body)), f"{name}:{child.name}"
        else:
            yield from complexities(child, name)


def test_decisions_are_counted_as_radon_does() -> None:
    text = """
def f(x):
    assert x and 1
    for k in [y for y in x if y if k]:
        if k and x or 1:
            return (lambda z: 1 if z else 2)(k)
    else:
        x = 3
    try:
        match x:
            case 1: pass
            case 2: pass
            case _: pass
    except ValueError:
        def inner(): return 1 if x else 2
    while x:
        break
"""
    # assert 1, for … else 2, comprehension 3, if 1, and + or 2, lambda's if 1, match 2, except 1,
    # while 1; the function inside is not counted.
    assert list(complexities(ast.parse(text), "m")) == [(1 + 14, "m:f")]


def test_few_functions_are_complex() -> None:
    found = [
        one
        for path in sorted(ROOT.rglob("*.py"))
        for one in complexities(ast.parse(path.read_text("utf-8")), str(path.relative_to(ROOT)))
    ]
    above = sorted([one for one in found if one[0] > SIMPLE], reverse=True)
    share = len(above) / len(found)
    assert share <= MOST, f"{share:.1%} of {len(found)} functions are too complex: {above}"
