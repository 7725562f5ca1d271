"""The ledger: counts, what they cost, caps, and what it refuses."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy.settings import SMALL, run_of
from refusals import refuses

from dpscaffold.privacy import SERVER, Cost, Ledger, adversaries, epsilon
from dpscaffold.privacy.accounting import MOST_RATES, spent, step_epsilon
from dpscaffold.privacy.ledger import participations_within


def filled(run, rounds, seed=0, **options) -> Ledger:
    ledger, rng = Ledger(run, **options), np.random.default_rng(seed)
    for round in range(1, rounds + 1):
        drawn = rng.choice(run.users, run.cohort_size, replace=False).tolist()
        ledger.record(round, ledger.allowed(drawn))
    return ledger


def state_of(ledger: Ledger) -> tuple:
    return ledger.participations.tolist(), ledger.rounds, ledger.extra


def test_counts_and_prices():
    run = run_of(SMALL)
    ledger = Ledger(run)
    assert ledger.largest() == 0.0 == max(law.epsilon(run.delta) for law in ledger.losses())
    for round, users in enumerate([[0, 1], [1, 2], [1, 3]], start=1):
        ledger.record(round, users)
    assert ledger.participations.tolist() == [1, 3, 1, 1] + [0] * 6 and ledger.rounds == 3
    assert ledger.of(1) == ledger.largest() == epsilon(run, SERVER, times=3) == spent(run, 3)
    assert 0 == ledger.of(9) < ledger.of(0) < ledger.of(1)
    assert ledger.epsilons() == pytest.approx([ledger.of(user) for user in range(10)])
    assert max(law.epsilon(run.delta) for law in ledger.losses()) == ledger.largest()
    other = ledger.at_delta(1e-7)
    assert other.largest() > ledger.largest() and other.run.delta == 1e-7


def test_recording_again_changes_nothing():
    """A resumed simulation repeats its rounds: same participants, in any order, no new cost."""
    ledger = filled(run_of(SMALL), 5)
    before = state_of(ledger)
    first = np.flatnonzero(filled(run_of(SMALL), 1).participations)
    ledger.record(1, first[::-1])
    assert state_of(ledger) == before
    with refuses("round-recorded: round=1 … other participants"):
        ledger.record(1, [int(first[0])])
    assert state_of(ledger) == before


@pytest.mark.parametrize("round", [0, -1, 6, 7, 10])
def test_it_never_goes_back(round):
    """Rounds rise; one that was passed over (6, 7, 10 here) cannot be entered afterwards."""
    ledger = filled(run_of(SMALL), 5)
    ledger.record(8, [0, 1])
    ledger.record(11, [0])
    before = state_of(ledger)
    with refuses("round-out-of-order: record 12"):
        ledger.record(round, [0, 1])
    assert state_of(ledger) == before


def test_a_second_run_with_fresh_noise_costs_again():
    """Whoever took part, in the first attempt or in the second, has spent a participation; over the
    draw the run has an attempt more, or as many as it allowed for."""
    ledger = Ledger(run_of(SMALL))
    ledger.record(1, [0, 1])
    once = ledger.of(0)
    ledger.record(1, [0, 2], again=True)
    assert state_of(ledger) == ([2, 1, 1] + [0] * 7, 1, 1)
    assert ledger.of(0) == spent(ledger.run, 2) > once == ledger.of(2)
    assert ledger.released.extra == 1 and ledger.run.extra == 0
    assert Ledger(run_of(SMALL, extra=5)).released.extra == 5


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ([0, 10], "unknown-user: user 10"),
        ([-1, 0], "unknown-user"),
        ([0, 1, 2], "wrong-participants: 3 participants … draws 2"),
    ],
)
def test_impossible_participants_are_refused(users, message):
    ledger = Ledger(run_of(SMALL))
    with refuses(message):
        ledger.record(1, users)
    assert ledger.rounds == 0 == ledger.participations.sum()


@given(st.integers(1, 3), st.floats(0.05, 8.0), st.integers(0, 10_000))
@settings(max_examples=12, deadline=None)
def test_a_budget_per_user_is_never_exceeded_and_used_up(cohort, budget, seed):
    """The cap is the largest n with ε(n) ≤ budget: a user's ε stays below, and one more
    participation would not. Nobody else declines."""
    run = run_of(SMALL, cohort_size=cohort, rounds=60, noise=4.0)
    ledger = filled(run, 60, seed, user_budget=budget)
    assert ledger.largest() <= budget and ledger.run.declines == "user_epsilon"
    for user in range(10):
        times = int(ledger.participations[user])
        stays = spent(run, times + 1) > budget
        assert (ledger.allowed([user]) == []) == stays
        assert ledger.allowed([user]) == [user] * (not stays)


def test_what_was_spent_before_training_is_in_every_users_epsilon_and_cap():
    run, costs = run_of(SMALL, rounds=60, noise=4.0), [Cost("mean", noise=4.0)]
    ledger = filled(run, 20).charged(costs)
    assert ledger.of(0) == spent(run, int(ledger.participations[0]), costs)
    never = Ledger(run, costs=costs)
    assert never.epsilons().min() == never.largest() == spent(run, 0, costs) > 0
    plain, less = (participations_within(run, 2.0, 200, tuple(more)) for more in ((), costs))
    assert spent(run, less, costs) <= 2.0 < spent(run, less + 1, costs) and 0 < less < plain
    capped = Ledger(run, user_budget=2.0, costs=costs)
    for round in range(1, less + 1):
        assert capped.allowed([0]) == [0]
        capped.record(round, [0])
    assert capped.allowed([0]) == []
    with refuses("budget-too-small: mean alone costs"):
        Ledger(run, user_budget=0.1, costs=costs).allowed([0])
    with refuses("out-of-range: user_budget=0"):
        Ledger(run, user_budget=0.0)


def test_unequal_users_pay_by_their_own_rate():
    sizes = {"records": [100, 100, 100, 50], "batch_sizes": [10, 20, 40, 10]}
    ledger = Ledger(run_of(SMALL, users=4, cohort_size=4, **sizes))
    ledger.record(1, [0, 1, 2, 3])
    ledger.record(2, [0, 1])
    values = ledger.epsilons()
    assert values == pytest.approx([ledger.of(u) for u in range(4)])
    assert ledger.largest() == values.max()
    assert values[1] > values[3]  # the same rate, once more often
    assert values[2] > values[3]  # as often, a larger rate
    assert ledger.most_by_group().tolist() == [2, 2, 1, 1]


def test_thousands_of_sizes_are_affordable_and_rounded_up():
    """At most a few rates are evaluated for each count, whoever holds how many records."""
    rng = np.random.default_rng(0)
    records = rng.integers(50, 5000, 3000).tolist()
    batches = [max(1, r // 5) for r in records]
    louder = [1.0, *rng.uniform(1, 3, 2999)]
    run = run_of(SMALL, users=3000, cohort_size=30, records=records, batch_sizes=batches,
                 louder=louder, rounds=300)  # fmt: skip
    assert len(run.groups) > 10 * MOST_RATES
    ledger = filled(run, 100, user_budget=3.0)
    before = step_epsilon.cache_info().misses
    values = ledger.epsilons()
    counts = len(set(ledger.participations.tolist()))
    assert step_epsilon.cache_info().misses - before < 2 * MOST_RATES * counts
    some = rng.choice(3000, 20, replace=False)
    exact = np.array([ledger.of(int(u)) for u in some])
    assert (values[some] >= exact - 1e-12).all() and (values[some] <= 1.2 * exact + 1e-12).all()
    assert exact.max() <= ledger.largest() <= values.max() and ledger.largest() <= 3.0


def test_what_is_shown_while_a_run_goes_on_is_never_too_small():
    ledger = Ledger(run_of(SMALL, rounds=400, noise=8.0))
    shown = []
    for round in range(1, 121):
        ledger.record(round, [0])
        shown.append(ledger.shown())
        assert ledger.largest() <= shown[-1] <= 1.1 * ledger.largest()
    assert shown == sorted(shown) and len(set(shown)) < 40


def test_a_ledger_towards_others_counts_the_noise_of_others():
    run = run_of(SMALL, memory=False, local_steps=1, cohort_size=4)
    ledger = filled(run, 5)
    for who in adversaries(run).values():
        most = int(ledger.participations.max())
        assert ledger.largest(who) == pytest.approx(epsilon(run, who, times=most))


def test_recording_a_round_touches_its_participants_alone():
    """A hundred thousand users' counts would be 800 kB."""
    ledger = Ledger(run_of(SMALL, users=100_000, cohort_size=20, rounds=1000))
    tracemalloc.start()
    for round in range(1, 201):
        ledger.record(round, ledger.allowed(list(range(round % 50, round % 50 + 20))))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000
