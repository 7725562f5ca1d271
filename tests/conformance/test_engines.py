"""Both engines run every algorithm, task and privacy alike, whatever the chunks, stacks and stores.

Adding an entry to ``ALGORITHMS`` adds it to every test here.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from refusals import refuses
from world import (
    EQUAL,
    EVERY,
    PLAN,
    PRIVACIES,
    TASKS,
    UNEQUAL,
    Drive,
    Stack,
    assert_agree,
    assert_identical,
    changed,
    drawn_by,
    federation,
    final,
    keeps_records,
    server_at_start,
    setting,
)

from dpscaffold import Gaussian, fedprox

#: Sizes of the users, weighting of the mean, averaging of the output.
SHAPES = {
    "unequal": (UNEQUAL, {"weighting": "records", "averaging": "tail"}),
    "equal": (EQUAL, {"weighting": "uniform", "averaging": "none"}),
}

every_algorithm = pytest.mark.parametrize("algorithm", EVERY)
every_task = pytest.mark.parametrize("task", TASKS)


def cases(*parts, fast):
    """All combinations; those that ``fast`` does not accept run with ``make test-all``."""
    return [
        pytest.param(*case, marks=[] if fast(*case) else pytest.mark.slow)
        for case in product(*parts)
    ]


#: Each privacy in ``make test`` with the logistic task and with one of the networks.
WITH_PRIVACY = {
    "logistic": tuple(PRIVACIES),
    "mlp": ("fixed", "user-poisson", "median"),
    "module": ("none", "poisson", "user", "median-poisson"),
}


def is_fast(task, shape, privacy):
    if shape == "equal":
        return task == "logistic" and privacy in ("none", "poisson")
    return privacy in WITH_PRIVACY[task]


@every_algorithm
@pytest.mark.parametrize(
    ("task", "shape", "privacy"), cases(TASKS, SHAPES, PRIVACIES, fast=is_fast)
)
def test_the_simulator_agrees_with_the_loop(algorithm, task, privacy, shape):
    """Given the same Randomness, x, c, every c_i and the averaged iterate agree to float
    tolerance."""
    sizes, plan = SHAPES[shape]
    run = setting(algorithm, task, privacy, federation(sizes), **plan)
    # Adam divides by √v, which magnifies rounding: starting at x⁰(1 + 1e-7) moves the loop itself
    # by up to 8e-4 here; a median of norms in a ReLU network under FedDyn by up to 1.2e-2.
    atol = 1e-3 if algorithm == "fedadam" else 1e-5
    if (algorithm, task, privacy) == ("feddyn", "module", "median"):
        atol = 2e-2
    assert_agree(final("simulator", run), final("loop", run), atol=atol)


@pytest.mark.parametrize(
    ("weighting", "averaging"),
    cases(
        ["uniform", "records"],
        ["none", "uniform", 0.4],
        fast=lambda weighting, averaging: (weighting == "records") == (averaging == "uniform"),
    ),
)
@every_algorithm
def test_every_weighting_and_averaging_agrees(algorithm, weighting, averaging):
    """The mean over participants and the mean over iterates are the same on both engines."""
    run = setting(
        algorithm, "logistic", "fixed", weighting=weighting, averaging=averaging, rounds=6
    )
    assert_agree(final("simulator", run), final("loop", run))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@every_algorithm
@pytest.mark.parametrize(
    "privacy", [pytest.param("none", marks=pytest.mark.slow), "fixed", "poisson"]
)
def test_a_seed_reproduces_a_run_bit_for_bit(algorithm, privacy, engine):
    """The same setting twice gives identical bits, and another seed does not."""
    run = setting(algorithm, "mlp", privacy)
    once = final(engine, run)
    assert_identical(once, final(engine, run))
    other = final(engine, changed(run, seed=1))
    assert not torch.allclose(once.params, other.params, atol=1e-4)


@every_algorithm
@every_task
@pytest.mark.parametrize(
    ("privacy", "chunk"), [("none", "one user at a time"), ("poisson", "two users at a time")]
)
def test_chunks_change_nothing_but_rounding(algorithm, task, privacy, chunk):
    """Any chunk size draws the same participants, batches and noise, and agrees to float
    tolerance."""
    run = setting(algorithm, task, privacy)
    assert_agree(final(chunk, run), final("simulator", run))


@every_algorithm
@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson", "user-poisson", "median"])
def test_stacked_runs_agree_with_single_ones(algorithm, privacy):
    """Runs with their own data, rates, clips and noise share a stack without touching each
    other."""
    kind = PRIVACIES[privacy]
    data = federation(UNEQUAL, seed=0)
    runs = [setting(algorithm, "logistic", kind, data)]
    runs.append(
        setting(
            algorithm,
            "logistic",
            kind,
            data,
            seed=5,
            learning_rate=0.1,
            regularisation=0.0,
        )
    )
    other = (
        kind
        if kind is None
        else kind.changed(noise=0.3, clip=kind.clip if kind.clip == "median" else 1.3)
    )
    runs.append(
        setting(
            algorithm,
            "logistic",
            other,
            federation(EQUAL, seed=3),
            server_rate=0.5,
            weighting="records",
            averaging="uniform",
            seed=9,
            user_ratio=0.7,
        )
    )
    for chunk in (None, 2):
        for reached, run in zip(Stack(runs, chunk).drive(), runs, strict=True):
            assert_agree(reached, final("simulator", run))


def test_a_silent_run_may_share_a_stack_with_a_noised_one():
    """σ_g = 0 and C = ∞ next to C = 1 and noise: neither poisons nor alters the other."""
    silent, noised = (
        setting("scaffold", "logistic", Gaussian(clip=c, noise=n, sampling="poisson", unit="user"))
        for c, n in ((float("inf"), 0.0), (1.0, 1.0))
    )
    tight = setting(
        "scaffold", "logistic", Gaussian(clip=0.1, noise=0.0, sampling="poisson", unit="user")
    )
    runs = [silent, noised, tight]
    for reached, run in zip(Stack(runs).drive(3), runs, strict=True):
        for engine in ("simulator", "loop"):
            assert_agree(reached, final(engine, run, rounds=3))


def test_runs_of_different_structure_are_not_stacked():
    """A stack refuses what it cannot run alike, and names the part: nothing runs under another
    run's rule."""
    data = federation()
    task = TASKS["module"](data.dimension, data.classes)
    base = setting("fedprox", task, "fixed")
    others = {
        "algorithm": setting("fedavg", task, "fixed"),
        "mu": setting(fedprox(mu=0.9), task, "fixed"),
        "task": setting("fedprox", "module", "fixed"),
        "local_steps": setting("fedprox", task, "fixed", local_steps=2),
        "rounds": setting("fedprox", task, "fixed", rounds=3),
        "privacy": setting("fedprox", task, None),
        "sampling": setting("fedprox", task, "poisson"),
        "unit": setting("fedprox", task, "user"),
        "clip": setting("fedprox", task, "median"),
    }
    for name, other in others.items():
        with refuses("not-stackable"):
            Stack([base, other])
            pytest.fail(f"a stack was accepted although {name} differs")
    Stack([base, setting(fedprox(mu=0.1), task, "fixed", seed=4)])


