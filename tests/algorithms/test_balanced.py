"""Balanced controls: a correction that sums to zero, and a share that is as large as it deserves.

False alarms of the statistical tests have chance 10⁻⁶.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from scipy.stats import chi2
from small import EQUAL, PRIVACIES, UNEQUAL, Driven, federation, loop, setting, simulator
from torch.testing import assert_close
from toys import Linear, vectors

from dpscaffold import Gaussian, Logistic, Plan, train
from dpscaffold.algorithms import Broadcast, Cohort, Known, Local, Participant, Server, Upload
from dpscaffold.algorithms.balanced import (
    add_all,
    along_balanced,
    balance,
    deserved_trust,
    scaffold_balanced,
    send_balanced,
    spread_of,
)
from dpscaffold.algorithms.base import Partial

ALARM = 1e-6
ENGINES = {"loop": loop, "simulator": simulator}
KNOWN = [name for name in PRIVACIES if not name.startswith("median")]
NUMBERS = ("weight", "square", "noise")
each_engine = pytest.mark.parametrize("engine", ENGINES)


def reached(engine: str, run, *cohorts):
    """Where a run stands after rounds of these users, or after all of its own."""
    driven = Driven(ENGINES[engine](run))
    for cohort in cohorts:
        driven.round_of(cohort)
    return (driven if cohorts else driven.drive()).reached


def assert_near(one, other) -> None:
    assert float((one.params - other.params).norm() / one.params.norm()) < 1e-5


@given(seed=st.integers(0, 1000), weighted=st.booleans(), unseen=st.integers(0, 2))
def test_drift_corrections_sum_to_zero_over_the_cohort(seed, weighted, unseen):
    """Whatever the controls and the weights: all that is left of the cohort's sum is the common
    part, for those who were seen; and that is all that a newcomer gets."""
    stream = torch.Generator().manual_seed(seed)
    controls = torch.randn(5, 7, generator=stream)
    weights = torch.rand(5, generator=stream) + 0.1 if weighted else torch.ones(5)
    weights /= weights.sum()
    seen = torch.arange(5) >= unseen
    slots = {"control": torch.randn(7, generator=stream), "weight": torch.tensor([3.0])}
    slots |= {"square": torch.tensor([90.0]), "noise": torch.tensor([0.1])}
    server, known = Server(torch.zeros(7), slots), Known(2, 0.1, torch.full((5, 1), 0.1))
    controls[~seen] = 0.0
    own = (weights * seen)[:, None]  # any weights of the users' own would do
    memories = {"control": own * controls, "weight": own}
    shared = balance(0.3, server, Cohort(tuple(range(5)), weights, known, memories, seen))
    at = Participant(Broadcast(2, server.params, shared), memories, known)
    added = along_balanced(torch.zeros(5, 7), torch.zeros(5, 7), at)
    mean = (weights * seen) @ controls / (weights * seen).sum()
    common = 0.3 * (slots["control"] / 3 - mean)
    assert_close(added[~seen], common.expand(int(unseen), 7))
    total = (weights * seen).sum() * common
    assert_close((weights * seen) @ added, total, rtol=1e-4, atol=1e-5)


def test_nobody_seen_means_no_correction():
    nothing = {name: torch.zeros(1) for name in NUMBERS}
    server = Server(torch.zeros(2), {"control": torch.ones(2), **nothing})
    memories = {"control": torch.zeros(1, 2), "weight": torch.zeros(1, 1)}
    cohort = Cohort((0,), torch.ones(1), Known(1, 1.0), memories, torch.tensor([False]))
    told = balance("auto", server, cohort)
    assert not told["cohort"].any() and not told["common"].any()
    centre, *numbers = spread_of(Server(torch.zeros(2), {"control": torch.zeros(2), **nothing}))
    assert not centre.any() and numbers == [0.0, 0.0]


def test_controls_that_do_not_differ_deserve_no_trust_where_there_is_noise():
    """And none below zero, however far the spread falls short of its noise; without noise all."""
    for one in torch.tensor([1.0, 0.125], dtype=torch.float64):
        for square, trust in ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (2.0, 0.5)):
            assert deserved_trust(square * one, one) == trust
            assert deserved_trust(square * one, 0 * one) == 1.0


@each_engine
@pytest.mark.parametrize("privacy", KNOWN)
def test_full_trust_with_everyone_is_scaffold_from_the_first_round(engine, privacy):
    plan = {"user_ratio": 1.0, "rounds": 5}
    runs = (setting(a, "logistic", privacy, **plan) for a in ("scaffold", scaffold_balanced(1.0)))
    assert_near(*(reached(engine, run) for run in runs))


@each_engine
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL])
def test_full_trust_is_scaffold_once_everyone_has_taken_part(engine, sizes):
    """A warm round with everybody, then a part of the users at a time."""
    plan = {"rounds": 4, "warm_rounds": 1}
    names = ("scaffold-warm", "scaffold-balanced-warm")
    one, other = (setting(a, "logistic", "fixed", federation(sizes), **plan) for a in names)
    other = replace(other, algorithm=other.algorithm.replace(announce=Partial(balance, (1.0,))))
    cohorts = (range(6), [0, 2, 5], [1, 2, 3], [0, 1, 4])
    assert_near(*(reached(engine, run, *cohorts) for run in (one, other)))


@each_engine
@pytest.mark.parametrize("weighting", ["uniform", "records"])
@pytest.mark.parametrize("privacy", [None, "fixed", "user", "user-poisson"])
def test_the_running_sums_are_those_of_the_controls(engine, privacy, weighting):
    """c and mean‖c_i − c‖², weighted by records, against the memories of all users; the noise is
    divided by the batch, but not towards whole users. Without noise trust is full."""
    data = federation(UNEQUAL)
    run = setting("scaffold-balanced", "logistic", privacy, data, weighting=weighting, rounds=9)
    found = reached(engine, run)
    memories = found.memories
    found_centre, found_square, found_noise = spread_of(found.state.server)
    weights = memories["weight"].double()
    allowed = run.sizes.tolist() if weighting == "records" else [1.0]
    assert set(weights[:, 0].tolist()) <= {0.0, *allowed}
    controls = memories["control"].double() / weights.clamp_min(1)
    weights = weights[:, 0] / weights.sum()
    centre = weights @ controls
    assert_close(found_centre.double(), centre, rtol=1e-4, atol=1e-5)
    square = float(weights @ (controls - centre).square().sum(1))
    assert found_square == pytest.approx(square, rel=1e-4)
    scale = {None: 0.0, "fixed": 2 * 0.7 * 0.8 / run.batch_sizes.double()}.get(privacy, 0.28)
    variance = scale**2 / run.plan.local_steps * torch.ones(len(weights), dtype=torch.float64)
    assert found_noise == pytest.approx(float(weights @ variance) * controls.shape[1], rel=1e-4)
    assert (deserved_trust(found_square, found_noise) == 1.0) == (privacy is None)


# --- noise in the aggregate -------------------------------------------------------------------

SIZE, STEPS, USERS, COHORT = 16_000, 3, 8, 4


def scale_is(values: np.ndarray, variance: float) -> bool:
    """Whether independent zero-mean normals have this variance, by the chi-square interval."""
    statistic = float(np.square(values, dtype=np.float64).sum()) / variance
    return bool(chi2.ppf(ALARM / 2, values.size) < statistic < chi2.isf(ALARM / 2, values.size))


def aggregate_noise(engine: str, algorithm) -> np.ndarray:
    """The second round's mean gradient where every record's gradient is zero: noise alone."""
    data = vectors([torch.zeros(6, SIZE) for _ in range(USERS)])
    plan = {"rounds": 2, "regularisation": 0.0, "local_steps": STEPS}
    run = setting(algorithm, Linear(SIZE), Gaussian(clip=1.0, noise=2.0), data, **plan)
    before, after = (
        reached(engine, run, range(USERS), *more).params for more in ((), (range(COHORT),))
    )
    return ((before - after) / (STEPS * run.plan.step_size)).numpy()


@each_engine
@pytest.mark.parametrize("trust", [0.0, 0.5, 1.0])
def test_the_aggregate_holds_as_much_old_noise_as_trust_lets_in(engine, trust):
    """v/m + a²v(1/m − 1/M) per coordinate, v the variance of a mean of K noised gradients. SCAFFOLD
    has that of a = 1 and FedAvg that of a = 0."""
    v = (2 * 1.0 * 2.0 / 2) ** 2 / STEPS  # C = 1, σ_g = 2, b = 2
    law = {a: v / COHORT + a**2 * v * (1 / COHORT - 1 / USERS) for a in (0.0, 0.5, 1.0)}
    neighbour = {0.0: ["fedavg"], 1.0: ["scaffold"]}.get(trust, [])
    for algorithm in (scaffold_balanced(trust), *neighbour):
        noise = aggregate_noise(engine, algorithm)
        assert {a for a in law if scale_is(noise, law[a])} == {trust}


@pytest.mark.parametrize("zeta", [0.0, 0.5, 1.0, 3.0])
def test_trust_is_estimated_rightly_on_gaussian_controls(zeta):
    """c_i = θ_i + noise of known spread, unequal between users: a → ζ²/(ζ² + v̄P)."""
    users, size, steps = 400, 500, 5
    stream = torch.Generator().manual_seed(3)
    spread = torch.linspace(0.1, 0.3, users)[:, None]
    noise = spread / steps**0.5 * torch.randn(users, size, generator=stream)
    controls = zeta / size**0.5 * torch.randn(users, size, generator=stream) + noise
    slots = {name: torch.zeros(users, 1) for name in NUMBERS} | {"control": 0 * controls}
    known = Known(steps, 0.1, spread, torch.ones(users, 1))
    at = Participant(Broadcast(1, torch.zeros(users, size)), slots, known)
    upload, _ = send_balanced(Local(0 * controls, controls), at)
    totals = {name: value.mean(0) for name, value in upload.totals.items()}
    start = {name: torch.zeros_like(value) for name, value in totals.items()}
    server = add_all(Server(torch.zeros(size), start), Upload(torch.zeros(size), totals), 1.0)
    expected = zeta**2 / (zeta**2 + float((spread**2).mean()) / steps * size)
    assert deserved_trust(*spread_of(server)[1:]) == pytest.approx(expected, abs=0.02)


# --- as a user meets it -----------------------------------------------------------------------


@pytest.mark.parametrize("trust", [-0.1, 1.1, float("nan"), "half", True])
def test_a_trust_outside_the_unit_interval_is_refused(trust):
    with refuses("out-of-range: algorithm.trust is … [0, 1]"):
        scaffold_balanced(trust)


def test_a_clip_read_off_the_batch_is_refused():
    data, median = federation(), Gaussian(clip="median", noise=1.0)
    plan = Plan(rounds=2, user_ratio=0.5, data_ratio=0.5)
    with refuses("median-clip: privacy.clip is 'median'"):
        train(data, Logistic(data.dimension, data.classes), scaffold_balanced(), plan, median)
