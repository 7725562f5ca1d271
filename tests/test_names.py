"""The names of the package and its parts: each listed once, and imported when it is first used."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import dpscaffold

ROOT = Path(dpscaffold.__file__).parent
PARTS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
LAZY = sorted(path.parent.name for path in ROOT.glob("*/__init__.pyi"))


def fresh(code: str) -> object:
    """What code prints, as JSON, in a process that has imported nothing."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_a_part_imports_nothing_of_it() -> None:
    """And a part that is a list of names imports nothing at all, PyTorch least of all."""
    code = f"""
import importlib, json, sys
for part in {LAZY}:
    importlib.import_module("dpscaffold." + part)
lists = sorted(name for name in sys.modules if name.startswith("dpscaffold.") or name == "torch")
inside = {{}}
for part in {sorted(PARTS, key=lambda part: part not in LAZY)}:
    before = set(sys.modules)
    importlib.import_module("dpscaffold." + part)
    new = set(sys.modules) - before
    inside[part] = [name for name in new if name.startswith(f"dpscaffold.{{part}}.")]
print(json.dumps([lists, inside]))
"""
    lists, inside = fresh(code)
    assert lists == [f"dpscaffold.{part}" for part in LAZY]
    assert inside == {part: [] for part in PARTS}


def test_every_name_is_what_its_file_says_even_where_the_file_has_the_same_name() -> None:
    """Importing ``algorithms.scaffold``, the file, must not put it in the place of the function."""
    code = f"""
import ast, importlib, json, pathlib
wrong = []
for part in {["", *LAZY]}:
    package = importlib.import_module("dpscaffold" + ("." + part if part else ""))
    stub = pathlib.Path(package.__file__).with_suffix(".pyi")
    nodes = [n for n in ast.parse(stub.read_text()).body if isinstance(n, ast.ImportFrom)]
    homes = {{a.name: package.__name__ + "." + n.module for n in nodes for a in n.names}}
    files = {{name: importlib.import_module(home) for name, home in homes.items()}}
    wrong += [[part, "__all__"]] * (sorted(package.__all__) != sorted(homes))
    for name, file in files.items():
        if getattr(package, name) is not getattr(file, name):
            wrong.append([part, name])
print(json.dumps(wrong))
"""
    assert fresh(code) == []
    assert (ROOT / "algorithms" / "scaffold.py").exists(), "there is a name that two things have"


def test_names_are_listed_once() -> None:
    """In the stubs, from which they are imported lazily; nothing repeats them."""
    for stub in (ROOT / "__init__.pyi", *ROOT.glob("*/__init__.pyi")):
        names = [line.split()[-1] for line in stub.read_text().splitlines() if " import " in line]
        assert len(set(names)) == len(names), stub
        body = ast.parse(stub.with_suffix(".py").read_text()).body
        assert not any(isinstance(n, ast.ImportFrom) and n.module != "__future__" for n in body)


def test_parts_without_a_list_of_names_hand_nothing_on() -> None:
    """What is imported from a part stands there or in its stub's list."""
    for part in set(PARTS) - set(LAZY):
        for node in ast.parse((ROOT / part / "__init__.py").read_text()).body:
            assert getattr(node, "module", None) is None or (
                not str(node.module).startswith(f"dpscaffold.{part}")
            ), part
            assert "__all__" not in ast.dump(node), part


def test_no_two_classes_share_a_name() -> None:
    """A name that means two things must be looked up each time it is read."""
    homes: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def test_every_package_says_what_belongs_there_and_what_does_not() -> None:
    for path in sorted(ROOT.rglob("*/__init__.py")):
        said = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
        assert "Belongs here: " in said and "Does not belong here: " in said, path


def test_the_root_has_few_names() -> None:
    """Whoever wants more imports it from the package that has it."""
    assert len(dpscaffold.__all__) <= 28
