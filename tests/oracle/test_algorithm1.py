"""Both engines against the paper's pseudo-code in numpy, with the same draws."""

from __future__ import annotations

import numpy as np
import pytest
from oracle.algorithm1 import dp_scaffold, gradient
from world import EQUAL, UNEQUAL, Draws, federation, final, setting

from dpscaffold import Gaussian


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("algorithm", ["scaffold", "scaffold-warm", "fedavg"])
def test_the_engines_do_what_the_paper_writes(draws_of_the_cpu, algorithm, sampling, sizes, engine):
    """x^T, c^T and every c_i^T of DP-SCAFFOLD, DP-SCAFFOLD-warm and DP-FedAvg equal Algorithms 1
    and 2."""
    data = federation(sizes, dimension=5, classes=4)
    clip, sigma = 0.9, 0.6
    plan = {"rounds": 6, "local_steps": 4, "data_ratio": 0.5, "server_rate": 0.8, "warm_rounds": 2}
    run = setting(algorithm, "logistic", Gaussian(clip, sigma, sampling), data, **plan)
    draws = Draws(run)

    x, c, own = dp_scaffold(
        data=[tuple(part.numpy() for part in data.train.of(i)) for i in range(6)],
        classes=4,
        rounds=6,
        steps=4,
        size=lambda i: sizes[i] // 2,
        step_size=0.3 / (0.5 * 4),
        server_rate=0.8,
        clip=clip,
        sigma=sigma,
        regularisation=0.02,
        participants=draws.members,
        batches=lambda t, i: draws.batches(t, i, sizes[i], sizes[i] // 2, 4, sampling),
        noise=lambda t, i: draws.noise(t, i, 4 * 6),
        controls=algorithm != "fedavg",
        warm=2 if algorithm == "scaffold-warm" else 0,
    )
    state = final(engine, run)
    np.testing.assert_allclose(state.params.numpy(), x.ravel(), rtol=1e-4, atol=1e-4)
    if algorithm != "fedavg":
        np.testing.assert_allclose(state.control.numpy(), c.ravel(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state.memory.numpy(), own.reshape(6, -1), rtol=1e-4, atol=1e-4)
    assert np.abs(x).max() > 0.1


def test_the_oracle_itself_has_the_right_gradient():
    """Central differences of −log softmax agree with the oracle's formula."""
    stream = np.random.default_rng(0)
    weights, a, label = stream.standard_normal((4, 6)), stream.standard_normal(5), 2

    def loss(w):
        z = w @ np.append(a, 1.0)
        return np.log(np.exp(z).sum()) - z[label]

    found, step = gradient(weights, a, label), 1e-6
    for p in np.ndindex(weights.shape):
        nudge = np.zeros_like(weights)
        nudge[p] = step
        assert found[p] == pytest.approx(
            (loss(weights + nudge) - loss(weights - nudge)) / (2 * step), abs=1e-7
        )
