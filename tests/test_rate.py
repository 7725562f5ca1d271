"""The step size that nobody gave: from public sizes, within its limits, without a record."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpscaffold import Federation, Gaussian, Linear, Logistic, Plan, fedavg, scaffold
from dpscaffold.algorithms import with_adam, with_momentum
from dpscaffold.config import Run, make_run, solve_noise
from dpscaffold.config.noise import dominating_site
from dpscaffold.config.rate import (
    CURVATURE,
    DEEP,
    MOST_DRIFTING,
    MOST_NOISE,
    MOST_STEPS,
)
from dpscaffold.data.prepared import ClipNorm
from dpscaffold.planning import Facts
from dpscaffold.tasks import LOSSES, Mlp

PLAN = Plan(
    rounds=50,
    local_steps=1,
    user_ratio=1.0,
    data_ratio=1.0,
    weighting="records",
    regularisation=0.0,
)
CLIP = 10.0
HOSPITALS = (720, 610, 540, 480, 430, 390, 350, 320, 290, 250, 210, 140, 10)


def public(
    sizes: tuple[int, ...], noise: float = 10.0, classes: int = 2, norm: float = 3.0, **plan
) -> Run:
    """A run of gradient descent on rows of at most this norm, which no clipping shortens."""
    roster = Facts(sizes, 6, classes).roster
    roster = replace(roster, schema=replace(roster.schema, preparation=(ClipNorm(norm),)))
    task = Logistic(6, classes) if classes else Linear(6, 1, LOSSES["squared"])
    return make_run(roster, task, fedavg(), PLAN.changed(**plan), Gaussian(CLIP, noise, "poisson"))


def rate_of(run: Run) -> float:
    """The step size that is chosen for a run."""
    chosen = replace(run, plan=run.plan.changed(learning_rate=None)).settled.learning_rate
    assert chosen is not None
    return chosen


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
    rate = rate_of(public(tuple(sizes), noise, classes, norm))
    each = 2 * CLIP * noise * math.sqrt(len(sizes)) / sum(sizes)
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
    assert rate_of(alike) < 0.2 * rate_of(without)
    rates = [rate_of(public(sizes, noise=100.0)) for sizes in (HOSPITALS, HOSPITALS[:-1])]
    assert rates[0] == pytest.approx(rates[1], rel=0.1)


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        # the noise of K steps averages out: a round goes as far, by K steps of half the noise
        ({"plan": PLAN.changed(local_steps=4)}, 2.0),
        ({"algorithm": scaffold()}, 1.0),
        ({"algorithm": with_momentum(fedavg(), 0.9)}, 0.1),
        ({"plan": PLAN.changed(server_rate=2.0)}, 0.5),
        ({"algorithm": with_adam(fedavg()), "plan": PLAN.changed(server_rate=0.01)}, 1.0),
        ({"plan": PLAN.changed(rounds=200)}, 0.5),
        ({"plan": PLAN.changed(data_ratio=0.5)}, 0.25),
        ({"task": Mlp(6, 2, 4)}, DEEP),
        ({"privacy": Gaussian(2 * CLIP, 1000.0, "poisson")}, 0.5),
        ({"privacy": Gaussian("median", 1000.0, "poisson")}, CLIP),
    ],
)
def test_under_noise_the_step_size_follows_the_noise_that_scores_gather(change, factor):
    loud = public((50, 60), noise=1000.0)
    assert rate_of(replace(loud, **change)) == pytest.approx(factor * rate_of(loud), rel=0.05)


def test_without_noise_curvature_and_drift_limit_it():
    plain = replace(public((50, 60)), privacy=None)
    bend = 0.5 * (3.0**2 + 1)
    for steps, rule, length in (
        *((1, fedavg(), 1), (500, fedavg(), MOST_DRIFTING)),
        *((10, scaffold(), 10), (500, scaffold(), MOST_STEPS)),
    ):
        plan = PLAN.changed(local_steps=steps, regularisation=0.5)
        rate = rate_of(replace(plain, plan=plan, algorithm=rule))
        assert rate == pytest.approx(length / (bend + 0.5), rel=0.05)


def test_rows_without_a_promised_norm_are_those_of_standardised_features():
    free = Facts((50, 60), 6, 2).roster
    run = replace(public((50, 60), norm=math.sqrt(6)), roster=free)
    assert rate_of(run) == rate_of(public((50, 60), norm=math.sqrt(6)))


def test_it_is_the_same_whatever_the_records_and_is_chosen_again_with_other_noise():
    stream = torch.Generator().manual_seed(0)
    data = [
        [(torch.randn(40, 6, generator=stream), torch.randint(3, (40,), generator=stream))] * 5
        for _ in range(2)
    ]
    made = [Federation.from_arrays(parts, parts, classes=3) for parts in data]
    runs = [
        make_run(f.roster, Logistic(6, 3), scaffold(), Plan(), Gaussian(1.0, 2.0)) for f in made
    ]
    assert runs[0].settled == runs[1].settled and runs[0].plan.learning_rate is None
    quiet = solve_noise(runs[0], 50.0)
    assert quiet.settled.learning_rate == rate_of(quiet) != runs[0].settled.learning_rate


def test_a_round_has_the_noise_of_its_participants():
    run = public((100, 100, 100, 100), user_ratio=0.5, weighting="uniform")
    assert run.round_noise == pytest.approx(2 * CLIP * 10 / 100 / math.sqrt(2))


def test_a_site_whose_noise_dominates_is_named_with_what_helps():
    assert dominating_site(public(HOSPITALS)) is None
    said = dominating_site(public(HOSPITALS, weighting="uniform"))
    assert said is not None and "site 12: 10 records, 72 times site 0's noise (720 records)" in said
    assert 'plan.weighting = "records"' in said and "minimum_records" in said
    assert dominating_site(public((40, 50, 60), weighting="uniform")) is None
    assert dominating_site(replace(public(HOSPITALS), privacy=None)) is None
