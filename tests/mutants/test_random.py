"""Mistakes at random: where they are planted, where not, and what counts as a lower share."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from mutants.planting import chosen, mistakes
from mutants.random_mistakes import PACKAGES, ROOT, SOURCE, files_of, lower

CODE = '''"""Adds 1 and 2."""
__all__ = ["f" + "g"]
log = getLogger("a" + "b")
ONE: Literal[7] = 3

def f(a: Annotated[int, 5], b, *rest):
    """Not 1 == 2."""
    if not a < b:
        raise ValueError(f"{a + 1} is not below", 4)
    log.info("3 of %d", a - 1)
    total = a * 2 if a and b else 0
    return g(a, b) + total
'''


def test_what_is_planted_and_what_never_is(tmp_path: Path):
    (tmp_path / "one.py").write_text(CODE, encoding="utf-8")
    found = {(one.kind, one.before, one.after) for one in mistakes(tmp_path, "one.py")}
    assert found == {
        ("constant", "3", "(4)"),
        ("branch", "not a < b", "(False)"),
        ("not", "not a < b", "(a < b)"),
        ("comparison", "a < b", "(a <= b)"),
        ("arguments", "g(a, b)", "(g(b, a))"),
        ("operator", "g(a, b) + total", "(g(a, b) - total)"),
        ("branch", "a * 2 if a and b else 0", "(0)"),
        ("operator", "a * 2", "(a / 2)"),
        ("constant", "2", "(3)"),
        ("constant", "0", "(1)"),
        ("and or", "a and b", "(a or b)"),
    }  # fmt: skip


@pytest.mark.parametrize("package", ["randomness", "sums"])
def test_the_same_ten_each_of_which_changes_the_code(package: str):
    ten = chosen(ROOT / SOURCE, package, 10, 20)
    assert ten == chosen(ROOT / SOURCE, package, 10, 20) and len(set(ten)) == 10
    for mistake in ten:
        text = (ROOT / SOURCE / mistake.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(mistake.planted(text))) != ast.dump(ast.parse(text))


def test_every_package_has_tests():
    table = tomllib.loads(PACKAGES.read_text(encoding="utf-8"))
    for path in (ROOT / SOURCE).iterdir():
        if (path / "__init__.py").is_file():
            assert files_of(ROOT, table[path.name]["tests"], ""), path.name


def test_a_share_is_compared_with_those_of_the_packages_that_it_comes_from():
    def packages(**caught: int):
        return {name: {"caught": n, "mistakes": [{}] * 10} for name, n in caught.items()}

    then = {"packages": packages(sums=7, tasks=8)}
    assert lower({"packages": packages(sums=7, tasks=9)}, then) == []
    (sentence,) = lower({"packages": packages(sums=6, tasks=8)}, then)
    assert sentence == "sums: 6 of 10 caught, and 7 of 10 in 0.2.0"
