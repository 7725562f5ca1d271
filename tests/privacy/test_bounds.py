"""Which bound applies to what, how they are ordered, and how they move."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, SYNTHETIC, run_of, small_runs
from refusals import refuses

from dpscaffold.privacy import (
    AGGREGATE,
    BOUNDS,
    CAP,
    LEDGER,
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    RANDOM_PARTICIPATION_RDP,
    USER_SAMPLING,
    Cost,
    bound_for,
    bound_named,
)
from dpscaffold.privacy.aggregate import worst_steps

runs = small_runs(0.8)


@given(runs)
@settings(max_examples=20, deadline=None)
def test_loss_distributions_are_below_renyi(run):
    """The same mechanism, accounted twice: PLD ≤ RDP."""
    assert (
        RANDOM_PARTICIPATION.epsilon(run)
        <= RANDOM_PARTICIPATION_RDP.epsilon(run) * (1 + 1e-6) + 1e-9
    )


@given(runs)
@settings(max_examples=40, deadline=None)
def test_epsilon_is_monotone_in_everything(run):
    """More rounds, steps, users per round, records per batch, or less noise never cost less.

    Half a per cent is allowed for: the grid, and with it the rounding up, depends on noise and
    batch.
    """
    base = RANDOM_PARTICIPATION.epsilon(run) * 0.995
    batch = run.worst.batch
    more = [
        replace(run, rounds=run.rounds + 1),
        replace(run, local_steps=run.local_steps + 1),
        replace(run, cohort_size=run.cohort_size + 1),
        run_of(
            SMALL,
            rounds=run.rounds,
            local_steps=run.local_steps,
            cohort_size=run.cohort_size,
            batch_sizes=batch + 10,
            noise=run.noise,
            sampling=run.sampling,
        ),
        replace(run, noise=run.noise / 1.1),
    ]
    for other in more:
        assert RANDOM_PARTICIPATION.epsilon(other) >= base
    assert RANDOM_PARTICIPATION.epsilon(run, 0) == 0.0


@given(runs)
@settings(max_examples=30, deadline=None)
def test_a_random_draw_never_costs_more_than_every_round(run):
    assert RANDOM_PARTICIPATION.epsilon(run) <= CAP.epsilon(run) * 1.001 + 1e-9


def test_one_full_step_is_the_gaussian_mechanism():
    """s = l = 1 and K = T = 1: the closed form."""
    run = run_of(SMALL, rounds=1, local_steps=1, cohort_size=10, batch_sizes=100, noise=1.3)
    assert RANDOM_PARTICIPATION.epsilon(run) == pytest.approx(
        gaussian_epsilon(1e-5, 1 / 1.3), rel=2e-3
    )


def test_the_published_numbers_stand():
    """Every setting the paper prints has a proved bound far below what is printed."""
    run = run_of(SYNTHETIC)
    assert RANDOM_PARTICIPATION.epsilon(run) < PAPER_THIRD_PARTY.epsilon(run) / 10


def test_the_worst_group_is_the_one_with_the_largest_rate():
    records, batches = [100, 100, 200, 50] * 5, [10, 30, 20, 10] * 5
    mixed = run_of(SMALL, users=20, cohort_size=4, records=records, batch_sizes=batches)
    alone = [
        run_of(SMALL, users=20, cohort_size=4, records=r, batch_sizes=b)
        for r, b in ((100, 10), (100, 30), (50, 10))
    ]
    assert RANDOM_PARTICIPATION.epsilon(mixed) == max(
        RANDOM_PARTICIPATION.epsilon(run) for run in alone
    )
    assert len(mixed.groups) == 4 and mixed.group_of(1).batch == 30
    assert mixed.worst == mixed.group_of(1)


class TestAggregate:
    memoryless = run_of(SMALL, memory=False, local_steps=1, cohort_size=4)

    def test_equal_users_gain_the_root_of_m(self):
        assert worst_steps(self.memoryless) == [(0.2, pytest.approx(2.0 * 2.0))]
        as_if = replace(self.memoryless, noise=4.0)
        assert AGGREGATE.epsilon(self.memoryless) == pytest.approx(
            RANDOM_PARTICIPATION.epsilon(as_if), rel=1e-9
        )

    def test_unequal_users_are_hidden_by_their_quietest_companions(self):
        """Uniform weights: a user with a small batch is loud. The reference tries every set of
        users."""
        from itertools import combinations

        batches = [5, 10, 10, 20, 40]
        run = run_of(
            SMALL, users=5, cohort_size=3, batch_sizes=batches, memory=False, local_steps=1
        )
        worst = {}
        for i, b in enumerate(batches):
            sets = [c for c in combinations(range(5), 3) if i in c]
            worst[b] = (
                min(math.sqrt(sum(1 / batches[j] ** 2 for j in c)) * b for c in sets) * run.noise
            )
        front = worst_steps(run)
        assert (0.4, pytest.approx(worst[40])) in front
        for rate, noise in front:
            assert noise == pytest.approx(worst[round(rate * 100)])
        for b, noise in worst.items():  # whoever is not listed is beaten by one that is
            assert any(r >= b / 100 and s <= noise * (1 + 1e-12) for r, s in front)

    def test_record_weights_cancel_unequal_batches(self):
        """w_j = R_j and b_j = sR_j: every user adds the same noise to the sum, so all gain √m."""
        run = run_of(
            SMALL,
            users=4,
            cohort_size=4,
            records=[50, 100, 200, 400],
            batch_sizes=[10, 20, 40, 80],
            memory=False,
            local_steps=1,
            weighting="records",
        )
        assert worst_steps(run) == [(0.2, pytest.approx(4.0))]

    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"memory": True, "local_steps": 1}, "memory"),
            ({"memory": False, "local_steps": 2}, "local_steps=2"),
            ({"memory": False, "local_steps": 1, "max_participations": 3}, "decline"),
            ({"memory": False, "local_steps": 1, "one_sum": False}, "not known to be one vector"),
        ],
    )
    def test_it_says_why_it_does_not_apply(self, changes, why):
        with refuses(f"bound-not-applicable: 'aggregate' … {why}"):
            AGGREGATE.epsilon(run_of(SMALL, **changes))


class TestUserUnit:
    def test_no_record_sampling_and_k_gaussians(self):
        run = run_of(SMALL, unit="user", cohort_size=10, rounds=1, local_steps=4, noise=3.0)
        assert RANDOM_PARTICIPATION.epsilon(run) == pytest.approx(
            gaussian_epsilon(1e-5, 2 / 3.0), rel=2e-3
        )

    def test_sampling_users_amplifies_for_memoryless_third_parties_only(self):
        run = run_of(
            SMALL,
            unit="user",
            memory=False,
            users=200,
            cohort_size=4,
            noise=3.0,
            hidden_draw=True,
        )
        assert USER_SAMPLING.epsilon(run) < RANDOM_PARTICIPATION.epsilon(run)
        assert bound_for(run, "third_party") is USER_SAMPLING
        known = replace(run, hidden_draw=False)
        assert bound_for(known, "third_party") is RANDOM_PARTICIPATION
        assert "who takes part can be known" in USER_SAMPLING.applies(known)
        assert bound_for(run, "participant") is RANDOM_PARTICIPATION
        assert bound_for(run, "server") is RANDOM_PARTICIPATION
        assert "memory" in USER_SAMPLING.applies(replace(run, memory=True))
        assert "not for unit='record'" in USER_SAMPLING.applies(run_of(SMALL, memory=False))

    def test_it_is_below_the_generic_theorem(self):
        """Wang, Balle, Kasiviswanathan's theorem for the same mechanism is looser."""
        from dp_accounting import NeighboringRelation, dp_event
        from dp_accounting.rdp import RdpAccountant

        run = run_of(
            SMALL,
            unit="user",
            memory=False,
            users=200,
            cohort_size=4,
            noise=3.0,
            local_steps=2,
            hidden_draw=True,
        )
        accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        gaussian = dp_event.GaussianDpEvent(3.0 / math.sqrt(2))
        accountant.compose(dp_event.SampledWithoutReplacementDpEvent(200, 4, gaussian), run.rounds)
        assert USER_SAMPLING.epsilon(run) <= accountant.get_epsilon(1e-5)

    def test_record_weights_are_refused(self):
        run = run_of(SMALL, unit="user", weighting="records")
        with refuses("bound-not-applicable: weighting='uniform'"):
            RANDOM_PARTICIPATION.epsilon(run)


