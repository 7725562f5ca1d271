"""The best of a random number of trials: its law, closed forms, and brute force."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from refusals import refuses
from scipy import stats

from dpscaffold.privacy.selection import TrialCount, selected_profile

LAWS = [TrialCount(mean) for mean in (1.3, 4.0, 7.0, 30.0)]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_law_of_the_number_of_trials_is_geometric(law):
    numbers = np.arange(0, 3000)
    chances = stats.geom(1 / law.mean).pmf(numbers)
    assert [law.probability(int(j)) for j in numbers] == pytest.approx(chances, abs=1e-12)
    assert chances @ numbers == pytest.approx(law.mean)
    for q in (0.0, 0.3, 0.9, 0.99):
        assert law.generating(q) == pytest.approx(chances @ q**numbers, abs=1e-9)


def chi_square(law: TrialCount, draws: list[int]) -> float:
    """The p-value of draws under a law, cells of at least 20 expected draws."""
    cells, left, start = [], 1.0, 0
    while left * len(draws) > 60:
        chance, end = 0.0, start
        while chance * len(draws) < 20:
            chance += law.probability(end)
            end += 1
        cells.append((start, end, chance))
        left, start = left - chance, end
    counts = [sum(low <= d < high for d in draws) for low, high, _ in cells]
    counts.append(len(draws) - sum(counts))
    chances = [c for *_, c in cells]
    expected = np.array([*chances, 1 - sum(chances)]) * len(draws)
    return float(stats.chisquare(counts, expected).pvalue)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_drawn_numbers_follow_the_law_and_no_other(law):
    stream = random.Random(5)
    draws = [law.draw(stream) for _ in range(8000)]
    assert min(draws) == 1
    assert chi_square(law, draws) > 1e-4  # wrong once in 10,000
    assert chi_square(TrialCount(1.2 * law.mean), draws) < 1e-3  # a wrong mean is seen


def test_the_ends_of_a_draw():
    class Fixed:
        def __init__(self, value):
            self.value = value

        def random(self):
            return self.value

    assert TrialCount(4.0).draw(Fixed(0.0)) == 1
    assert TrialCount(1_000_000.0).draw(Fixed(1 - 2**-53)) > 10_000_000


def test_a_purely_private_trial_costs_three_epsilon_whatever_the_mean():
    for law in LAWS:
        found = selected_profile(law, lambda e: float(e < 0.2), lambda d: 0.2, 1e-9)
        assert found == pytest.approx(3 * 0.2, rel=1e-9)


def test_one_term_by_hand():
    """ε_Q(δ/E[J]) + 2·log(e^ε̂ + δ̂(1−γ)/γ), for the profile δ̂ = 10⁻³e^{−ε̂} whose best ε̂ is the
    smallest that is tried."""
    law = TrialCount(10.0)

    def profile(epsilon: float) -> float:
        return 1e-3 * math.exp(-epsilon)

    found = selected_profile(law, profile, lambda d: -math.log(d), 1e-5)
    least = 1e-4
    term = math.log(math.exp(least) + 9 * profile(least))
    assert found == pytest.approx(-math.log(1e-6) + 2 * term, rel=1e-12)


def hockey(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0).sum())


def winner(law: TrialCount, q: np.ndarray) -> np.ndarray:
    """The winner's law among outputs in rising order: f(Q(≤ y)) − f(Q(< y))."""
    reached = np.array([law.generating(min(1.0, c)) for c in (0.0, *np.cumsum(q))])
    return np.diff(reached)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.floats(0.02, 1), min_size=2, max_size=6),
    st.lists(st.floats(-0.8, 0.8), min_size=6, max_size=6),
    st.sampled_from(LAWS),
    st.sampled_from([1e-3, 1e-2, 0.05]),
)
def test_reported_epsilon_is_at_least_that_of_the_winner_itself(weights, tilts, law, delta):
    """Brute force over a mechanism with few outputs: the exact ε of the selection, both
    directions, never exceeds what is reported."""
    p = np.array(weights) / sum(weights)
    q = p * np.exp(tilts[: len(p)])
    q /= q.sum()

    def profile(epsilon: float) -> float:
        return max(hockey(p, q, epsilon), hockey(q, p, epsilon))

    def epsilon_of(target: float, of=profile) -> float:
        low, high = 0.0, 40.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if of(middle) > target else (low, middle)
        return high

    a, b = winner(law, p), winner(law, q)
    assume(a.sum() == pytest.approx(1) and b.sum() == pytest.approx(1))
    exact = epsilon_of(delta, lambda e: max(hockey(a, b, e), hockey(b, a, e)))
    assert selected_profile(law, profile, epsilon_of, delta) >= exact - 1e-9


def test_a_constant_number_of_trials_would_cost_more():
    """Why J is random: the best of exactly eight randomised answers tells more than 3ε."""
    eps = 0.3
    p = np.array([math.exp(eps), 1.0]) / (1 + math.exp(eps))
    fixed = [np.array([d[0] ** 8, 1 - d[0] ** 8]) for d in (p, p[::-1])]
    assert abs(math.log(fixed[0][0] / fixed[1][0])) == pytest.approx(8 * eps)
    drawn = [winner(TrialCount(8.0), d) for d in (p, p[::-1])]
    assert np.abs(np.log(drawn[0] / drawn[1])).max() <= 3 * eps


@pytest.mark.parametrize("mean", [1.0, 0.0, -3.0, math.inf, math.nan])
def test_bad_laws_are_refused(mean):
    with refuses("out-of-range: above 1"):
        TrialCount(mean)
