"""Stacked runs are the single runs, side by side."""

from __future__ import annotations

import pytest
import torch
from refusals import refuses
from small import federation, setting

from dpscaffold import Gaussian, train
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.history import HistoryRow
from dpscaffold.training import stack as stacks
from dpscaffold.training.evaluator import Evaluator, late
from dpscaffold.training.stack import Schedule, evaluators_of, shared_draws, split

CPU = torch.device("cpu")
FULL = Schedule(every=1, full=True)


def train_stack(runs, *more):
    """The trials, each on its own federation."""
    return stacks.train_stack(runs, [run.federation for run in runs], *more)


def alone(one):
    """The same run by ``train``, its last iterates evaluated every round."""
    plan = {**one.plan.model_dump(), "averaging": "none", "evaluate_every": 1}
    run = type(one.plan)(**plan)
    return train(one.federation, one.task, one.algorithm, run, one.privacy)


@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson", "median"])
@pytest.mark.parametrize("algorithm", ["scaffold", "scaffold-warm", "fedavg"])
def test_a_stack_agrees_with_single_runs(algorithm, privacy):
    data = [federation(seed=0), federation(seed=1)]
    runs = [
        setting(
            algorithm, privacy=privacy, data=one, seed=seed, learning_rate=rate, averaging="tail"
        )
        for one in data
        for seed in (0, 1)
        for rate in (0.1, 0.4)
    ]
    for run, outcome in zip(runs, train_stack(runs, FULL), strict=True):
        single = alone(run)
        assert len(outcome.history) == len(single.history)
        for mine, theirs in zip(outcome.history, single.history, strict=True):
            for metric in ("train_loss", "gradient_dissimilarity", "test_accuracy"):
                assert mine[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_the_average_is_judged_beside_the_last_iterate(task):
    one = setting(task=task, averaging="tail")
    (outcome,) = train_stack([one], FULL)
    averaged = train(one.federation, one.task, one.algorithm, one.plan).final
    assert outcome.average["train_loss"] == pytest.approx(averaged["train_loss"], rel=1e-5)
    assert outcome.history[-1]["train_loss"] == pytest.approx(averaged["last_train_loss"], rel=1e-5)
    assert outcome.average["train_loss"] != outcome.history[-1]["train_loss"]


def test_a_diverged_run_leaves_the_others_alone():
    data = federation()
    calm, wild = (
        setting(data=data, learning_rate=0.1),
        setting(data=data, learning_rate=1e36, regularisation=1.0),
    )
    (reference,) = train_stack([calm], FULL)
    stacked = train_stack([calm, wild], FULL)
    assert stacked[1].diverged is not None and stacked[1].late("test_accuracy") is None
    assert stacked[0].diverged is None
    assert stacked[0].history[-1]["train_loss"] == pytest.approx(
        reference.history[-1]["train_loss"], rel=1e-5
    )


def test_stacks_are_split_by_structure_and_size():
    data = federation()
    runs = [setting(data=data, seed=s) for s in range(5)] + [setting("fedavg", data=data)]
    assert split(runs, CPU, rows=6) == [[0, 1], [2, 3], [4], [5]]
    with refuses("not-stackable"):
        train_stack([runs[0], runs[-1]])
    with refuses("too-few-runs"):
        train_stack([])


def test_runs_of_one_seed_draw_once(monkeypatch):
    runs = [
        setting(privacy="fixed", seed=s, learning_rate=r) for s in (0, 1) for r in (0.1, 0.2, 0.4)
    ]
    drawn = shared_draws(runs)
    assert drawn[0] is drawn[1] is drawn[2] and drawn[3] is drawn[5] and drawn[0] is not drawn[3]
    asked = []
    draw = Randomness.normals
    monkeypatch.setattr(
        Randomness,
        "normals",
        lambda self, t, user: asked.append((self.seed, t, user)) or draw(self, t, user),
    )
    train_stack(runs)
    assert len(asked) == len(set(asked)) == 2 * runs[0].plan.rounds * runs[0].cohort_size


def test_secret_runs_share_nothing():
    runs = [setting(privacy=Gaussian(1.0, 1.0, secret=True), seed=0) for _ in range(2)]
    drawn = shared_draws(runs)
    assert drawn[0] is not drawn[1]


@pytest.mark.parametrize("task", ["logistic", "mlp", "module"])
def test_models_are_evaluated_together_as_they_are_alone(task):
    data = federation()
    made = setting(task=task, data=data).task
    runs = [setting(task=made, data=data, regularisation=r) for r in (0.0, 0.3)]
    models = [
        torch.randn(runs[0].task.parameters, generator=torch.Generator().manual_seed(k))
        for k in (0, 1)
    ]
    evaluators = evaluators_of(runs, [data] * 2, CPU, {(id(data), 0.3): 0.1}, full=True)
    for run, model, evaluate in zip(runs, models, evaluators, strict=True):
        row = evaluate(model)
        loss = 0.1 if run.plan.regularisation else None
        expected = Evaluator(data, run.task, run.plan.regularisation, CPU, loss)(model)
        for metric, value in expected.items():
            assert row[metric] == (value if value is None else pytest.approx(value, rel=1e-6))
        assert row.keys() == expected.keys()
    shown = evaluators_of(runs, [data] * 2, CPU, {}, full=False)
    assert shown[0](models[0]) == {"test_accuracy": evaluators[0](models[0])["test_accuracy"]}


@pytest.mark.parametrize("diverged", [None, 3])
def test_late_has_one_meaning(diverged):
    """The mean over the last 10 % of rounds; None where the run diverged or a value is missing."""
    history = [
        HistoryRow(t, {"loss": float(t), "gap": None if t == 20 else 1.0}) for t in (1, 19, 20)
    ]
    expected = 19.5 if diverged is None else None
    assert late(history, "loss", 20, diverged=diverged) == expected
    assert late(history, "gap", 20) is None and late(history, "absent", 20) is None
    assert late(history[:1], "loss", 20) == 1.0 and late([], "loss", 20) is None


def test_late_means_and_schedules():
    assert Schedule(every=10, late=4).rounds(400)[-6:] == (370, 374, 380, 387, 390, 400)
    assert Schedule(late=20).rounds(72) == (66, 67, 68, 69, 70, 71, 72)
    one = setting(privacy=Gaussian(1.0, 0.5), rounds=20)
    (outcome,) = train_stack([one], Schedule(every=1))
    last_two = [row["test_accuracy"] for row in outcome.history[-2:]]
    assert outcome.late("test_accuracy") == pytest.approx(sum(last_two) / 2)
