"""Users with noise of their own: what each has spent, and which bounds say so."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from privacy.explicit_pairs import gaussian_epsilon
from refusals import refuses

from dpscaffold.privacy import (
    AGGREGATE,
    BOUNDS,
    CAP,
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    USER_SAMPLING,
    Ledger,
    Mechanism,
    describe,
)
from dpscaffold.privacy.aggregate import secure_factors, worst_steps
from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION_RDP, SECURE_SUMS, aggregate_among
from dpscaffold.privacy.by_user import epsilons_by_user
from dpscaffold.privacy.composition import RunPart, together
from dpscaffold.privacy.drawn import FROM_SYSTEM
from dpscaffold.privacy.mechanism import SecureTerms

NOISES = (2.0, 5.0, 3.0, 9.0)
DELTA = 1e-5


def run_of(noises=NOISES, **changes: object) -> Mechanism:
    """Full batches of all users in every round: K = 1, so every user is hidden by a plain
    Gaussian."""
    given: dict = {
        "rounds": 6,
        "local_steps": 1,
        "users": len(noises),
        "cohort_size": len(noises),
        "records": 40,
        "batch_sizes": 40,
        "noise": min(noises),
        "louder": [noise / min(noises) for noise in noises],
        "memory": False,
        "one_sum": True,
        "delta": DELTA,
    }
    return describe(**{**given, **changes})


def exact(count: int, noise: float) -> float:
    """ε of this many plain Gaussian releases."""
    return gaussian_epsilon(DELTA, math.sqrt(count) / noise)


@pytest.mark.parametrize("bound", [RANDOM_PARTICIPATION, CAP], ids=lambda b: b.name)
def test_each_user_has_the_epsilon_of_its_own_noise(bound):
    run = run_of()
    found = epsilons_by_user(bound, run)
    assert found == pytest.approx([exact(6, noise) for noise in NOISES], rel=2e-3)
    assert bound.epsilon(run) == found.max()


def test_repeated_rounds_count_for_each():
    found = epsilons_by_user(RANDOM_PARTICIPATION, run_of(), 6, (), (1, 2))
    assert found == pytest.approx([exact(9, noise) for noise in NOISES], rel=2e-3)


def test_the_ledger_counts_each_users_own_noise():
    run = run_of()
    ledger = Ledger(run)
    for number, users in enumerate([[0, 1, 2, 3], [1, 3], [1], [1], [1, 2]], 1):
        ledger.record(number, users)
    counts = [1, 5, 2, 2]
    want = [exact(n, noise) for n, noise in zip(counts, NOISES, strict=True)]
    assert [ledger.of(user) for user in range(4)] == pytest.approx(want, rel=2e-3)
    assert ledger.epsilons() == pytest.approx(want, rel=2e-3)
    assert ledger.largest() == pytest.approx(max(want), rel=2e-3)
    assert Ledger.from_dict(ledger.to_dict()).largest() == ledger.largest()


def test_no_user_is_stated_by_anothers_rate():
    """The largest rate and the least noise belong to different users; none has both."""
    run = run_of(
        (4.0, 12.0), users=2, cohort_size=1, records=[100, 100], batch_sizes=[10, 60], rounds=30
    )
    alone = [
        RANDOM_PARTICIPATION.epsilon(
            describe(
                rounds=30,
                local_steps=1,
                users=2,
                cohort_size=1,
                records=100,
                batch_sizes=batch,
                noise=noise,
                delta=DELTA,
            )
        )
        for batch, noise in ((10, 4.0), (60, 12.0))
    ]
    assert epsilons_by_user(RANDOM_PARTICIPATION, run) == pytest.approx(alone)
    assert RANDOM_PARTICIPATION.epsilon(run) == max(alone)
    assert RANDOM_PARTICIPATION_RDP.epsilon(run) >= max(alone)


WEIGHTS = (1.0, 0.2, 0.7, 0.4, 0.9)
LOUD = (1.0, 3.0, 1.5, 2.0, 1.2)
BATCHES = (10, 25, 40, 8, 16)


def weighted(cohort: int, **more: object) -> Mechanism:
    return run_of(
        tuple(2.0 * loud for loud in LOUD),
        cohort_size=cohort,
        records=[50] * 5,
        batch_sizes=list(BATCHES),
        weighting="noise",
        weights=WEIGHTS,
        **more,
    )


def by_hand(user: int, hiding: int, users: int = 5) -> float:
    """√(Σ(σ_j w_j/b_j)²)/(w_i/b_i) over the quietest set of ``hiding`` users with ``user``."""
    loud = [2.0 * LOUD[j] * WEIGHTS[j] / BATCHES[j] for j in range(users)]
    others = [j for j in range(users) if j != user]
    sets = combinations(others, hiding - 1)
    least = min(math.fsum(loud[j] ** 2 for j in (user, *chosen)) for chosen in sets)
    return math.sqrt(least) / (WEIGHTS[user] / BATCHES[user])


@pytest.mark.parametrize(("cohort", "colluders"), [(5, 0), (3, 0), (1, 0), (5, 2), (4, 1)])
def test_the_aggregate_counts_the_noise_that_others_really_add(cohort, colluders):
    run = weighted(cohort)
    for user in range(5):
        place = run.membership[user]
        ((rate, noise),) = worst_steps(replace(run, protects=(place,)), colluders)
        assert rate == pytest.approx(BATCHES[user] / 50)
        assert noise == pytest.approx(by_hand(user, cohort - colluders))
    bound = AGGREGATE if not colluders else aggregate_among(colluders)
    assert bound.epsilon(run) == epsilons_by_user(bound, run).max()


@pytest.mark.parametrize(("least", "colluders"), [(5, 0), (5, 2), (3, 1), (4, 1)])
def test_secure_sums_count_the_noise_of_the_quietest_list(least, colluders):
    run = weighted(5, secure=SecureTerms(colluders, least))
    want = [
        min(
            math.sqrt((5 - colluders) / (n - colluders)) * by_hand(user, n - colluders)
            for n in range(least, 6)
        )
        for user in range(5)
    ]
    found = 2.0 * secure_factors(run)[list(run.membership)]
    assert found == pytest.approx(want)
    ledger = Ledger(run)
    ledger.record(1, range(5))
    assert ledger.largest() == pytest.approx(max(ledger.of(user) for user in range(5)))
    assert SECURE_SUMS.epsilon(run) == epsilons_by_user(SECURE_SUMS, run).max()


def test_the_ledger_looks_at_noise_besides_rates():
    """The user with the larger rate has so much noise that the other one spends more."""
    ledger = Ledger(run_of((9.0, 2.0), batch_sizes=[20, 10]))
    for number in range(1, 7):
        ledger.record(number, range(2))
    assert ledger.of(1) > 2 * ledger.of(0)
    assert ledger.largest() == ledger.epsilons().max() == ledger.of(1)


def test_the_ledger_of_secure_sums_looks_at_every_size():
    """Equal rates and counts, unequal batches: the small site is hidden least by the sum."""
    run = describe(
        rounds=4,
        local_steps=1,
        users=6,
        cohort_size=6,
        records=[1000, 1000, 1000, 1000, 1000, 100],
        batch_sizes=[200, 200, 200, 200, 200, 20],
        noise=1.0,
        memory=False,
        one_sum=True,
        delta=DELTA,
        secure=SecureTerms(1, 6),
    )
    ledger = Ledger(run)
    for number in range(1, 5):
        ledger.record(number, range(6))
    every = [ledger.of(user) for user in range(6)]
    assert every[5] > 2 * every[0]
    assert ledger.largest() == ledger.epsilons().max() == max(every)


def test_bounds_that_assume_equal_noise_refuse():
    run = run_of(unit="user", memory=False, hidden_draw=True)
    assert USER_SAMPLING.applies(replace(run, groups=(replace(run.groups[0], users=4),))) is None
    for bound in (USER_SAMPLING, PAPER_THIRD_PARTY):
        assert bound.applies(run_of(hidden_draw=True, unit=bound.proved_for[0][0])) is not None
    assert "equal noise" in USER_SAMPLING.applies(run)
    assert "equal noise" in PAPER_THIRD_PARTY.applies(run_of())
    assert {b.name for b in BOUNDS.values() if not b.unequal} == {
        "user_sampling",
        "paper_third_party",
    }


@pytest.mark.parametrize("view", ["server", "ledger"])
def test_several_runs_together_are_at_least_what_each_user_spent(view):
    """A user who is quiet in one run may be loud in the other; their laws do not mix."""
    parts = []
    for name, noises in (("a", (2.0, 6.0)), ("b", (6.0, 2.0))):
        run = run_of(noises, rounds=3)
        ledger = Ledger(run)
        for number in (1, 2, 3):
            ledger.record(number, [0, 1])
        bounds = {"server": RANDOM_PARTICIPATION}
        parts.append(
            RunPart(name, run, 3, bounds, ledger, secret=True, drawn=FROM_SYSTEM, data="d")
        )
    true = gaussian_epsilon(2 * DELTA, math.sqrt(3 / 2.0**2 + 3 / 6.0**2))
    for fixed in (False, True):
        assert together(parts, fixed_in_advance=fixed).epsilon[view] >= true * (1 - 1e-6)


def test_a_description_is_read_back_and_says_nothing_new_of_equal_users():
    run = weighted(3)
    assert Mechanism.from_dict(run.to_dict()) == run
    plain = describe(
        rounds=2, local_steps=1, users=2, cohort_size=1, records=4, batch_sizes=2, noise=1
    )
    assert set(plain.to_dict()["groups"][0]) == {"records", "batch", "users"}
    assert "protects" not in plain.to_dict()


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("out-of-range", {"louder": [1.5, 2.0, 3.0, 4.0]}),
        ("out-of-range", {"louder": [1.0, 0.5, 3.0, 4.0]}),
        ("out-of-range", {"louder": [1.0, math.inf, 3.0, 4.0]}),
        ("count-differs", {"louder": [1.0, 2.0]}),
        ("missing-argument", {"weighting": "noise"}),
        ("missing-argument", {"weights": [1.0] * 4}),
        ("out-of-range", {"weighting": "noise", "weights": [1.0, 0.0, 1.0, 1.0]}),
    ],
)
def test_numbers_that_describe_no_run_are_refused(code, changes):
    with refuses(code):
        run_of(**changes)


def test_a_user_is_never_stated_below_what_its_noise_spends():
    """Random rates, noises and counts: the largest is the largest, and rounding goes upwards."""
    rng = np.random.default_rng(3)
    users = 60
    records = rng.integers(20, 400, users).tolist()
    run = describe(
        rounds=5,
        local_steps=2,
        users=users,
        cohort_size=20,
        records=records,
        batch_sizes=[max(1, r // 6) for r in records],
        noise=3.0,
        louder=[1.0, *rng.uniform(1, 4, users - 1)],
        delta=DELTA,
    )
    ledger = Ledger(run)
    for number in range(1, 6):
        ledger.record(number, rng.choice(users, 20, replace=False))
    some = rng.choice(users, 12, replace=False)
    each = np.array([ledger.of(int(user)) for user in some])
    assert (ledger.epsilons()[some] >= each - 1e-12).all()
    assert ledger.largest() >= each.max()


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_many_groups_are_never_hidden_better_together_than_each_alone(sampling):
    """Beyond sixteen groups of which none is worse in rate and noise, neighbours are merged: to the
    larger rate and to the smaller noise."""
    batches = list(range(6, 46))  # a larger rate with more noise: no user is worse in both
    run = run_of(
        tuple(1.0 + 0.08 * batch for batch in batches),
        cohort_size=10,
        records=[50] * 40,
        batch_sizes=batches,
        sampling=sampling,
    )
    merged = worst_steps(run)
    alone = [worst_steps(replace(run, protects=(place,))) for place in range(40)]
    assert len(merged) <= 16
    for ((rate, noise),) in alone:
        assert any(r >= rate and s <= noise for r, s in merged)
    for bound in (RANDOM_PARTICIPATION, AGGREGATE, CAP):
        worst = max(bound.epsilon(replace(run, protects=(place,))) for place in (0, 1, 2, 20, 39))
        assert worst <= bound.epsilon(run) < 1.3 * epsilons_by_user(bound, run).max()
