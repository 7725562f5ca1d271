"""The central optimum: stationary, lowest, equal to another library's."""

from __future__ import annotations

import pytest
import torch
from refusals import refuses
from sklearn.linear_model import LogisticRegression
from small import EQUAL, UNEQUAL, federation

from dpscaffold.tasks import Logistic, Mlp
from dpscaffold.training.optimum import solve

REGULARISATION = 0.02


def objective(data, params: torch.Tensor) -> torch.Tensor:
    """F(x) = (1/M)ΣF_i(x) + (λ/2)‖x‖², written out."""
    task = Logistic(data.dimension, data.classes)
    users = [data.train.of(i) for i in range(data.users)]
    mean = (
        sum(task.losses(params, task.prepare(x.double()), y).mean() for x, y in users) / data.users
    )
    return mean + REGULARISATION / 2 * (params**2).sum()


@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_the_optimum_is_stationary_and_lowest(sizes):
    """∇F(x*) = 0 to 10⁻⁷ by automatic differentiation, F(x*) is as stated, and no perturbation is
    lower."""
    data = federation(sizes, seed=2)
    found = solve(data, Logistic(4, 3), REGULARISATION)
    point = found.params.clone().requires_grad_()
    value = objective(data, point)
    (gradient,) = torch.autograd.grad(value, point)
    assert float(gradient.norm()) < 1e-7 and found.gradient_norm < 1e-7
    assert found.loss == pytest.approx(float(value.detach()), abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 1e-1, 1.0):
        for _ in range(10):
            nudge = size * torch.randn(found.params.shape, generator=generator, dtype=torch.float64)
            assert float(objective(data, found.params + nudge)) > found.loss


def test_it_is_scikit_learns_solution():
    """On users of equal size F is the pooled objective, which LogisticRegression minimises too
    (bias as a column)."""
    data = federation((40, 40, 40), seed=1)
    found = solve(data, Logistic(4, 3), REGULARISATION)
    x = torch.cat([data.train.features, torch.ones(120, 1)], dim=1).double().numpy()
    model = LogisticRegression(
        C=1 / (REGULARISATION * 120), fit_intercept=False, tol=1e-12, max_iter=10000
    )
    model.fit(x, data.train.labels.numpy())
    torch.testing.assert_close(
        found.params.view(3, 5), torch.from_numpy(model.coef_), rtol=1e-4, atol=1e-4
    )
    rows = [
        torch.cat([t, torch.ones(len(t), 1)], 1).double().numpy()
        for t, _ in map(data.test.of, range(3))
    ]
    scores = [model.score(r, data.test.of(i)[1].numpy()) for i, r in enumerate(rows)]
    assert found.metrics["test_accuracy"] == pytest.approx(sum(scores) / 3, abs=1e-6)


def test_users_count_equally_whatever_their_sizes():
    """A user of 300 records pulls no more than one of 3: doubling its records changes nothing."""
    from dpscaffold.federation import Federation

    data = federation((3, 30), seed=5)
    tables = [data.train.of(0), data.train.of(1)]
    doubled = [tables[0], tuple(torch.cat([part, part]) for part in tables[1])]
    tests = [data.test.of(0), data.test.of(1)]
    one, two = (
        solve(Federation.from_arrays(part, tests, classes=3), Logistic(4, 3), 0.1).params
        for part in (tables, doubled)
    )
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_a_network_has_no_optimum_to_speak_of():
    """Only convex tasks are solved."""
    with refuses("not-convex: 'mlp'"):
        solve(federation(), Mlp(4, 3), REGULARISATION)
