"""Whose noise may be counted: what every adversary sees, by brute force over all who may be with a
record, and every combination that no theorem covers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from privacy.explicit_pairs import composed_epsilon, gaussian_epsilon, step_pair
from privacy.settings import SMALL, run_of
from refusals import refuses

from dpscaffold.privacy import (
    ALONE,
    SERVER,
    THIRD_PARTY,
    Ledger,
    Mechanism,
    SecureSums,
    adversaries,
    capped,
    describe,
    epsilon,
    epsilons_by_group,
    noise_seen,
    participants,
    solve_noise,
)
from dpscaffold.privacy.accounting import rounding_cost
from dpscaffold.privacy.solve import largest_rounds

#: Users of whom no two are alike: σ_i over σ_g, weights, R_i and b_i.
LOUD = (1.0, 3.0, 1.5, 2.0, 1.2, 1.0)
WEIGHTS = (1.0, 0.2, 0.7, 0.4, 0.9, 0.5)
RECORDS = (50, 60, 80, 80, 200, 30)
BATCHES = (10, 25, 40, 8, 16, 15)
KINDS = {
    "equal noise": {},
    "by records": {"weighting": "records"},
    "unequal noise": {"weighting": "noise", "weights": WEIGHTS, "louder": LOUD},
    "whole users": {"unit": "user", "louder": LOUD},
}


def unequal(kind: str, cohort: int, **more: object) -> Mechanism:
    """A sum over users of whom no two are alike."""
    plan = {
        "rounds": 6,
        "local_steps": 1,
        "users": 6,
        "cohort_size": cohort,
        "records": RECORDS,
        "batch_sizes": BATCHES,
        "noise": 2.0,
        "memory": False,
        "one_sum": True,
        "delta": 1e-5,
    }
    return describe(**{**plan, **KINDS[kind], **more})


def influence(kind: str) -> list[float]:
    """How far one record of each user moves the sum, in units of 2C."""
    if kind == "whole users":
        return [1.0] * 6
    weights = {"by records": RECORDS, "unequal noise": WEIGHTS}.get(kind, (1.0,) * 6)
    return [w / b for w, b in zip(weights, BATCHES, strict=True)]


def least_noise(run: Mechanism, kind: str, lists: list[int], helpers: int) -> list[float]:
    """σ over what a record can change, the least over all lists of these lengths and over all sets
    of helpers whose noise is known, for each user."""
    moved, quieter = influence(kind), run.secure is None
    louder = LOUD if "louder" in KINDS[kind] else (1.0,) * 6
    found = [math.inf] * 6
    for size in lists:
        share = 1.0 if quieter else (run.cohort_size - helpers) / (size - helpers)
        for members in itertools.combinations(range(6), size):
            for user in members:
                others = [j for j in members if j != user]
                for known in itertools.combinations(others, helpers):
                    honest = {user, *others} - set(known)
                    total = sum((2.0 * louder[j] * moved[j]) ** 2 for j in honest)
                    found[user] = min(found[user], math.sqrt(share * total) / moved[user])
    return found


def of_users(run: Mechanism, multipliers: np.ndarray) -> list[float]:
    return [float(multipliers[run.place(user)]) for user in range(run.users)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cohort", "colluders"), [(6, 0), (3, 0), (1, 0), (6, 2), (4, 1), (4, 2)])
def test_the_quietest_companions_of_every_set(kind, cohort, colluders):
    run = unequal(kind, cohort)
    who = participants(colluders) if colluders else THIRD_PARTY
    seen = noise_seen(run, who)
    assert seen.theorem == "2" or cohort == 1
    assert of_users(run, seen.multipliers) == pytest.approx(
        least_noise(run, kind, [cohort], colluders)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "least"), [(0, 5), (1, 5), (2, 4), (0, 2), (1, 3)])
def test_the_quietest_of_all_lists_of_a_secure_sum(kind, k, least):
    run = unequal(kind, 5, secure=SecureSums(k, least))
    expected = least_noise(run, kind, list(range(least, 6)), k)
    for who in (adversaries(run)["server"], THIRD_PARTY, *[participants(k)] * (k > 0)):
        seen = noise_seen(run, who)
        assert seen.theorem == "4"
        assert of_users(run, seen.multipliers) == pytest.approx(expected)
    for who in (ALONE, participants(k + 1)):
        own = noise_seen(run, who)
        assert own.theorem == "1" and (own.multipliers == noise_seen(run, SERVER).multipliers).all()


@pytest.mark.parametrize(
    ("left", "who"), [(8, THIRD_PARTY), *((8 - k, participants(k)) for k in (1, 3, 6))]
)
def test_equal_users_in_closed_form(left, who):
    """Everyone in every round with all records: T Gaussians of multiplier σ_g·√(m − k)."""
    plan = {**SMALL, "users": 8, "cohort_size": 8, "batch_sizes": 100, "noise": 6.0}
    run = run_of(plan, memory=False, local_steps=1)
    exact = gaussian_epsilon(1e-5, math.sqrt(run.rounds / left) / 6.0)
    assert exact <= epsilon(run, who) <= exact * 1.003
    secure = replace(run, secure=SecureSums(8 - left, 8))
    if left < 8:
        assert exact <= epsilon(secure, adversaries(secure)["server"]) <= exact * 1.003


SUM = run_of(SMALL, memory=False, local_steps=1, cohort_size=4)
SECURE = replace(SUM, secure=SecureSums(1, 3))


@pytest.mark.parametrize("run", [SUM, SECURE], ids=["sums", "secure sums"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"memory": True}, "memory between rounds"),
        ({"local_steps": 2}, "second local step"),
        ({"one_sum": False}, "not known to be one vector"),
    ],
)
def test_what_is_no_sum_of_gaussian_queries_is_hidden_by_own_noise_alone(run, changes, why):
    other = replace(run, **changes)
    own = epsilon(other, ALONE)
    for who in adversaries(other).values():
        seen = noise_seen(other, who)
        assert (seen.multipliers == run.noise).all() and seen.theorem == "1"
        assert seen.not_more == "it sees single uploads" or why in seen.not_more
        assert epsilon(other, who) == own
        ledger = Ledger(other)
        ledger.record(1, [0])
        assert ledger.largest(who) == ledger.largest(ALONE)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"declines": "a site's policy"}, "a site's policy"), ({"extra": 1}, "fresh noise")],
)
def test_theorem_2_needs_everybody_exactly_once(changes, why):
    """Whoever stays away adds no noise; secure sums make up for it, list by list."""
    run = replace(SUM, **changes)
    for who in (THIRD_PARTY, participants(1)):
        assert noise_seen(SUM, who).theorem == "2"
        seen = noise_seen(run, who)
        assert why in seen.not_more and (seen.multipliers == 2.0).all()
        assert epsilon(run, who) == epsilon(run, SERVER)
    assert noise_seen(replace(run, secure=SECURE.secure), THIRD_PARTY).theorem == "4"


def test_the_server_sees_uploads_whatever_else_holds():
    for run in (SUM, unequal("unequal noise", 3)):
        assert (noise_seen(run, SERVER).multipliers >= run.noise).all()
        assert noise_seen(run, SERVER).theorem == "1"
        assert epsilon(run, THIRD_PARTY) < epsilon(run, participants()) < epsilon(run, SERVER)


@pytest.mark.parametrize("colluders", [3, 4, 9])
def test_from_m_minus_one_on_only_the_own_noise_is_left(colluders):
    seen = noise_seen(SUM, adversaries(SUM, colluders)["participant"])
    assert seen.theorem == "1" and "may collude" in seen.not_more
    assert (seen.multipliers == SUM.noise).all()


@pytest.mark.parametrize("colluders", [0, -1, 10, 11])
def test_nobody_or_everybody_is_refused(colluders):
    with refuses(f"out-of-range: colluders={colluders} "):
        adversaries(SUM, colluders)


def test_a_single_user_has_no_companions():
    alone = run_of(SMALL, users=1, cohort_size=1, memory=False, local_steps=1)
    for who in adversaries(alone).values():
        assert epsilon(alone, who) == epsilon(alone, SERVER)


def test_who_there_is():
    assert list(adversaries(SUM)) == ["server", "third_party", "participant"]
    assert list(adversaries(SECURE)) == ["server", "alone", "third_party", "participant"]
    server = adversaries(SECURE)["server"]
    assert "sums over at least 3" in server.words and "at most 1" in server.words


class TestDeclining:
    """Nine users with batches of 1 in 2 and one with 1 in 3, all drawn in every round. A budget per
    user lets the nine take part less often, so that the tenth ends alone in the sum."""

    noise, delta, budget = 4.0, 1e-5, 4.0

    def described(self, rounds: int) -> Mechanism:
        sizes = {"users": 10, "cohort_size": 10, "records": [2] * 9 + [3], "batch_sizes": 1}
        sums = {"local_steps": 1, "memory": False, "one_sum": True}
        return describe(rounds=rounds, noise=self.noise, delta=self.delta, **sizes, **sums)

    def test_a_user_may_end_alone_in_the_sum(self):
        """The exact ε of one pair of datasets in the rounds in which the tenth is alone is above
        what the sum of ten noises would give, and not above what is stated."""
        ledger, counts = Ledger(self.described(1000), user_budget=self.budget), []
        while active := ledger.allowed(range(10)):
            ledger.record(len(counts) + 1, active)
            counts.append(len(active))
        alone = sum(count == 1 for count in counts)
        pair = step_pair(1 / 3, self.noise, "aligned")
        exact = composed_epsilon(self.delta, *pair, 1, 1.0, alone)
        run = self.described(len(counts))
        assert epsilon(run, THIRD_PARTY) < exact
        stated = Ledger(run, user_budget=self.budget).run
        assert stated.declines == "user_epsilon" and epsilon(stated, THIRD_PARTY) >= exact


class TestUnequalNoise:
    noises = (2.0, 5.0, 3.0, 9.0)

    def run(self, noises: tuple[float, ...] = noises, **changes: object) -> Mechanism:
        """Full batches of all users in every round: every user is hidden by a plain Gaussian."""
        least = min(noises)
        numbers = {
            **SMALL,
            "users": len(noises),
            "cohort_size": len(noises),
            "rounds": 6,
            "local_steps": 1,
            "batch_sizes": 100,
            "noise": least,
            "louder": [noise / least for noise in noises],
        }
        return run_of(numbers, **changes)

    def exact(self, count: int, noise: float) -> float:
        return gaussian_epsilon(1e-5, math.sqrt(count) / noise)

    def test_each_user_has_the_epsilon_of_its_own_noise(self):
        for extra in (0, 3):
            run = self.run(extra=extra)
            found = epsilons_by_group(run, SERVER)
            exact = [self.exact(6 + extra, noise) for noise in self.noises]
            assert found == pytest.approx(exact, rel=2e-3)
            assert epsilon(run, SERVER) == max(found) == pytest.approx(capped(run, SERVER))

    def test_the_ledger_counts_each_users_own_noise(self):
        ledger = Ledger(self.run())
        for number, users in enumerate([[0, 1, 2, 3], [1, 3], [1], [1], [1, 2]], 1):
            ledger.record(number, users)
        pairs = zip([1, 5, 2, 2], self.noises, strict=True)
        exact = [self.exact(count, noise) for count, noise in pairs]
        assert [ledger.of(user) for user in range(4)] == pytest.approx(exact, rel=2e-3)
        assert ledger.epsilons() == pytest.approx(exact, rel=2e-3)
        assert ledger.largest() == pytest.approx(max(exact), rel=2e-3)

    def test_no_user_is_stated_by_anothers_rate(self):
        """The largest rate and the least noise belong to different users; none has both."""
        more = {"cohort_size": 1, "batch_sizes": [10, 60], "rounds": 30}
        run = self.run((4.0, 12.0), **more)
        alone = [
            epsilon(self.run((noise,) * 2, **{**more, "batch_sizes": batch}), SERVER)
            for noise, batch in ((4.0, 10), (12.0, 60))
        ]
        assert epsilons_by_group(run, SERVER) == pytest.approx(alone)
        assert epsilon(run, SERVER) == max(alone)

    def test_the_ledger_looks_at_noise_besides_rates(self):
        """The user with the larger rate has so much noise that the other one spends more."""
        ledger = Ledger(self.run((9.0, 2.0), batch_sizes=[20, 10]))
        for number in range(1, 7):
            ledger.record(number, range(2))
        assert ledger.of(1) > 2 * ledger.of(0)
        assert ledger.largest() == ledger.epsilons().max() == ledger.of(1)


def thirty(noise: float = 1.4088, **changes: object) -> Mechanism:
    """30 sites with 400 records, all in every round, s = 0.2, T = 400, in secure sums."""
    plan = {
        "rounds": 400,
        "local_steps": 1,
        "users": 30,
        "cohort_size": 30,
        "records": 400,
        "batch_sizes": 80,
        "memory": False,
        "one_sum": True,
        "sampling": "poisson",
        "secure": SecureSums(colluders=1, least=30),
    }
    return describe(noise=noise, **{**plan, **changes})  # type: ignore[arg-type]


def seen_by(run: Mechanism, name: str = "server") -> float:
    return epsilon(run, adversaries(run)[name])


class TestSecureSums:
    def test_the_golden_values(self):
        """30 sites, one colluder, ε = 1: σ_g falls from 7.59 to 1.41. 20 attempts beyond the rounds
        make it 1.03, one beyond every round 1.46."""
        noise = solve_noise(thirty(), 1.0, adversaries(thirty())["server"])
        own = solve_noise(thirty(), 1.0, ALONE)
        assert (own, noise) == pytest.approx((7.59, 1.41), abs=0.005)
        assert noise == pytest.approx(own / math.sqrt(29), rel=1e-3)
        found = [seen_by(thirty(noise, extra=n)) for n in (0, 20, 400)]
        assert found == pytest.approx([1.0, 1.027, 1.462], abs=0.001)

    @pytest.mark.parametrize("sampling", ["fixed", "poisson"])
    @pytest.mark.parametrize("unit", ["record", "user"])
    def test_it_is_the_same_run_with_the_noise_of_the_honest(self, sampling, unit):
        more = {"sampling": sampling, "unit": unit, "cohort_size": 12}
        run = thirty(2.0, **more, secure=SecureSums(2, 12))
        other = thirty(2.0 * math.sqrt(10), **more, secure=None)
        assert epsilon(other, SERVER) * (1 - 1e-9) <= seen_by(run)
        assert seen_by(run) == pytest.approx(epsilon(other, SERVER), rel=1e-4)

    def test_shorter_lists_never_lower_epsilon_and_attempts_and_colluders_raise_it(self):
        values = [seen_by(thirty(secure=SecureSums(1, n))) for n in (3, 10, 30)]
        assert values == pytest.approx([values[0]] * 3, rel=1e-9)
        more = [seen_by(thirty(secure=SecureSums(k, 30))) for k in (0, 1, 5, 20)]
        assert more == sorted(more) and more[0] < more[-1]
        for name, who in adversaries(thirty()).items():
            assert seen_by(thirty(extra=5), name) > seen_by(thirty(), name)
            assert capped(thirty(extra=5), who) == epsilon(thirty(), who, times=405)

    def test_drawing_sites_pays_but_attempts_do_not(self):
        """With l < 1 an attempt is a whole participation, not one with probability l."""
        run = thirty(cohort_size=6, secure=SecureSums(1, 6))
        assert seen_by(replace(run, extra=400)) > 1.5 * seen_by(replace(run, rounds=800))

    def test_the_ledger_of_secure_sums_looks_at_every_size(self):
        """Equal rates and counts, unequal batches: the small site is hidden least by the sum."""
        sizes = {"records": [1000] * 5 + [100], "batch_sizes": [200] * 5 + [20]}
        run = run_of(SMALL, memory=False, local_steps=1, users=6, cohort_size=6, **sizes,
                     secure=SecureSums(1, 6))  # fmt: skip
        ledger = Ledger(run)
        for number in range(1, 5):
            ledger.record(number, range(6))
        every = [ledger.of(user) for user in range(6)]
        assert every[5] > 2 * every[0]
        assert ledger.largest() == ledger.epsilons().max() == max(every)
        assert ledger.largest() == pytest.approx(epsilon(run, adversaries(run)["server"], times=4))
        assert ledger.largest(ALONE) == pytest.approx(epsilon(run, ALONE, times=4))

    def test_rounding_costs_nothing_until_there_are_very_many_members(self):
        """It is part of every law, and refuses no number of sites silently."""
        assert rounding_cost(100, 10**6) == 0.0
        assert 0 < rounding_cost(100_000, 10**6) < 1e-10
        assert rounding_cost(1_000_000, 10**6) == 1.0
        many = thirty(users=10**6, cohort_size=10**6, secure=SecureSums(1, 10**6))
        with refuses("delta-too-small"):
            seen_by(many)
        assert epsilon(many, ALONE) > 0


@pytest.mark.parametrize("name", ["server", "third_party", "participant"])
@pytest.mark.parametrize("unit", ["record", "user"])
@pytest.mark.parametrize("steps", [1, 3])
def test_what_is_planned_is_what_is_stated(name, unit, steps):
    """The noise that was solved for, and the rounds, keep ε towards that adversary."""
    plan = run_of(SMALL, users=40, cohort_size=8, unit=unit, local_steps=steps, memory=False)
    who = adversaries(plan)[name]
    run = replace(plan, noise=solve_noise(plan, 1.0, who))
    assert 0.99 <= epsilon(run, who) <= 1.0 and largest_rounds(run, 1.0, who) >= run.rounds
