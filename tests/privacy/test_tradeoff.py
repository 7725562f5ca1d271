"""The trade-off function: never above the truth, close to it, and right for groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, run_of, small_runs
from scipy.stats import beta, binom, norm

from dpscaffold.privacy import SERVER, TradeOff, epsilon, losses
from dpscaffold.privacy.loss import Loss, privacy_parameters, step_losses

RATES = np.concatenate([10.0 ** -np.arange(1.0, 7.0), np.linspace(0.01, 0.99, 99)])


def gaussian_power(alpha: np.ndarray, mu: float) -> np.ndarray:
    """1 − G_μ(α), in the tail that keeps its digits."""
    return norm.sf(norm.isf(alpha) - mu)


def above_and_close(curve: TradeOff, alpha: np.ndarray, truth: np.ndarray, within: float) -> None:
    """The power granted to a test is at least the true one, and at most a little more."""
    granted = curve.power(alpha)
    assert np.all(granted >= truth * (1 - 1e-12))
    assert np.all(1 - curve.power(alpha) <= 1 - truth + 1e-15)
    assert np.all(granted <= truth * (1 + within))


@pytest.mark.parametrize("sigma", [0.4, 1.0, 3.0, 40.0])
@pytest.mark.parametrize("times", [1, 7])
def test_the_gaussian_mechanism(sigma, times):
    """f = Φ(Φ⁻¹(1−α) − μ) with μ = √n/σ."""
    (law,) = step_losses(1.0, sigma, "fixed")
    curve = TradeOff.of((law.power(times),))
    above_and_close(curve, RATES, gaussian_power(RATES, math.sqrt(times) / sigma), 0.02)


def sampled_power(alpha: np.ndarray, rate: float, sigma: float) -> np.ndarray:
    """N(0, σ²) against (1−q)N(0, σ²) + qN(1, σ²): the likelihood ratio rises with x."""
    x = norm.isf(alpha)
    return (1 - rate) * alpha + rate * norm.sf(x - 1 / sigma)


def sampled_power_reversed(alpha: np.ndarray, rate: float, sigma: float) -> np.ndarray:
    """The other order: reject the mixture where x is small."""
    x = np.linspace(-12 * sigma, 12 * sigma + 1, 400_001)
    false = (1 - rate) * norm.cdf(x / sigma) + rate * norm.cdf((x - 1) / sigma)
    return np.interp(alpha, false, norm.cdf(x / sigma))


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_a_sampled_step_in_both_directions(rate, noise):
    """One Poisson step is its own explicit pair; the curve covers both orders and no more."""
    curve = TradeOff.of(step_losses(rate, noise, "poisson"))
    alpha = RATES[RATES > 1e-5]
    one = sampled_power(alpha, rate, 2 * noise)
    other = sampled_power_reversed(alpha, rate, 2 * noise)
    assert np.all(curve.power(alpha) >= np.maximum(one, other) - 1e-9)
    # Symmetrised, f is the convex envelope of the two; where slopes agree it is one of them.
    assert np.min(curve.power(alpha) / np.maximum(one, other)) < 1.001
    assert np.all(curve.power(alpha) <= np.maximum(one, other) * 1.05)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_fixed_batch_against_an_explicit_dataset(rate):
    """All other gradients +C, the record's −C or +C: this pair reaches the curve at small α."""
    curve = TradeOff.of(step_losses(rate, 1.0, "fixed"))
    reached = sampled_power(RATES, rate, 1.0)
    assert np.all(curve.power(RATES) >= reached * (1 - 1e-12))
    small = RATES <= 0.01
    assert np.all(curve.power(RATES[small]) <= reached[small] * 1.005)


@pytest.mark.parametrize(("chance", "rounds", "sigma"), [(0.1, 30, 2.0), (0.02, 400, 3.0)])
def test_random_participation_against_an_explicit_dataset(chance, rounds, sigma):
    """A round shows N(0, σ²) or N(1, σ²) with this chance: the likelihood test's two rates."""
    users = round(1 / chance)
    run = run_of(
        SMALL,
        rounds=rounds,
        users=users,
        cohort_size=1,
        local_steps=1,
        batch_sizes=100,
        noise=sigma,
    )
    curve = TradeOff.of(losses(run, SERVER))
    counts = np.arange(0, 80)
    weights = binom.pmf(counts, rounds, chance)
    mu = np.sqrt(counts) / sigma
    cuts = np.linspace(0.02, 8.0, 60)
    z = np.divide(cuts[:, None], mu, where=mu > 0, out=np.full((60, 80), math.inf))
    false = norm.sf(z + mu / 2) @ weights
    true = norm.sf(z - mu / 2) @ weights
    kept = false > 1e-9
    above_and_close(curve, false[kept], true[kept], 0.01)


