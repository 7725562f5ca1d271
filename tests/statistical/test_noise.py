"""The noise that is really added: its scale and its shape, measured on both engines.

Every interval has a false-alarm chance of 10⁻⁶ and is narrow enough to reject a scale wrong by 10
%.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest
from small import ENGINES, final, setting, uploads
from statistical.captured import ALARM, SIZE, queries
from torch import nn
from toys import Linear, vectors

from dpscaffold.algorithms import ITERATIVE
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.tasks import ModuleTask

each_engine = pytest.mark.parametrize("engine", ENGINES)


def scale_is(values: np.ndarray, scale: float) -> bool:
    """Whether independent zero-mean normals ``values`` have this standard deviation, by the
    chi-square interval."""
    n = values.size
    statistic = float(np.square(values, dtype=np.float64).sum()) / scale**2
    return bool(chi2.ppf(ALARM / 2, n) < statistic < chi2.isf(ALARM / 2, n))


@each_engine
@pytest.mark.parametrize("algorithm", ITERATIVE)
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("unit", ["record", "user"])
def test_the_noise_of_a_step_has_the_stated_scale(algorithm, sampling, unit, engine):
    """std(H̃) = 2Cσ_g/b_i for each user's own b_i, or 2Cσ_g towards users.

    Neither σ_gC nor Cσ_g/b, nor 10 % off.
    """
    clip, sigma, sizes = 0.8, 1.7, (9, 12, 30)
    noise = queries(engine, algorithm, Gaussian(clip, sigma, sampling, unit), sizes)
    assert noise.shape == (3, 3, 3, SIZE)
    for user, size in enumerate(sizes):
        batch = size // 3 if unit == "record" else 1
        mine, stated = noise[:, :, user], 2 * clip * sigma / batch
        assert scale_is(mine, stated)
        for wrong in (1.1 * stated, 0.9 * stated, stated / 2, sigma * clip):
            assert not scale_is(mine, wrong)


@each_engine
def test_the_noise_is_normal(engine):
    """Kolmogorov-Smirnov against the normal law; a uniform of the same variance is rejected."""
    noise = queries(engine, "fedavg", Gaussian(1.0, 1.0), (6, 6)).ravel()[:20000] / (2 / 2)
    assert kstest(noise, "norm").pvalue > ALARM
    assert kstest(np.random.default_rng(0).uniform(-(3**0.5), 3**0.5, 20000), "norm").pvalue < ALARM


@each_engine
def test_every_tensor_gets_the_same_noise(engine):
    """A network of four tensors: the noise of each has scale 2Cσ_g/b, whatever the tensor's
    size."""
    task = ModuleTask(nn.Sequential(nn.Linear(60, 90), nn.ReLU(), nn.Linear(90, 60)))
    sizes = [value.numel() for value in task.module.parameters()]
    privacy, users = Gaussian(clip=1e-4, noise=1000.0), 30
    # Against noise of 2Cσ_g/b = 0.1 a clipped mean of norm at most 10⁻⁴ is nothing.
    features = torch.randn(6, 60, generator=torch.Generator().manual_seed(0))
    from dpscaffold.federation import Federation

    table = [(features, torch.arange(6))] * users
    data = Federation.from_arrays(table, table, classes=60)
    run = setting("fedavg", task, privacy, data, local_steps=1, user_ratio=1.0, regularisation=0.0)
    moves = uploads(engine, run)[0]["move"] / -run.plan.step_size
    for part in moves.split(sizes, dim=1):
        assert scale_is(part.numpy(), 0.1)
        for factor in (1.1, 0.9, 2.0, len(sizes) ** 0.5):
            assert part.numel() < 2500 or not scale_is(part.numpy(), 0.1 * factor)


@each_engine
def test_a_round_averages_the_noise_of_its_users(engine):
    """With m users the noise of x is that of one user divided by √m: it is independent, not
    shared."""
    data = vectors([torch.zeros(6, SIZE) for _ in range(10)])
    run = setting(
        "fedavg", Linear(SIZE), Gaussian(1.0, 1.0), data, local_steps=1, rounds=5, user_ratio=1.0
    )
    moved = final(engine, run, rounds=1).params.numpy() / run.plan.step_size
    alone = 2 * 1.0 * 1.0 / 2
    assert scale_is(moved, alone / 10**0.5)
    assert not scale_is(moved, alone)
