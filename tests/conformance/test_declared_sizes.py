"""Declared sizes: nothing that a user uploads depends on how many records it really holds.

Neighbouring datasets then differ by one record that is there or not, so rates, divisors, weights
and every slot must be made of the declared size, on every engine.
"""

from __future__ import annotations

import pytest
import torch
from deploy.test_sites import assert_parity
from deploy.world import World, sent_in
from scipy.stats import binom
from world import (
    ENGINES,
    EVERY,
    PLAN,
    ClippedSum,
    assert_agree,
    counted_batches,
    federation,
    final,
    setting,
    uploads,
)

from dpscaffold import Gaussian, Logistic

POISSON = Gaussian(clip=0.7, noise=0.8, sampling="poisson")
DECLARED = (10, 9, 6, 12, 15, 7)
#: True sizes below and above the declared ones.
FEWER, MORE = (4, 3, 2, 7, 5, 6), (13, 17, 9, 14, 30, 8)
ALARM, TRIALS = 1e-9, 4000

#: Those that a configuration can name; sites run no other.
REGISTERED = [name for name in EVERY if name not in ("fedadam", "feddyn")]
each_algorithm = pytest.mark.parametrize("algorithm", EVERY)


class Blind(Logistic):
    """A task in which every record's gradient is zero: uploads are noise and public numbers."""

    def losses(self, params, features, labels):
        return params.sum() * 0 * features.sum(1)

    def clipped_sum(self, params, batch, clip):
        return ClippedSum(torch.zeros_like(params), clip)


def run_of(sizes, algorithm="scaffold-balanced", task="logistic", declared=DECLARED, **plan):
    return setting(algorithm, task, POISSON, federation(sizes).declaring(declared), **plan)


@pytest.mark.parametrize("engine", [*ENGINES, "one user at a time", "mapped", "stacked"])
@each_algorithm
def test_uploads_are_the_same_for_any_true_sizes(engine, algorithm):
    """Records that add nothing are not told from records that are not there, in any vector."""
    fewer, more = (
        uploads(engine, run_of(sizes, algorithm, Blind(4, 3), weighting="records"), 2)
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
    slow, fast = (final(name, run) for name in ("loop", "simulator"))
    assert_agree(fast, slow, atol=1e-3 if algorithm == "fedadam" else 1e-5)


def expected_slots(user: int) -> tuple[float, float]:
    """w_i and w_i·v_i of balanced controls, from declared numbers alone."""
    size = DECLARED[user]
    batch = int(PLAN.data_ratio * size + 1e-9)
    spread = 2 * POISSON.clip * POISSON.noise / batch
    return float(size), size * spread**2 / PLAN.local_steps


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", [FEWER, MORE], ids=["fewer", "more"])
def test_the_slots_hold_the_declared_size(engine, sizes):
    run = run_of(sizes, weighting="records", user_ratio=1.0)
    (sent,) = uploads(engine, run)
    for user in range(len(DECLARED)):
        weight, noise = expected_slots(user)
        assert float(sent["weight"][user]) == float(sent["memory weight"][user]) == weight
        assert float(sent["noise"][user]) == pytest.approx(noise, rel=1e-6)


def site_world(folder, sizes, algorithm="scaffold-balanced", **plan) -> World:
    data = federation(sizes).declaring(DECLARED)
    plan = {"weighting": "records", "user_ratio": 1.0, **plan}
    return World(folder, algorithm, "logistic", POISSON, data, **plan)


@pytest.mark.cpu_only("sites compute on CPUs, and the simulator must end at the same bits")
@pytest.mark.parametrize("algorithm", REGISTERED)
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
    sent = sent_in(world)
    for user, name in enumerate(world.names):
        weight, noise = expected_slots(user)
        assert sent[name]["kept.weight"].tolist() == [weight]
        assert float(sent[name]["kept.noise"][0]) == pytest.approx(noise, rel=1e-6)


@pytest.mark.parametrize("engine", ["loop", "simulator", "sites"])
@pytest.mark.parametrize("sizes", [FEWER, MORE], ids=["fewer", "more"])
def test_every_engine_draws_at_the_declared_rate(tmp_path, engine, sizes):
    """Each record with chance ⌊sD_i⌋/D_i; chances from the true sizes would be rejected."""
    plan = {"rounds": 1, "user_ratio": 1.0}
    with counted_batches(TRIALS) as drawn:
        if engine == "sites":
            world = site_world(tmp_path, sizes, "fedavg", **plan)
            world.enrol()
            world.round()
        else:
            final(engine, run_of(sizes, "fedavg", **plan))
    rejected = 0
    for user, (taken, trials) in drawn.items():
        batch = int(PLAN.data_ratio * DECLARED[user] + 1e-9)
        low, high = binom.ppf([ALARM, 1 - ALARM], trials, batch / DECLARED[user])
        assert low <= taken <= high
        wrong = min(1.0, batch / sizes[user])
        rejected += not low <= binom.median(trials, wrong) <= high
    assert len(drawn) == len(DECLARED) and rejected >= 5
