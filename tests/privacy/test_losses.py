"""Loss distributions against other libraries, closed forms and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant, pld_pmf
from dp_accounting.pld import privacy_loss_distribution as library
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy.explicit_pairs import composed_epsilon, gaussian_delta, gaussian_epsilon, step_pair

from dpscaffold.privacy.loss import (
    Loss,
    participation_losses,
    privacy_parameters,
    step_losses,
)

rates = st.floats(0.001, 1.0)
noises = st.floats(0.3, 100.0)


def fixed_size_profile(epsilon: float, rate: float, noise: float) -> float:
    """The tight profile, straight from its definition."""
    size = abs(epsilon)
    amplified = rate * gaussian_delta(math.log1p(math.expm1(size) / rate), 1 / noise)
    return amplified if epsilon >= 0 else 1 - math.exp(-size) + math.exp(-size) * amplified


@given(rates, noises, st.floats(-3.0, 3.0))
@settings(max_examples=60, deadline=None)
def test_a_step_never_promises_more_than_the_tight_profile(rate, noise, position):
    """Above the exact δ(ε) everywhere, on both sides of 0, and equal to it on the grid."""
    (law,) = step_losses(rate, noise, "fixed")
    spread = math.sqrt(float(np.dot(law.losses**2, law.probs)))
    exact = fixed_size_profile(position * spread, rate, noise)
    assert law.delta(position * spread) >= exact * (1 - 1e-9) - 1e-14
    on_grid = law.interval * round(position * spread / law.interval)
    assert law.delta(on_grid) == pytest.approx(
        fixed_size_profile(on_grid, rate, noise), rel=1e-6, abs=1e-13
    )


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 60.0), (0.2, 1.0), (0.01, 0.7)])
def test_the_same_atoms_as_the_library_that_connects_dots(rate, noise):
    """Handed the profile on our grid, dp_accounting's own constructor puts the same mass on each
    point."""
    (law,) = step_losses(rate, noise, "fixed")
    middle = np.abs(law.losses) < 30 * law.interval
    deltas = [fixed_size_profile(loss, rate, noise) for loss in law.losses[middle]]
    first, last = np.flatnonzero(middle)[[0, -1]] + law.lowest
    theirs = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(
        law.interval, first, last, deltas
    ).to_dense_pmf()
    assert law.probs[middle][1:-1] == pytest.approx(theirs._probs[1:-1], rel=1e-5, abs=1e-10)


@pytest.mark.parametrize(("rate", "noise"), [(0.2, 5.0), (0.05, 1.0), (1.0, 2.0), (0.5, 0.5)])
@pytest.mark.parametrize("times", [1, 37])
def test_poisson_agrees_with_dp_accounting(rate, noise, times):
    theirs = (
        library.from_gaussian_mechanism(2 * noise, sampling_prob=rate)
        .self_compose(times)
        .get_epsilon_for_delta(1e-6)
    )
    ours = max(law.power(times).epsilon(1e-6) for law in step_losses(rate, noise, "poisson"))
    assert theirs * (1 - 1e-4) <= ours <= theirs * 1.003


def test_composition_agrees_with_dp_accounting_events():
    """Their multiplier is relative to adding a record, half of what replacing one moves: 6 for our
    3."""
    accountant = PLDAccountant(NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp_event.GaussianDpEvent(6.0), 12)
    ours = step_losses(1.0, 3.0, "fixed")[0].power(12).epsilon(1e-5)
    assert ours == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)


@given(st.floats(0.5, 50.0), st.sampled_from([1, 2, 10, 300]), st.sampled_from([1e-3, 1e-5, 1e-7]))
@settings(max_examples=40, deadline=None)
def test_plain_gaussians_reach_their_closed_form(noise, times, delta):
    """n Gaussians are one with √n times the shift: never below its ε, and within a fraction of a
    per cent."""
    exact = 0.0
    if gaussian_delta(0.0, math.sqrt(times) / noise) > delta:
        exact = gaussian_epsilon(delta, math.sqrt(times) / noise)
    ours = step_losses(1.0, noise, "fixed")[0].power(times).epsilon(delta)
    assert exact * (1 - 1e-6) <= ours <= exact * 1.005 + 1e-9


@pytest.mark.parametrize("times", [10**3, 10**4, 10**5, 10**6])
def test_rounding_is_bounded_up_to_a_million_compositions(times):
    """μ = 1 in all: ε stays above its closed form, and what is set aside for the rounding of the
    transforms stays far below any δ."""
    law = step_losses(1.0, math.sqrt(times), "fixed")[0].power(times)
    for delta in (1e-5, 1e-7):
        exact = gaussian_epsilon(delta, 1.0)
        assert exact * (1 - 1e-6) <= law.epsilon(delta) <= exact * 1.01
    assert 0 < law.infinite < 1e-8
    for epsilon in (0.5, 2.0, 5.0):
        assert law.delta(epsilon) >= gaussian_delta(epsilon, 1.0) * (1 - 1e-9)


@pytest.mark.parametrize(("rate", "noise", "times"), [(0.3, 1.5, 50), (0.05, 0.8, 900)])
def test_powers_and_products_agree_with_dp_accounting(rate, noise, times):
    """Handed the very same law, dp_accounting's transforms give the same δ(ε)."""

    def theirs(law: Loss) -> pld_pmf.DensePLDPmf:
        return pld_pmf.DensePLDPmf(law.interval, law.lowest, law.probs, law.infinite, True)

    law, other = step_losses(rate, noise, "poisson", interval=0.01)
    pairs = [
        (law.power(times), theirs(law).self_compose(times, 1e-18)),
        (law.compose(other), theirs(law).compose(theirs(other), 1e-18)),
    ]
    for ours, known in pairs:
        for epsilon in (0.0, 0.4, 1.5, 4.0):
            expected = known.get_delta_for_epsilon(epsilon)
            assert ours.delta(epsilon) == pytest.approx(expected, rel=1e-6, abs=1e-11)


