"""Every metric against scikit-learn, pooled and user by user, on scores with ties and users with
one class."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refuses
from sklearn import metrics as sk

from dpscaffold.federation.schema import Target
from dpscaffold.tasks.metrics import METRICS, constant_scores, metrics_for, report, shown_metric

Oracle = Callable[[np.ndarray, np.ndarray], float]


def probabilities(scores: np.ndarray) -> np.ndarray:
    if scores.shape[1] == 1:
        p = 1 / (1 + np.exp(-scores.astype(np.float64)))
        return np.concatenate([1 - p, p], axis=1)
    e = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def classes(scores: np.ndarray) -> np.ndarray:
    return (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)


def difference(scores: np.ndarray) -> np.ndarray:
    return scores[:, 0] if scores.shape[1] == 1 else scores[:, 1] - scores[:, 0]


def sk_auc(y: np.ndarray, z: np.ndarray) -> float:
    return sk.roc_auc_score(y, difference(z)) if len(set(y)) == 2 else math.nan


def sk_r2(y: np.ndarray, z: np.ndarray) -> float:
    return sk.r2_score(y.astype(float), z[:, 0].astype(float)) if np.ptp(y) > 0 else math.nan


ORACLES: dict[str, Oracle] = {
    "accuracy": lambda y, z: sk.accuracy_score(y, classes(z)),
    "log_loss": lambda y, z: sk.log_loss(
        y, probabilities(z), labels=list(range(max(2, z.shape[1])))
    ),
    "balanced_accuracy": lambda y, z: sk.balanced_accuracy_score(y, classes(z)),
    "auc": sk_auc,
    "f1": lambda y, z: sk.f1_score(y, classes(z), zero_division=np.nan),
    "rmse": lambda y, z: float(np.sqrt(sk.mean_squared_error(y.astype(float), z[:, 0]))),
    "mae": lambda y, z: sk.mean_absolute_error(y.astype(float), z[:, 0]),
    "r2": sk_r2,
}


def check(name: str, scores: np.ndarray, targets: np.ndarray, user: np.ndarray) -> None:
    metric, oracle, users = METRICS[name], ORACLES[name], int(user.max()) + 1
    z, y, g = torch.from_numpy(scores), torch.from_numpy(targets), torch.from_numpy(user)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = oracle(targets, scores)
        each = [
            oracle(targets[user == i], scores[user == i]) if (user == i).any() else math.nan
            for i in range(users)
        ]
    np.testing.assert_allclose(metric.of(z, y), whole, rtol=1e-6, atol=1e-9)
    found = metric.by_group(z, y, g, users).numpy()
    np.testing.assert_allclose(found, each, rtol=1e-6, atol=1e-9)
    mean = np.mean([v for v in each if v == v]) if any(v == v for v in each) else math.nan
    np.testing.assert_allclose(metric.per_user(z, y, g, users), mean, rtol=1e-6, atol=1e-9)


#: Few distinct values, so that ties within and between classes are common.
coarse = st.integers(-8, 8).map(lambda k: k / 4)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    count=st.integers(1, 30),
    outputs=st.sampled_from([1, 2, 4]),
)
def test_metrics_of_classes_agree_with_scikit_learn(
    data: st.DataObject, count: int, outputs: int
) -> None:
    scores = data.draw(hnp.arrays(np.float32, (count, outputs), elements=coarse))
    targets = data.draw(hnp.arrays(np.int64, count, elements=st.integers(0, max(1, outputs - 1))))
    user = data.draw(hnp.arrays(np.int64, count, elements=st.integers(0, 3)))
    for metric in metrics_for(Target.numbered(max(2, outputs))):
        check(metric.name, scores, targets, user)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 30))
def test_metrics_of_numbers_agree_with_scikit_learn(data: st.DataObject, count: int) -> None:
    numbers = st.floats(-100, 100, width=32)
    scores = data.draw(hnp.arrays(np.float32, (count, 1), elements=numbers))
    coarse_or_not = data.draw(st.sampled_from([coarse, numbers.map(lambda x: round(x, 2))]))
    targets = data.draw(hnp.arrays(np.float32, count, elements=coarse_or_not.map(np.float32)))
    user = data.draw(hnp.arrays(np.int64, count, elements=st.integers(0, 3)))
    for metric in metrics_for(Target("number")):
        check(metric.name, scores, targets, user)


def test_log_loss_stays_finite_where_probabilities_round_to_zero() -> None:
    far = torch.tensor([[300.0], [-300.0]])
    assert METRICS["log_loss"].of(far, torch.tensor([0, 0])) == pytest.approx(150.0)
    assert METRICS["log_loss"].of(torch.cat([-far, far], 1), torch.tensor([0, 0])) == pytest.approx(
        300.0
    )


def test_pooled_and_per_user_differ_and_say_which_is_which() -> None:
    """Two users whose scores stand apart: each user's AUC is 1, the pooled one is not."""
    scores = torch.tensor([[0.0], [1.0], [10.0], [11.0]])
    targets, user = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    found = report(metrics_for(Target.numbered(2)), scores, targets, user, 2)
    assert found["test_auc_per_user"] == 1.0 and found["test_auc"] == 0.75
    assert "test_accuracy_per_user" not in found and found["test_accuracy"] == 0.75
    single = report(metrics_for(Target.numbered(2)), scores[:1], targets[:1], user[:1], 1)
    assert single["test_auc"] is None and single["test_auc_per_user"] is None


def test_what_is_reported_of_each_target() -> None:
    names = {target: [metric.name for metric in metrics_for(target)] for target in TARGETS}
    assert names[TARGETS[0]] == ["accuracy", "log_loss", "balanced_accuracy", "auc", "f1"]
    assert names[TARGETS[1]] == ["accuracy", "log_loss", "balanced_accuracy"]
    assert names[TARGETS[2]] == ["rmse", "mae", "r2"]
    assert [shown_metric(target) for target in TARGETS[1:]] == ["test_accuracy", "test_rmse"]
    lower = {metric.name for metric in METRICS.values() if metric.better == "lower"}
    assert lower == {"log_loss", "rmse", "mae", "label_log_loss"}


TARGETS = [Target.numbered(2), Target.numbered(3), Target("number")]


@pytest.mark.parametrize(
    ("name", "target", "said"),
    [
        ("auc", TARGETS[1], "wrong-target: 'auc' … target has 3"),
        ("f1", TARGETS[1], "wrong-target: 'f1'"),
        ("auc", TARGETS[2], "wrong-target: 'auc'"),
        ("r2", TARGETS[0], "wrong-target: 'r2' … target is 2"),
    ],
)
def test_metrics_that_do_not_fit(name: str, target: Target, said: str) -> None:
    with refuses(said) as caught:
        METRICS[name].fits(target)
    assert "\n" not in str(caught.value)


def test_the_constant_model_is_the_majority_or_the_mean() -> None:
    labels = torch.tensor([2, 1, 2, 0])
    scores = constant_scores(labels, Target.numbered(4)).expand(4, -1)
    assert METRICS["accuracy"].of(scores, labels) == 0.5
    numbers = torch.tensor([1.0, 2.0, 6.0])
    mean = constant_scores(numbers, Target("number")).expand(3, -1)
    assert METRICS["r2"].of(mean, numbers) == pytest.approx(0.0, abs=1e-12)
