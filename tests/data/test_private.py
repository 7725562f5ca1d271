"""The private sums are really private: sensitivity never above the stated one, noise never below.

Noise scales are measured from n independent draws; the relative error of a sample deviation is
1/√(2n), so with n = 40,000 a band of ±2 % is 5.6 standard errors: a correct scale fails about once
in 10⁸ runs, a scale that is off by 5 % always. Seeds are fixed besides.
"""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpscaffold.data import preprocess
from dpscaffold.data.preparation import fit
from dpscaffold.data.private import (
    clip_rows,
    moment_sensitivity,
    noised_moments,
    noised_squares,
    noised_sum,
    sum_sensitivity,
)
from dpscaffold.federation import Federation
from dpscaffold.privacy.solve import gaussian_delta, gaussian_multiplier
from dpscaffold.randomness.csprng import CipherStream

BAND = 0.02
rows = hnp.arrays(np.float64, 4, elements=st.floats(-1e3, 1e3))


@settings(max_examples=200, deadline=None)
@given(x=rows, y=rows, bound=st.floats(0.01, 50))
def test_replacing_one_row_moves_no_sum_beyond_its_sensitivity(
    x: np.ndarray, y: np.ndarray, bound: float
) -> None:
    a, b = clip_rows(np.stack([x, y]), bound)
    slack = 1 + 1e-12
    assert max(np.linalg.norm(a), np.linalg.norm(b)) <= bound
    assert np.linalg.norm(a - b) <= sum_sensitivity(bound) * slack
    assert np.linalg.norm(a**2 - b**2) <= moment_sensitivity(bound) * slack
    assert np.linalg.norm(np.outer(a, a) - np.outer(b, b)) <= moment_sensitivity(bound) * slack
    # Add/remove neighbours: the ratios 2 and √2 that costs carry.
    assert np.linalg.norm(a) <= sum_sensitivity(bound) / 2 * slack
    assert np.linalg.norm(np.outer(a, a)) <= moment_sensitivity(bound) / math.sqrt(2) * slack


def test_sensitivities_are_reached() -> None:
    e, f = np.eye(2) * 3.0
    assert np.linalg.norm(e - -e) == pytest.approx(sum_sensitivity(3.0))
    assert np.linalg.norm(e**2 - f**2) == pytest.approx(moment_sensitivity(3.0))
    assert np.linalg.norm(np.outer(e, e) - np.outer(f, f)) == pytest.approx(moment_sensitivity(3.0))


def measured(values: np.ndarray, expected: float) -> float:
    """The ratio of a sample's deviation to the expected one; values are centred at 0 by
    construction."""
    return float(np.sqrt(np.mean(values**2)) / expected)


def test_noise_scales() -> None:
    rng = np.random.default_rng(11)
    bound, z = 1.5, 4.0
    vector = np.zeros(40_000)
    assert abs(measured(noised_sum(vector, bound, z, rng), z * 2 * bound) - 1) < BAND
    assert (
        abs(measured(noised_squares(vector, bound, z, rng), z * math.sqrt(2) * bound**2) - 1) < BAND
    )
    matrix = noised_moments(np.zeros((300, 300)), bound, z, rng)
    assert np.array_equal(matrix, matrix.T)
    upper = matrix[np.triu_indices(300, 1)]  # 44,850 draws
    assert abs(measured(upper, z * bound**2) - 1) < BAND
    diagonals = np.concatenate(
        [np.diag(noised_moments(np.zeros((300, 300)), bound, z, rng)) for _ in range(140)]
    )
    assert abs(measured(diagonals, z * math.sqrt(2) * bound**2) - 1) < BAND


def test_the_noise_of_the_matrix_is_isotropic() -> None:
    """In an orthonormal basis of symmetric matrices every coordinate has the same deviation."""
    rng = np.random.default_rng(5)
    direction = (
        np.array([[1.0, 1.0], [1.0, 1.0]]) / 2
    )  # Frobenius norm 1, mixes diagonal and off-diagonal
    draws = np.array(
        [(noised_moments(np.zeros((2, 2)), 1.0, 1.0, rng) * direction).sum() for _ in range(40_000)]
    )
    assert abs(measured(draws, math.sqrt(2)) - 1) < BAND


