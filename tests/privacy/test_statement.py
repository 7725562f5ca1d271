"""What the statement says, and what it must never leave out."""

from __future__ import annotations

import json

import pytest
from privacy.settings import SMALL, SYNTHETIC, run_of

from dpscaffold.privacy import RANDOM_PARTICIPATION, Cost, Ledger, Remark, statement
from dpscaffold.privacy.showing import round_up
from dpscaffold.report.statement_page import render


def test_a_plan():
    run = run_of(SYNTHETIC)
    said = statement(run)
    assert said["server"]["epsilon"] == RANDOM_PARTICIPATION.epsilon(run)
    assert said["third_party"]["bound"] == said["server"]["bound"] == "random_participation"
    assert said["paper_third_party"]["epsilon"] == pytest.approx(12.906, abs=0.001)
    assert said["delta"] == run.delta and "ledger" not in said and said["guarantee"]
    assert [row["name"] for row in said["bounds"] if row["applies"]] == [
        "random_participation",
        "random_participation_rdp",
        "cap",
        "paper_third_party",
    ]
    assert all(row["reason"] for row in said["bounds"] if not row["applies"])
    json.dumps(said.to_json(), allow_nan=False)


def test_a_memoryless_single_step_is_better_hidden_from_a_third_party():
    said = statement(run_of(SMALL, memory=False, local_steps=1))
    assert said["third_party"]["bound"] == "aggregate"
    assert said["third_party"]["epsilon"] < said["server"]["epsilon"]


def test_a_run_shows_both_numbers_with_their_labels():
    ledger = Ledger(run_of(SMALL))
    for round in range(1, 8):
        ledger.record(round, [0, round])
    said = statement(ledger.run, ledger)
    assert said["rounds"] == 7
    assert said["server"]["epsilon"] == RANDOM_PARTICIPATION.epsilon(ledger.run, 7)
    assert (
        said["server"]["ledger"]
        == said["ledger"]["epsilon"]
        == ledger.of(0)
        > said["server"]["epsilon"]
    )
    assert said["planned"] == {"rounds": 20, "epsilon": RANDOM_PARTICIPATION.epsilon(ledger.run)}
    assert "given who took part" in said["quote"].lower()
    assert any("Stopping" in sentence for sentence in said["outside"])
    page = render(said)
    assert "## Ledger" in page and round_up(ledger.of(0)) in page


def test_repeated_rounds_are_counted_on_their_draw():
    ledger = Ledger(run_of(SMALL, memory=False, local_steps=1))
    ledger.record(1, [0, 1])
    ledger.record(1, [0, 1], again=True)
    said = statement(ledger.run, ledger)
    assert said["server"]["epsilon"] == RANDOM_PARTICIPATION.epsilon(ledger.run, 1, repeats=[1])
    assert said["third_party"]["bound"] == "random_participation"
    assert said["paper_third_party"]["epsilon"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip": "median"}, "no guarantee: the clip is computed from private data"),
        ({"noise": 0.0}, "epsilon is infinite"),
        ({"unit": "user", "weighting": "records"}, "reveal how many records"),
    ],
)
def test_no_guarantee_is_said_and_epsilon_is_null(changes, words):
    run = run_of(SMALL, **changes)
    ledger = Ledger(run)
    ledger.record(1, [0])
    for said in (statement(run), statement(run, ledger)):
        assert not said["guarantee"] and words in said["reason"]
        assert (
            said["server"]["epsilon"]
            is said["third_party"]["epsilon"]
            is said["paper_third_party"]["epsilon"]
            is None
        )
        assert all(row["epsilon"] is None for row in said["bounds"])
        assert words in render(said)
        json.dumps(said.to_json(), allow_nan=False)


def test_a_run_without_privacy():
    said = statement(
        None, preparation=[Remark("Features were scaled with private means.", "unprotected")]
    )
    assert (
        not said["guarantee"]
        and said["server"]["epsilon"] is None
        and "not private" in said["quote"]
    )
    assert "Features were scaled with private means." in render(said)


def test_what_is_outside_is_named():
    said = statement(
        run_of(SMALL),
        preparation=[
            Remark("Principal components were fitted on private records (no fit).", "unprotected"),
            Remark("Rows have unit norm.", "none needed"),
        ],
        seed_public=True,
    )
    text = " ".join(said["outside"])
    for words in (
        "Metrics",
        "tuned",
        "Principal components",
        "anyone holding the seed can remove the noise",
    ):
        assert words in text
    assert "unit norm" not in text and len(said["preprocessing"]) == 2
    assert "seed" not in " ".join(statement(run_of(SMALL))["outside"])


def test_a_public_draw_rules_out_user_sampling():
    run = run_of(SMALL, unit="user", memory=False, users=200, noise=5.0, hidden_draw=True)
    assert statement(run)["third_party"]["bound"] == "user_sampling"
    said = statement(run, seed_public=True)
    assert said["third_party"]["bound"] == "random_participation"
    assert not next(row for row in said["bounds"] if row["name"] == "user_sampling")["applies"]


def test_other_mechanisms_are_in_the_quoted_number():
    run = run_of(SMALL)
    costs = (Cost("a private mean", noise=3.0), Cost("a private vote", epsilon=0.1))
    said = statement(run, extra_costs=costs)
    assert (
        said["server"]["training_alone"]
        == RANDOM_PARTICIPATION.epsilon(run)
        < said["server"]["epsilon"]
    )
    assert (
        "a private mean, a private vote" in said["quote"]
        and "composed" in said["server"]["composition"]
    )
    assert "a private vote: epsilon 0.1" in render(said)


def test_the_page_fits_and_has_every_part():
    page = render(statement(run_of(SYNTHETIC)))
    for heading in (
        "Mechanism",
        "Adversaries",
        "Epsilon by bound",
        "Outside the guarantee",
        "Why each bound holds",
    ):
        assert f"## {heading}" in page
    assert "0.861" in page and "12.907" in page and "Balle, Barthe, Gaboardi" in page
    assert len(page.splitlines()) < 90


def test_epsilon_is_rounded_up_for_reading():
    assert (
        round_up(0.8601) == "0.861"
        and round_up(0.86) == "0.860"
        and round_up(float("inf")) == "infinite"
    )


def test_the_table_in_the_documentation_is_what_the_command_prints():
    from pathlib import Path

    from dpscaffold.report.privacy_table import comparison

    page = (Path(__file__).parents[2] / "docs" / "published-bound.md").read_text(encoding="utf-8")
    assert comparison() in page


def test_a_step_that_says_something_unknown_of_itself_is_outside_the_guarantee():
    """Only what says that it is harmless is taken to be."""
    steps = [Remark("My own step.", "harmless"), Remark("Unit norm.", "none needed")]
    said = statement(None, preparation=steps)
    assert "My own step." in said["outside"] and "Unit norm." not in said["outside"]
