"""Facts of any size: a surrogate stays small and keeps what decides, the promise is the real run's,
and what no plan is made for is one sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from typer.testing import CliRunner

import dpscaffold
from dpscaffold import (
    BadInput,
    Gaussian,
    Linear,
    Logistic,
    Mlp,
    ModuleTask,
    Plan,
    scaffold_balanced,
    scaffold_warm,
)
from dpscaffold.cli import app
from dpscaffold.config import Run, make_run, solve_noise
from dpscaffold.planning import Facts, Goal, Limits
from dpscaffold.planning import shape as shapes
from dpscaffold.planning.shape import CLASSES, FEATURES, ROUNDS, WEIGHTS, Shape
from dpscaffold.planning.surrogate import SurrogateAssumptions, SurrogateSetting, invented
from dpscaffold.planning.trial import Bench
from dpscaffold.privacy import epsilon
from dpscaffold.tasks import LOSSES

FACTS = Facts.of(users=12, records=60, features=6, classes=3, similarity=0.0)


def public(facts: Facts = FACTS, task: object = None, **plan: object) -> Run:
    values = {"rounds": 6, "local_steps": 2, "user_ratio": 0.5, "regularisation": 0.01}
    chosen = task or Logistic(facts.features, facts.classes)
    noise = Gaussian(0.7, 2.0, "poisson")
    return make_run(facts.roster, chosen, scaffold_balanced(), Plan(**(values | plan)), noise)  # type: ignore[arg-type]


def gathered(setting: Run, rate: float) -> tuple[float, float]:
    """The distance of all rounds that train, T·Kη_l, and the variance that they gather in one
    coordinate, T·(Kη_l)²·(2Cσ_g/b)²/(mK), by hand."""
    plan = setting.plan.changed(learning_rate=rate)
    moved = plan.step_size * plan.local_steps
    rounds = plan.rounds - setting.warm_rounds
    step = (2 * setting.privacy.clip * setting.privacy.noise / int(setting.batch_sizes[0])) ** 2
    variance = step / (plan.local_steps * setting.cohort_size)
    return rounds * moved, rounds * moved**2 * variance


@settings(max_examples=25, deadline=None)
@given(rounds=st.integers(2, 10**6), steps=st.integers(1, 30), rate=st.floats(1e-4, 10))
def test_fewer_rounds_go_as_far_and_gather_the_same_noise(rounds, steps, rate):
    real = public(rounds=rounds, local_steps=steps)
    small = SurrogateSetting.of(real)
    run = small.on(invented(small.shape, "class", SurrogateAssumptions(), 0.5), rate)
    assert run.plan.rounds == min(rounds, ROUNDS)
    assert gathered(run, run.plan.learning_rate) == pytest.approx(gathered(real, rate), rel=1e-6)
    assert run.plan.regularisation == real.plan.regularisation
    said = small.shape.smaller_than(real)
    assert (f"instead of {rounds}, each" in said) == (rounds > ROUNDS)


def test_a_long_warm_start_is_cut_and_what_trains_is_stretched():
    facts = Facts.of(users=10_000, records=60, features=6, classes=3)
    real = replace(public(facts, rounds=5000, user_ratio=0.001), algorithm=scaffold_warm())
    assert real.warm_rounds == 4000
    small = SurrogateSetting.of(real)
    run = small.on(invented(small.shape, "class", SurrogateAssumptions(), 0.5), 0.3)
    assert (run.warm_rounds, run.plan.rounds) == (ROUNDS, 2 * ROUNDS)
    assert gathered(run, run.plan.learning_rate) == pytest.approx(gathered(real, 0.3), rel=1e-6)


def test_few_of_very_many_users_are_as_many_as_can_be():
    """A thousandth of 200 users would be one, whose class alone were learnt in a round."""
    million = Facts.of(users=10**6, records=40, features=6, classes=3)
    shape = Shape.of(public(million, user_ratio=0.001))
    assert (shape.users, shape.cohort_size) == (200, 20)
    assert (
        Shape.of(
            public(Facts.of(users=150, records=40, features=6, classes=3), user_ratio=0.04)
        ).cohort_size
        == 6
    )
    assert "200 users" in shape.smaller_than(public(million, user_ratio=0.001))


@settings(max_examples=15, deadline=None)
@given(features=st.integers(1, 10**6), classes=st.integers(2, 10**4))
def test_a_surrogate_has_few_enough_columns(features, classes):
    features = min(features, 10**6 // classes)
    real = public(Facts.of(users=12, records=60, features=features, classes=classes))
    shape = Shape.of(real)
    assert shape.features * shape.classes <= WEIGHTS or shape.features == 1
    assert shape.features <= FEATURES and shape.classes <= CLASSES
    if features <= 500 and classes <= CLASSES:
        assert (shape.features, shape.classes) == (features, classes)
        assert shape.task(real) is real.task
    task = shape.task(real)
    assert (task.features, task.classes) == (shape.features, shape.classes)
    said = shape.smaller_than(real)
    assert (f"features instead of {features}" in said) == (shape.features < features)
    assert (f"classes instead of {classes}" in said) == (shape.classes < classes)


@pytest.mark.parametrize(
    ("task", "classes"),
    [
        (Linear(3000, 1, LOSSES["squared"]), 0),
        (Mlp(3000, 300, hidden=7), 300),
        (Mlp(3000, 1, hidden=7, loss=LOSSES["squared"]), 0),
        (Logistic(3000, 300), 300),
    ],
)
def test_every_task_with_columns_is_made_smaller(task, classes):
    real = public(Facts.of(users=12, records=60, features=3000, classes=classes), task)
    small = SurrogateSetting.of(real)
    kind = "class" if classes else "number"
    run = small.on(
        invented(small.shape, kind, SurrogateAssumptions(), 0.5), 0.1
    )  # its columns are checked
    assert type(run.task) is type(task) and run.task.features == small.shape.features < 3000
    assert run.task.outputs == (CLASSES if classes else 1)
    assert getattr(run.task, "hidden", 7) == 7


def test_a_class_of_fewer_is_moved_as_far_and_as_far_astray():
    """The weights of a class hear of it in 1/c of the records: at x⁰ = 0 its mean gradient is
    (mean a − mean a of the class)/c. A step along it, its noise and its shrinking are the same."""
    real = public(Facts.of(users=12, records=60, features=6, classes=10 * CLASSES))
    small = SurrogateSetting.of(real)
    run = small.on(invented(small.shape, "class", SurrogateAssumptions(), 0.5), 0.9)
    assert len(run.roster.schema.target.classes) == CLASSES
    distance, variance = gathered(real, 0.9)
    got, noise = gathered(run, run.plan.learning_rate)
    assert got / CLASSES == pytest.approx(distance / (10 * CLASSES))
    assert noise == pytest.approx(variance)
    assert got * run.plan.regularisation == pytest.approx(distance * real.plan.regularisation)


def test_a_plan_of_many_rounds_promises_what_all_of_them_cost(monkeypatch):
    """ε of the T that is written, by the accountant, and σ_g beyond that of the rounds tried."""
    monkeypatch.setattr(shapes, "ROUNDS", 6)
    found = dpscaffold.plan(FACTS, Goal(3.0), Limits(10_000, 2, 6))
    plan, run = found.setting.plan, found.setting.describe()
    assert plan.rounds == run.rounds == 10_000
    assert 2.9 < epsilon(run, found.setting.limits.against(run)) <= 3.0
    few = solve_noise(replace(found.setting, plan=plan.changed(rounds=6)), 3.0)
    assert found.setting.privacy.noise > 10 * few.privacy.noise
    assert "6 rounds instead of 10000" in found.smaller
    assert "σ_g are those of all 10000" in found.smaller
    assert found.choice.rate < 1


def test_the_stretched_surrogate_agrees_with_the_long_one(monkeypatch):
    """The same run of 120 rounds tried as it is and in 30: the same choice, and accuracies within
    five points at every rate (four surrogates of 4,000 test records; measured at most two)."""
    facts = Facts.of(users=10, records=40, features=5, classes=3, similarity=0.0)
    real = solve_noise(public(facts, rounds=120, user_ratio=0.2), 3.0)
    rates = [0.01, 0.1, 1.0]
    scores = {}
    for most in (120, 30):
        monkeypatch.setattr(shapes, "ROUNDS", most)
        [found] = Bench(facts.guess).choices([(real, rates)])
        scores[most] = [trial.score for trial in found.trials]
        assert found.rate == 0.1
    assert scores[30] == pytest.approx(scores[120], abs=0.05)


def test_a_module_with_too_many_columns_is_one_sentence():
    facts = Facts.of(users=12, records=60, features=80_000, classes=2)
    task = ModuleTask(torch.nn.Linear(80_000, 2))
    with refuses("too-many-weights: 80000 … plan.learning_rate"):
        Bench(facts.guess).choices([(public(facts, task), [1.0])])


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        (
            "--rounds",
            "1000000000",
            "the most rounds is 1000000000; a plan is made for at most 1000000,",
        ),
        ("--users", "20000000", "facts.users is 20000000; a plan is made for at most 10000000,"),
        ("--records", str(10**30), f"facts.records is {10**30}; a plan is made for at most"),
        ("--features", "1000000000", "facts.features is 1000000000 and facts.classes is 3, more"),
        (
            "--classes",
            "1000000000",
            "facts.classes is 1000000000; a plan is made for at most 10000,",
        ),
    ],
)
def test_what_no_plan_is_made_for_is_one_sentence(tmp_path, option, value, said):
    small = {"--users": "12", "--records": "60", "--features": "6", "--classes": "3"}
    asked = [word for pair in (small | {option: value}).items() for word in pair]
    out = tmp_path / "plan"
    result = CliRunner().invoke(app, ["plan", *asked, "--epsilon", "1", "--out", str(out)])
    assert result.exit_code != 0 and not out.exists()
    assert isinstance(result.exception, BadInput) and said in str(result.exception)
