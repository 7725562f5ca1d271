"""The ledger: counts, prices, caps, and what it refuses."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy.settings import SMALL, run_of
from refusals import refuses

from dpscaffold.privacy import CAP, Ledger
from dpscaffold.privacy.ledger import MOST_RATES, _spent_at


def filled(run, rounds, seed=0, **options) -> Ledger:
    ledger, rng = Ledger(run, **options), np.random.default_rng(seed)
    for round in range(1, rounds + 1):
        ledger.record(
            round, ledger.allowed(rng.choice(run.users, run.cohort_size, replace=False).tolist())
        )
    return ledger


def test_counts_and_prices():
    run = run_of(SMALL)
    ledger = Ledger(run)
    for round, users in enumerate([[0, 1], [1, 2], [1, 3]], start=1):
        ledger.record(round, users)
    assert ledger.participations.tolist() == [1, 3, 1, 1] + [0] * 6 and ledger.rounds == 3
    assert ledger.of(1) == ledger.largest() == pytest.approx(CAP.epsilon(run, 3))
    assert 0 == ledger.of(9) < ledger.of(0) < ledger.of(1)
    counts, spread = ledger.distribution()
    assert counts == {0: 6, 1: 3, 3: 1}
    assert spread.max == ledger.largest() and spread.min == 0.0


def test_recording_again_changes_nothing():
    """A resumed simulation repeats its rounds: same participants, in any order, no new cost."""
    ledger = filled(run_of(SMALL), 5)
    before = ledger.to_dict()
    first = [u for u in range(10) if filled(run_of(SMALL), 1).participations[u]]
    ledger.record(1, first[::-1])
    assert ledger.to_dict() == before


@pytest.mark.parametrize("round", [0, -1, 6, 7, 10])
def test_it_never_goes_back(round):
    """Rounds rise; one that was passed over (6, 7, 10 here) cannot be entered afterwards."""
    ledger = filled(run_of(SMALL), 5)
    ledger.record(8, [0, 1])
    ledger.record(11, [0])
    before = ledger.to_dict()
    with refuses("round-out-of-order: record 12"):
        ledger.record(round, [0, 1])
    assert ledger.to_dict() == before


def test_a_user_drawn_now_and_then_has_spent_its_own_rounds():
    """A site drawn in rounds 3 and 9: two participations, while nine rounds may have drawn it."""
    ledger = Ledger(run_of(SMALL))
    ledger.record(3, [0])
    ledger.record(9, [0])
    ledger.record(3, [0])
    assert ledger.rounds == 9 and ledger.participations[0] == 2 and ledger.of(0) > 0
    again = Ledger.from_dict(ledger.to_dict())
    assert again.rounds == 9 and again.to_dict() == ledger.to_dict()
    with refuses("round-recorded"):
        again.record(9, [1])


def test_a_recorded_round_never_changes():
    ledger = Ledger(run_of(SMALL))
    ledger.record(1, [0, 1])
    with refuses("round-recorded"):
        ledger.record(1, [0, 2])
    assert ledger.participations.sum() == 2


def test_a_second_run_with_fresh_noise_costs_again():
    ledger = Ledger(run_of(SMALL))
    ledger.record(1, [0, 1])
    once = ledger.of(0)
    ledger.record(1, [0, 1], again=True)
    assert ledger.rounds == 1 and ledger.repeats == (1,) and ledger.of(0) > once
    assert Ledger.from_dict(ledger.to_dict()).repeats == (1,)


@pytest.mark.parametrize(
    ("users", "message"),
    [([0, 10], "unknown-user: user 10"), ([0, 1, 2], "wrong-participants")],
)
def test_impossible_participants_are_refused(users, message):
    ledger = Ledger(run_of(SMALL))
    with refuses(message):
        ledger.record(1, users)
    assert ledger.rounds == 0


@given(st.integers(0, 30), st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_it_reads_back_what_it_wrote(rounds, seed):
    ledger = filled(run_of(SMALL, rounds=30), rounds, seed, user_budget=40.0)
    back = Ledger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert (
        back.to_dict() == ledger.to_dict()
        and back.run == ledger.run
        and back.largest() == ledger.largest()
    )


def test_damage_is_noticed():
    saved = filled(run_of(SMALL), 5).to_dict()
    for key in [k for k in saved if k != "checksum"]:
        changed = json.loads(json.dumps(saved))
        changed[key] = [] if isinstance(changed[key], list) else 99
        with refuses("ledger-damaged"):
            Ledger.from_dict(changed)
    lowered = json.loads(json.dumps(saved))
    lowered["participations"][int(np.argmax(lowered["participations"]))] -= 1
    with refuses("ledger-damaged"):
        Ledger.from_dict(lowered)
    with refuses("ledger-damaged"):
        Ledger.from_dict({})


def test_a_capped_user_declines_and_nobody_else_does():
    run = run_of(SMALL, max_participations=2)
    ledger = Ledger(run)
    for round in (1, 2):
        ledger.record(round, [3, round + 3])
    assert ledger.declines(3) and not ledger.declines(4)
    assert ledger.allowed([9, 3, 4]) == [9, 4]
    assert filled(run, 30, seed=1).participations.max() == 2


def test_a_budget_per_user_is_never_exceeded_and_used_up():
    """The cap is the largest n with ε(n) ≤ budget: the user's ε stays below, and one more would
    not."""
    run = run_of(SMALL, rounds=200, noise=4.0)
    ledger = filled(run, 200, user_budget=2.0)
    assert ledger.largest() <= 2.0
    most = int(ledger.participations.max())
    assert ledger.declines(int(np.argmax(ledger.participations)))
    assert CAP.epsilon(run, most + 1) > 2.0


def test_a_budget_too_small_for_one_round_keeps_everyone_away():
    ledger = Ledger(run_of(SMALL, noise=0.8), user_budget=0.01)
    assert ledger.allowed(list(range(10))) == []


def test_unequal_users_pay_by_their_own_rate():
    run = run_of(
        SMALL, users=4, cohort_size=4, records=[100, 100, 100, 50], batch_sizes=[10, 20, 40, 10]
    )
    ledger = Ledger(run)
    ledger.record(1, [0, 1, 2, 3])
    ledger.record(2, [0, 1])
    values = ledger.epsilons()
    assert values == pytest.approx([ledger.of(u) for u in range(4)])
    assert ledger.largest() == values.max()
    assert values[1] > values[3]  # the same rate, once more often
    assert values[2] > values[3]  # as often, a larger rate


def test_thousands_of_sizes_are_affordable_and_rounded_up():
    rng = np.random.default_rng(0)
    records = rng.integers(50, 5000, 3000).tolist()
    run = run_of(
        SMALL,
        users=3000,
        cohort_size=30,
        records=records,
        batch_sizes=[max(1, r // 5) for r in records],
        rounds=300,
    )
    assert len({g.rate for g in run.groups}) > 10 * MOST_RATES
    ledger = filled(run, 100, user_budget=3.0)
    before = _spent_at.cache_info().misses
    values, largest = ledger.epsilons(), ledger.largest()
    assert _spent_at.cache_info().misses - before < 2 * MOST_RATES * len(set(ledger.participations))
    some = rng.choice(3000, 20, replace=False)
    exact = np.array([ledger.of(int(u)) for u in some])
    assert (values[some] >= exact - 1e-12).all() and (values[some] <= 1.1 * exact + 1e-12).all()
    assert largest <= values.max() and largest <= 3.0


def test_recording_a_round_touches_its_participants_alone():
    """A hundred thousand users' counts would be 800 kB."""
    ledger = Ledger(run_of(SMALL, users=100_000, cohort_size=20, rounds=1000))
    tracemalloc.start()
    for round in range(1, 201):
        ledger.record(round, ledger.allowed(list(range(round % 50, round % 50 + 20))))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000
