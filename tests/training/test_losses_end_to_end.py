"""Every loss from a CSV file to metrics, through both engines, TOML and the command line, and its
optimum against scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses
from sklearn.linear_model import LogisticRegression, Ridge

from dpscaffold import Linear, Plan, fedavg, train
from dpscaffold.config import parse
from dpscaffold.data import from_users, load_federation
from dpscaffold.tasks import LOSSES, huber
from dpscaffold.training.evaluator import Evaluator, baseline
from dpscaffold.training.optimum import solve
from dpscaffold.tuning.settings import TuneSettings
from dpscaffold.tuning.tuning import tune

COLUMNS = 5
RANGE = {"kind": "number", "low": -9, "high": 15}


def write(path: Path, kind: str) -> dict[str, Any]:
    """A CSV whose target is two classes, three, or a number that is linear in the features."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=(400, COLUMNS))
    z = x @ np.array([[2.0, 0, 1], [-1, 1, 0], [0, -2, 1], [1, 0, 0], [0, 0, 0]])
    z += 0.3 * rng.normal(size=z.shape)
    labels = {
        "two": np.array(["no", "yes"])[(z[:, 0] > 0).astype(int)],
        "three": np.array(["a", "b", "c"])[z.argmax(axis=1)],
        "number": [repr(float(np.float32(v))) for v in z[:, 0] + 3],
    }[kind]
    lines = [",".join([*(f"x{j}" for j in range(COLUMNS)), "site", "y"])]
    lines += [
        ",".join([*(repr(float(np.float32(v))) for v in row), f"s{i % 4}", str(label)])
        for i, (row, label) in enumerate(zip(x, labels, strict=True))
    ]
    path.write_text("\n".join(lines) + "\n")
    return {
        "source": "csv",
        "path": str(path),
        "label": "y",
        "user": "site",
        "target": RANGE if kind == "number" else "class",
        "preprocess": ["standardise"],
    }


TASKS = [
    ("two", {"kind": "logistic"}),
    ("two", {"kind": "linear", "loss": "logistic"}),
    ("three", {"kind": "linear", "loss": "softmax"}),
    ("number", {"kind": "linear"}),
    ("number", {"kind": "linear", "loss": "squared"}),
    ("number", {"kind": "linear", "loss": "huber:0.2"}),
    ("number", {"kind": "mlp", "hidden": 8}),
    ("two", {"kind": "mlp", "hidden": 8, "loss": "logistic"}),
]
NAMES = [f"{kind}-{'-'.join(str(v) for v in task.values())}" for kind, task in TASKS]
PLAN = {
    "rounds": 25,
    "local_steps": 5,
    "user_ratio": 1.0,
    "data_ratio": 0.5,
    "learning_rate": 0.1,
    "evaluate_every": 25,
}


@pytest.mark.parametrize(("kind", "task"), TASKS, ids=NAMES)
def test_every_loss_learns_from_a_csv_file_in_both_engines(
    tmp_path: Path, kind: str, task: dict[str, Any]
) -> None:
    rate = 0.3 if (kind, task["kind"]) == ("number", "mlp") else PLAN["learning_rate"]
    plan = {**PLAN, "learning_rate": rate}
    tables = {"data": write(tmp_path / "t.csv", kind), "task": task, "plan": plan}
    settings = parse({**tables, "algorithm": {"name": "scaffold"}})
    federation = load_federation(settings.data)
    setting = settings.setting(federation)
    found = [
        train(federation, setting.task, setting.algorithm, setting.plan, engine=engine)
        for engine in ("simulator", "loop")
    ]
    torch.testing.assert_close(found[0].params, found[1].params, rtol=1e-3, atol=1e-4)
    final = found[0].final
    for name, value in found[1].final.items():
        if name.startswith("test_"):
            assert final[name] == pytest.approx(value, abs=0.02)
    plain = baseline(federation)
    if kind == "number":
        assert final["test_rmse"] < 0.4 * plain["test_rmse"] and final["test_r2"] > 0.8
        assert "test_accuracy" not in final and final["test_r2_per_user"] is not None
    else:
        assert final["test_accuracy"] > max(0.85, plain["test_accuracy"] + 0.2)
        assert ("test_auc" in final) == (kind == "two")


def users(number: bool, count: int = 3, records: int = 50) -> Any:
    rng = np.random.default_rng(7)
    pairs = []
    for _ in range(count):
        x = rng.normal(size=(records, 4)).astype(np.float32)
        z = x @ np.array([1.0, -2.0, 0.5, 0.0]) + 0.5 + 0.5 * rng.normal(size=records)
        pairs.append((x, z if number else (z > 0).astype(int)))
    return from_users(pairs, target="number" if number else "class")


