"""The comparison of two trees' results: nothing that one of them lacks passes in silence."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "identity.py"
FOUND = {"scaffold | fixed": {"x": "1", "loss": "2"}, "figures": {"epsilon": "0.5"}}


@pytest.fixture
def identity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("identity", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({**FOUND, "figures": {"epsilon": "0.6"}}, "differs: figures: epsilon"),
        ({**FOUND, "scaffold | fixed": {"x": "1"}}, "only here: scaffold | fixed: loss"),
        ({"figures": FOUND["figures"], "scaffold | fixed": {}}, "only here: scaffold | fixed: x"),
        ({**FOUND, "figures": {}}, "only here: figures: epsilon"),
        ({**FOUND, "mlp": {"x": "1"}}, "only in the other tree: mlp: x"),
        ({**FOUND, "mlp": {}}, "only in the other tree: mlp"),
        ({}, "only here: figures"),
    ],
)
def test_what_differs_or_is_missing_is_named(identity, monkeypatch, tmp_path, capsys, other, line):
    monkeypatch.setattr(identity, "everything", lambda: FOUND)
    kept = tmp_path / "other.json"
    kept.write_text(json.dumps(other), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["identity.py", "--compare", str(kept)])
    assert identity.main() == 1
    assert line in capsys.readouterr().out.splitlines()


def test_equal_results_pass(identity, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(identity, "everything", lambda: FOUND)
    kept = tmp_path / "this.json"
    monkeypatch.setattr(sys, "argv", ["identity.py", "--out", str(kept)])
    assert identity.main() == 0
    monkeypatch.setattr(sys, "argv", ["identity.py", "--compare", str(kept)])
    assert identity.main() == 0
    assert capsys.readouterr().out.endswith("2 cases, 3 values, 0 differences\n")


def test_numbers_are_kept_to_the_last_bit_and_by_name(identity):
    value = {"bounds": [{"name": "cap", "epsilon": 0.1 + 0.2, "title": "words"}], "curve": [[1, 2]]}
    kept = dict(identity.numbers(value, "privacy"))
    assert kept["privacy.bounds.cap.epsilon"] == "0.30000000000000004"
    assert set(kept) == {"privacy.bounds.cap.epsilon", "privacy.curve"}
    assert kept["privacy.curve"] != dict(identity.numbers({"curve": [[1, 3]]}, "p"))["p.curve"]
