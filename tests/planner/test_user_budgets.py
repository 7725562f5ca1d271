"""What one user's stricter budget costs everybody, against closed forms."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from refusals import refuses
from small import EQUAL, UNEQUAL, federation, setting
from typer.testing import CliRunner

from dpscaffold import Gaussian
from dpscaffold.cli import app
from dpscaffold.planning.budgets import (
    costs_of,
    equivalent_epsilon,
    mean_variance,
    usual_budget,
)
from dpscaffold.privacy import RANDOM_PARTICIPATION
from dpscaffold.setting import Secure

TABLE = {"default": 4.0, "1": 0.5, "3": 2.0}


def planned(sizes=EQUAL, **plan):
    run = setting("fedavg", "logistic", "fixed", federation(sizes), user_ratio=1.0, **plan)
    return run.calibrated(4.0)


def test_equal_users_have_the_noise_of_the_mean_variance():
    """With equal sizes and a plain mean, all alike would have σ² = the mean of σ_i²."""
    run = planned().calibrated(TABLE)
    noises = run.privacy.noise_by_user
    alike = math.sqrt(sum(noise**2 for noise in noises) / 6)
    one = run.with_noises((alike,))
    assert equivalent_epsilon(run) == pytest.approx(RANDOM_PARTICIPATION.epsilon(one.mechanism))
    assert equivalent_epsilon(planned()) == RANDOM_PARTICIPATION.epsilon(planned().mechanism)


@pytest.mark.parametrize("weighting", ["uniform", "records", "noise"])
def test_the_strictest_costs_most_and_all_together_more(weighting):
    run = planned(UNEQUAL, weighting=weighting)
    scores = [(0.4, 0.5), (4.0, 0.8), (40.0, 1.1)]
    strict, mild, both = costs_of(run, TABLE, (), scores)
    assert (strict.user, mild.user, both.user) == ("1", "3", "")
    assert strict.equivalent == mild.equivalent == both.equivalent < mild.without
    assert mild.without < both.without and strict.without <= both.without * (1 + 1e-6)
    for cost in (strict, mild, both):
        on_line = 30 * (math.log10(cost.without) - math.log10(cost.equivalent))
        assert cost.points == pytest.approx(on_line) and cost.points > 0
        assert "planned, not measured" in cost.sentence()
    assert "1's ε = 0.5 instead of 4" in strict.sentence()


def test_weights_by_noise_make_a_strict_budget_cheaper():
    equal, weighted = (
        costs_of(planned(weighting=name), {"default": 4.0, "1": 0.1})[0].equivalent
        for name in ("uniform", "noise")
    )
    assert weighted > 2 * equal


def test_a_strict_member_of_a_secure_sum_costs_all_or_its_own_weight():
    def secured(weighting):
        run = setting(
            "fedavg",
            "logistic",
            "fixed",
            federation(EQUAL),
            local_steps=1,
            user_ratio=1.0,
            weighting=weighting,
        )
        return replace(run, secure=Secure(1)).calibrated(4.0)

    (plain,) = costs_of(secured("uniform"), {"default": 4.0, "1": 0.1})
    (weighted,) = costs_of(secured("noise"), {"default": 4.0, "1": 0.1})
    assert plain.equivalent == pytest.approx(0.1, rel=0.02)  # it decides for everybody
    assert weighted.equivalent > 3 * plain.equivalent


def test_the_variance_of_the_mean_is_what_the_formula_says():
    run = planned(UNEQUAL, weighting="records").calibrated(TABLE)
    weights = [float(size) for size in UNEQUAL]
    tau = 0.7**2
    each = [
        (2 * 0.7 * noise / (size // 3)) ** 2 / 3 + tau
        for noise, size in zip(run.privacy.noise_by_user, UNEQUAL, strict=True)
    ]
    total = sum(w**2 * v for w, v in zip(weights, each, strict=True)) / sum(weights) ** 2
    assert mean_variance(run) == pytest.approx(6 * total)


def test_names_are_those_of_the_facts_or_of_equal_users():
    assert costs_of(planned(), {"default": 4.0}) == ()
    (cost,) = costs_of(planned(), {"default": 4.0, "north": 1.0})
    assert cost.user == "north" and cost.points is None
    named = costs_of(planned(UNEQUAL), {"default": 4.0, "c": 1.0}, tuple("abcdef"))
    by_number = costs_of(planned(UNEQUAL), {"default": 4.0, "2": 1.0})
    assert named[0].equivalent == by_number[0].equivalent
    with refuses("unknown-user: north"):
        costs_of(planned(UNEQUAL), {"default": 4.0, "north": 1.0})
    with refuses("unknown-user: z"):
        costs_of(planned(UNEQUAL), {"default": 4.0, "z": 1.0}, tuple("abcdef"))
    assert usual_budget({"a": 1.0, "b": 2.0}) == 1.0


def test_the_command_says_it_and_keeps_the_table(tmp_path):
    path = tmp_path / "facts.toml"
    path.write_text(
        "[facts]\nusers = 6\nrecords = 60\nfeatures = 3\nclasses = 2\n"
        '[algorithm]\nname = "fedavg"\n[plan]\nrounds = 4\nlocal_steps = 1\n'
        "[privacy]\nepsilon = { default = 4.0, north = 0.5 }\n"
    )
    command = ["plan", "--config", str(path), "--out", str(tmp_path / "plan"), "--json"]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    assert found["recommended"]["privacy"]["epsilon"] == {"default": 4.0, "north": 0.5}
    (cost,) = found["budgets"]
    assert cost["user"] == "north" and cost["equivalent"] < cost["without"]
    written = (tmp_path / "plan" / "plan.toml").read_text()
    assert "planned, not measured" in written and "north = 0.5" in written


def test_a_step_size_is_planned_for_unequal_noise():
    """A surrogate has one noise, that of the mean."""
    from dpscaffold.planning.surrogate import SurrogateSetting

    data = federation((60,) * 6)
    privacy = Gaussian(0.7, 2.0, noise_by_user=(2.0, 4.0, 6.0, 2.0, 2.0, 2.0))
    run = setting("fedavg", "logistic", privacy, data, user_ratio=1.0)
    alike = math.sqrt(sum(n**2 for n in privacy.noise_by_user) / 6)
    one = setting("fedavg", "logistic", Gaussian(0.7, alike), data, user_ratio=1.0)
    noises = [SurrogateSetting.of(each).privacy.noise for each in (run, one)]
    assert noises[0] == pytest.approx(noises[1])
