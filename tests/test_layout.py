"""What the layout of the package promises: no circles, an accountant that stands alone, and
refusals with codes that are documented."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from refusals import PAGE, listed_codes

import dpscaffold
from dpscaffold.deployment.protocol.messages import REASONS

ROOT = Path(dpscaffold.__file__).parent
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}

#: The errors whose first argument is a code.
CODED = ("BadInput", "BadValue", "NotNumbers", "NotText", "BadInput", "Refused")


def module_of(path: Path) -> str:
    """``cli.train`` for cli/train.py, ``cli`` for cli/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): source for path, source in SOURCES.items()}


def lazy_names() -> dict[str, str]:
    """A name that a package hands on lazily, with the module that its stub takes it from."""
    found = {}
    for stub in ROOT.glob("*/**/__init__.pyi"):
        package = ".".join(stub.parent.relative_to(ROOT).parts)
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            assert isinstance(node, ast.ImportFrom)
            found |= {f"{package}.{a.name}": f"{package}.{node.module}" for a in node.names}
    return found


def imported(source: str) -> Iterator[str]:
    """Every dotted name that a source imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def graph() -> dict[str, set[str]]:
    """Module → the modules of the package that it imports."""
    lazy, edges = lazy_names(), {}
    for module, source in MODULES.items():
        edges[module] = set()
        for name in imported(source):
            if name.startswith("dpscaffold."):
                inner = name.removeprefix("dpscaffold.")
                known = inner if inner in MODULES else inner.rpartition(".")[0]
                edges[module].add(lazy.get(inner, known))
        edges[module] -= {"", module}
    return edges


def test_no_modules_import_each_other_in_a_circle() -> None:
    graphlib.TopologicalSorter(graph()).prepare()


def test_a_circle_is_noticed() -> None:
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


def test_privacy_imports_nothing_of_the_rest_but_errors() -> None:
    """The accountant reads descriptions; it must not be able to reach for anything else."""
    edges = graph()
    packages = {
        target.partition(".")[0]
        for module, targets in edges.items()
        if module.partition(".")[0] == "privacy"
        for target in targets
    }
    assert packages <= {"privacy", "errors"}


LOADED = """
import importlib, pkgutil, sys
import dpscaffold.privacy as privacy
for module in pkgutil.iter_modules(privacy.__path__):
    importlib.import_module(f"dpscaffold.privacy.{module.name}")
for name in privacy.__all__:
    getattr(privacy, name)
print(*sorted(name.partition(".")[0] for name in sys.modules))
"""


def test_privacy_loads_no_library_of_data_or_training() -> None:
    """A statement can be checked where nothing is trained."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True
    )
    assert not {"torch", "pandas", "matplotlib", "sklearn"} & set(done.stdout.split())


READ = """
import sys
from dpscaffold import Gaussian, Plan
from dpscaffold.config import Secure, load
load(None, ["privacy.noise=4.0", "secure.colluders=2", "task.kind=mlp"])
print(*sorted(name.partition(".")[0] for name in sys.modules))
"""


def test_a_configuration_is_read_without_a_library_of_data_or_training() -> None:
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, check=True)
    assert not {"torch", "pandas", "matplotlib", "sklearn"} & set(done.stdout.split())


def refusals(source: str) -> Iterator[ast.Call]:
    """The calls that build a refusal."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CODED:
            yield node


def codes(node: ast.expr) -> list[str]:
    """The codes that an expression gives as a literal, or as a choice between literals."""
    if isinstance(node, ast.IfExp):
        return codes(node.body) + codes(node.orelse)
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


@pytest.mark.parametrize("module", ["training.train", "training.stack", "paper.runner"])
def test_a_machine_that_only_computes_needs_no_pyarrow(module: str) -> None:
    script = f"import sys; sys.modules['pyarrow'] = None; import dpscaffold.{module}"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_code_is_documented_and_every_documented_code_is_raised() -> None:
    calls = [call for source in MODULES.values() for call in refusals(source) if call.args]
    raised = {code for call in calls for code in codes(call.args[0])}
    known = set(listed_codes())
    assert not raised - known - set(REASONS), f"add them to {PAGE.name}"
    assert not [code for code in known if not any(f'"{code}"' in s for s in MODULES.values())]


TESTS = Path(__file__).parent
#: Suites that must hold whatever the inside looks like.
LAWS = (
    "conformance/*.py",
    "lifecycle/*.py",
    "oracle/*.py",
    "privacy/explicit_pairs.py",
    "privacy/test_counterexamples.py",
    "privacy/test_golden.py",
    "tasks/test_total_clipping.py",
    "torture/*.py",
)
#: Files among them that are about what sites keep, or about files of an old release.
OF_SITES = ("torture/federated.py", "lifecycle/test_released_files.py")
#: What they may name of the package themselves.
LASTING = {"Gaussian", "Logistic", "Task", "fedavg", "fedprox", "scaffold", "scaffold_balanced"}


def test_suites_of_laws_reach_the_package_through_the_facade_alone() -> None:
    """So that only tests/world.py follows when something inside moves."""
    found = {path for pattern in LAWS for path in TESTS.glob(pattern)}
    assert len(found) > 15
    for path in found - {TESTS / name for name in OF_SITES}:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("dpscaffold")]
            elif isinstance(node, ast.ImportFrom) and node.module == "dpscaffold":
                names = [alias.name for alias in node.names if alias.name not in LASTING]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dpscaffold"):
                names = [str(node.module)]
            assert not names, f"{path.name} imports {names}; ask tests/world.py for it"