def zeros(users: int, records: int, dimension: int) -> Federation:
    """Records of zeros: after a private centring by m, what is left of a record is −m, the noise
    itself."""
    pair = (torch.zeros(records, dimension), torch.arange(records) % 2)
    return Federation.from_arrays([pair] * users, [pair] * users)


def test_the_noise_that_reaches_the_features_is_the_noise_that_is_accounted() -> None:
    federation = zeros(users=2, records=5, dimension=40_000)
    step = {"step": "centre", "fit": "private", "norm_bound": 3.0, "noise": 7.0}
    done = preprocess(federation, [step], seed=2)
    (centred,) = done.preparation
    cost = centred.cost
    assert cost is not None and centred.protection == "private"
    assert (cost.noise, cost.add_remove, cost.seeded) == (7.0, 14.0, True)
    noise_of_the_sum = -done.test.features[0].double().numpy() * 10  # 10 pooled training records
    assert abs(measured(noise_of_the_sum, 7.0 * sum_sensitivity(3.0)) - 1) < BAND
    # And the test would notice noise for add/remove neighbours passed off as replace-one.
    assert abs(measured(noise_of_the_sum, 7.0 * 3.0) - 1) > 0.5


def neighbours(seed: int) -> tuple[Federation, Federation]:
    """Two federations that differ in one training record of one user, at its most harmful."""
    rng = np.random.default_rng(seed)
    x = torch.from_numpy(rng.normal(size=(12, 3)).astype(np.float32))
    y = torch.arange(12) % 2
    probes = torch.cat([torch.zeros(1, 3), torch.eye(3)])
    held_out = (probes, torch.tensor([0, 1, 0, 1]))
    other = x.clone()
    x[4], other[4] = torch.tensor([1e6, 0.0, 0.0]), torch.tensor([0.0, -1e6, 1.0])
    pair = [
        Federation.from_arrays([(x, y), (rows, y)], [held_out, held_out]) for rows in (x, other)
    ]
    return pair[0], pair[1]


@pytest.mark.parametrize("seed", range(5))
def test_neighbouring_federations_move_the_released_sums_by_at_most_the_sensitivity(
    seed: int,
) -> None:
    """With equal seeds the noise cancels, and what remains is the change of the sums."""
    bound, count = 2.0, 24
    step: dict[str, Any] = {
        "step": "standardise",
        "fit": "private",
        "norm_bound": bound,
        "noise": 0.01,
    }
    sums, squares = [], []
    for federation in neighbours(seed):
        found = preprocess(federation, [step]).test.features[:4].double().numpy()
        factors = found[[1, 2, 3], [0, 1, 2]] - found[0]
        mean = -found[0] / factors
        sums.append(mean * count)
        squares.append((1 / factors**2 + mean**2) * count)
    moved = np.linalg.norm(sums[0] - sums[1]), np.linalg.norm(squares[0] - squares[1])
    assert 0.5 * bound < moved[0] <= sum_sensitivity(bound) * (1 + 1e-4)
    assert 0.5 * bound**2 < moved[1] <= moment_sensitivity(bound) * (1 + 1e-3)