def pooled(federation: Any) -> tuple[np.ndarray, np.ndarray]:
    ones = torch.ones(len(federation.train), 1)
    x = torch.cat([federation.train.features, ones], 1).double().numpy()
    return x, federation.train.labels.double().numpy()


def test_the_optimum_of_squared_loss_is_ridge_regression() -> None:
    """Users of equal size: F is the mean over all records, and the bias is penalised too."""
    federation, strength = users(number=True), 0.03
    found = solve(federation, Linear(4, 1, LOSSES["squared"]), strength)
    x, y = pooled(federation)
    ridge = Ridge(alpha=strength * len(y), fit_intercept=False, tol=1e-12).fit(x, y)
    np.testing.assert_allclose(found.params.numpy(), ridge.coef_, atol=1e-6)
    assert "test_accuracy" not in found.metrics and found.metrics["test_r2"] is not None
    judged = Evaluator(
        federation, Linear(4, 1, LOSSES["squared"]), strength, torch.device("cpu"), found.loss
    )(found.params.float())
    assert judged["log10_gap"] is not None and judged["log10_gap"] < -6


def test_the_optimum_of_logistic_loss_is_logistic_regression() -> None:
    federation, strength = users(number=False), 0.03
    task = Linear(4, 1, LOSSES["logistic"])
    found = solve(federation, task, strength)
    x, y = pooled(federation)
    oracle = LogisticRegression(C=1 / (strength * len(y)), fit_intercept=False, tol=1e-10)
    oracle.fit(x, y)
    np.testing.assert_allclose(found.params.numpy(), oracle.coef_[0], atol=1e-4)
    result = train(
        federation,
        task,
        fedavg(),
        Plan(
            rounds=60,
            local_steps=1,
            user_ratio=1.0,
            data_ratio=1.0,
            learning_rate=2.0,
            regularisation=strength,
        ),
        metrics=["optimum"],
    )
    assert result.final["log10_gap"] < -4


def test_the_optimum_of_huber_loss_lies_where_its_gradient_does_not() -> None:
    """Against the definition: at x* the mean of clipped residuals times features is −λx*."""
    federation, strength = users(number=True), 0.02
    found = solve(federation, Linear(4, 1, huber(0.3)), strength)
    x, y = pooled(federation)
    residual = np.clip(x @ found.params.numpy() - y, -0.3, 0.3)
    assert (np.abs(x @ found.params.numpy() - y) > 0.3).mean() > 0.1  # some are cut off
    gradient = x.T @ residual / len(y) + strength * found.params.numpy()
    assert np.abs(gradient).max() < 1e-6


@pytest.mark.parametrize(
    ("kind", "task", "said"),
    [
        ("number", {}, "wrong-target: task.kind is 'logistic'"),
        ("number", {"kind": "linear", "loss": "softmax"}, "wrong-loss: 'softmax'"),
        ("two", {"kind": "linear", "loss": "huber"}, "wrong-loss: 'huber'"),
        ("three", {"kind": "linear", "loss": "logistic"}, "wrong-loss"),
        ("two", {"kind": "linear", "loss": "hinge"}, "unknown-loss: task.loss is 'hinge'"),
        ("two", {"loss": "logistic"}, "wrong-loss: task.kind … 'logistic' … task.kind = 'linear'"),
        ("number", {"kind": "linear", "loss": "huber:-1"}, "out-of-range: huber:-1"),
    ],
)
def test_tasks_that_do_not_fit(tmp_path: Path, kind: str, task: dict[str, Any], said: str) -> None:
    tables = {"data": write(tmp_path / "t.csv", kind), "task": task, "plan": PLAN}
    with refuses(said) as caught:
        settings = parse(tables)
        settings.setting(load_federation(settings.data))
    assert "\n" not in str(caught.value)


def test_tuning_compares_the_metric_that_is_asked_for(tmp_path: Path) -> None:
    """A rate that is far too small loses by RMSE (lower is better) and by R² (higher is)."""
    tables = {
        "data": write(tmp_path / "t.csv", "number"),
        "task": {"kind": "linear"},
        "plan": {**PLAN, "rounds": 10},
        "algorithm": {"name": "fedavg"},
    }
    grid = {"plan.learning_rate": (1e-4, 0.1)}
    cpu = torch.device("cpu")
    for metric in (None, "r2"):
        chosen = TuneSettings(grid=grid, folds=2, metric=metric)
        tuned = tune(parse(tables), chosen, cpu)
        assert tuned.best.values == {"plan.learning_rate": 0.1}
        assert tuned.metric.name == (metric or "rmse")
    three = parse({"data": write(tmp_path / "u.csv", "three"), "plan": PLAN})
    with refuses("wrong-target: 'auc' … target has 3"):
        tune(three, TuneSettings(grid=grid, folds=2, metric="auc"), cpu)
