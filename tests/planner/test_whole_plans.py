"""Whole plans: what is compared, how ties are decided, and what a plan says and writes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from typer.testing import CliRunner

import dpscaffold
from dpscaffold import BadInput, Gaussian, Logistic, Plan, fedavg, scaffold_balanced
from dpscaffold.cli import app
from dpscaffold.config import Run, Secure, load, make_run
from dpscaffold.deployment.server.config import load_served
from dpscaffold.planning import Facts, Goal, Limits
from dpscaffold.planning.recommendation import Preset, _candidates
from dpscaffold.planning.shape import Fidelity, Shape
from dpscaffold.planning.stages import (
    CLOSE_LOOK,
    QUICK_LOOK,
    PlanSearch,
    best_of,
    preferred,
)
from dpscaffold.planning.trial import Bench, Choice, StepSizeTrial, best_trial, within_error
from dpscaffold.report.planning import plan_lines
from dpscaffold.training.events import silence

FACTS = Facts.of(users=12, records=60, features=6, classes=3, similarity=0.0)
WORDS = ["--users", "12", "--records", "60", "--features", "6", "--classes", "3", "--epsilon", "2"]


def setting(balanced: bool = True, **plan: int) -> Run:
    algorithm = scaffold_balanced() if balanced else fedavg()
    return make_run(
        FACTS.roster, Logistic(6, 3), algorithm, Plan(rounds=6, **plan), Gaussian(1.0, 2.0)
    )


def tried(scores: Sequence[float], balanced: bool) -> Choice:
    return Choice(setting(balanced), (StepSizeTrial(1.0, tuple(scores)),), cautious=True)


@pytest.fixture
def by_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of training: the less noise in a round's mean, the better, and one best η₀."""

    def scored(self: Bench, asked: list[tuple[Run, float]]) -> list[StepSizeTrial]:
        found = []
        for one, rate in asked:
            noise = 0.0 if one.privacy is None else one.privacy.noise
            score = 1 / (1 + 0.1 * noise) - 0.1 * (rate not in (0.3, 1.0))
            scores = (score,) * (2 * len(self.seeds))
            found.append(StepSizeTrial(rate, scores))
        return found

    monkeypatch.setattr(Bench, "run", scored)


def command(folder: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["plan", *words, "--out", str(folder / "plan")])


def test_ties_go_to_the_algorithm_for_users_who_differ():
    """Within the standard error of the differences, or half a point, which is not beyond it."""
    ours = tried((0.70, 0.80), True)
    assert preferred([tried((0.704, 0.804), False), ours]) is ours
    assert preferred([tried((0.72, 0.795), False), ours]) is ours  # 0.75 more, give or take 1.25
    better = tried((0.72, 0.82), False)
    assert preferred([better, ours]) is better


scores = st.lists(st.floats(0, 1), min_size=4, max_size=4)


@given(st.lists(scores, min_size=1, max_size=6), st.sampled_from([0, 2]))
def test_the_step_size_is_the_smallest_within_one_standard_error(all_scores, own):
    trials = [StepSizeTrial(3.0**k, tuple(found), own) for k, found in enumerate(all_scores)]
    best, chosen = best_trial(trials), within_error(trials)
    assert chosen.rate <= best.rate
    for one in trials:
        near = one.score >= best.score - best.error(one)
        assert one.rate >= chosen.rate if near else one is not chosen or one is best


def looked(rate: float, score: float) -> StepSizeTrial:
    """A trial with the same score on two surrogates."""
    return StepSizeTrial(rate, (score, score))


@pytest.mark.parametrize("more", [0.0, 0.0009, 0.002])
def test_the_last_look_stays_where_scores_are_equal(more):
    """A tenth of a point is no difference. More is: the step may also become larger, for which the
    one-standard-error rule is not asked again."""
    chosen = Choice(setting(), (looked(1.0, 0.7),), cautious=True)
    found = best_of(chosen, [looked(0.58, 0.7 - more), looked(1.7, 0.7 + more)])
    assert found.rate == found.setting.plan.learning_rate == (1.7 if more > 0.001 else 1.0)
    assert [one.rate for one in found.trials] == [0.58, 1.0, 1.7]


