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
from toys import Linear, vectors

from dpscaffold import Gaussian, Logistic, Plan, train
from dpscaffold.algorithms import (
    Broadcast,
    Cohort,
    Known,
    Local,
    Participant,
    Server,
    Upload,
    scaffold_balanced,
)
from dpscaffold.algorithms.balanced import (
    Balance,
    Spread,
    add_all,
    along_balanced,
    scaffold_balanced_warm,
    send_balanced,
    send_measured,
)
from dpscaffold.engines import Draw

ALARM = 1e-6
ENGINES = {"loop": loop, "simulator": simulator}
KNOWN = [name for name in PRIVACIES if not name.startswith("median")]
each_engine = pytest.mark.parametrize("engine", ENGINES)


def everyone(run) -> Draw:
    users = np.arange(run.users)
    return Draw(users, users)


def corrections(server: Server, cohort: Cohort) -> torch.Tensor:
    """What balanced controls add to the gradient of each of the cohort, (m, P)."""
    shared = Balance(0.3)(server, cohort)
    at = Participant(Broadcast(2, server.params, shared), cohort.memories, cohort.known)
    nothing = torch.zeros_like(cohort.memories["control"])
    return along_balanced(nothing, nothing, at)


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
    server = Server(torch.zeros(7), slots)
    controls[~seen] = 0.0
    known = Known(2, 0.1, torch.full((5, 1), 0.1))
    own = (weights * seen)[:, None]  # any weights of the users' own would do
    memories = {"control": own * controls, "weight": own}
    cohort = Cohort(tuple(range(5)), weights, known, memories, seen)
    added = corrections(server, cohort)
    mean = (weights * seen) @ controls / (weights * seen).sum()
    common = 0.3 * (slots["control"] / 3 - mean)
    torch.testing.assert_close(added[~seen], common.expand(int(unseen), 7))
    torch.testing.assert_close(
        (weights * seen) @ added, (weights * seen).sum() * common, rtol=1e-4, atol=1e-5
    )


def test_nobody_seen_means_no_correction():
    nothing = {name: torch.zeros(1) for name in ("weight", "square", "noise")}
    server = Server(torch.zeros(2), {"control": torch.ones(2), **nothing})
    memories = {"control": torch.zeros(1, 2), "weight": torch.zeros(1, 1)}
    cohort = Cohort((0,), torch.ones(1), Known(1, 1.0), memories, torch.tensor([False]))
    told = Balance("auto")(server, cohort)
    assert not told["cohort"].any() and not told["common"].any()
    spread = Spread.of(Server(torch.zeros(2), {"control": torch.zeros(2), **nothing}))
    assert not spread.centre.any() and (spread.square, spread.noise) == (0.0, 0.0)


def test_controls_that_do_not_differ_deserve_no_trust_where_there_is_noise():
    """And none below zero, however far the spread falls short of its noise."""
    for square in (0.0, 0.5, 1.0):
        value = torch.tensor(square, dtype=torch.float64)
        assert Spread(torch.ones(3), value, torch.ones_like(value)).trust() == 0.0
    half = torch.tensor(2.0, dtype=torch.float64)
    assert Spread(torch.ones(3), half, torch.ones_like(half)).trust() == 0.5


def test_the_server_moves_at_its_rate_and_keeps_what_is_not_the_controls():
    """A server optimiser's slots stay as they are; the controls' totals are added whole."""
    slots = {"weight": torch.tensor([1.0]), "velocity": torch.tensor([5.0])}
    upload = Upload(torch.tensor([2.0]), {"weight": torch.tensor([3.0])})
    after = add_all(Server(torch.tensor([1.0]), slots), upload, 0.25)
    assert after.params == 1.5 and after.slots == {"weight": 4.0, "velocity": 5.0}


def test_a_warm_start_measures_and_does_not_move():
    """Wherever local steps ended: no move goes up, and c_i is the mean of the gradients."""
    memory = {name: torch.zeros(1) for name in ("weight", "square", "noise")}
    memory["control"] = torch.zeros(2)
    known = Known(4, 0.1, torch.tensor([0.6]), torch.tensor([2.0]))
    at = Participant(Broadcast(1, torch.zeros(2)), memory, known)
    local = Local(torch.tensor([7.0, 8.0]), torch.tensor([3.0, 4.0]))
    upload, kept = send_measured(local, at)
    assert not upload.params.any()
    assert kept["control"].tolist() == [6.0, 8.0] and kept["square"] == 50.0
    assert float(kept["noise"]) == pytest.approx(2 * 0.6**2 / 4)


