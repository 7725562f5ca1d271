"""The benchmark of drafts: its tables need no download, and its page evaluates the goals."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT))
    yield script("tables")
    for name in ("tables", "made_tables"):
        sys.modules.pop(name, None)


def test_every_table_is_made(tables, tmp_path):
    for make in tables.MADE.values():
        table = make(tmp_path)
        assert table.path.exists()
    files = sorted(path.name for path in (tmp_path / "hospitals").iterdir())
    assert len(files) == 14 and "README.txt" in files
    assert (tmp_path / "hospitals" / "lyon.csv").read_text().startswith("Export of")


def test_goals_are_met_or_missed(tables):
    split = tables.Split(1, 0.80, 0.79, 0.78, 0.5, 0.55, 0.6, 10.0, 5.0)
    found = tables.Found(
        "one", "AUC", 5, 500, 10, 80.0, 4, 2.0, 2.0, 4.4, 0.5, 1e-4, (split, split)
    )
    numbers = replace(found, name="other", metric="R²", typical=20.0)
    page = tables.as_page([found, numbers], 2.0)
    assert "on average: 0.02, goal 0.015: missed" in page
    assert "at worst (one): 0.02, goal 0.03: met" in page
    assert "constant's at worst (one): -0.05, goal 0: met" in page
    assert "R² below central on other: 0.02, goal 0.12: met" in page
    assert "| one | 5 | 500 (10, 80) | 4 | AUC | 0.800 | 0.790 |" in page


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path):
    words = ["--data-dir", str(tmp_path / "no"), "--tables", "benefits", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tables.py"), *words], capture_output=True, text=True
    )
    assert done.returncode == 0 and "no folder: benefits, " in done.stdout, done.stderr
    assert not (tmp_path / "tables.md").exists()