def test_a_plan_is_refined_between_the_step_sizes_of_the_close_look(monkeypatch):
    """The best η₀, 0.52, lies between those that are a factor of three apart; and each candidate
    is tried once."""

    def scored(self: Bench, asked: list[tuple[Run, float]]) -> list[StepSizeTrial]:
        return [
            StepSizeTrial(rate, (0.8 - 0.2 * abs(math.log(rate / 0.52)),) * 2) for _, rate in asked
        ]

    monkeypatch.setattr(Bench, "run", scored)
    found = dpscaffold.plan(FACTS, Goal(2.0), Limits(8, 2))
    assert found.choice.rate == found.setting.plan.learning_rate
    assert abs(math.log(found.choice.rate / 0.52)) <= math.log(3) / 4 + 0.03  # two digits
    kept = {
        (one.setting.algorithm.name, one.setting.plan.local_steps)
        for one in (found.choice, *found.tried)
    }
    assert len(found.tried) + 1 == len(kept)


def test_the_local_steps_that_are_compared():
    """One step, and ten or as many as are allowed; without controls one, unless it is asked
    for."""

    def kinds(preset: Preset, most: int) -> set[tuple[str, int]]:
        found = _candidates(FACTS, Goal(2.0), Limits(8, most), preset)
        return {(one.algorithm.name, one.plan.local_steps) for one in found}

    balanced, plain = scaffold_balanced().name, fedavg().name
    assert kinds(Preset(), 50) == {(balanced, 10), (balanced, 1), (plain, 1)}
    assert kinds(Preset(), 1) == {(balanced, 1), (plain, 1)}
    assert kinds(Preset(algorithm=fedavg()), 20) == {(plain, 10), (plain, 1)}
    secure = _candidates(FACTS, Goal(2.0), Limits(8, 5), Preset(available=Secure()))
    assert {one.secure is not None for one in secure} == {True, False}
    assert all(one.plan.local_steps == 1 for one in secure if one.secure is not None)


def test_a_look_computes_at_most_its_work():
    large = setting(local_steps=10)
    large = replace(large, plan=large.plan.changed(rounds=400))
    for fidelity in (QUICK_LOOK, CLOSE_LOOK, Fidelity(work=3e6)):
        shape = Shape.of(large, fidelity)
        work = shape.cohort_size * shape.steps * shape.batch * large.task.parameters * shape.rounds
        assert work <= fidelity.work or shape.rounds == 50
        assert shape.steps * shape.rounds <= fidelity.steps_in_all
        assert shape.stretch(large) * shape.rounds == pytest.approx(400)


@pytest.mark.usefixtures("by_noise")
def test_secure_sums_are_used_where_they_are_available_and_better(tmp_path):
    plain = command(tmp_path, *WORDS, "-q")
    assert plain.exit_code == 0, plain.exception
    assert load(tmp_path / "plan" / "plan.toml").secure is None
    result = command(tmp_path, *WORDS, "--secure-sums")
    assert result.exit_code == 0, result.exception
    written = load(tmp_path / "plan" / "plan.toml")
    assert written.secure is not None and written.plan.local_steps == 1
    assert "with secure sums" in result.output and "ε alone" in result.output
    said = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert {one["secure"] for one in said["candidates"]} == {True, False}
    few = ["--users", "2", *WORDS[2:], "--secure-sums", "-q"]
    assert command(tmp_path, *few).exit_code == 0  # two sites cannot hide each other
    assert load(tmp_path / "plan" / "plan.toml").secure is None


@pytest.mark.usefixtures("by_noise")
def test_the_first_five_lines_say_what_why_and_what_to_expect():
    found = dpscaffold.plan(FACTS, Goal(2.0), Limits(8, 10), Preset(available=Secure()))
    lines = plan_lines(found)[:5]
    assert lines[0].startswith("DP-FedAvg with secure sums: T = ")
    assert lines[1].startswith("why: ")
    assert "keeps ε = 2 towards the server together with at most 1 site" in lines[2]
    assert lines[3].startswith("expected: ") and "without privacy" in lines[3]
    assert lines[4].startswith("it costs ")


