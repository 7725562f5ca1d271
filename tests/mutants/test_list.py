"""The list of mistakes fits the source: each can be planted, and its tests are there."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from mutants.runner import ROOT, SOURCE, Mutant, read_list

MUTANTS = read_list()


@cache
def functions(path: Path) -> frozenset[str]:
    """Every test of a file: ``test_x``, and ``TestClass::test_x``."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            found |= {node.name, *(f"{node.name}::{name}" for name in inner)}
    return frozenset(found)


def test_there_are_many_and_each_has_a_name_of_its_own():
    assert len(MUTANTS) >= 60
    assert [name for name, times in Counter(m.name for m in MUTANTS).items() if times > 1] == []


def test_all_parts_that_make_the_promise_have_some():
    rooms = Counter(mutant.file.split("/")[0] for mutant in MUTANTS)
    for room, least in {
        "privacy": 15,
        "runs": 8,
        "deployment": 8,
        "engine": 4,
        "tasks": 3,
    }.items():
        assert rooms[room] >= least, room


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mistake_can_be_planted_and_its_tests_are_there(mutant: Mutant):
    text = (ROOT / SOURCE / mutant.file).read_text(encoding="utf-8")
    planted = mutant.planted(text)  # the old text is there exactly once
    assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
    assert mutant.why and mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        name = name.partition("[")[0]
        assert name in functions(ROOT / file), f"{file} has no {name}"