@every_algorithm
@pytest.mark.parametrize(
    ("task", "privacy"),
    cases(
        TASKS,
        ["none", "poisson"],
        fast=lambda task, privacy: task == "logistic" or privacy == "poisson",
    ),
)
def test_mapped_federations_agree_with_resident_ones(algorithm, task, privacy):
    """Loading only a round's users gives the same run as keeping everyone's records at hand."""
    run = setting(algorithm, task, privacy)
    assert keeps_records("simulator", run) and not keeps_records("mapped", run)
    resident = final("simulator", run)
    assert_agree(final("mapped", run), resident, rtol=1e-5, atol=1e-6)
    assert_agree(final("mapped, two users at a time", run), resident)


@every_algorithm
@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_a_user_who_declines_leaves_the_divisor_alone(algorithm, engine, weighting):
    """Drawn but inactive users contribute zero: the mean is still over all who were drawn."""
    run = setting(algorithm, "logistic", "fixed", weighting=weighting, warm_rounds=0)
    rounds = {}
    for active in ([0, 2, 5], [0], [2, 5], []):
        done = Drive(engine, run).round_of([0, 2, 5], active)
        assert done.arrived == tuple(active)
        rounds[tuple(active)] = done
    parts = [{a: done.move for a, done in rounds.items()}]
    for name in rounds[0,].totals:
        parts.append({a: done.totals[name] for a, done in rounds.items() if a})
    for part in parts:
        torch.testing.assert_close(part[0,] + part[2, 5], part[0, 2, 5], rtol=1e-5, atol=1e-6)
    assert torch.equal(rounds[()].params, server_at_start(run).params)
    assert float(rounds[()].move.norm()) == 0


@every_algorithm
@pytest.mark.parametrize("privacy", ["fixed", "poisson"])
def test_every_engine_and_chunk_makes_the_same_draws_once(algorithm, privacy):
    """Loop, simulator and any chunk ask for the same batches and noise, once per participant and
    round."""
    run = setting(algorithm, "logistic", privacy)
    first, *others = (drawn_by(way, run) for way in ("loop", "simulator", "two users at a time"))
    assert len(first) == 2 * PLAN.rounds * int(PLAN.user_ratio * len(UNEQUAL))
    for other in others:
        assert other.keys() == first.keys()
        assert all(np.array_equal(other[key], value) for key, value in first.items())