SERVER = """
[schema]
features = ["a", "b", "c"]
classes = ["no", "yes"]
prepare = [{ step = "clip-norm", norm = 2.0 }]
[plan]
rounds = 8
[privacy]
epsilon = 3.0
sampling = "poisson"
[deploy]
records = { north = 100, east = 150, south = 90 }
"""


@pytest.mark.parametrize(("more", "colluding"), [("", False), ("[secure]\ncolluders = 1\n", True)])
@pytest.mark.usefixtures("by_noise")
def test_a_deployed_server_is_planned_from_its_schema_and_the_public_sizes(
    tmp_path, more, colluding
):
    """The noise of the plan is the one that the server solves for the written file."""
    (tmp_path / "server.toml").write_text(SERVER + more)
    result = command(tmp_path, "--config", str(tmp_path / "server.toml"))
    assert result.exit_code == 0, result.exception
    written = load_served(tmp_path / "plan" / "plan.toml")
    mechanism = written._mechanism
    assert mechanism is not None and (written.secure is not None) == colluding
    said = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert said["noise"] == pytest.approx(mechanism.noise, rel=1e-9)
    assert said["recommended"]["facts"]["row_norm"] == 2.0
    written.offer()


@pytest.mark.usefixtures("by_noise")
def test_a_server_that_hides_sizes_says_the_records_in_its_facts(tmp_path):
    text = SERVER.replace("100", "1").replace("150", "1").replace("90", "1")
    text = text.replace("epsilon = 3.0", 'epsilon = 3.0\nunit = "user"')
    (tmp_path / "server.toml").write_text(text)
    words = ["--config", str(tmp_path / "server.toml")]
    with refuses("missing-argument: facts.records"):
        raise command(tmp_path, *words).exception  # type: ignore[misc]
    result = command(tmp_path, *words, "--records", "80")
    assert result.exit_code == 0, result.exception
    written = load_served(tmp_path / "plan" / "plan.toml")
    assert written._mechanism is not None and written._mechanism.unit == "user"
    said = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert said["noise"] == pytest.approx(written._mechanism.noise, rel=1e-9)


def test_progress_is_printed_line_by_line_without_a_terminal(tmp_path):
    words = [*WORDS, "--rounds", "2", "--local-steps", "1"]
    shown = command(tmp_path, *words)
    assert shown.exit_code == 0, shown.exception
    lines = [line for line in shown.stderr.splitlines() if line.startswith("planning ")]
    assert len(lines) > 3 and "trying step sizes" in lines[0] and "rounds (" in lines[0]
    assert "planning " not in command(tmp_path, *words, "-q").stderr


def test_nothing_is_looked_at_closely_that_a_quick_look_rules_out(monkeypatch):
    """A candidate that is far behind in few rounds is not trained in many."""
    looked: list[tuple[str, Fidelity]] = []

    def scored(self: Bench, asked: list[tuple[Run, float]]) -> list[StepSizeTrial]:
        looked.extend((one.algorithm.name, self.fidelity) for one, _ in asked)
        value = {scaffold_balanced().name: 0.9, fedavg().name: 0.5}
        return [StepSizeTrial(rate, (value[one.algorithm.name],)) for one, rate in asked]

    monkeypatch.setattr(Bench, "run", scored)
    bench = Bench(FACTS.guess, torch.device("cpu"), silence)
    PlanSearch(bench).compared([setting(True), setting(False)])
    assert {name for name, fidelity in looked if fidelity == CLOSE_LOOK} == {
        scaffold_balanced().name
    }
    assert len({name for name, _ in looked}) == 2


def test_a_unit_that_there_is_not_is_refused():
    with refuses("unknown-choice: --unit is 'house'"):
        Goal(1.0, unit="house")  # type: ignore[arg-type]
    assert issubclass(BadInput, ValueError)
