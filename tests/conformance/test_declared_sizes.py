"""Declared sizes: nothing that a user uploads depends on how many records it really holds.

Neighbouring datasets then differ by one record that is there or not, so rates, divisors, weights
and every slot must be made of the declared size, on every engine.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deploy.test_sites import assert_parity
from deploy.world import World
from scipy.stats import binom
from small import (
    ENGINES,
    EVERY,
    PLAN,
    Driven,
    assert_agree,
    assert_identical,
    federation,
    setting,
    simulator,
    uploads,
)

from dpscaffold.algorithms import ITERATIVE
from dpscaffold.deployment.protocol.messages import unpack
from dpscaffold.engines.fast.lockstep import Lockstep
from dpscaffold.engines.participation import participate
from dpscaffold.randomness.streams import Randomness
from dpscaffold.setting.gaussian import Gaussian
from dpscaffold.tasks import ClippedSum, Logistic

POISSON = Gaussian(clip=0.7, noise=0.8, sampling="poisson")
DECLARED = (10, 9, 6, 12, 15, 7)
#: True sizes below and above the declared ones.
FEWER, MORE = (4, 3, 2, 7, 5, 6), (13, 17, 9, 14, 30, 8)
ALARM, TRIALS = 1e-9, 4000

each_algorithm = pytest.mark.parametrize("algorithm", EVERY)


class Blind(Logistic):
    """A task in which every record's gradient is zero: uploads are noise and public numbers."""

    def losses(self, params, features, labels):
        return params.sum() * 0 * features.sum(1)

    def clipped_sum(self, params, batch, clip):
        return ClippedSum(torch.zeros_like(params), clip)


def run_of(sizes, algorithm="scaffold-balanced", task="logistic", declared=DECLARED, **plan):
    return setting(algorithm, task, POISSON, federation(sizes).declaring(declared), **plan)


def sent_by(engine: str, run, rounds: int):
    """Every vector that users upload or keep, by round."""
    if engine in ENGINES:
        return uploads(engine, run, rounds)
    ways = {
        "one user at a time": lambda one: Driven(simulator(one, chunk=1)),
        "mapped": lambda one: Driven(simulator(replace(one, data=replace(one.data, mapped=True)))),
        "stacked": lambda one: Driven(simulator([one, replace(one, plan=one.plan)])),
    }
    ENGINES["other"] = lambda one, randomness=None: ways[engine](one)
    try:
        return uploads("other", run, rounds)
    finally:
        del ENGINES["other"]


@pytest.mark.parametrize("engine", [*ENGINES, "one user at a time", "mapped", "stacked"])
@each_algorithm
def test_uploads_are_the_same_for_any_true_sizes(engine, algorithm):
    """Records that add nothing are not told from records that are not there, in any vector."""
    fewer, more = (
        sent_by(engine, run_of(sizes, algorithm, Blind(4, 3), weighting="records"), 2)
        for sizes in (FEWER, MORE)
    )
    for one, other in zip(fewer, more, strict=True):
        assert one.keys() == other.keys() and "move" in one
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(("task", "sizes"), [("logistic", MORE), ("module", FEWER)])
@each_algorithm
def test_both_engines_agree(algorithm, task, sizes):
    """Scripted steps (logistic), batched steps (module) and the loop upload the same."""
    run = run_of(sizes, algorithm, task, weighting="records")
    slow, fast = (ENGINES[name](run).drive().reached for name in ("loop", "simulator"))
    assert_agree(fast, slow, atol=1e-3 if algorithm == "fedadam" else 1e-5)


@pytest.mark.cpu_only("scripts are for CPUs")
def test_scripted_steps_take_part_in_this(monkeypatch):
    """The logistic runs above are those of the script; switched off, they end at the same bits."""
    found = []
    real = participate.scripted_steps

    def watched(*given):
        found.append(real(*given))
        return found[-1]

    monkeypatch.setattr(participate, "scripted_steps", watched)
    with_script = Driven(simulator(run_of(MORE))).drive().reached
    assert found and all(local is not None for local in found)
    monkeypatch.setattr(participate, "scripted_steps", lambda *given: None)
    assert_identical(with_script, Driven(simulator(run_of(MORE))).drive().reached)


