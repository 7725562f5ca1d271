"""Solving for noise and rounds: on the budget, never above it, quickly."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy.settings import SMALL, SYNTHETIC, run_of
from refusals import refuses

from dpscaffold.privacy import (
    AGGREGATE,
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    RANDOM_PARTICIPATION_RDP,
    Bound,
    Cost,
    Spending,
    budget_table,
    calibrate_noise,
    largest_rounds,
)


@given(
    st.floats(0.02, 30.0),
    st.integers(1, 80),
    st.integers(1, 10),
    st.sampled_from(["fixed", "poisson"]),
)
@settings(max_examples=15, deadline=None)
def test_the_noise_is_on_the_budget(epsilon, rounds, steps, sampling):
    run = run_of(SMALL, rounds=rounds, local_steps=steps, sampling=sampling)
    spent = RANDOM_PARTICIPATION.epsilon(replace(run, noise=calibrate_noise(run, epsilon)))
    assert 0.99 * epsilon <= spent <= epsilon


@pytest.mark.parametrize(
    ("bound", "epsilon"),
    [(RANDOM_PARTICIPATION_RDP, 2.0), (PAPER_THIRD_PARTY, 14.0), (AGGREGATE, 0.5)],
)
def test_every_bound_can_be_solved(bound, epsilon):
    run = (
        run_of(SYNTHETIC, memory=False, local_steps=1) if bound is AGGREGATE else run_of(SYNTHETIC)
    )
    spent = bound.epsilon(replace(run, noise=calibrate_noise(run, epsilon, bound)))
    assert 0.99 * epsilon <= spent <= epsilon


def test_a_larger_budget_needs_less_noise():
    noises = [calibrate_noise(run_of(SYNTHETIC), e) for e in (0.25, 0.5, 0.501, 1.0, 4.0)]
    assert noises == sorted(noises, reverse=True) and len(set(noises)) == 5


def test_the_rounds_are_the_last_within_the_budget():
    run = run_of(SYNTHETIC)
    rounds = largest_rounds(run, 1.0)
    assert (
        RANDOM_PARTICIPATION.epsilon(run, rounds)
        <= 1.0
        < RANDOM_PARTICIPATION.epsilon(run, rounds + 1)
    )
    assert largest_rounds(run, 1.0, at_most=50) == 50


def test_other_mechanisms_share_the_budget():
    run, costs = run_of(SYNTHETIC), (Cost("a private mean", noise=8.0),)
    assert largest_rounds(run, 1.0, costs=costs) < largest_rounds(run, 1.0)
    assert Spending(run, costs=costs).after(400) == RANDOM_PARTICIPATION.epsilon(run, costs=costs)


def test_a_table_of_combinations():
    run = run_of(SYNTHETIC)
    table = budget_table(run, 1.0, local_steps=(1, 50), rounds=(100, 400))
    assert [(row.local_steps, row.rounds) for row in table] == [
        (1, 100),
        (1, 400),
        (50, 100),
        (50, 400),
    ]
    assert all(0.99 <= row.epsilon <= 1.0 for row in table)
    assert table[0].noise < table[1].noise < table[3].noise and table[2].noise < table[3].noise


def test_a_table_for_a_bound_that_never_applies():
    with refuses("bound-not-applicable: 'aggregate'"):
        budget_table(run_of(SMALL), 1.0, AGGREGATE)


def test_calibration_asks_the_bound_a_few_times(monkeypatch):
    asked, real = [], Bound.epsilon

    def counted(self, *given, **named):
        asked.append(given)
        return real(self, *given, **named)

    monkeypatch.setattr(Bound, "epsilon", counted)
    calibrate_noise(run_of(SYNTHETIC), 1.0)
    assert 5 < len(asked) < 16, len(asked)


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan")])
def test_no_budget_is_refused(epsilon):
    with refuses("out-of-range: epsilon"):
        calibrate_noise(run_of(SMALL), epsilon)
    with refuses("out-of-range: epsilon"):
        largest_rounds(run_of(SMALL), epsilon)


def test_a_budget_below_one_round_is_refused():
    with refuses("goal-not-met"):
        largest_rounds(run_of(SMALL, cohort_size=10), 0.001)
    with refuses("goal-not-met: noise is 0"):
        largest_rounds(run_of(SMALL, noise=0.0), 1.0)


def test_a_bound_that_no_noise_satisfies_says_so():
    """The published bound keeps terms that do not vanish with the noise."""
    with refuses("goal-not-met"):
        calibrate_noise(run_of(SYNTHETIC), 3.0, PAPER_THIRD_PARTY)


def test_live_spending_is_never_below_the_bound():
    run = run_of(SYNTHETIC)
    spending = Spending(run)
    shown = [spending.shown(t) for t in range(1, run.rounds + 1)]
    assert len(spending._known) < 10 + math.log(run.rounds) / math.log(1.1)
    assert shown == sorted(shown) and shown[-1] == pytest.approx(0.860, rel=0.005)
    for t in (1, 7, 60, 333, 400):
        exact = RANDOM_PARTICIPATION.epsilon(run, t)
        assert spending.after(t) == exact <= shown[t - 1] <= 1.08 * exact