def test_private_statistics_approach_the_plain_ones_with_many_records() -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(20_000, 6)) * [3, 2.5, 2, 0.3, 0.2, 0.1] + 1).astype(np.float32)
    pair = (torch.from_numpy(x), torch.arange(20_000) % 2)
    federation = Federation.from_arrays([pair], [pair])
    private = {"fit": "private", "norm_bound": 30.0, "noise": 1.0}
    done = preprocess(federation, [{"step": "standardise", **private}])
    plain = preprocess(federation, ["standardise"])
    assert (done.train.features[:, :3] - plain.train.features[:, :3]).abs().max() < 0.1
    both = preprocess(
        federation, [{"step": "centre", **private}, {"step": "pca", "components": 3, **private}]
    )
    exact = preprocess(federation, ["centre", "pca:3"])
    # The leading space is found: it holds the same variance.
    assert both.train.features.var(dim=0).sum() > 0.98 * exact.train.features.var(dim=0).sum()
    assert [step.cost.name for step in both.preparation if step.cost] == [
        "mean",
        "principal components",
    ]
    assert all("differentially private" in s and "trusted" in s for s in both.preprocessing)


def test_noise_repeats_with_the_seed_and_not_with_the_system() -> None:
    federation = zeros(1, 4, 50)
    step = {"step": "centre", "fit": "private", "norm_bound": 1.0, "noise": 1.0}
    a, b, c = (preprocess(federation, [step], seed).train.features for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    fresh = [preprocess(federation, [step], 0, release=True) for _ in range(2)]
    assert not torch.equal(fresh[0].train.features, fresh[1].train.features)
    assert "operating system" in fresh[0].preprocessing[0]
    assert "seed" in preprocess(federation, [step]).preprocessing[0]
    assert fresh[0].preparation[0].cost is not None and not fresh[0].preparation[0].cost.seeded


def test_two_steps_draw_independent_noise() -> None:
    federation = zeros(1, 4, 20_000)
    step = {"step": "centre", "fit": "private", "norm_bound": 1.0, "noise": 1.0}
    once = preprocess(federation, [step]).train.features[0]
    twice = preprocess(federation, [step, step]).train.features[0] - once
    correlation = float(torch.corrcoef(torch.stack([once, twice]))[0, 1])
    assert abs(correlation) < 5 / math.sqrt(20_000)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (5.0, 1e-3), (50.0, 1e-9)]
)
def test_calibration_agrees_with_dp_accounting(epsilon: float, delta: float) -> None:
    z = gaussian_multiplier(epsilon, delta)
    assert dp_accounting.get_epsilon_gaussian(z, delta) == pytest.approx(epsilon, rel=1e-4)
    assert gaussian_delta(epsilon, z) <= delta < gaussian_delta(epsilon, z * 0.999)


def test_epsilon_is_for_the_whole_step() -> None:
    """A private standardisation releases two sums; composed they are one Gaussian of the asked-for
    ε at δ = 10⁻⁶."""
    step = {"step": "standardise", "fit": "private", "norm_bound": 1.0, "epsilon": 2.0}
    (fitted,) = preprocess(zeros(1, 4, 3), [step]).preparation
    assert fitted.cost is not None and fitted.cost.noise is not None
    assert fitted.cost.noise == pytest.approx(gaussian_multiplier(2.0, 1e-6), rel=1e-9)
    # Under add/remove the sums of x and x² have multipliers 2z and √2·z, z = √2 times the whole's.
    z = math.sqrt(2) * fitted.cost.noise
    whole = 1 / math.sqrt(1 / (2 * z) ** 2 + 1 / (math.sqrt(2) * z) ** 2)
    assert fitted.cost.add_remove == pytest.approx(whole, rel=1e-12)


def on_the_grid(values: np.ndarray, spread: float) -> bool:
    """Whole multiples of a power of two of at most 2⁻²⁰ of the noise's deviation."""
    step = 2.0 ** (math.floor(math.log2(spread)) - 20)
    return bool((values / step == np.round(values / step)).all())


