"""What is proved is below the truth as often as it says, and counting is exact."""

from __future__ import annotations

import math

import numpy as np
import pytest
from privacy.explicit_pairs import gaussian_epsilon
from scipy.stats import beta, binom

from dpscaffold.audit.limits import lower_limit, one_run_epsilon, prove, upper_limit
from dpscaffold.privacy import TradeOff
from dpscaffold.privacy.loss import participation_losses

DELTA = 1e-3


@pytest.mark.parametrize(("count", "games"), [(0, 40), (1, 40), (17, 40), (40, 40)])
def test_limits_are_where_the_binomial_tail_says(count, games):
    """Clopper and Pearson by their definition: the tail at the limit is the chance of error."""
    low, high = lower_limit(count, games, 0.02), upper_limit(count, games, 0.02)
    if count:
        assert binom.sf(count - 1, games, low) == pytest.approx(0.02)
    if count < games:
        assert binom.cdf(count, games, high) == pytest.approx(0.02)


def curve_of(noise):
    """The trade-off of one step that takes every record."""
    return TradeOff.of(participation_losses(1.0, noise, "fixed", "record", 1))


def games(mu, count, rng):
    return rng.normal(mu, 1, (1, count)), rng.normal(0, 1, (1, count))


def test_a_proof_is_wrong_no_more_often_than_it_says():
    """On Gaussians of known ε and curve: 120 proofs at 90 %, and they are not idle."""
    true, curve = (
        gaussian_epsilon(DELTA, 1.0),
        curve_of(1.0),
    )
    rng = np.random.default_rng(5)
    found = [prove(*games(1.0, 600, rng), DELTA, 0.9, curve) for _ in range(120)]
    wrong = sum(proof.epsilon > true or proof.curve_beaten for proof in found)
    assert wrong <= binom.isf(1e-6, 120, 0.1)
    assert np.median([proof.epsilon for proof in found]) > 0.25 * true


def test_many_statistics_do_not_make_a_proof_wrong_more_often():
    """Sixty statistics that tell nothing, all looked at: the true ε is 0, and a coin's curve holds.

    Were the event counted on the games that chose it, nearly every proof would be wrong.
    """
    curve = curve_of(1e6)
    rng = np.random.default_rng(9)
    found = [prove(*rng.normal(0, 1, (2, 60, 90)), DELTA, 0.9, curve) for _ in range(16)]
    wrong = sum(proof.epsilon > 1e-4 or proof.curve_beaten for proof in found)
    assert wrong <= binom.isf(1e-4, 16, 0.1)


def test_a_little_too_much_is_seen_against_the_curve():
    """Noise a fifth too small is beyond what ε at a small δ can tell from so few games."""
    curve = curve_of(1.0)
    rng = np.random.default_rng(6)
    proof = prove(*games(1.25, 8000, rng), 1e-5, 0.99, curve)
    assert proof.curve_beaten and proof.epsilon < gaussian_epsilon(1e-5, 1.0)


def test_several_statistics_and_signs():
    """The one that tells is found among others, whichever way it points."""
    rng = np.random.default_rng(7)
    inside, outside = rng.normal(0, 1, (3, 900)), rng.normal(0, 1, (3, 900))
    inside[1] -= 3
    proof = prove(inside, outside, DELTA, 0.95)
    assert proof.statistic == 1 and proof.epsilon > 2.5


@pytest.mark.parametrize(("guesses", "right"), [(50, 25), (50, 40), (50, 50), (200, 130)])
def test_one_run_without_delta_is_a_binomial(guesses, right):
    """At δ = 0 a right guess has chance at most e^ε/(1 + e^ε): ε is the logit of the limit."""
    limit = beta.ppf(0.05, right, guesses - right + 1)
    expected = max(0.0, math.log(limit / (1 - limit)))
    assert one_run_epsilon(1000, guesses, right, 0.0, 0.95) == pytest.approx(expected, abs=1e-6)


def test_one_run_is_lower_with_a_delta():
    proved = [one_run_epsilon(1000, 200, 190, delta, 0.95) for delta in (0.0, 1e-5, 1e-3)]
    assert proved[0] > proved[1] > proved[2]


def test_one_run_keeps_its_confidence_on_randomised_response():
    """Each coin is guessed correctly with probability e^ε/(1 + e^ε): exactly ε-DP."""
    epsilon, rng = 1.0, np.random.default_rng(8)
    right = rng.binomial(300, 1 / (1 + math.exp(-epsilon)), 100)
    wrong = sum(one_run_epsilon(300, 300, int(v), 0.0, 0.9) > epsilon for v in right)
    assert wrong <= binom.isf(1e-6, 100, 0.1)
