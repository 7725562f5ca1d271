"""Where dictionaries of anything are still public: each module with the reason, and no new one.

What one package hands to another has a type with named fields, so that mypy sees a misspelt name.
Writing JSON and reading it back (``to_json``, ``from_dict``, …) is where such dictionaries belong.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import dpscaffold

ROOT = Path(dpscaffold.__file__).parent

CODECS = {"to_json", "from_json", "to_dict", "from_dict", "to_line", "from_line", "as_json"}

#: Reason → the modules that have public dictionaries of anything for it.
REASONS = {
    "tables of a TOML file or overrides from a user, as given, before they are checked": (
        "algorithms.naming cli.__init__ cli.config cli.example cli.keys config.configuration "
        "config.reading data.config data.preparation data.preprocessing data.sources.arrays "
        "deployment.server.config deployment.server.run deployment.site.data_table "
        "deployment.site.file sums.site deployment.site.reading deployment.transports.flower.app "
        "deployment.transports.flower.demo paper.cases paper.definition paper.published "
        "planning.recommendation report.planning runs.folder runs.written training.from_config "
        "training.front training.in_progress tuning.private_tuning tuning.tuning"
    ),
    "an agreement as it was sent, whose hash is signed; parsed by read_offer": (
        "deployment.protocol.agreement deployment.protocol.enrolment deployment.site.answer "
        "deployment.site.memory deployment.site.work"
    ),
    "lines of a journal, whose hash covers every key; each ledger parses its own": (
        "deployment.site.ledger runs.journal runs.ledger"
    ),
    "a checkpoint: tensors by name, restored by the object that wrote them": (
        "deployment.server.sites engines.memories flower.kept runs.checkpoint"
    ),
    "entries of model.json with a kind of their own, parsed where the kind is known": (
        "data.stored report.outcome tasks.stored"
    ),
    "rows of a user's own data, or drawing options of another library": (
        "models.model paper.figures"
    ),
    "rows of a table for people or a spreadsheet, whose columns depend on the metrics": (
        "models.evaluate paper.results report.runs"
    ),
    "an answer that a command prints as JSON": ("cli.calibrate deployment.site.operation"),
    "what made a stored result of the paper: compared key by key": "paper.archive",
    "keys of files of other versions, kept as they are": "privacy.record",
}


def untyped(annotation: ast.AST) -> bool:
    """Whether an annotation has a dictionary or mapping from text to anything in it."""
    return any(
        isinstance(node, ast.Subscript)
        and ast.unparse(node.value) in ("dict", "Mapping", "MutableMapping")
        and ast.unparse(node.slice).strip("()") == "str, Any"
        for node in ast.walk(annotation)
    )


def places(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """The public functions, methods, fields and aliases with such an annotation."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from places(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            hidden = node.name in CODECS or (node.name.startswith("_") and node.name != "__init__")
            given = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            found = [*(one.annotation for one in given), node.returns]
            if not hidden and any(one is not None and untyped(one) for one in found):
                yield f"{prefix}{node.name}"
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            value = node.annotation if isinstance(node, ast.AnnAssign) else node.value
            name = ast.unparse(target)
            if name.isidentifier() and not name.startswith("_") and untyped(value):
                yield f"{prefix}{name}"


def public_places() -> dict[str, list[str]]:
    """Module → its public places, where it has any."""
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): [
            *places(ast.parse(path.read_text(encoding="utf-8")).body)
        ]
        for path in ROOT.rglob("*.py")
    }
    return {module: names for module, names in found.items() if names}


def test_public_dictionaries_of_anything_are_listed_with_their_reason() -> None:
    listed = {module for modules in REASONS.values() for module in modules.split()}
    new = {module: names for module, names in public_places().items() if module not in listed}
    assert not new, "give them a type with named fields, or list the module with a reason"


def test_their_number_only_falls() -> None:
    assert sum(map(len, public_places().values())) <= 109


def test_a_new_one_is_found() -> None:
    source = (
        "Row = Mapping[str, Any]\n"
        "class Run:\n"
        "    summary: dict[str, Any] | None = None\n"
        "    def to_json(self) -> dict[str, Any]: ...\n"
        "    def read(self, *, rows: list[dict[str, Any]]) -> None: ...\n"
        "    def _hidden(self) -> dict[str, Any]: ...\n"
        "class _Hidden:\n    rows: dict[str, Any]\n"
        "def named(values: Mapping[str, float]) -> dict[str, int]:\n"
        "    inner: dict[str, Any] = {}\n"
        "def made() -> dict[str, Any]: ...\n"
    )
    assert [*places(ast.parse(source).body)] == ["Row", "Run.summary", "Run.read", "made"]
