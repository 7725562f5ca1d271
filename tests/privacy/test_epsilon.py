"""ε of a run: closed forms, how it moves, repeats, other mechanisms, and solving for it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.renyi import renyi_epsilon
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, SYNTHETIC, run_of, small_runs
from refusals import refuses

from dpscaffold.errors import BadInput
from dpscaffold.privacy import (
    ALONE,
    SERVER,
    Cost,
    Mechanism,
    adversaries,
    capped,
    epsilon,
    epsilons_by_group,
    largest_rounds,
    losses,
    solve_noise,
    solve_noise_for_guess,
)
from dpscaffold.privacy import gaussian_epsilon as one_release
from dpscaffold.privacy.accounting import MOST_STEPS, _front, group_steps, spent, step_epsilon
from dpscaffold.privacy.loss import participation_losses
from dpscaffold.privacy.solve import guess

runs = small_runs(0.8)


@given(runs)
@settings(max_examples=20, deadline=None)
def test_loss_distributions_are_below_renyi(run):
    """The same mechanism, accounted twice."""
    for extra in (0, 2):
        more = replace(run, extra=extra)
        assert epsilon(more, SERVER) <= renyi_epsilon(more) * (1 + 1e-6) + 1e-9


@given(runs)
@settings(max_examples=30, deadline=None)
def test_epsilon_is_monotone_in_everything(run):
    """More rounds, attempts, steps, users per round, records per batch, or less noise never cost
    less, and a random draw never more than every round.

    Half a per cent is allowed for: the grid, and with it the rounding up, depends on noise and
    batch.
    """
    base = epsilon(run, SERVER) * 0.995
    (group,) = run.groups
    more = [
        replace(run, rounds=run.rounds + 1),
        replace(run, extra=1),
        replace(run, local_steps=run.local_steps + 1),
        replace(run, cohort_size=run.cohort_size + 1),
        replace(run, groups=(replace(group, batch=group.batch + 10),)),
        replace(run, noise=run.noise / 1.1),
    ]
    for other in more:
        assert epsilon(other, SERVER) >= base
    assert epsilon(run, SERVER, 0) == 0.0
    assert epsilon(run, SERVER) <= capped(run, SERVER) * 1.001 + 1e-9


def test_one_full_step_is_the_gaussian_mechanism():
    """s = l = 1 and K = T = 1: the closed form."""
    run = run_of(SMALL, rounds=1, local_steps=1, cohort_size=10, batch_sizes=100, noise=1.3)
    exact = gaussian_epsilon(1e-5, 1 / 1.3)
    assert exact <= epsilon(run, SERVER) <= exact * 1.002
    assert one_release(1.3, 1e-5) == pytest.approx(exact, rel=1e-6)


def test_local_steps_towards_a_whole_user_are_one_gaussian():
    """No record is sampled, and K steps on one dataset have μ = √K/σ_g."""
    run = run_of(SMALL, unit="user", cohort_size=10, rounds=1, local_steps=4, noise=3.0)
    exact = gaussian_epsilon(1e-5, 2 / 3.0)
    assert exact <= epsilon(run, SERVER) <= exact * 1.002


def test_zero_out_is_what_another_library_calls_replace_special():
    """Poisson batches, gradient against zero: the sum moves by C, half of what σ_g counts."""
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.pld import PLDAccountant

    run = run_of(SMALL, sampling="poisson", cohort_size=10, rounds=4)
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    step = dp_event.PoissonSampledDpEvent(0.2, dp_event.GaussianDpEvent(2 * run.noise))
    accountant.compose(step, run.rounds * run.local_steps)
    assert epsilon(run, SERVER) == pytest.approx(accountant.get_epsilon(run.delta), rel=5e-3)


def test_the_worst_user_has_the_largest_rate():
    records, batches = [100, 100, 200, 50] * 5, [10, 30, 20, 10] * 5
    several = run_of(SMALL, users=20, cohort_size=4, records=records, batch_sizes=batches)
    kinds = list(zip(records, batches, strict=True))[:4]
    alone = [run_of(SMALL, users=20, cohort_size=4, records=r, batch_sizes=b) for r, b in kinds]
    each = [epsilon(run, SERVER) for run in alone]
    assert epsilons_by_group(several, SERVER) == pytest.approx(each)
    assert epsilon(several, SERVER) == max(each) > 1.3 * each[3]


def test_many_groups_are_never_hidden_better_together_than_each_alone():
    """Beyond sixteen groups of which none is worse in rate and noise, neighbours are merged: to the
    larger rate and to the smaller noise."""
    batches = list(range(6, 46))  # a larger rate with more noise: no user is worse in both
    plan = {**SMALL, "users": 40, "cohort_size": 10, "records": 50, "local_steps": 1}
    louder = [(1.0 + 0.08 * batch) / 1.48 for batch in batches]
    for sampling in ("fixed", "poisson"):
        more = {"sampling": sampling, "noise": 1.48, "memory": False}
        run = run_of(plan, batch_sizes=batches, louder=louder, **more)
        for who in adversaries(run).values():
            steps = group_steps(run, who)
            assert len(set(steps)) == 40
            found, cap = epsilon(run, who), epsilon(run, who, times=5)
            merged = _front(steps)
            assert len(merged) <= MOST_STEPS
            for rate, noise in steps:
                assert any(r >= rate and s <= noise for r, s in merged)
            assert max(epsilons_by_group(run, who)) <= found * (1 + 1e-9)
            assert found < 1.3 * max(epsilons_by_group(run, who))
            for step in (steps[0], steps[20], steps[39]):
                assert step_epsilon(run, who, step) <= found
                assert step_epsilon(run, who, step, None, 5) <= cap


def tight_law_of_repeats(run: Mechanism, repeats: tuple[int, ...]) -> float:
    """ε where it is known which rounds were run again, and how often: a round that was run 1 + r
    times on one draw is (1 + r)·K steps with probability l, and nothing otherwise."""
    (group,) = run.groups
    found = []
    for law in participation_losses(group.rate, run.noise, run.sampling, run.unit, run.local_steps):
        total = law.mixed(run.user_ratio).power(run.rounds - len(repeats))
        for more in repeats:
            again = law.power(1 + more).mixed(run.user_ratio)
            total = total.compose(again)
        found.append(total.epsilon(run.delta))
    return max(found)


@given(runs, st.lists(st.integers(1, 3), min_size=1, max_size=3))
@settings(max_examples=25, deadline=None)
def test_a_repeat_costs_at_least_what_it_costs_on_its_draw(run, repeats):
    """However the attempts are spread over the rounds: never below the tight law, nor below the run
    without them, and never above everybody taking part in all."""
    run = replace(run, rounds=max(run.rounds, len(repeats)))
    extra = replace(run, extra=sum(repeats))
    found = epsilon(extra, SERVER)
    assert found >= tight_law_of_repeats(run, tuple(repeats)) * (1 - 1e-6)
    assert epsilon(run, SERVER) <= found <= capped(extra, SERVER) * 1.002 + 1e-9
    assert capped(extra, SERVER) == epsilon(run, SERVER, times=run.rounds + sum(repeats))


def test_an_attempt_is_a_whole_participation():
    """With l < 1 one attempt costs more than one more round, and what was spent given who took
    part counts participations alone."""
    run = run_of(SMALL, users=100, cohort_size=2, noise=1.0, rounds=10)
    assert epsilon(replace(run, extra=10), SERVER) > 2 * epsilon(run, SERVER, 20)
    assert epsilon(replace(run, extra=3), SERVER, 0) == 0.0  # nothing has begun
    assert epsilon(replace(run, extra=3), SERVER, times=2) == spent(run, 2)


def test_other_mechanisms_are_composed_exactly():
    """A full Gaussian step and two Gaussian costs are one Gaussian of added squared shifts."""
    run = run_of(SMALL, rounds=1, local_steps=1, cohort_size=10, batch_sizes=100, noise=2.0)
    costs = [Cost("mean", noise=4.0), Cost("variance", noise=5.0)]
    exact = gaussian_epsilon(1e-5, math.sqrt(1 / 4 + 1 / 16 + 1 / 25))
    assert exact <= epsilon(run, SERVER, costs=costs) <= exact * 1.002
    assert epsilon(run, SERVER, times=0, costs=costs) == pytest.approx(
        gaussian_epsilon(1e-5, math.sqrt(1 / 16 + 1 / 25)), rel=2e-3
    )


def test_stated_costs_are_at_most_added():
    run, vote = run_of(SMALL), Cost("vote", epsilon=0.5, delta=1e-6)
    alone = epsilon(replace(run, delta=0.9e-5), SERVER)
    assert epsilon(run, SERVER) < epsilon(run, SERVER, costs=[vote]) <= alone + 0.51
    assert epsilon(run, SERVER, costs=[replace(vote, delta=1e-4)]) == math.inf
    for wrong in ({}, {"noise": 1.0, "epsilon": 1.0}):
        with pytest.raises(BadInput, match="needs either noise or epsilon"):
            Cost("vote", **wrong)
    wrong = [{"noise": 0.0}, {"noise": math.inf}, {"epsilon": -1.0}, {"epsilon": 1.0, "delta": 1.0}]
    for numbers in wrong:
        with pytest.raises(BadInput):
            Cost("vote", **numbers)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"clip": "median"}, "private data"),
        ({"unit": "user", "weighting": "records"}, "weighting='uniform'"),
        ({"unit": "user", "query": "sums"}, "single records"),
        ({"unproved_hooks": ("new",)}, "new"),
    ],
)
def test_what_has_no_guarantee_has_no_epsilon(changes, why):
    run = run_of(SMALL, **changes)
    for ask in (epsilon, capped, losses):
        for who in adversaries(run).values():
            with refuses(f"no-privacy: {why}"):
                ask(run, who)
    with refuses("no-privacy"):
        epsilons_by_group(run, SERVER)


def test_without_noise_epsilon_is_infinite():
    run = run_of(SMALL, noise=0.0)
    assert epsilon(run, SERVER) == capped(run, SERVER) == math.inf
    with refuses("no-privacy: noise=0"):
        losses(run, SERVER)
    with refuses("out-of-range: rounds=-1"):
        epsilon(run_of(SMALL), SERVER, -1)
    with refuses("delta-too-small"):
        epsilon(run_of(SYNTHETIC, delta=1e-17), SERVER)


@given(
    st.floats(0.02, 30.0),
    st.integers(1, 80),
    st.integers(1, 10),
    st.sampled_from(["fixed", "poisson"]),
    st.sampled_from([0, 2]),
)
@settings(max_examples=12, deadline=None)
def test_the_noise_is_on_the_budget(target, rounds, steps, sampling, extra):
    run = run_of(SMALL, rounds=rounds, local_steps=steps, sampling=sampling, extra=extra)
    found = epsilon(replace(run, noise=solve_noise(run, target)), SERVER)
    assert 0.99 * target <= found <= target


def test_the_noise_towards_everybody_and_with_other_mechanisms():
    run = run_of(SYNTHETIC, memory=False, local_steps=1)
    costs = (Cost("a private mean", noise=8.0),)
    for who in adversaries(run, 3).values():
        noise = solve_noise(run, 0.6, who, costs)
        assert 0.99 * 0.6 <= epsilon(replace(run, noise=noise), who, costs=costs) <= 0.6
    assert solve_noise(run, 0.6, costs=costs) > 1.05 * solve_noise(run, 0.6)
    in_sums = Cost("a mean in sums", noise=16.0, alone=0.5)
    assert solve_noise(run, 0.6, ALONE, [in_sums]) == solve_noise(run, 0.6, SERVER, costs)
    noises = [solve_noise(run_of(SYNTHETIC), target) for target in (0.25, 0.5, 0.501, 1.0, 4.0)]
    assert noises == sorted(noises, reverse=True) and len(set(noises)) == 5


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_the_noise_for_a_guess_meets_it_and_not_by_much(sampling):
    run = run_of(SMALL, sampling=sampling)
    for costs in ((), (Cost("mean", noise=4.0),)):
        noise = solve_noise_for_guess(run, 0.6, costs=costs)
        of = [
            guess(losses(replace(run, noise=n), SERVER, costs=costs)) for n in (noise, noise / 1.01)
        ]
        assert 0.5989 <= of[0] <= 0.6 < of[1]


def test_a_guess_is_that_of_the_closed_form():
    """Φ(μ/2), here with μ = √(TK)/σ_g."""
    from scipy.stats import norm

    run = run_of(SMALL, unit="user", cohort_size=10, noise=10.0)
    exact = norm.cdf(math.sqrt(60) / 10 / 2)
    assert exact <= guess(losses(run, SERVER)) <= exact + 1e-3


def test_the_rounds_are_the_last_within_the_budget():
    run, costs = run_of(SYNTHETIC), (Cost("a private mean", noise=8.0),)
    rounds = largest_rounds(run, 1.0)
    assert epsilon(run, SERVER, rounds) <= 1.0 < epsilon(run, SERVER, rounds + 1)
    assert largest_rounds(run, 1.0, at_most=50) == 50
    assert largest_rounds(run, 1.0, costs=costs) < rounds


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf])
def test_no_budget_is_refused(target):
    for solve in (solve_noise, largest_rounds):
        with refuses("out-of-range: epsilon"):
            solve(run_of(SMALL), target)
    for wrong in (target, 0.5, 1.0):
        with refuses("out-of-range: per cent"):
            solve_noise_for_guess(run_of(SMALL), wrong)


def test_goals_that_nothing_meets_or_everything_are_refused():
    full = run_of(SMALL, cohort_size=10)
    for run, target, why in (
        (full, 1e-3, "one round"),
        (replace(full, noise=0.0), 1.0, "noise is 0"),
    ):
        with refuses(f"goal-not-met: {why}"):
            largest_rounds(run, target)
    with refuses("goal-not-met: up to 1e+07"):
        solve_noise(full, 0.5, costs=(Cost("mean", noise=1.0),))
    rare = run_of(SMALL, rounds=1, cohort_size=1, users=1000)
    with refuses("goal-too-weak: below 0.05"):  # sampling alone meets it, whatever the noise
        solve_noise_for_guess(rare, 0.95)
    with refuses("goal-too-weak: below 0.05"):
        solve_noise(run_of(SMALL), 1e6)


def test_one_epsilon_is_affordable_for_a_million_users():
    """Groups are looked at, not users."""
    sizes = np.random.default_rng(0).integers(50, 60, 1_000_000)
    run = run_of(SMALL, users=1_000_000, cohort_size=50, records=sizes, batch_sizes=10)
    assert len(run.groups) == 10
    same = run_of(SMALL, users=1_000_000, cohort_size=50, records=50, batch_sizes=10)
    assert epsilon(run, SERVER) == epsilon(same, SERVER)
