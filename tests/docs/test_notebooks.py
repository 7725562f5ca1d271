"""The notebooks run from top to bottom, and keep small outputs of such a run."""

from __future__ import annotations

import ast
import json

import pytest
from notebooks import HERE, NOTEBOOKS, executed

KEPT = 120_000


def cells(path):
    return [
        cell
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]


def test_there_are_four():
    assert len(NOTEBOOKS) >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_was_kept_after_a_run_from_top_to_bottom(path):
    """Outputs are there, small, without errors and without anything of the machine that ran it."""
    text = path.read_text(encoding="utf-8")
    assert len(text) < KEPT
    found = cells(path)
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    assert any(cell["outputs"] for cell in found)
    for cell in found:
        ast.parse("".join(cell["source"]))
        assert all(output["output_type"] != "error" for output in cell["outputs"])
    assert all(
        word not in text for word in (str(HERE), "/tmp/", "/home/", "/root/", "site-packages")
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path):
    """And shows what it showed when its outputs were kept, kind by kind."""
    reason = "notebooks are run with pip install 'dpscaffold[notebooks]'"
    for package in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason=reason)
    done = executed(path, tmp_path)
    again = [cell for cell in done.cells if cell.cell_type == "code"]
    for kept, cell in zip(cells(path), again, strict=True):
        outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        assert kinds(kept["outputs"]) == kinds(outputs)


def kinds(outputs):
    return [sorted(output.get("data", {"text": None})) for output in outputs]