def test_runs_in_lockstep_leave_declared_sizes_to_the_simulator():
    """Their device draws with the true size, so they must not take such runs."""
    runs = [run_of((9,) * 6, declared=9), run_of((9,) * 6, declared=9, seed=1)]
    streams = [run.randomness() for run in runs]
    data = [run.federation for run in runs]
    assert Lockstep.of(runs, data, streams, torch.device("cuda"), capture=None) is None


def expected_slots(run, user: int) -> tuple[float, float]:
    """w_i and w_i·v_i of balanced controls, from declared numbers alone."""
    size = DECLARED[user]
    batch = int(run.plan.data_ratio * size + 1e-9)
    spread = 2 * POISSON.clip * POISSON.noise / batch
    return float(size), size * spread**2 / run.plan.local_steps


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [FEWER, MORE], ids=["fewer", "more"])
def test_the_slots_hold_the_declared_size(engine, sizes):
    run = run_of(sizes, weighting="records", user_ratio=1.0)
    (sent,) = uploads(engine, run)
    for user in range(run.users):
        weight, noise = expected_slots(run, user)
        assert float(sent["weight"][user]) == float(sent["memory weight"][user]) == weight
        assert float(sent["noise"][user]) == pytest.approx(noise, rel=1e-6)


def site_world(folder, sizes, algorithm="scaffold-balanced", **plan) -> World:
    data = federation(sizes).declaring(DECLARED)
    plan = {"weighting": "records", "user_ratio": 1.0, **plan}
    return World(folder, algorithm, "logistic", POISSON, data, **plan)


@pytest.mark.cpu_only("sites compute on CPUs, and the simulator must end at the same bits")
@pytest.mark.parametrize("algorithm", ITERATIVE)
def test_sites_end_where_the_simulator_does(tmp_path, algorithm):
    """Whether a site holds fewer records than it declared or more of them."""
    world = site_world(tmp_path, (4, 17, 2, 14, 5, 8), algorithm)
    world.enrol()
    assert world.enrolled.sizes == DECLARED and world.enrolled.declared
    assert_parity(world.drive())


def test_sites_upload_the_declared_size(tmp_path):
    world = site_world(tmp_path, FEWER)
    world.enrol()
    world.round()
    sent = {name: unpack(raw).vectors for name, raw in world.exchange.answered}
    for user, name in enumerate(world.names):
        weight, noise = expected_slots(world.setting, user)
        assert sent[name]["kept.weight"].tolist() == [weight]
        assert float(sent[name]["kept.noise"][0]) == pytest.approx(noise, rel=1e-6)


@pytest.fixture
def drawn(monkeypatch):
    """How many records were drawn of how many trials, by user."""
    counts: dict[int, tuple[int, int]] = {}
    real = Randomness.batches

    def batches(self, round, user, records, batch, steps, sampling, out=None, declared=None):
        many = real(self, round, user, records, batch, TRIALS, sampling, None, declared)
        counts[user] = (int(many.count.sum()), records * TRIALS)
        return real(self, round, user, records, batch, steps, sampling, out, declared)

    monkeypatch.setattr(Randomness, "batches", batches)
    return counts


@pytest.mark.parametrize("engine", ["loop", "simulator", "sites"])
@pytest.mark.parametrize("sizes", [FEWER, MORE], ids=["fewer", "more"])
def test_every_engine_draws_at_the_declared_rate(tmp_path, drawn, engine, sizes):
    """Each record with chance ⌊sD_i⌋/D_i; chances from the true sizes would be rejected."""
    plan = {"rounds": 1, "user_ratio": 1.0}
    if engine == "sites":
        world = site_world(tmp_path, sizes, "fedavg", **plan)
        world.enrol()
        world.round()
    else:
        ENGINES[engine](run_of(sizes, "fedavg", **plan)).drive()
    rejected = 0
    for user, (taken, trials) in drawn.items():
        batch = int(PLAN.data_ratio * DECLARED[user] + 1e-9)
        low, high = binom.ppf([ALARM, 1 - ALARM], trials, batch / DECLARED[user])
        assert low <= taken <= high
        wrong = min(1.0, batch / sizes[user])
        rejected += not low <= binom.median(trials, wrong) <= high
    assert len(drawn) == len(DECLARED) and rejected >= 5
