"""ε for replacing one record by another, where ε is for removing a record's content."""

from __future__ import annotations

import math

import pytest
from privacy.settings import SMALL, run_of
from scipy.optimize import brentq
from scipy.stats import norm

from dpscaffold.privacy import Ledger, describe, statement
from dpscaffold.privacy.showing import round_up
from dpscaffold.report.statement_page import render

FULL = {
    "rounds": 30,
    "local_steps": 1,
    "users": 5,
    "cohort_size": 5,
    "records": 60,
    "batch_sizes": 60,
}


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of one Gaussian release with shift μ, by its closed form (Balle, Wang 2018)."""

    def excess(epsilon: float) -> float:
        high = norm.cdf(mu / 2 - epsilon / mu)
        return high - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return float(brentq(excess, 0.0, 50.0))


@pytest.mark.parametrize("noise", [3.0, 12.0])
def test_full_batches_are_exact_in_both_relations(noise):
    """T releases with every record: one Gaussian of shift √T/(2σ_g) for removing a record's
    content, √T/σ_g for replacing it."""
    run = describe(**FULL, noise=noise, sampling="poisson", memory=False)
    said = statement(run)["server"]
    removed, replaced = (gaussian_epsilon(math.sqrt(30) / s, run.delta) for s in (2 * noise, noise))
    assert said["epsilon"] == pytest.approx(removed, rel=2e-3) and said["epsilon"] >= removed
    assert said["replace_one"] == pytest.approx(replaced, rel=2e-3)
    assert said["replace_one"] >= replaced
    fixed = statement(describe(**FULL, noise=noise, sampling="fixed", memory=False))["server"]
    assert fixed["replace_one"] == fixed["epsilon"] == pytest.approx(replaced, rel=2e-3)


def test_smaller_poisson_batches_are_a_group_of_two():
    run = run_of(SMALL, sampling="poisson")
    said = statement(run, groups=(2,))
    two = said["human"]["server"]["groups"][0]
    assert two["size"] == 2 and said["server"]["replace_one"] == two["epsilon"]
    assert said["server"]["replace_one"] > 2 * said["server"]["epsilon"] * 0.9
    assert said["quoted"]["replace_one"] == said["server"]["replace_one"]


def test_the_sentence_and_the_page_give_both():
    run = run_of(SMALL, sampling="poisson")
    ledger = Ledger(run)
    ledger.record(1, [0, 1])
    for said, whom in (
        (statement(run), "server"),
        (statement(run, seed_public=True), "server"),
        (statement(run, ledger), "server"),
        (statement(run, ledger, draw_given=True), "ledger"),
    ):
        shown = round_up(said[whom]["replace_one"])
        towards = "everybody" if whom == "ledger" else "the server"
        assert (
            f"For replacing one record by another, epsilon = {shown} towards {towards}."
            in said["quote"]
        )
        assert "a group of two" in render(said)
    fixed = statement(run_of(SMALL))
    assert "replacing one record" not in fixed["quote"] and "group of two" not in render(fixed)
    assert fixed["server"]["replace_one"] == fixed["server"]["epsilon"]
