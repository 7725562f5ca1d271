"""The best of a random number of trials: its law, closed forms, another library, brute force."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from privacy.settings import SMALL, run_of
from refusals import refuses
from scipy import stats

from dpscaffold.privacy import (
    THIRD_PARTY,
    Cost,
    SecureSums,
    adversaries,
    epsilon,
)
from dpscaffold.privacy.loss import Loss, privacy_parameters, step_losses
from dpscaffold.privacy.selection import (
    SelectionCost,
    TrialCount,
    Trials,
    epsilon_of_all,
    epsilon_of_winner,
    selected,
)


@pytest.mark.parametrize("mean", [1.5, 4.0, 30.0])
def test_drawn_numbers_are_geometric_and_of_no_other_mean(mean):
    """Wrong once in 10,000; a mean that is a fifth larger is seen."""
    stream, size = random.Random(5), 8000
    draws = np.array([TrialCount(mean).draw(stream.random()) for _ in range(size)])
    assert draws.min() >= 1
    for other, holds in ((mean, True), (1.2 * mean, False)):
        law = stats.geom(1 / other)
        edges = np.unique(law.ppf(np.linspace(0, 1, 12)[:-1]).astype(int))
        counts = np.histogram(draws, [*edges, 10**9])[0]
        below = np.array([*law.cdf(edges - 1), 1.0])
        expected = size * np.diff(below)
        scaled = expected[1:] * counts[1:].sum() / expected[1:].sum()
        assert (stats.chisquare(counts[1:], scaled).pvalue > 1e-4) == holds


def test_pure_privacy_costs_at_most_three_times():
    """(2 + η)ε with η = 1, whatever the mean (Papernot and Steinke 2022); less for few trials."""
    pure = privacy_parameters(0.2, 0.0, 0.05)
    few, *many = (selected(TrialCount(mean), [pure], 1e-9) for mean in (2.0, 20.0, 1e5))
    assert 0.2 < few < 0.6 and many == pytest.approx([0.6, 0.6], rel=1e-8)


def test_it_is_below_the_bound_of_another_library():
    """dp_accounting knows the Rényi form of the same selection of one Gaussian release."""
    from dp_accounting import dp_event
    from dp_accounting.rdp import RdpAccountant

    for mean in (3.0, 8.0, 100.0):
        accountant = RdpAccountant()
        accountant.compose(dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(6.0), mean, 1))
        theirs = accountant.get_epsilon(1e-6)
        found = selected(TrialCount(mean), step_losses(1.0, 6.0, "fixed"), 1e-6)
        assert 0.6 * theirs < found < 1.1 * theirs


def hockey(p: np.ndarray, q: np.ndarray, at: float) -> float:
    return float(np.maximum(p - math.exp(at) * q, 0).sum())


def law_of(p: np.ndarray, q: np.ndarray, interval: float = 1e-5) -> Loss:
    """The loss of a pair, on a fine grid."""
    index = np.ceil(np.log(p / q) / interval).astype(int)
    return Loss(interval, int(index.min()), np.bincount(index - index.min(), weights=p), 0.0)


def winner(mean: float, q: np.ndarray) -> np.ndarray:
    """The winner's law among outputs in rising order: f(Q(≤ y)) − f(Q(< y)), f being the generating
    function of the geometric law."""
    reached = np.array([0.0, *np.cumsum(q)])
    return np.diff(reached / (mean - (mean - 1) * np.minimum(1.0, reached)))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0.02, 1), min_size=2, max_size=6),
    st.lists(st.floats(-0.8, 0.8), min_size=6, max_size=6),
    st.sampled_from([1.1, 3.0, 7.0, 40.0]),
    st.sampled_from([1e-3, 1e-2, 0.05]),
)
def test_reported_epsilon_is_at_least_that_of_the_winner_itself(weights, tilts, mean, delta):
    """Brute force over a mechanism with few outputs: the exact ε of the selection, both
    directions, never exceeds what is reported."""
    p = np.array(weights) / sum(weights)
    q = p * np.exp(tilts[: len(p)])
    q /= q.sum()
    a, b = winner(mean, p), winner(mean, q)
    assume(a.sum() == pytest.approx(1) and b.sum() == pytest.approx(1))

    def epsilon_of(target: float, of: Callable[[float], float]) -> float:
        low, high = 0.0, 40.0
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if of(middle) > target else (low, middle)
        return high

    exact = epsilon_of(delta, lambda at: max(hockey(a, b, at), hockey(b, a, at)))
    assert selected(TrialCount(mean), [law_of(p, q), law_of(q, p)], delta) >= exact - 1e-9


def test_a_constant_number_of_trials_would_cost_more():
    """Why J is random: the best of exactly eight randomised answers tells more than 3ε."""
    eps = 0.3
    p = np.array([math.exp(eps), 1.0]) / (1 + math.exp(eps))
    assert abs(math.log(p[0] ** 8 / p[1] ** 8)) == pytest.approx(8 * eps)
    drawn = [winner(8.0, d) for d in (p, p[::-1])]
    assert np.abs(np.log(drawn[0] / drawn[1])).max() <= 3 * eps


@pytest.mark.parametrize("mean", [1.0, 0.0, -3.0, math.inf, math.nan, 2e6])
def test_bad_laws_are_refused(mean):
    with refuses("out-of-range: above 1 and at most 1,000,000"):
        TrialCount(mean)


RUN = run_of(SMALL, memory=False, local_steps=1, cohort_size=10, users=10)
SCORE = Cost("score", noise=20.0)


def test_all_trials_compose_and_preparation_counts_once():
    """Towards whoever saw them, three trials are a run of three times the rounds, and three
    scores."""
    mean = (Cost("mean", noise=5.0),)
    for preparation in ((), mean):
        trials = Trials((RUN,), (0, 0, 0), TrialCount(3.0), SCORE, preparation)
        whole = epsilon(replace(RUN, rounds=60), adversaries(RUN)["server"],
                        costs=(*[SCORE] * 3, *preparation))  # fmt: skip
        assert whole * (1 - 1e-6) <= epsilon_of_all(trials)["server"] <= whole * 1.02
    alone = replace(trials, preparation=())
    assert epsilon_of_winner(trials) > epsilon_of_winner(alone) > epsilon(RUN, THIRD_PARTY)


def test_the_worst_candidate_counts_for_the_winner():
    loud = replace(RUN, noise=8.0)
    of = [
        epsilon_of_winner(Trials(runs, (0,), TrialCount(3.0), None))
        for runs in ((RUN,), (loud,), (loud, RUN))
    ]
    assert of[0] == of[2] > of[1]


def test_secure_sums_state_what_all_other_sites_can_learn_too():
    run = replace(RUN, secure=SecureSums(1, 10))
    found, plain = (
        SelectionCost.of(Trials((one,), (0, 0, 0), TrialCount(3.0), SCORE)) for one in (run, RUN)
    )
    assert found.all_trials["alone"] == pytest.approx(plain.all_trials["server"], rel=1e-6)
    assert found.all_trials["server"] < 0.5 * found.all_trials["alone"]
    assert "alone" not in plain.all_trials and "trials" not in found.for_third_parties()
    more = SelectionCost.of(Trials((replace(run, extra=9),), (0, 0, 0), TrialCount(3.0), SCORE))
    assert more.winner > found.winner
    assert all(more.all_trials[name] > value for name, value in found.all_trials.items())


def test_candidates_without_or_with_different_guarantees_are_refused():
    for other, refusal in (
        (replace(RUN, clip="median"), "no-privacy: private data"),
        (replace(RUN, sampling="poisson"), "units-differ"),
    ):
        with refuses(refusal):
            Trials((RUN, other), (0,), TrialCount(3.0), None)