@each_engine
@pytest.mark.parametrize("privacy", ["user", "user-poisson"])
def test_towards_whole_users_the_noise_is_not_divided_by_the_batch(engine, privacy):
    run = setting("scaffold-balanced", "logistic", privacy, federation(UNEQUAL), rounds=5)
    spread = Spread.of(Driven(ENGINES[engine](run)).drive().reached.state.server)
    variance = (2 * 0.7 * 0.2) ** 2 / run.plan.local_steps
    assert run.known(range(2)).spread.flatten().tolist() == pytest.approx([2 * 0.7 * 0.2] * 2)
    assert spread.noise == pytest.approx(variance * run.task.parameters, rel=1e-4)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_run_that_was_cut_goes_on_as_it_would_have(tmp_path, engine, warm):
    """Every slot, the users' and the server's: a depends on all four."""

    def cut(row):
        if row.round == 4:
            raise InterruptedError

    data = federation(UNEQUAL)
    algorithm = scaffold_balanced_warm() if warm else scaffold_balanced()
    more = {"warm_rounds": 2} if warm else {}
    plan = Plan(rounds=7, local_steps=2, user_ratio=0.5, data_ratio=0.5, checkpoint_every=3, **more)
    asked = (data, Logistic(data.dimension, data.classes), algorithm, plan, Gaussian(1.0, 0.1))
    whole = train(*asked, engine=engine)
    with pytest.raises(InterruptedError):
        train(*asked, engine=engine, out=tmp_path, on_round=cut)
    rest = train(*asked, engine=engine, out=tmp_path, resume=True)
    assert torch.equal(whole.params, rest.params)
    shown = ("control_norm", "weight_norm", "square_norm", "noise_norm")
    assert [whole.history[-1][name] for name in shown] == [rest.history[-1][name] for name in shown]
    assert all(whole.history[-1][name] > 0 for name in shown)


@each_engine
@pytest.mark.parametrize("privacy", KNOWN)
def test_full_trust_with_everyone_is_scaffold_from_the_first_round(engine, privacy):
    plan = {"user_ratio": 1.0, "rounds": 5}
    one, other = (
        Driven(ENGINES[engine](setting(algorithm, "logistic", privacy, **plan))).drive().reached
        for algorithm in ("scaffold", scaffold_balanced(1.0))
    )
    assert float((one.params - other.params).norm() / one.params.norm()) < 1e-5


@each_engine
@pytest.mark.parametrize("sizes", [EQUAL, UNEQUAL])
def test_full_trust_is_scaffold_once_everyone_has_taken_part(engine, sizes):
    """A warm round with everybody, then a part of the users at a time."""
    cohorts = ([0, 2, 5], [1, 2, 3], [0, 1, 4])
    reached = []
    for name in ("scaffold-warm", "scaffold-balanced-warm"):
        run = setting(name, "logistic", "fixed", federation(sizes), rounds=4, warm_rounds=1)
        if name != "scaffold-warm":
            algorithm = replace(run.algorithm, announce=Balance(1.0))
            run = replace(run, algorithm=algorithm)
        driven = Driven(ENGINES[engine](run))
        driven.round(everyone(run))
        for cohort in cohorts:
            driven.round_of(cohort)
        reached.append(driven.reached.params)
    assert float((reached[0] - reached[1]).norm() / reached[0].norm()) < 1e-5


@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_without_noise_trust_is_full(weighting):
    run = setting("scaffold-balanced", "logistic", None, weighting=weighting)
    driven = Driven(simulator(run)).drive()
    assert Spread.of(driven.reached.state.server).trust() == 1.0


def test_the_running_sums_are_those_of_the_controls():
    """c and mean‖c_i − c‖², weighted by records, against the memories of all users."""
    run = setting("scaffold-balanced", "logistic", "fixed", weighting="records", rounds=9)
    driven = Driven(simulator(run)).drive()
    spread = Spread.of(driven.reached.state.server)
    memories = driven.reached.memories
    weights = memories["weight"].double()
    assert set(weights[:, 0].tolist()) <= {0.0, *run.sizes.tolist()}
    controls = memories["control"].double() / weights.clamp_min(1)
    weights = weights[:, 0] / weights.sum()
    centre = weights @ controls
    torch.testing.assert_close(spread.centre.double(), centre, rtol=1e-4, atol=1e-5)
    square = float(weights @ (controls - centre).square().sum(1))
    assert spread.square == pytest.approx(square, rel=1e-4)
    batches = run.batch_sizes.double()
    variance = (2 * 0.7 * 0.8 / batches) ** 2 / run.plan.local_steps
    assert spread.noise == pytest.approx(float(weights @ variance) * controls.shape[1], rel=1e-4)


# --- noise in the aggregate -------------------------------------------------------------------

