"""Human terms: in statements, on paper, in commands, and as goals to solve for."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy.settings import SMALL, run_of
from privacy.test_commands import SYNTHETIC, answer, call, refused, without, write_ledger
from refusals import refuses
from scipy.stats import norm

from dpscaffold.privacy import (
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    RANDOM_PARTICIPATION_RDP,
    AttackGoal,
    Cost,
    Ledger,
    human_terms,
    noise_for,
    rounds_for,
    statement,
)
from dpscaffold.privacy.human import ledger_terms
from dpscaffold.privacy.showing import percent, round_up
from dpscaffold.report.statement_page import render


def test_a_user_level_run_is_a_gaussian():
    """Everyone takes part: T·K Gaussian steps of multiplier σ_g, so μ = √(TK)/σ_g."""
    run = run_of(SMALL, unit="user", cohort_size=10, rounds=20, local_steps=3, noise=10.0)
    mu = math.sqrt(60) / 10
    terms = human_terms(RANDOM_PARTICIPATION, run)
    assert terms.protects == "user" and "user's whole dataset" in terms.sentence()
    assert norm.cdf(mu / 2) <= terms.accuracy <= norm.cdf(mu / 2) + 2e-3
    for found in terms.true_positives:
        truth = norm.sf(norm.isf(found.false_positives) - mu)
        assert truth <= found.rate <= truth * 1.02
    assert mu <= terms.mu <= mu * 1.01
    for group in terms.groups[:2]:
        assert group.accuracy == pytest.approx(norm.cdf(group.size * mu / 2), abs=5e-3)


def test_every_figure_of_the_curve_is_rounded_down():
    terms = human_terms(RANDOM_PARTICIPATION, run_of(SMALL, unit="user", cohort_size=10))
    mu = math.sqrt(60) / 2
    for alpha, beta in terms.curve:
        assert beta <= norm.cdf(norm.isf(alpha) - mu)
        assert beta == round(beta, 6)


def test_costs_and_repeats_are_in_the_terms():
    run = run_of(SMALL)
    plain = human_terms(RANDOM_PARTICIPATION, run)
    with_cost = human_terms(RANDOM_PARTICIPATION, run, costs=(Cost("mean", noise=2.0),))
    repeated = human_terms(RANDOM_PARTICIPATION, run, repeats=(1, 2))
    assert with_cost.accuracy > plain.accuracy + 0.01
    assert repeated.accuracy > plain.accuracy + 0.001
    fewer = human_terms(RANDOM_PARTICIPATION, run, 5)
    assert fewer.accuracy < plain.accuracy


def test_the_ledger_counts_the_worst_user():
    ledger = Ledger(run_of(SMALL, records=[100] * 5 + [400] * 5, batch_sizes=20))
    assert ledger_terms(ledger) is None
    for round in range(1, 7):
        ledger.record(round, [0 if round < 3 else 9])
    terms = ledger_terms(ledger)
    once = Ledger(ledger.run)
    once.record(1, [0])
    once.record(2, [0])
    # Two participations at rate 0.2 against four at 0.05: both count, the first is worse.
    assert terms.accuracy >= ledger_terms(once).accuracy
    assert terms.bound == "ledger"


def test_bounds_without_a_loss_distribution_are_refused():
    for bound in (RANDOM_PARTICIPATION_RDP, PAPER_THIRD_PARTY):
        with refuses("no-trade-off"):
            human_terms(bound, run_of(SMALL))
    with refuses("no-noise: noise=0"):
        human_terms(RANDOM_PARTICIPATION, run_of(SMALL, noise=0.0))
    with refuses("bound-not-applicable"):
        human_terms(RANDOM_PARTICIPATION, run_of(SMALL, clip="median"))


def test_a_statement_says_it_everywhere():
    ledger = Ledger(run_of(SMALL))
    ledger.record(1, [0, 1])
    said = statement(ledger.run, ledger, groups=(2, 4))
    human = json.loads(json.dumps(said["human"], allow_nan=False))
    assert list(human) == ["server", "third_party", "participant", "ledger"]
    assert human["server"]["mu_approximate"] is True
    assert [g["size"] for g in human["server"]["groups"]] == [2, 4]
    page = render(said)
    assert "## In human terms" in page and human["server"]["sentence"] in page
    assert percent(human["ledger"]["accuracy"]) in page and "records together" in page
    assert "human" not in statement(run_of(SMALL, noise=0.0))
    assert "In human terms" not in render(statement(None))


@given(st.floats(0.0, 1.0))
def test_percentages_are_never_too_small(value):
    shown = float(percent(value).split()[0])
    assert value * 100 <= shown <= min(100.0, value * 100 + 0.1001)
    assert value <= float(round_up(value)) <= value + 0.0010001


GOALS = [
    AttackGoal("advantage", 0.2),
    AttackGoal("tpr", 0.05, at_fpr=0.01),
    AttackGoal("mu", 0.4),
    AttackGoal("epsilon", 2.0, group=3),
    AttackGoal("advantage", 0.3, group=2),
]


@pytest.mark.parametrize("goal", GOALS, ids=str)
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_the_noise_for_a_goal_meets_it_and_not_by_much(goal, sampling):
    run = run_of(SMALL, sampling=sampling)
    noise = noise_for(run, goal)
    assert 0.99 * goal.target <= goal.of(replace(run, noise=noise)) <= goal.target
    assert goal.of(replace(run, noise=noise * 0.99)) > goal.target * 0.999


@given(st.integers(1, 6), st.floats(1.0, 8.0), st.sampled_from(GOALS[:3]))
@settings(max_examples=12, deadline=None)
def test_the_rounds_for_a_goal_are_the_most(local_steps, noise, goal):
    run = run_of(SMALL, local_steps=local_steps, noise=noise)
    if goal.of(run, rounds=1) > goal.target:
        with refuses("goal-not-met"):
            rounds_for(run, goal)
        return
    most = rounds_for(run, goal)
    assert goal.of(run, rounds=most) <= goal.target < goal.of(run, rounds=most + 1)


def test_goals_leave_room_for_preprocessing():
    run, goal, cost = run_of(SMALL), AttackGoal("advantage", 0.2), Cost("mean", noise=4.0)
    assert noise_for(run, goal, costs=(cost,)) > 1.05 * noise_for(run, goal)
    with refuses("goal-not-met"):
        noise_for(run, goal, costs=(Cost("mean", noise=1.0),))
    # Sampling alone meets this one, whatever the noise.
    rare = run_of(SMALL, rounds=1, cohort_size=1, users=1000)
    with refuses("goal-too-weak: 0.001"):
        noise_for(rare, AttackGoal("advantage", 0.9))


def test_commands_in_human_terms():
    shown = call("privacy", *SYNTHETIC)
    assert shown.exit_code == 0
    for words in ("54.3 %", "1.8 %", "0.21 %", "μ (approximate)", "0.218", "records together"):
        assert words in shown.stdout
    human = answer("privacy", *SYNTHETIC)["human"]
    assert [g["size"] for g in human["server"]["groups"]] == [2, 5, 10]
    plan = [*without(SYNTHETIC, "--local-steps"), "--local-steps", "1", "--algorithm", "fedavg"]
    users = answer("privacy", *plan, "--unit", "user")
    assert users["third_party"]["bound"] == "aggregate"
    assert users["human"]["third_party"]["accuracy"] < users["human"]["server"]["accuracy"]


def test_a_run_folder_in_human_terms(tmp_path):
    write_ledger(tmp_path)
    human = answer("privacy", str(tmp_path))["human"]
    assert human["ledger"]["accuracy"] > 0.5 and human["server"]["accuracy"] > 0.5


def test_calibrate_to_a_share_of_right_guesses():
    plan = without(SYNTHETIC, "--noise")
    found = answer("calibrate", "--guess", "55", *plan)
    back = answer("privacy", *plan, "--noise", str(found["noise"]))["human"]["server"]
    assert 0.54975 <= back["accuracy"] <= 0.55 and found["guess"] == 100 * back["accuracy"]
    rounds = answer(
        "calibrate", "--guess", "56", "--solve", "rounds", *without(SYNTHETIC, "--rounds")
    )
    assert rounds["rounds"] > 400 and rounds["guess"] <= 56
    shown = call("calibrate", "--guess", "55", *plan)
    assert "right guesses = " in shown.stdout and "at most" in shown.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--guess", "50"], "--guess is 50; give a number above 50"),
        (["--guess", "0.55"], "--guess is 0.55; give a number above 50"),
        (["--guess", "100"], "below 100, in per cent"),
        (["--guess", "nan"], "--guess is nan"),
        (["--guess", "55", "--epsilon", "1"], "--epsilon and --guess are both given"),
        (["--guess", "55", "--view", "paper-third-party"], "no loss distribution"),
    ],
)
def test_bad_goals_are_one_sentence(options, words):
    assert words in refused("calibrate", *without(SYNTHETIC, "--noise"), *options)


def test_a_goal_beyond_the_most_noise_is_refused_with_one_that_is_met():
    """What is recommended can be trained: the most noise is the same for both."""
    plan = without(SYNTHETIC, "--noise")
    said = refused("calibrate", *plan, "--guess", "50.00001")
    assert "not met by any noise up to 1e+07" in said
    published = ("--view", "paper-third-party", "--epsilon", "1e-3")
    assert "any noise up to 1e+07, where it is" in refused("calibrate", *plan, *published)
