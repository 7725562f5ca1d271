"""Whose noise may be counted: users who may decline, participants who collude, draws that are
known."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import pytest
from privacy.explicit_pairs import composed_epsilon, gaussian_epsilon, step_pair
from privacy.settings import SMALL, run_of
from refusals import refuses
from small import federation

from dpscaffold import Budget, Gaussian, Logistic, Plan, fedavg, train
from dpscaffold.config import parse
from dpscaffold.privacy import (
    AGGREGATE,
    RANDOM_PARTICIPATION,
    USER_SAMPLING,
    Ledger,
    Mechanism,
    aggregate_among,
    bound_for,
    calibrate_noise,
    describe,
    statement,
)
from dpscaffold.privacy.aggregate import worst_steps
from dpscaffold.setting import Setting

SUM = run_of(SMALL, memory=False, local_steps=1, cohort_size=4)


class TestDeclining:
    """Nine users with batches of 1 in 2 and one with 1 in 3, all drawn in every round. A budget per
    user lets the nine take part less often, so that the tenth ends alone in the sum."""

    noise, delta, budget = 4.0, 1e-5, 4.0

    def described(self, rounds: int, may_decline: str | None) -> Mechanism:
        return describe(
            rounds=rounds,
            local_steps=1,
            users=10,
            cohort_size=10,
            records=[2] * 9 + [3],
            batch_sizes=1,
            noise=self.noise,
            memory=False,
            one_sum=True,
            delta=self.delta,
            may_decline=may_decline,
        )

    def alone(self) -> tuple[int, int]:
        """How often the nine, and the tenth, take part."""
        ledger, rounds = Ledger(self.described(1000, None), user_budget=self.budget), 0
        counts = []
        while active := ledger.allowed(range(10)):
            rounds += 1
            ledger.record(rounds, active)
            counts.append(len(active))
        return sum(n == 10 for n in counts), rounds

    def test_a_user_may_end_alone_in_the_sum(self):
        """The exact ε of one pair of datasets in the rounds in which the tenth is alone is above
        what the sum of ten noises would give, and not above what is stated."""
        together, total = self.alone()
        losses, probs = step_pair(1 / 3, self.noise, "aligned")
        exact = composed_epsilon(self.delta, losses, probs, 1, 1.0, total - together)
        assert AGGREGATE.epsilon(self.described(total, None)) < exact
        ledger = Ledger(self.described(total, None), user_budget=self.budget)
        stated = statement(ledger.run)["third_party"]
        assert stated["bound"] == "random_participation" and stated["epsilon"] >= exact

    def test_the_ledger_says_that_users_may_decline(self):
        ledger = Ledger(self.described(5, None), user_budget=1.0)
        assert ledger.run.may_decline == "user_epsilon"
        assert Ledger.from_dict(ledger.to_dict()).run == ledger.run
        assert "user_epsilon" in AGGREGATE.applies(ledger.run)

    def test_both_bounds_refuse_it_and_say_why(self):
        run = replace(SUM, may_decline="a site's own policy")
        assert "may decline (a site's own policy)" in AGGREGATE.applies(run)
        assert "site's own policy" in aggregate_among(1).applies(run)
        user = run_of(SMALL, unit="user", memory=False, hidden_draw=True, may_decline="a site")
        assert "declines" in USER_SAMPLING.applies(user)
        assert USER_SAMPLING.applies(replace(user, may_decline=None)) is None
        capped = replace(run, max_participations=3)
        assert capped.declines == "max_participations, a site's own policy"
        assert Mechanism.from_dict(capped.to_dict()) == capped

    def test_a_run_with_a_budget_per_user_states_random_participation(self):
        data = federation((9, 12, 4, 7, 15, 6))
        plan = Plan(rounds=4, local_steps=1, user_ratio=0.5, data_ratio=0.25)
        arguments = (data, Logistic(4, 3), fedavg(), plan, Gaussian(noise=4.0))
        said = train(*arguments, budget=Budget(user_epsilon=3.0)).privacy
        assert said["third_party"]["bound"] == "random_participation"
        assert said["mechanism"]["may_decline"] == "user_epsilon"
        assert train(*arguments).privacy["third_party"]["bound"] == "aggregate"

    def test_it_counts_in_calibration(self):
        """The noise for a given ε towards a third party is that of random participation."""
        data = federation((9, 12, 4, 7, 15, 6))
        limits = {"epsilon": 1.0, "view": "third-party", "delta": 1e-3}
        tables = {
            "plan": {"rounds": 4, "local_steps": 1, "user_ratio": 0.5, "data_ratio": 0.25},
            "algorithm": {"name": "fedavg"},
        }
        free = parse({**tables, "privacy": limits}).setting(data)
        held = parse({**tables, "privacy": {**limits, "user_epsilon": 3.0}}).setting(data)
        run = held.describe(1e-3)
        assert free.privacy.noise < held.privacy.noise == calibrate_noise(run, 1.0)


class TestParticipants:
    @pytest.mark.parametrize("colluders", [1, 2, 3])
    def test_the_quietest_honest_companions_of_every_set(self, colluders):
        """The reference tries every set of participants and every set of colluders."""
        batches, m = [5, 10, 10, 20, 40, 41], 4
        run = run_of(
            SMALL, users=6, cohort_size=m, batch_sizes=batches, memory=False, local_steps=1
        )
        least = {}
        for i, b in enumerate(batches):
            others = [j for j in range(6) if j != i]
            least[b] = min(
                math.sqrt(1 / b**2 + sum(1 / batches[j] ** 2 for j in set(c) - set(k)))
                * b
                * run.noise
                for c in combinations(others, m - 1)
                for k in combinations(others, colluders)
            )
        front = worst_steps(run, colluders)
        for rate, noise in front:
            assert noise == pytest.approx(least[round(rate * 100)])
        for b, noise in least.items():  # whoever is not listed is beaten by one that is
            assert any(r >= b / 100 and s <= noise * (1 + 1e-12) for r, s in front)

    @pytest.mark.parametrize(("colluders", "left"), [(1, 7), (3, 5), (6, 2)])
    def test_equal_users_in_closed_form(self, colluders, left):
        """Everyone in every round with all records: T Gaussians of multiplier σ_g·√(m − k)."""
        run = run_of(
            SMALL,
            memory=False,
            one_sum=True,
            local_steps=1,
            users=8,
            cohort_size=8,
            batch_sizes=100,
            noise=6.0,
            delta=1e-5,
        )
        exact = gaussian_epsilon(1e-5, math.sqrt(run.rounds / left) / 6.0)
        found = bound_for(run, "participant", colluders=colluders).epsilon(run)
        assert exact <= found <= exact * 1.003
        said = statement(run, colluders=colluders)
        assert said["participant"]["epsilon"] == found > said["third_party"]["epsilon"]
        assert said["participant"]["colluders"] == colluders

    @pytest.mark.parametrize("colluders", [3, 4, 9])
    def test_from_m_minus_one_on_only_the_own_noise_is_left(self, colluders):
        assert bound_for(SUM, "participant", colluders=colluders) is RANDOM_PARTICIPATION
        assert "all the companions" in aggregate_among(colluders).applies(SUM)
        if colluders == 3:  # and the limit is reached without a jump
            assert worst_steps(SUM, 3) == [(0.2, SUM.noise)]

    @pytest.mark.parametrize("colluders", [0, -1, 10, 11])
    def test_nobody_or_everybody_is_refused(self, colluders):
        with refuses(f"out-of-range: colluders={colluders} "):
            bound_for(SUM, "participant", colluders=colluders)
        with refuses(f"out-of-range: colluders={colluders} "):
            statement(SUM, colluders=colluders)

    def test_a_single_user_has_no_companions(self):
        alone = run_of(SMALL, users=1, cohort_size=1, memory=False, local_steps=1)
        assert statement(alone)["participant"]["bound"] == "random_participation"

    def test_sampling_users_is_no_gain_for_a_participant(self):
        run = run_of(SMALL, unit="user", memory=False, hidden_draw=True, users=200, noise=5.0)
        said = statement(run)
        assert said["third_party"]["bound"] == "user_sampling"
        assert said["participant"]["bound"] == "random_participation"
        assert said["participant"]["epsilon"] == said["server"]["epsilon"]

    def test_the_statement_says_who_is_no_participant_and_what_single_uploads_tell(self):
        said = statement(SUM)
        assert any("not a participant" in line for line in said["third_party"]["assumptions"])
        assert "not a participant" in said["views"]["third_party"]
        drift = [line for line in said["outside"] if "largest_drift" in line]
        assert len(drift) == 1 and "Theorem 2" in drift[0] and "server's view" in drift[0]
        assert "that took no part" in said["quote"] and "towards one that did" in said["quote"]

    def test_a_budget_towards_participants(self):
        """Calibrated and halted by the bound that the run then states."""
        data = federation((9, 9, 9, 9, 9, 9))
        tables = {
            "plan": {"rounds": 4, "local_steps": 1, "user_ratio": 1.0, "data_ratio": 0.25},
            "algorithm": {"name": "fedavg"},
            "privacy": {"epsilon": 1.0, "view": "participant", "colluders": 2, "delta": 1e-3},
        }
        settings = parse(tables)
        setting = settings.setting(data)
        budget = replace(settings.privacy.budget, target_epsilon=0.7)
        result = train(
            data, setting.task, setting.algorithm, setting.plan, setting.privacy, budget=budget
        )
        assert result.ended == "budget" and result.privacy["participant"]["epsilon"] <= 0.7
        whole = train(
            data,
            setting.task,
            setting.algorithm,
            setting.plan,
            setting.privacy,
            budget=settings.privacy.budget,
        ).privacy["participant"]
        assert whole["bound"] == "aggregate_participant" and whole["colluders"] == 2
        assert 0.99 <= whole["epsilon"] <= 1.0


class TestOneBound:
    """What is planned from numbers is what the run states."""

    @pytest.mark.parametrize("view", ["server", "third-party", "participant"])
    @pytest.mark.parametrize("unit", ["record", "user"])
    @pytest.mark.parametrize("steps", [1, 3])
    def test_planned_from_numbers_and_stated_by_the_run(self, view, unit, steps):
        plan = describe(
            users=40,
            cohort_size=8,
            records=50,
            batch_sizes=10,
            rounds=10,
            delta=1e-4,
            noise=1.0,
            local_steps=steps,
            unit=unit,
            memory=False,
            one_sum=True,
        )
        noise = calibrate_noise(plan, 1.0, bound_for(plan, view))
        setting = Setting(
            federation((50,) * 40).roster,
            Logistic(4, 3),
            fedavg(),
            Plan(rounds=10, local_steps=steps, user_ratio=0.2, data_ratio=0.2),
            Gaussian(noise=noise, unit=unit),
        )
        stated = statement(setting.describe(1e-4))[view.replace("-", "_")]
        assert stated["bound"] == bound_for(plan, view).name
        assert 0.99 <= stated["epsilon"] <= 1.0

    @pytest.mark.parametrize("unit", ["record", "user"])
    def test_the_choice_is_the_smallest(self, unit):
        """Where several hold, the one that is chosen is below the others, whatever the noise."""
        for noise in (0.7, 3.0, 40.0):
            run = run_of(SUM_OF_USERS, unit=unit, noise=noise)
            held = [b for b in THIRD if b.applies(run) is None]
            chosen = bound_for(run, "third_party").epsilon(run)
            assert chosen <= min(b.epsilon(run) for b in held) * (1 + 1e-9)


THIRD = (RANDOM_PARTICIPATION, AGGREGATE, USER_SAMPLING)
SUM_OF_USERS = {
    **SMALL,
    "local_steps": 1,
    "memory": False,
    "hidden_draw": True,
    "users": 50,
    "cohort_size": 5,
}