SIZE, STEPS, USERS, COHORT = 16_000, 3, 8, 4


def scale_is(values: np.ndarray, variance: float) -> bool:
    """Whether independent zero-mean normals have this variance, by the chi-square interval."""
    statistic = float(np.square(values, dtype=np.float64).sum()) / variance
    return bool(chi2.ppf(ALARM / 2, values.size) < statistic < chi2.isf(ALARM / 2, values.size))


def aggregate_noise(engine: str, algorithm) -> np.ndarray:
    """The second round's mean gradient where every record's gradient is zero: noise alone."""
    data = vectors([torch.zeros(6, SIZE) for _ in range(USERS)])
    run = setting(
        algorithm,
        Linear(SIZE),
        Gaussian(clip=1.0, noise=2.0),
        data,
        rounds=2,
        regularisation=0.0,
        local_steps=STEPS,
    )
    driven = Driven(ENGINES[engine](run))
    driven.round(everyone(run))
    before = driven.reached.params.clone()
    driven.round_of(range(COHORT))
    return ((before - driven.reached.params) / (STEPS * run.plan.step_size)).numpy()


@each_engine
@pytest.mark.parametrize("trust", [0.0, 0.5, 1.0])
def test_the_aggregate_holds_as_much_old_noise_as_trust_lets_in(engine, trust):
    """v/m + a²v(1/m − 1/M) per coordinate, v the variance of a mean of K noised gradients. With
    a = ½ the interval rejects what SCAFFOLD and FedAvg have."""
    noise = aggregate_noise(engine, scaffold_balanced(trust))
    v = (2 * 1.0 * 2.0 / 2) ** 2 / STEPS  # C = 1, σ_g = 2, b = 2
    law = {a: v / COHORT + a**2 * v * (1 / COHORT - 1 / USERS) for a in (0.0, 0.5, 1.0)}
    assert scale_is(noise, law[trust])
    for other in set(law) - {trust}:
        assert not scale_is(noise, law[other])


@pytest.mark.parametrize("engine", ["simulator"])
def test_the_laws_above_are_those_of_the_neighbours(engine):
    """SCAFFOLD has the variance of a = 1 and FedAvg that of a = 0."""
    v = (2 * 1.0 * 2.0 / 2) ** 2 / STEPS
    assert scale_is(aggregate_noise(engine, "scaffold"), v / COHORT + v * (1 / COHORT - 1 / USERS))
    assert scale_is(aggregate_noise(engine, "fedavg"), v / COHORT)


@pytest.mark.parametrize("zeta", [0.0, 0.5, 1.0, 3.0])
def test_trust_is_estimated_rightly_on_gaussian_controls(zeta):
    """c_i = θ_i + noise of known spread, unequal between users: a → ζ²/(ζ² + v̄P)."""
    users, size, steps = 400, 500, 5
    stream = torch.Generator().manual_seed(3)
    spread = torch.linspace(0.1, 0.3, users)[:, None]
    noise = spread / steps**0.5 * torch.randn(users, size, generator=stream)
    controls = zeta / size**0.5 * torch.randn(users, size, generator=stream) + noise
    slots = {name: torch.zeros(users, 1) for name in ("weight", "square", "noise")}
    slots["control"] = 0 * controls
    at = Participant(
        Broadcast(1, torch.zeros(users, size)),
        slots,
        Known(steps, 0.1, spread, torch.ones(users, 1)),
    )
    upload, _ = send_balanced(Local(0 * controls, controls), at)
    totals = {name: value.mean(0) for name, value in upload.totals.items()}
    start = {name: torch.zeros_like(value) for name, value in totals.items()}
    server = add_all(Server(torch.zeros(size), start), Upload(torch.zeros(size), totals), 1.0)
    expected = zeta**2 / (zeta**2 + float((spread**2).mean()) / steps * size)
    assert Spread.of(server).trust() == pytest.approx(expected, abs=0.02)


# --- as a user meets it -----------------------------------------------------------------------


@pytest.mark.parametrize("trust", [-0.1, 1.1, float("nan"), "half", True])
def test_a_trust_outside_the_unit_interval_is_refused(trust):
    with refuses("out-of-range: algorithm.trust is … [0, 1]"):
        scaffold_balanced(trust)


def test_a_clip_read_off_the_batch_is_refused():
    data = federation()
    with refuses("median-clip: privacy.clip is 'median'"):
        plan = Plan(rounds=2, user_ratio=0.5, data_ratio=0.5)
        task, median = Logistic(data.dimension, data.classes), Gaussian(clip="median", noise=1.0)
        train(data, task, scaffold_balanced(), plan, median)