def test_a_simulated_likelihood_test_stays_below():
    """3 Poisson steps on an explicit pair, 10⁶ draws: the best test's rate at 1 % false alarms
    lies under the curve at 99.99 % confidence, and over that of a run with a fifth more noise."""
    rate, noise, steps, draws = 0.5, 0.4, 3, 1_000_000
    rng = np.random.default_rng(3)
    sigma = 2 * noise

    def ratio(present: bool) -> np.ndarray:
        x = sigma * rng.standard_normal((draws, steps))
        if present:
            x += rng.random((draws, steps)) < rate
        return np.log(1 - rate + rate * np.exp((2 * x - 1) / (2 * sigma**2))).sum(axis=1)

    cut = np.quantile(ratio(False), 0.99)
    found = int((ratio(True) > cut).sum())
    low, high = beta.ppf([5e-5, 1 - 5e-5], [found, found + 1], [draws - found + 1, draws - found])
    false = 0.01 + 4 * math.sqrt(0.01 * 0.99 / draws)
    curve = TradeOff.of(
        tuple(law.power(steps) for law in step_losses(rate, noise, "poisson")),
    )
    assert low <= float(curve.power(false)) and float(curve.power(0.01)) <= high * 1.03
    quieter = tuple(law.power(steps) for law in step_losses(rate, 1.2 * noise, "poisson"))
    assert float(TradeOff.of(quieter).power(false)) < low


@pytest.mark.parametrize(("of", "delta"), [(1.0, 1e-3), (0.25, 0.0), (3.0, 0.1)])
def test_one_statement_is_its_own_curve(of, delta):
    """f_{ε,δ}, mass at infinity included."""
    curve = TradeOff.of((privacy_parameters(of, delta, 0.25),))
    truth = np.maximum.reduce(
        [
            np.zeros_like(RATES),
            1 - delta - np.exp(of) * RATES,
            np.exp(-of) * (1 - delta - RATES),
        ]
    )
    missed = 1 - curve.power(RATES)
    assert np.all(missed <= truth + 1e-15) and np.all(missed >= truth - 1e-9)
    assert float(1 - curve.power(0.0)) <= 1 - delta


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.5])
@pytest.mark.parametrize("group", [2, 3, 6])
def test_groups_add_up_and_do_not_average(mu, group):
    """A group of k has k·μ; convolving, which would give √k·μ, is far below."""
    curve = TradeOff.of(step_losses(1.0, 1 / mu, "fixed"))
    exact, wrong = group * mu, math.sqrt(group) * mu

    def advantage(m: float) -> float:
        return float(2 * norm.cdf(m / 2) - 1)

    assert advantage(exact) <= curve.advantage(group) <= advantage(exact) + 1e-3
    assert curve.advantage(group) > advantage(wrong) + 0.003
    truth = gaussian_power(RATES, exact)
    assert np.all(curve.power(RATES, group) >= truth * (1 - 1e-12))
    assert np.all(curve.power(RATES[RATES > 1e-4], group) <= truth[RATES > 1e-4] * 1.02)
    if exact < 5:
        found = curve.epsilon(1e-5, group)
        assert gaussian_epsilon(1e-5, exact) - 1e-4 <= found
        assert found <= gaussian_epsilon(1e-5, exact) * 1.005 + 1e-4
        assert found > gaussian_epsilon(1e-5, wrong) * 1.1


def test_mass_at_infinity_leaves_no_epsilon_below_it():
    curve = TradeOff.of((Loss(0.5, -1, np.array([0.3, 0.3, 0.3999]), 1e-4),))
    assert math.isinf(curve.epsilon(1e-5)) and math.isfinite(curve.epsilon(1e-3))


runs = small_runs(0.5, unit=st.sampled_from(["record", "user"]))


@given(runs, st.floats(1e-6, 0.999), st.floats(0.0, 8.0))
@settings(max_examples=40, deadline=None)
def test_laws_of_a_trade_off(run, alpha, at):
    """Convex, falling, below a coin, its own inverse, and all that its law states, for any run."""
    laws = losses(run, SERVER)
    curve = TradeOff.of(laws)
    grid = np.linspace(0.0, 1.0, 301)
    f = 1 - curve.power(grid)
    assert np.all(np.diff(f) <= 1e-15) and np.all(f <= 1 - grid + 1e-15)
    assert np.all(np.diff(f, 2) >= -1e-12)
    there = float(1 - curve.power(alpha))
    if 1e-6 < there < 0.999:
        assert float(1 - curve.power(there)) == pytest.approx(alpha, rel=1e-5, abs=1e-12)
    stated = max(law.delta(at) for law in laws) + math.exp(at) * alpha
    assert float(curve.power(alpha)) <= stated * (1 + 2e-3) + 1e-12
    stated = epsilon(run, SERVER)
    assert curve.epsilon(run.delta) == pytest.approx(stated, rel=2e-3, abs=1e-4)
    assert float(curve.power(alpha, 2)) == float(curve.power(curve.power(alpha)))
    more = TradeOff.of((*laws, *losses(run, SERVER, run.rounds + 5)))
    assert float(more.power(alpha)) >= float(curve.power(alpha)) * (1 - 1e-4)


@given(runs, st.lists(st.floats(0.0, 12.0), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_many_deltas_are_each_delta_rounded_up(run, epsilons):
    for law in losses(run, SERVER):
        many = law.deltas(np.array(epsilons))
        single = np.array([law.delta(e) for e in epsilons])
        assert np.all(many >= single - 1e-16) and np.allclose(many, single, rtol=1e-6, atol=1e-9)