@pytest.mark.parametrize("name", [name for name in BOUNDS if name != "ledger"])
def test_a_median_clip_has_no_bound(name):
    with refuses("bound-not-applicable"):
        BOUNDS[name].epsilon(run_of(SMALL, clip="median"))


def test_without_noise_epsilon_is_infinite():
    assert RANDOM_PARTICIPATION.epsilon(run_of(SMALL, noise=0.0)) == math.inf
    assert PAPER_THIRD_PARTY.epsilon(run_of(SMALL, noise=0.0)) == math.inf


def test_a_cap_bounds_what_selection_may_do():
    run = run_of(SMALL, max_participations=2)
    assert (
        CAP.epsilon(run)
        == CAP.epsilon(replace(run, rounds=2, max_participations=None))
        < CAP.epsilon(run_of(SMALL))
    )


def test_a_repeated_round_costs_more_than_an_independent_one():
    """Two runs on one draw: 2K steps with probability l, worse than two rounds drawn
    independently."""
    run = run_of(SMALL, users=100, cohort_size=2, noise=1.0)
    repeated = RANDOM_PARTICIPATION.epsilon(run, 10, repeats=[1] * 10)
    assert repeated == pytest.approx(
        RANDOM_PARTICIPATION.epsilon(replace(run, local_steps=6), 10), rel=1e-3
    )
    assert repeated > RANDOM_PARTICIPATION.epsilon(run, 20)
    assert RANDOM_PARTICIPATION.epsilon(run, 10, repeats=[2]) > RANDOM_PARTICIPATION.epsilon(
        run, 10, repeats=[1]
    )
    with refuses("bound-not-applicable"):
        PAPER_THIRD_PARTY.epsilon(run, 10, repeats=[1])


