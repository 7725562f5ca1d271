"""The step size of noisy gradient descent: from real sizes, within its limits, without a record."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpscaffold import Gaussian, Linear, Logistic, Plan, fedavg, scaffold
from dpscaffold.algorithms import with_momentum
from dpscaffold.config import Run
from dpscaffold.config.noise import dominating_site, round_noise
from dpscaffold.planning import Facts
from dpscaffold.planning.asked import planned_rate
from dpscaffold.planning.descent import CURVATURE, MOST_NOISE, descent_rate
from dpscaffold.tasks import LOSSES, Mlp

PLAN = Plan(
    rounds=50,
    local_steps=1,
    user_ratio=1.0,
    data_ratio=1.0,
    weighting="records",
    regularisation=0.0,
)
HOSPITALS = (720, 610, 540, 480, 430, 390, 350, 320, 290, 250, 210, 140, 10)


def public(sizes: tuple[int, ...], noise: float = 10.0, classes: int = 2, **plan) -> Run:
    facts = Facts(sizes, 6, classes)
    task = Logistic(6, classes) if classes else Linear(6, 1, LOSSES["squared"])
    return Run(facts.roster, task, fedavg(), PLAN.changed(**plan), Gaussian(2.0, noise, "poisson"))


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(5, 900), min_size=1, max_size=30),
    noise=st.floats(0.1, 300),
    norm=st.floats(0.5, 5),
    classes=st.sampled_from([0, 2, 5]),
)
def test_the_noise_of_a_score_stays_below_its_limit(sizes, noise, norm, classes):
    """Worked out by hand: T steps of length η, each with the noise of all sites' 2Cσ_g in the sum
    of all records."""
    run = public(tuple(sizes), noise, classes)
    rate = descent_rate(run, norm)
    assert rate is not None
    each = 2 * 2.0 * noise * math.sqrt(len(sizes)) / sum(sizes)
    score = rate * each * math.sqrt(50) * norm * (math.sqrt(2) if classes else 1)
    bend = (0.5 if classes else 1.0) * (norm**2 + 1)
    most = MOST_NOISE["class" if classes else "number"]
    assert score <= 1.06 * most and rate * bend <= 1.06  # two digits are kept
    assert score >= 0.94 * most or rate * bend >= 0.94  # and one of the limits is reached


@pytest.mark.parametrize("loss", ["softmax", "logistic", "squared", "huber", "labels"])
def test_no_loss_bends_more_than_its_curvature(loss):
    """The largest eigenvalue of the second derivative in the scores, anywhere."""
    outputs = 3 if loss in ("softmax", "labels") else 1
    scores = torch.randn(40, outputs, generator=torch.Generator().manual_seed(0)).double() * 2
    target = torch.zeros(1) if loss in ("squared", "huber") else torch.zeros(1, dtype=torch.long)

    def value(row: torch.Tensor) -> torch.Tensor:
        return LOSSES[loss].values(row[None], target)[0]

    bends = [
        float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(value, row)).max())
        for row in [*scores, torch.zeros(outputs).double()]
    ]
    assert max(bends) <= CURVATURE[loss] + 1e-9
    assert max(bends) > 0.6 * CURVATURE[loss]  # and not by far less


def test_the_step_size_follows_the_real_sizes():
    """A site with ten records shortens the step where sites count alike, and hardly where records
    do."""
    alike = public(HOSPITALS, noise=100.0, weighting="uniform")
    without = public(HOSPITALS[:-1], noise=100.0, weighting="uniform")
    assert descent_rate(alike, 3.0) < 0.2 * descent_rate(without, 3.0)
    by_records = public(HOSPITALS, noise=100.0), public(HOSPITALS[:-1], noise=100.0)
    rates = [descent_rate(run, 3.0) for run in by_records]
    assert rates[0] == pytest.approx(rates[1], rel=0.1)
    assert planned_rate(by_records[0], None) > 0


@pytest.mark.parametrize(
    "change",
    [
        {"plan": PLAN.changed(local_steps=2)},
        {"algorithm": scaffold()},
        {"algorithm": with_momentum(fedavg(), 0.9)},
        {"task": Mlp(6, 2, 4)},
        {"privacy": None},
        {"privacy": Gaussian("median", 2.0)},
        {"privacy": Gaussian(1.0, 2.0, unit="user")},
    ],
)
def test_other_runs_have_no_formula(change):
    assert descent_rate(public((50, 60)), 3.0) is not None
    assert descent_rate(replace(public((50, 60)), **change), 3.0) is None
    assert descent_rate(public((50, 60)), None) is None


def test_batches_and_a_server_that_steps_further_leave_the_distance_as_it_is():
    """η_g·η₀/s is the length of a round's step."""
    whole = descent_rate(public((100, 200), noise=0.01), 1.0)
    part = descent_rate(public((100, 200), noise=0.01, data_ratio=0.5, server_rate=2.0), 1.0)
    assert whole == pytest.approx(1.0) and part == pytest.approx(0.25)


def test_a_round_has_the_noise_of_its_participants():
    run = public((100, 100, 100, 100), user_ratio=0.5, weighting="uniform")
    assert round_noise(run) == pytest.approx(2 * 2.0 * 10 / 100 / math.sqrt(2))


def test_a_site_whose_noise_dominates_is_named_with_what_helps():
    assert dominating_site(public(HOSPITALS)) is None
    said = dominating_site(public(HOSPITALS, weighting="uniform"))
    assert said is not None and "site 12: 10 records, 72 times site 0's noise (720 records)" in said
    assert 'plan.weighting = "records"' in said and "minimum_records" in said
    assert dominating_site(public((40, 50, 60), weighting="uniform")) is None
    assert dominating_site(replace(public(HOSPITALS), privacy=None)) is None
