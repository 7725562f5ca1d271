"""Which part may import which: the layers of the package, as a test over its import graph.

Imports inside functions and for type checkers count: they are dependencies all the same.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import dpscaffold

ROOT = Path(dpscaffold.__file__).parent

#: Low to high, as docs/architecture.md shows them. Packages of one line may use each other as long
#: as there is no cycle.
LAYERS = (
    "errors checks atomic",
    "privacy",
    "report.notebook report.statement_page report.human_tables",
    "randomness federation",
    "algorithms tasks data",
    "setting",
    "engines",
    "runs",
    "config models",
    "training",
    "deployment",
    "sums flower",
    "planning tuning",
    "audit training.from_config",
    "report config.reference",
    "paper",
    "cli __main__",
)
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms.split()}

#: A part → the parts outside itself that may import it, where the layers alone allow more.
ONLY_BY = {"paper": {"cli.reproduce"}, "cli": {"__main__"}}

Graph = Mapping[str, Iterable[str]]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module by its name within the package (``cli.train``; ``cli`` for the folder's)."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def homes(root: Path = ROOT) -> dict[str, str]:
    """A lazy name of a part (``algorithms.Algorithm``) → its module, as the part's stub says."""
    found = {}
    for stub in root.rglob("__init__.pyi"):
        part = ".".join(stub.parent.relative_to(root).parts)
        for node in ast.parse(stub.read_text()).body if part else ():
            assert isinstance(node, ast.ImportFrom) and node.level == 1, stub
            for alias in node.names:
                found[f"{part}.{alias.name}"] = f"{part}.{node.module}"
    return found


def imported(
    source: str, known: Iterable[str], lazy: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The modules of the package that a source imports anywhere; "" is the package itself. A
    ``lazy`` name counts as an import of its home: there it is taken from, sooner or later."""
    known, lazy = set(known), lazy or {}
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: say where it stands, from dpscaffold on"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if name.partition(".")[0] != "dpscaffold":
                continue
            inner = name.removeprefix("dpscaffold").removeprefix(".")
            yield inner if inner in known else lazy.get(inner, inner.rpartition(".")[0])


def outside(source: str) -> set[str]:
    """The packages that a source imports anywhere."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    taken = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in (*plain, *taken)}


def graph() -> dict[str, set[str]]:
    """Module → the modules that it imports, lazily or for its types too."""
    files, lazy = modules(), homes()
    return {name: set(imported(path.read_text(), files, lazy)) for name, path in files.items()}


def room_of(module: str) -> str:
    """The package of a module: its first folder, or the part of one that has its own layer."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in HEIGHT), parts[0])


def rooms_of(edges: Graph) -> dict[str, set[str]]:
    """Room → the other rooms that it imports; the package's own names are left out."""
    found: dict[str, set[str]] = {}
    for module, targets in edges.items():
        rooms = {room_of(target) for target in targets} - {room_of(module), ""}
        found.setdefault(room_of(module), set()).update(rooms)
    return found


def cycle(edges: Graph) -> list[str]:
    """A cycle, from a node back to itself; empty where there is none.

    >>> cycle({"a": ["b"], "b": ["c"], "c": ["b"]})
    ['b', 'c', 'b']
    """
    finished: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in finished:
            for target in sorted(edges.get(node, ())):
                if found := walk(target, [*path, node]):
                    return found
            finished.add(node)
        return []

    for node in sorted(edges):
        if found := walk(node, []):
            return found
    return []


def test_every_part_has_its_layer():
    rooms = {room_of(name) for name in modules()} - {""}
    assert rooms == set(HEIGHT)


def test_the_top_level_has_at_most_twenty_one_packages_and_three_modules():
    entries = {name.partition(".")[0] for name in modules()} - {"", "__main__"}
    files = {name for name in entries if (ROOT / f"{name}.py").exists()}
    assert files == {"errors", "checks", "atomic"}
    assert len(entries - files) <= 21


def test_no_part_imports_a_higher_one():
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph().items()
        for target in targets
        if target and HEIGHT[room_of(module)] < HEIGHT[room_of(target)]
    ]
    assert not wrong


def test_no_parts_import_each_other_in_a_circle():
    assert not cycle(rooms_of(graph()))


def test_no_modules_import_each_other_in_a_circle():
    assert not cycle(graph())


def test_privacy_imports_nothing_from_the_rest():
    """The accountant reads descriptions; it must not be able to reach for anything else."""
    assert rooms_of(graph())["privacy"] == set()


@pytest.mark.parametrize("room", ONLY_BY)
def test_some_parts_are_for_one_door_alone(room):
    users = {m for m, targets in graph().items() if room in map(room_of, targets)}
    assert {m for m in users if room_of(m) != room} <= ONLY_BY[room]


def test_nothing_is_taken_from_the_package_itself_but_its_version():
    """Its public names are made of everything: whoever imports one depends on all."""
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "dpscaffold":
                taken = {alias.name for alias in node.names} - set(modules())
                assert taken <= {"__version__"}, f"{name} imports {taken} from dpscaffold"


def test_flower_is_imported_in_its_own_folder_alone():
    for name, path in modules().items():
        taken = outside(path.read_text())
        assert "flwr" not in taken or "flower" in name.split("."), name


def test_figures_are_drawn_on_canvases_of_their_own():
    """The backend and the settings of matplotlib belong to whoever uses the package."""
    for name, path in modules().items():
        text = path.read_text()
        for switch in ("pyplot", "matplotlib.use", "rcParams["):
            assert switch not in text, f"{name} has {switch}"


def test_imports_are_found_wherever_they_stand():
    source = (
        "from __future__ import annotations\n"
        "import dpscaffold.checks\n"
        "from dpscaffold import flower, __version__\n"
        "if TYPE_CHECKING:\n    from dpscaffold.training import Result\n"
        "def f():\n    from dpscaffold.cli import train\n"
        "from dpscaffold.setting import Gaussian\n"
    )
    known = ["checks", "flower", "training", "cli", "cli.train", "setting", "setting.gaussian"]
    found = list(imported(source, known, {"setting.Gaussian": "setting.gaussian"}))
    assert found == ["checks", "flower", "", "setting.gaussian", "training", "cli.train"]


def test_cycles_are_found():
    assert cycle({"a": ["b"], "b": ["c"], "c": ["a"]}) == ["a", "b", "c", "a"]
    assert cycle({"a": ["b", "c"], "b": ["d"], "c": ["d"]}) == []


def test_synthetic_data_need_no_reader_no_configuration_and_no_accountant():
    """Names are imported when they are used, so the first one costs little beyond PyTorch."""
    heavy = ("pyarrow", "pydantic", "scipy", "sklearn", "matplotlib", "dp_accounting", "rich")
    code = (
        "import sys, torch; before = set(sys.modules); from dpscaffold import synthetic; "
        "synthetic(users=2, records=5); "
        f"print([name for name in {heavy} if name in set(sys.modules) - before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