def test_other_mechanisms_are_composed_exactly():
    """A full Gaussian step and two Gaussian costs are one Gaussian of added squared shifts."""
    run = run_of(SMALL, rounds=1, local_steps=1, cohort_size=10, batch_sizes=100, noise=2.0)
    costs = [Cost("mean", noise=4.0), Cost("variance", noise=5.0)]
    mu = math.sqrt(1 / 4 + 1 / 16 + 1 / 25)
    assert RANDOM_PARTICIPATION.epsilon(run, costs=costs) == pytest.approx(
        gaussian_epsilon(1e-5, mu), rel=2e-3
    )


def test_stated_costs_are_at_most_added():
    run = run_of(SMALL)
    alone = RANDOM_PARTICIPATION.epsilon(replace(run, delta=0.9e-5))
    together = RANDOM_PARTICIPATION.epsilon(run, costs=[Cost("vote", epsilon=0.5, delta=1e-6)])
    assert RANDOM_PARTICIPATION.epsilon(run) < together <= alone + 0.51
    assert (
        RANDOM_PARTICIPATION.epsilon(run, costs=[Cost("vote", epsilon=0.5, delta=1e-4)]) == math.inf
    )


@pytest.mark.parametrize("bound", BOUNDS.values(), ids=BOUNDS)
def test_every_bound_explains_itself_in_two_sentences(bound):
    assert bound.explain().count(". ") == 1 and bound.explain().endswith(".")
    assert (
        bound.assumptions
        and bound.reference
        and bound.theorem
        and set(bound.views) <= {"server", "third_party", "participant"}
    )


def test_names_are_looked_up():
    assert bound_named("cap") is CAP
    with refuses("unknown-bound: random_participation"):
        bound_named("moments")
    with refuses("unknown-view: view='anyone'"):
        bound_for(run_of(SMALL), "anyone")
    with refuses("bound-not-applicable"):
        LEDGER.epsilon(run_of(SMALL))