@pytest.mark.parametrize("noised", [noised_sum, noised_squares, noised_moments])
def test_secret_noise_lies_on_the_public_grid_and_has_its_scale(noised: Any) -> None:
    """The sums do not; from a seed nothing is rounded."""
    shape = (200, 200) if noised is noised_moments else (40_000,)
    sums = np.random.default_rng(1).normal(size=shape)
    sums = (sums + sums.T) / 2 if noised is noised_moments else sums
    delta = 3.0 if noised is noised_sum else math.sqrt(2) * 2.25
    least = delta / math.sqrt(2) if noised is noised_moments else delta
    secret = noised(sums, 1.5, 4.0, CipherStream(bytes(32)))
    assert on_the_grid(secret, 4.0 * least) and not on_the_grid(sums, 4.0 * least)
    assert not on_the_grid(noised(sums, 1.5, 4.0, np.random.default_rng(0)), 4.0 * least)
    rows = np.triu_indices(200, 1) if noised is noised_moments else slice(None)
    assert abs(measured((secret - sums)[rows], 4.0 * least) - 1) < BAND
    if noised is noised_moments:
        assert np.array_equal(secret, secret.T)


def test_a_matrix_whose_halves_differ_shows_one_of_them() -> None:
    """Rounding that differs across the diagonal, under the same noise, would tell it exactly."""
    total = np.array([[1.0, 5.0], [2.0, 3.0]])
    secret = noised_moments(total, 1.0, 1e-6, CipherStream(bytes(32)))
    assert secret[0, 1] == secret[1, 0] == pytest.approx(2.0, abs=1e-3)


def test_what_is_stored_is_made_of_the_grid() -> None:
    """The mean is a multiple of the grid over N, in single precision; with noise as large as the
    sum that tells grid from no grid, which the seeded run shows."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(12, 60)).astype(np.float32))
    data = Federation.from_arrays([(x, torch.arange(12) % 2)], [(x, torch.arange(12) % 2)])
    step = {"step": "centre", "fit": "private", "norm_bound": 1.0, "noise": 7.0}
    grid = 2.0 ** (math.floor(math.log2(14.0)) - 20)

    def gridded(release: bool) -> bool:
        (shift,) = preprocess(data, [step], release=release).preparation
        mean = shift.mean.astype(np.float64)
        nearest = (np.round(mean * 12 / grid) * grid / 12).astype(np.float32)
        return bool((nearest == shift.mean).all())

    assert gridded(release=True) and not gridded(release=False)


def test_system_noise_is_the_ciphers_under_a_new_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    proper = CipherStream.__init__

    def watched(self: CipherStream, key: bytes | None = None) -> None:
        keys.append(key)
        proper(self, key)

    monkeypatch.setattr(CipherStream, "__init__", watched)
    step = {"step": "centre", "fit": "private", "norm_bound": 1.0, "noise": 1.0}
    preprocess(zeros(1, 4, 5), [step] * 2, release=True)
    assert keys == [None, None]
    preprocess(zeros(1, 4, 5), [step])
    assert len(keys) == 2


def test_seeded_noise_is_what_it_was() -> None:
    """The released sum is the sum plus 2Bz times the normals of its own stream, to the bit."""
    data = zeros(1, 4, 9)
    step = {"step": "centre", "fit": "private", "norm_bound": 2.0, "noise": 3.0}
    (shift,) = preprocess(data, [step], seed=8).preparation
    normals = np.random.default_rng([8, *b"noise 0"]).standard_normal(9)
    assert np.array_equal(shift.mean, (3.0 * 4.0 * normals / 4).astype(np.float32))


def test_a_record_that_is_no_number_adds_nothing() -> None:
    """Clipping is total here too: an earlier step that overflows spoils nobody's statistic."""
    big = torch.full((4, 2), 3e38)
    x = torch.cat([torch.ones(4, 2), big])
    data = Federation.from_arrays([(x, torch.arange(8) % 2)], [(x, torch.arange(8) % 2)])
    scaled = {"step": "standardise", "fit": "public", "mean": 0.0, "deviation": 1e-3}
    centre = {"step": "centre", "fit": "private", "norm_bound": 1.0, "noise": 1e-9}
    fitted = fit(data.train.features, [scaled, centre])
    assert fitted[1].mean == pytest.approx(np.full(2, 4 * 0.5**0.5 / 8), rel=1e-5)
