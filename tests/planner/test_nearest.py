"""Constraints that no plan meets: which of them, and what would do.

What a refusal offers is taken at its word: with it the command gets as far as its first surrogate,
and a little beyond it the command refuses again.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from stated import over_draw
from typer.testing import CliRunner

from dpscaffold import BadInput
from dpscaffold.cli import app
from dpscaffold.planning.trial import Bench
from dpscaffold.privacy import describe, solve_noise

SMALL = {"users": "12", "records": "60", "features": "6", "classes": "3", "rounds": "40"}


class Tried(Exception):
    """A candidate met every constraint, and would now be tried."""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What the command says; None where it found candidates. It must never have written."""

    def tried(*arguments: object, **more: object) -> None:
        raise Tried

    def ask(table: str = "", **options: object) -> str | None:
        config, out = tmp_path / "run.toml", tmp_path / "plan"
        config.write_text(table)
        asked = {**SMALL, **options, "config": config, "out": out}
        words = [w for key, value in asked.items() for w in (f"--{key.replace('_', '-')}", value)]
        result = CliRunner().invoke(app, ["plan", *map(str, words)])
        assert result.exit_code != 0 and not out.exists()
        if isinstance(result.exception, Tried):
            return None
        assert isinstance(result.exception, BadInput), result.exception
        said = str(result.exception)
        assert "\n" not in said
        return said

    monkeypatch.setattr(Bench, "run", tried)
    return ask


def offered(said: str | None, words: str) -> float:
    found = re.search(rf"{words} ([0-9.e+-]*[0-9])", said or "")
    assert found, said
    return float(found[1])


@pytest.mark.parametrize("epsilon", ["inf", "1e12"])
def test_an_epsilon_too_large_for_any_noise(plan, epsilon):
    said = plan(epsilon=epsilon)
    assert f"no plan keeps epsilon {float(epsilon):g} towards server at delta" in said
    assert "40 rounds of 10 local steps, 12 of 12 users" in said and "larger" not in said
    assert said.endswith(("give a smaller one", "give a number above 0, such as 2"))


def test_a_delta_below_what_can_be_resolved(plan):
    said = plan(epsilon=1, delta=1e-14, rounds=400)
    assert "delta=1e-14" in said


def test_a_share_of_users_that_takes_nobody(plan):
    said = plan("[plan]\nuser_ratio = 0.05\n", epsilon=1)
    assert "plan.user_ratio is 0.05, which takes none of 12 users" in said
    least = offered(said, "use at least")
    assert plan(f"[plan]\nuser_ratio = {least}\n", epsilon=1) is None
    assert plan(f"[plan]\nuser_ratio = {least - 0.0001}\n", epsilon=1) is not None
    assert plan("[plan]\nuser_ratio = 0.05\n", epsilon=1, participants=1) is None


@pytest.mark.parametrize("records", [30, 60, 7])
def test_a_share_of_records_that_makes_no_batch(plan, records):
    said = plan("[plan]\ndata_ratio = 0.01\n", epsilon=1, records=records)
    least = offered(said, "use at least")
    assert plan(f"[plan]\ndata_ratio = {least}\n", epsilon=1, records=records) is None


def test_too_few_rounds_for_a_warm_start(plan):
    warm = '[algorithm]\nname = "scaffold-warm"\n'
    said = plan(warm, epsilon=1, rounds=8, participants=1)
    rounds, users = int(offered(said, "; allow")), int(offered(said, "more, or"))
    for asked in ({"rounds": rounds, "participants": 1}, {"rounds": 8, "participants": users}):
        assert plan(warm, epsilon=1, **asked) is None
        name = "rounds" if asked["rounds"] == rounds else "participants"
        assert plan(warm, epsilon=1, **{**asked, name: asked[name] - 1}) is not None


def test_too_few_local_steps_for_a_pass(plan):
    sgd = '[algorithm]\nname = "fedsgd"\n'
    said = plan(sgd, epsilon=1, local_steps=3)
    assert plan(sgd, epsilon=1, local_steps=int(offered(said, "; allow"))) is None
    ratio = offered(said, "plan.data_ratio of")
    assert plan(f"{sgd}[plan]\ndata_ratio = {ratio}\n", epsilon=1, local_steps=3) is None


def test_a_tiny_epsilon_is_solved_for():
    """However small: where ε is reported as 0 there is still a noise that keeps it."""
    run = describe(
        rounds=40, local_steps=2, users=12, cohort_size=3, records=60, batch_sizes=12, noise=1
    )
    noise = solve_noise(run, 1e-15)
    assert over_draw(replace(run, noise=noise)) <= 1e-15
    assert over_draw(replace(run, noise=0.99 * noise)) > 1e-15
