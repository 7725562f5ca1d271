"""What is measured, weighted and warned of: chosen metrics, your own, class weights, a constant
model."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from sklearn import metrics as oracle
from sklearn.dummy import DummyClassifier, DummyRegressor
from small import federation, module
from stated import summary_of

from dpscaffold import (
    Federation,
    Gaussian,
    Linear,
    Logistic,
    Mlp,
    Model,
    ModuleTask,
    Plan,
    fedavg,
    run,
    train,
)
from dpscaffold.federation.labels import pack
from dpscaffold.federation.schema import Target
from dpscaffold.tasks import LOSSES, Batch, loss_named, weighted
from dpscaffold.tasks.metrics import METRICS, constant_report
from dpscaffold.training.evaluator import Evaluator, Measures, baseline, constant_loss

PLAN = Plan(rounds=2, local_steps=2, data_ratio=0.5, evaluate_every=1)
WEIGHTS = (1.0, 2.5, 0.5)


def test_only_what_is_asked_for_is_measured_and_the_rest_is_the_same() -> None:
    data, task = federation(), Logistic(4, 3)
    params = torch.randn(15, generator=torch.Generator().manual_seed(1))
    full = Evaluator(data, task, 0.1, torch.device("cpu"))(params)
    measures = Measures(("balanced_accuracy",), dissimilarity=False)
    few = Evaluator(data, task, 0.1, torch.device("cpu"), measures=measures)(params)
    assert few == {name: full[name] for name in few}
    assert set(full) - set(few) == {
        "test_log_loss",
        "gradient_dissimilarity",
        "gradient_log_dissimilarity",
    }


def test_a_metric_of_ones_own_sees_the_model_and_the_data() -> None:
    data = federation()

    def first_class_share(model: Model, given: Federation) -> float:
        assert given is not None and model.classes == given.target.classes
        said = model.predict(given.test.features, prepared=True)
        return float((said == 0).double().mean())

    result = train(data, Logistic(4, 3), fedavg(), PLAN, metrics=(first_class_share, "accuracy"))
    wanted = first_class_share(result.model, data)
    assert result.final["first_class_share"] == wanted
    assert "test_log_loss" not in result.final and "test_accuracy" in result.final


@pytest.mark.parametrize("name", ["auc", "rmse", "acuracy"])
def test_metrics_that_do_not_fit_are_refused_at_once(name: str) -> None:
    with refuses(f"unknown-metric|wrong-target: {name}"):
        train(federation(), Logistic(4, 3), fedavg(), PLAN, metrics=(name,))


def weighted_tasks() -> list[object]:
    loss = weighted(LOSSES["softmax"], WEIGHTS)
    return [Linear(4, 3, loss), Mlp(4, 3, 5, loss), ModuleTask(module(4, 3), loss=loss)]


@pytest.mark.parametrize("k", range(3))
@pytest.mark.parametrize("clip", [None, 0.3])
def test_weighted_gradients_are_those_of_the_weighted_loss(k: int, clip: float | None) -> None:
    """By autograd, record by record: the weight first, then the clip."""
    task = weighted_tasks()[k]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(7, 4, generator=generator), torch.tensor([0, 1, 2, 2, 1, 0, 1])
    params = torch.randn(task.parameters, generator=generator)
    rows = task.prepare(x)
    bound = None if clip is None else torch.tensor([clip])
    found = task.clipped_sum(params[None], Batch(rows[None], y[None]), bound).total[0]
    total = torch.zeros_like(params)
    for row, label in zip(rows, y, strict=True):
        leaf = params.clone().requires_grad_()
        scores = task.scores(leaf, row[None])
        plain = torch.nn.functional.cross_entropy(scores, label[None])
        gradient = torch.autograd.grad(plain, leaf)[0] * WEIGHTS[int(label)]
        shrink = 1.0 if clip is None else min(1.0, clip / float(gradient.norm()))
        total += gradient * shrink
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-5)


def test_weights_have_a_name_and_are_checked() -> None:
    loss = weighted(LOSSES["softmax"], WEIGHTS)
    assert loss_named(loss.name) == loss != LOSSES["softmax"]
    for given, said in (
        ((1.0, 0.0), "out-of-range"),
        ((1.0,), "out-of-range"),
        ((1.0, math.nan), "not-a-number"),
    ):
        with refuses(said):
            weighted(LOSSES["softmax"], given)
    with refuses("not-applicable"):
        weighted(LOSSES["squared"], WEIGHTS)
    with refuses("count-differs: target has 3"):
        train(federation(), Linear(4, 3, weighted(LOSSES["softmax"], (1, 2))), fedavg(), PLAN)


def test_weights_in_a_configuration_by_name(tmp_path: Path) -> None:
    tables = {
        "data": {"users": 4, "records": 60, "features": 4, "classes": 3},
        "task": {"class_weights": {"1": 2.5, "2": 0.5}, "metrics": ["balanced_accuracy"]},
        "plan": {"rounds": 2, "local_steps": 2, "user_ratio": 0.5},
    }
    result = run(tables, out=tmp_path / "run")
    assert result.setting.task.name == "linear-softmax@1.0,2.5,0.5"
    with refuses("unknown-class: class_weights … 'ill'"):
        run({**tables, "task": {"class_weights": {"ill": 2.0}}}, out=tmp_path / "other")


@pytest.mark.parametrize("name", ["softmax", "squared", "logistic"])
def test_the_constant_model_is_the_best_that_looks_at_no_feature(name: str) -> None:
    """Against a search over biases, on users of one size: then F is the pooled mean."""
    rng = np.random.default_rng(0)
    loss, classes = LOSSES[name], 3 if name == "softmax" else 2
    x = rng.normal(size=(40, 2)).astype(np.float32)
    y = (
        rng.normal(size=40).astype(np.float32)
        if name == "squared"
        else rng.integers(classes, size=40)
    )
    kind = "number" if name == "squared" else "class"
    data = Federation.from_arrays(
        [(x[:20], y[:20]), (x[20:], y[20:])], [(x, y), (x, y)], target=kind
    )
    outputs = loss.outputs(classes)
    task = Linear(2, outputs, loss)
    bias = torch.zeros(outputs, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([bias], max_iter=200)
    labels = data.train.labels if kind == "class" else data.train.labels.double()

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        value = loss.values(bias.expand(len(labels), -1), labels).mean()
        value.backward()
        return value

    optimiser.step(closure)
    assert constant_loss(data, task) == pytest.approx(closure().item(), abs=1e-6)


def test_a_model_worse_than_a_constant_is_told_what_helps(tmp_path: Path) -> None:
    data = federation()
    wild = Plan(rounds=4, local_steps=5, data_ratio=0.5, user_ratio=1.0, learning_rate=300.0)
    for mechanism, advice in (
        (Gaussian(clip=1.0, noise=0.1), "leave plan.learning_rate out"),
        (None, "lower plan.learning_rate (now 300)"),
    ):
        out = tmp_path / str(mechanism is None)
        train(data, Logistic(4, 3), fedavg(), wild, mechanism, out=out)
        assert advice in summary_of(out)["warning"]
    calm = Plan(rounds=30, local_steps=5, data_ratio=0.5, user_ratio=1.0)
    train(data, Logistic(4, 3), fedavg(), calm, out=tmp_path / "calm")
    assert "warning" not in summary_of(tmp_path / "calm")


def test_constant_baselines_are_those_of_scikit_learn() -> None:
    """Every metric next to the best single answer: dummy models fitted on the training records."""
    rng = np.random.default_rng(3)
    for classes in (2, 3):
        train_y, test_y = (rng.choice(classes, 200, p=[0.3, 0.7, 0][:classes]) for _ in range(2))
        train_y[0], test_y[:3] = classes - 1, classes - 1
        found = baseline(one_user(train_y, test_y, "class"))
        x = np.zeros((200, 1))
        prior = DummyClassifier(strategy="prior").fit(x, train_y)
        said, chance = prior.predict(x), prior.predict_proba(x)
        wanted = {
            "accuracy": oracle.accuracy_score(test_y, said),
            "log_loss": oracle.log_loss(test_y, chance),
            "balanced_accuracy": oracle.balanced_accuracy_score(test_y, said),
        }
        if classes == 2:
            wanted |= {"auc": 0.5, "f1": oracle.f1_score(test_y, np.ones(200))}
        assert {name: found[f"test_{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-5)
        assert all(value is not None for value in found.values())
    train_y, test_y = rng.gamma(2.0, 3.0, 200), rng.gamma(2.0, 3.0, 200)
    found = baseline(one_user(train_y, test_y, "number"))
    mean = DummyRegressor().fit(x, train_y).predict(x)
    median = DummyRegressor(strategy="median").fit(x, train_y).predict(x)
    assert found["test_rmse"] == pytest.approx(oracle.root_mean_squared_error(test_y, mean))
    assert found["test_r2"] == pytest.approx(oracle.r2_score(test_y, mean), abs=1e-6)
    assert found["test_mae"] == pytest.approx(oracle.mean_absolute_error(test_y, median), rel=1e-2)


def one_user(train_y: np.ndarray, test_y: np.ndarray, kind: str) -> Federation:
    """A federation of one user, whose features say nothing."""
    tables = [[(np.zeros((len(y), 1), np.float32), y)] for y in (train_y, test_y)]
    return Federation.from_arrays(*tables, target=kind)  # type: ignore[arg-type]


def test_no_constant_set_of_labels_has_a_larger_f1() -> None:
    """The baseline of several labels, next to all sets there are."""
    rng = np.random.default_rng(4)
    held = (rng.random((300, 4)) < [0.6, 0.05, 0.3, 0.45]).astype(int)
    packed, target = torch.from_numpy(pack(held)), Target("labels", ("a", "b", "c", "d"))
    user = torch.zeros(300, dtype=torch.int64)
    metrics = [METRICS[name] for name in ("micro_f1", "macro_f1", "label_log_loss")]
    found = constant_report(metrics, packed, target, packed, user, 1)
    for average in ("micro", "macro"):
        every = [
            oracle.f1_score(held, np.tile(row, (300, 1)), average=average, zero_division=0)
            for row in itertools.product((0, 1), repeat=4)
        ]
        assert found[f"test_{average}_f1"] == pytest.approx(max(every))
    chance = np.tile(held.mean(0), (300, 1))
    summed = -(held * np.log(chance) + (1 - held) * np.log(1 - chance)).sum(1).mean()
    assert found["test_label_log_loss"] == pytest.approx(summed, rel=1e-5)
