"""Every metric against its definition in the paper's appendix, written out user by user."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from small import CPU, EQUAL, TASKS, UNEQUAL, federation

from dpscaffold.training import evaluator as metrics
from dpscaffold.training.evaluator import Evaluator

REGULARISATION = 0.05


def by_hand(data, task, params):
    """The appendix's formulas with plain loops and automatic differentiation in double
    precision."""
    params = params.double()
    accuracies, losses, gradients = [], [], []
    for i in range(data.users):
        x, y = data.test.of(i)
        scores = task.scores(params, task.prepare(x.double()))
        accuracies.append(
            np.mean([int(s.argmax()) == int(label) for s, label in zip(scores, y, strict=True)])
        )
        x, y = data.train.of(i)
        point = params.clone().requires_grad_()
        loss = (
            task.losses(point, task.prepare(x.double()), y).mean()
            + REGULARISATION / 2 * (point**2).sum()
        )
        (gradient,) = torch.autograd.grad(loss, point)
        losses.append(float(loss.detach()))
        gradients.append(gradient)
    squares = float(np.mean([float((g**2).sum()) for g in gradients]))
    of_mean = float((torch.stack(gradients).mean(0) ** 2).sum())
    return {
        "test_accuracy": float(np.mean(accuracies)),
        "train_loss": float(np.mean(losses)),
        "gradient_dissimilarity": squares - of_mean,
        "gradient_log_dissimilarity": math.log(squares) - math.log(of_mean),
    }


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("block", [1 << 17, 16])
def test_metrics_equal_their_definitions(task, sizes, mapped, block, monkeypatch):
    """Users count equally whatever their sizes; mapped tables and small blocks change nothing."""
    monkeypatch.setattr(metrics, "_BLOCK", block)
    data = replace(federation(sizes, seed=4), mapped=mapped)
    task = TASKS[task](data.dimension, data.classes)
    params = torch.randn(task.parameters, generator=torch.Generator().manual_seed(0))
    found = Evaluator(data, task, REGULARISATION, CPU)(params)
    for key, value in by_hand(data, task, params).items():
        assert found[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    assert found["log10_gap"] is None


def test_unequal_users_are_not_pooled():
    """The mean over users differs from the mean over records, and it is the former that is
    reported."""
    data = federation((2, 200), seed=1)
    task = TASKS["logistic"](data.dimension, data.classes)
    params = torch.randn(task.parameters, generator=torch.Generator().manual_seed(3))
    found = Evaluator(data, task, 0.0, CPU)(params)["train_loss"]
    losses = task.losses(params, task.prepare(data.train.features), data.train.labels)
    assert found == pytest.approx(float((losses[:2].mean() + losses[2:].mean()) / 2), rel=1e-4)
    assert abs(found - float(losses.mean())) > 1e-2


def test_the_gap_is_the_logarithm_of_the_distance_to_the_optimum():
    """log10_gap = log₁₀(F(x) − F*), cut off where the difference is only rounding."""
    data = federation()
    task = TASKS["logistic"](data.dimension, data.classes)
    params = torch.ones(task.parameters)
    loss = Evaluator(data, task, 0.1, CPU)(params)["train_loss"]
    gap = Evaluator(data, task, 0.1, CPU, optimum_loss=loss - 0.01)(params)["log10_gap"]
    assert gap == pytest.approx(-2, abs=1e-3)
    at_optimum = Evaluator(data, task, 0.1, CPU, optimum_loss=loss + 1e-9)(params)["log10_gap"]
    assert math.isfinite(at_optimum) and at_optimum <= -6


def test_users_who_are_alike_have_no_dissimilarity():
    """Identical users: (1/M)Σ‖∇F_i‖² = ‖∇F‖²."""
    one = federation((12,), seed=2)
    from dpscaffold.federation import Federation

    data = Federation.from_arrays([one.train.of(0)] * 3, [one.test.of(0)] * 3, classes=3)
    task = TASKS["logistic"](4, 3)
    found = Evaluator(data, task, 0.1, CPU)(torch.ones(task.parameters))
    assert found["gradient_dissimilarity"] == pytest.approx(0, abs=1e-5)
    assert found["gradient_log_dissimilarity"] == pytest.approx(0, abs=1e-5)


def test_a_diverged_model_is_evaluated_without_an_exception():
    """Infinite or NaN parameters give non-finite losses, which the training loop turns into a
    stop."""
    data = federation()
    task = TASKS["logistic"](data.dimension, data.classes)
    found = Evaluator(data, task, 0.1, CPU, optimum_loss=1.0)(
        torch.full((task.parameters,), float("nan"))
    )
    assert not math.isfinite(found["train_loss"])
