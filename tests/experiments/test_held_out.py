"""Whole plans as a line of an experiment: made without data, once, and compared with the best."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpscaffold.paper import whole_plans
from dpscaffold.paper.archive import Archive, FinishedRun
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import experiment
from dpscaffold.paper.results import Results
from dpscaffold.paper.runner import Loader
from dpscaffold.paper.whole_plans import LINE, asked, make_plans, plan_parts
from dpscaffold.planning.trial import Bench, StepSizeTrial
from dpscaffold.setting import Setting
from dpscaffold.training.events import silence

CPU = torch.device("cpu")
HELD_OUT = experiment("fashion-mnist")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Instead of training: one best η₀; and how often something was tried."""
    count = []

    def scored(self: Bench, tried: list[tuple[Setting, float]]) -> list[StepSizeTrial]:
        count.append(len(tried))
        scores = {rate: (1.0 - 0.1 * (rate != 0.3),) * 2 * len(self.seeds) for _, rate in tried}
        return [
            StepSizeTrial(rate, scores[rate], 0, tuple((t, scores[rate]) for t in self.tails))
            for _, rate in tried
        ]

    def refused(*arguments: object) -> None:
        raise AssertionError("a plan must not load data")

    monkeypatch.setattr(Bench, "run", scored)
    monkeypatch.setattr("dpscaffold.paper.solving.load_federation", refused)
    monkeypatch.setattr("dpscaffold.paper.runner.load_federation", refused)
    return count


def some(seeds: int = 2) -> list[Case]:
    return [c for c in HELD_OUT.cases(seeds, 0.1) if c.labels["column"] == "1 poisson"]


def test_a_plan_is_made_once_for_each_row_and_epsilon_without_data(quick, tmp_path):
    runs = make_plans(some(), tmp_path, CPU, silence)
    made = len(quick)
    assert made and [run.labels["row"] for run in runs] == 2 * ["server sees uploads"] + 2 * [
        "secure sums"
    ]
    assert {run.labels["line"] for run in runs} == {LINE}
    assert [run.settings.plan.seed for run in runs] == [0, 1, 0, 1]
    for run in runs:  # what the row settles stays: ε, δ, the data, secure sums
        settings = run.settings
        assert settings.privacy is not None and settings.privacy.epsilon == 1.0
        assert settings.privacy.delta == "1/records"
        assert (settings.secure is not None) == (run.labels["row"] == "secure sums")
        assert settings.plan.rate == 0.3
    assert make_plans(some(), tmp_path, CPU, silence) == runs and len(quick) == made
    stored = json.loads((tmp_path / whole_plans.FILE).read_text())
    assert len(stored) == 2 and {row["column"] for row in stored} == {"1 poisson"}
    other = [c for c in HELD_OUT.cases(1, 0.2) if c.labels["column"] == "1 poisson"]
    make_plans(other, tmp_path, CPU, silence)  # another size has plans of its own
    assert len(quick) > made


def test_secure_sums_are_planned_with_one_step_and_all_users():
    [first] = {c.labels["row"]: c for c in some(1) if c.labels["row"] == "secure sums"}.values()
    facts, goal, limits, preset = asked(first)
    assert preset.secure is not None and preset.secure.colluders == 1
    assert limits.local_steps == 1 and limits.cohort_size == facts.users == 6
    assert (facts.features, facts.classes, facts.similarity) == (392, 10, 0.0)
    assert goal.view == "server"


def test_the_page_says_what_is_held_out_and_what_planning_loses(quick, tmp_path):
    cases = some()
    runs = make_plans(cases, tmp_path / "fashion-mnist", CPU, silence)
    archive = Archive(tmp_path, "fashion-mnist")
    made = {"rounds": 40, "label": "", "noise": 1.0}

    def finished(case: Case, accuracy: float) -> FinishedRun:
        return FinishedRun(case.digest, [], {"test_accuracy": accuracy}, None, 1.0, made)

    best = {"SCAFFOLD-balanced": 0.8, "FedAvg": 0.7, LINE: 0.65}
    archive.extend(finished(case, best[case.labels["line"]]) for case in [*cases, *runs])
    results = Results(HELD_OUT, [*cases, *runs], (), archive)
    _, said, table = plan_parts(results)
    lost = [float(line.split("|")[-2]) for line in table.splitlines()[2:]]
    assert lost == pytest.approx([15.0, 5.0])
    assert "Over 2 plans planning loses 10.00 points on average and at most 15.00." in said
    assert "with the test data in view" in said
    text = " ".join(HELD_OUT.about)
    assert "was held out" in text and "not held out for them" in text


def test_the_data_folder_of_a_request_names_no_other_run(tmp_path: Path):
    case = some(1)[0]
    loader, read = Loader(data_dir=tmp_path), []
    replaced = replace(case, labels={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpscaffold.paper.runner.load_federation", read.append)
        loader.get(case)
    assert read[0].data_dir == str(tmp_path) and replaced.digest == case.digest
    assert case.settings.data.data_dir is None