@given(
    st.floats(0.02, 1.0),
    st.floats(0.8, 40.0),
    st.sampled_from([200, 3000]),
    st.sampled_from(["opposite", "aligned"]),
)
@settings(max_examples=15, deadline=None)
def test_never_below_explicit_datasets(rate, noise, steps, kind):
    """Any pair of datasets is a lower bound: many steps of it never exceed what is claimed."""
    (law,) = step_losses(rate, noise, "fixed")
    shown = composed_epsilon(1e-5, *step_pair(rate, noise, kind), steps, 1.0, 1, points=2048)
    assert law.power(steps).epsilon(1e-5) >= shown * (1 - 1e-5)


def test_the_mixture_agrees_with_simulation():
    """δ(ε) of T rounds with random participation, by drawing outputs of the worst Poisson pair.

    100 000 draws of the total loss; δ is a mean of terms in [0, 1], so by Hoeffding its 99.9 %
    half-width is 0.0059. The claimed δ must lie inside; leaving the users' draw out of the account
    would not.
    """
    rng = np.random.default_rng(5)
    rate, sigma, steps, chance, rounds, epsilon, draws = 0.3, 1.0, 2, 0.25, 6, 1.0, 100_000
    took_part = rng.random((draws, rounds, 1)) < chance
    chosen = rng.random((draws, rounds, steps)) < rate
    x = chosen + sigma * rng.standard_normal((draws, rounds, steps))
    loss = np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2)))
    total = (loss * took_part).sum(axis=(1, 2))
    simulated = np.mean(np.maximum(0.0, -np.expm1(np.minimum(epsilon - total, 0.0))))
    remove, _ = participation_losses(rate, sigma / 2, "poisson", "record", steps)
    claimed = remove.mixed(chance).power(rounds).delta(epsilon)
    assert abs(claimed - simulated) < 0.006
    assert abs(remove.power(rounds).delta(epsilon) - simulated) > 0.006


@given(st.integers(2, 30), st.floats(0.01, 0.99))
@settings(max_examples=15, deadline=None)
def test_power_is_repeated_composition(times, chance):
    (law,) = step_losses(0.3, 1.0, "fixed", interval=0.02)
    law = law.mixed(chance)
    slow = law
    for _ in range(times - 1):
        slow = slow.compose(law)
    fast = law.power(times)
    for epsilon in (0.0, 0.3, 1.5):
        assert fast.delta(epsilon) == pytest.approx(slow.delta(epsilon), rel=1e-6, abs=1e-11)
        assert (
            fast.delta(epsilon) >= slow.delta(epsilon) - slow.infinite
        )  # slow has its own reserve for rounding


def test_mass_is_never_lost():
    """Mixing, composing and coarsening keep the total at 1 or put the excess at infinity."""
    (law,) = step_losses(0.2, 1.5, "fixed")
    for result in (
        law,
        law.mixed(0.1),
        law.power(300),
        law.mixed(0.1).power(300),
        law.on_grid(0.1),
    ):
        assert result.probs.min() >= 0
        assert 1 - 1e-12 <= result.probs.sum() + result.infinite <= 1 + 1e-6


@given(st.integers(2, 9), st.floats(0.0, 4.0))
@settings(max_examples=25, deadline=None)
def test_a_coarser_grid_only_rounds_up(factor, epsilon):
    (law,) = step_losses(0.4, 1.0, "fixed")
    assert law.on_grid(factor * law.interval).delta(epsilon) >= law.delta(epsilon) - 1e-15


def test_mass_at_infinity_counts_fully():
    law = Loss(0.1, 0, np.array([0.5, 0.4]), 0.1)
    assert law.delta(5.0) == pytest.approx(0.1)
    assert law.epsilon(0.05) == math.inf
    assert law.mixed(0.5).infinite == pytest.approx(0.05)
    assert law.power(3).infinite == pytest.approx(1 - 0.9**3)
    assert law.compose(law).infinite == pytest.approx(1 - 0.9**2)


@pytest.mark.parametrize("delta", [1e-6, 1e-3, 0.2])
@pytest.mark.parametrize(("rate", "noise"), [(0.2, 1.0), (1.0, 0.05), (0.9, 0.06)])
def test_epsilon_inverts_delta(rate, noise, delta):
    """δ(ε(δ)) = δ, also where losses reach the thousands and e^{−L} leaves the doubles."""
    (law,) = step_losses(rate, noise, "fixed")
    epsilon = law.epsilon(delta)
    assert law.delta(epsilon) <= delta * (1 + 1e-6)
    assert epsilon == 0.0 or law.delta(epsilon * 0.999) > delta


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 1e-6)])
def test_stated_parameters_become_a_dominating_pair(epsilon, delta):
    law = privacy_parameters(epsilon, delta, 0.01)
    theirs = library.from_privacy_parameters(
        library.common.DifferentialPrivacyParameters(epsilon, delta)
    )
    for e in (0.0, 0.2, 1.0):
        assert law.delta(e) == pytest.approx(theirs.get_delta_for_epsilon(e), rel=1e-3, abs=1e-9)
    assert law.compose(law).epsilon(3 * delta + 1e-9) <= 2 * epsilon + 0.02
