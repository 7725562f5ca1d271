"""The table of whole plans: what stands next to them is the frontier's best, and it is written
where the page says."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plans() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plans", ROOT / "benchmarks" / "plans.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["plans"] = module
    spec.loader.exec_module(module)
    return module


def shown_best(row: str, epsilon: float) -> float:
    """The largest mean of a line of the frontier's own page, in per cent."""
    own, secure, _ = row.partition(", secure sums")
    name = "frontier-secure" if secure else "frontier-hog" if "HOG" in row else "frontier"
    page = (ROOT / "docs" / "results" / name / "RESULT.md").read_text(encoding="utf-8")
    part = page.split(f"### {own}\n")[1].split("###")[0]
    [line] = re.findall(rf"^\| {epsilon:g} \| Poisson, .*$", part, re.M)
    cells = line.split("|")[3 : 4 if secure else 8]  # one or five algorithms
    return max(float(cell.split("±")[0]) for cell in cells)


def test_beside_a_plan_stands_the_best_of_the_frontier(plans):
    best = plans.frontier()
    for row in plans.ROWS.values():
        for epsilon in plans.EPSILONS:
            found = best[row, f"{epsilon:g} poisson"]
            assert len(found.accuracies) == 3
            mean = 100 * sum(found.accuracies) / 3
            assert mean == pytest.approx(shown_best(row, epsilon), abs=0.0051)


def test_the_planner_is_told_public_numbers_alone(plans, monkeypatch):
    def refused(*arguments: object) -> None:
        raise AssertionError("a plan must not load data")

    monkeypatch.setattr(plans, "load_federation", refused)
    monkeypatch.setattr("dpscaffold.paper.solving.load_federation", refused)
    facts, goal, limits, preset = plans.asked(plans.case_of("FEMNIST, γ = 0 %", 0.3))
    assert (facts.users, facts.features, facts.classes, facts.similarity) == (40, 784, 47, 0.0)
    assert (goal.epsilon, goal.view, goal.sampling) == (0.3, "server", "poisson")
    assert (limits.rounds, limits.local_steps, limits.cohort_size) == (400, 50, 8)
    assert preset.clip is None and preset.algorithm is None
    facts, _, limits, preset = plans.asked(plans.case_of("MNIST, γ = 0 %", 0.3))
    assert limits.local_steps == 10 and preset.task.parameters > 61 * 200
    _, _, _, preset = plans.asked(plans.case_of("synthetic (5, 5)", 1.0))
    assert preset.regularisation == 5e-3


def test_the_table_is_written_between_its_marks_and_again(plans, monkeypatch, tmp_path):
    page = tmp_path / "planning.md"
    page.write_text(f"before\n\n{plans.BEGIN}\nold\n{plans.END}\n\nafter\n")
    for name, value in (("ROOT", tmp_path), ("PAGE", page), ("RESULTS", tmp_path)):
        monkeypatch.setattr(plans, name, value)
    one = plans.Trained(
        "MNIST, γ = 0 %", 1.0, "fedavg", 400, 10, 0.5, 0.3, 9.0, (0.5, 0.6, 0.7), 30.0, "CPU"
    )
    for _ in range(2):
        plans.write_docs([one])
        text = page.read_text()
        assert text.startswith("before\n\n") and text.endswith("\n\nafter\n") and "old" not in text
        assert (
            text.count("| MNIST, γ = 0 % | 1 | fedavg, T = 400, K = 10, C = 0.5, η₀ = 0.3 |") == 1
        )
    difference = 60.0 - shown_best("MNIST, γ = 0 %", 1.0)
    assert f"| {difference:+.2f} |" in text
    real = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert real.count(plans.BEGIN) == real.count(plans.END) == 1


def test_plans_of_another_machine_are_read_from_one_file_and_newer_ones_replace_them(
    plans, tmp_path
):
    row, other = "MNIST, γ = 0 %", "synthetic (5, 5)"
    one = plans.Trained(row, 1.0, "fedavg", 4, 10, 0.5, 0.3, 9.0, (0.5, 0.6), 30.0, "CPU")
    two = replace(one, row=other, epsilon=0.3)
    plans.write([one, two], tmp_path)
    assert plans.finished(tmp_path) == [two, one]  # in the order of rows
    newer = replace(one, accuracies=(0.8, 0.9))
    folder = tmp_path / "row4-epsilon1"
    folder.mkdir()
    (folder / "trained.json").write_text(json.dumps(asdict(newer)), encoding="utf-8")
    assert plans.finished(tmp_path) == [two, newer]
