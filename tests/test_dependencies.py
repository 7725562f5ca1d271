"""What the package imports is what it declares: a newcomer's environment has nothing else."""

import ast
import re
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parents[1]
#: Distributions whose modules have another name.
MODULES = {
    "markdown-it-py": "markdown_it",
    "scikit-learn": "sklearn",
    "dp-accounting": "dp_accounting",
    "tomli-w": "tomli_w",
}
MODULES |= {"lazy-loader": "lazy_loader", "mlflow-skinny": "mlflow"}
#: Parts of what brings them along: pydantic, PyTorch on a GPU, and Flower.
BROUGHT_ALONG = {"pydantic_core", "triton", "google", "httpx", "starlette", "uvicorn"}


def modules(declared):
    """The modules of requirements such as 'numpy>=1.26'."""
    names = [re.split(r"[\[<>=!~; ]", one)[0] for one in declared]
    return {MODULES.get(name, name) for name in names}


def test_whatever_is_imported_is_declared():
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    always = modules(project["dependencies"])
    extras = modules(one for group in project["optional-dependencies"].values() for one in group)
    first, anywhere = set(), set()
    for path in (HERE / "src" / "dpscaffold").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            roots = {name.partition(".")[0] for name in names}
            anywhere |= roots
            first |= roots if node in tree.body and "flower" not in path.parts else set()
    own = {*sys.stdlib_module_names, "dpscaffold"}
    assert first - own - BROUGHT_ALONG <= always
    assert anywhere - own - BROUGHT_ALONG <= always | extras | {"datasets", "pandas", "polars"}
