"""Both engines run every algorithm, task and privacy alike, whatever the chunks, stacks and stores.

Adding an entry to ``ALGORITHMS`` adds it to every test here.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from refusals import refuses
from small import (
    ENGINES,
    EQUAL,
    EVERY,
    PRIVACIES,
    TASKS,
    UNEQUAL,
    WHERE,
    Driven,
    assert_agree,
    assert_identical,
    federation,
    final,
    loop,
    setting,
    simulator,
)

from dpscaffold.algorithms import fedprox
from dpscaffold.engines import Draw, Hardware, Simulator
from dpscaffold.randomness.streams import Randomness
from dpscaffold.setting.gaussian import Gaussian

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
        ["none", "uniform", "tail"],
        fast=lambda weighting, averaging: (weighting == "records") == (averaging == "uniform"),
    ),
)
@every_algorithm
def test_every_weighting_and_averaging_agrees(algorithm, weighting, averaging):
    """The mean over participants and the mean over iterates are the same on both engines."""
    run = setting(
        algorithm, "logistic", "fixed", weighting=weighting, averaging=averaging, tail=0.4, rounds=6
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
    other = final(engine, replace(run, plan=replace(run.plan, seed=1)))
    assert not torch.allclose(once.params, other.params, atol=1e-4)


@every_algorithm
@every_task
@pytest.mark.parametrize(("privacy", "chunk"), [("none", 1), ("poisson", 2)])
def test_chunks_change_nothing_but_rounding(algorithm, task, privacy, chunk):
    """Any chunk size draws the same participants, batches and noise, and agrees to float
    tolerance."""
    run = setting(algorithm, task, privacy)
    whole = final("simulator", run)
    assert_agree(Driven(simulator(run, chunk=chunk)).drive().reached, whole)


@every_algorithm
@pytest.mark.parametrize("privacy", ["none", "poisson"])
def test_devices_that_share_a_round_change_nothing(algorithm, privacy):
    """Chunks split over two workers give the very run of one worker with those chunks."""
    run = setting(algorithm, "mlp", privacy)
    hardware = Hardware((WHERE, WHERE), chunk=2)
    shared = Driven(Simulator([run], [run.federation], hardware))
    assert_identical(shared.drive().reached, Driven(simulator(run, chunk=2)).drive().reached)


@every_algorithm
@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson", "user-poisson", "median"])
def test_stacked_runs_agree_with_single_ones(algorithm, privacy):
    """Runs with their own data, rates, clips and noise share a stack without touching each
    other."""
    kind = PRIVACIES[privacy]
    runs = [setting(algorithm, "logistic", kind, federation(UNEQUAL, seed=0))]
    runs.append(
        setting(
            algorithm,
            "logistic",
            kind,
            runs[0].federation,
            seed=5,
            learning_rate=0.1,
            regularisation=0.0,
        )
    )
    other = (
        kind
        if kind is None
        else replace(kind, noise=0.3, clip=kind.clip if kind.clip == "median" else 1.3)
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
        stack = Driven(simulator(runs, chunk=chunk)).drive()
        for reached, run in zip(stack.all_reached, runs, strict=True):
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
    stack = Driven(simulator(runs)).drive(3)
    for reached, run in zip(stack.all_reached, runs, strict=True):
        for engine in ("simulator", "loop"):
            assert_agree(reached, final(engine, run, rounds=3))


def test_runs_of_different_structure_are_not_stacked():
    """A stack refuses what it cannot run alike, and names the part: nothing runs under another
    run's rule."""
    base = setting("fedprox", "module", "fixed")
    others = {
        "algorithm": setting("fedavg", base.task, "fixed"),
        "mu": setting(fedprox(mu=0.9), base.task, "fixed"),
        "task": setting("fedprox", "module", "fixed"),
        "local_steps": setting("fedprox", base.task, "fixed", local_steps=2),
        "rounds": setting("fedprox", base.task, "fixed", rounds=3),
        "privacy": setting("fedprox", base.task, None),
        "sampling": setting("fedprox", base.task, "poisson"),
        "unit": setting("fedprox", base.task, "user"),
        "clip": setting("fedprox", base.task, "median"),
    }
    for name, other in others.items():
        with refuses("not-stackable"):
            simulator([base, other])
            pytest.fail(f"a stack was accepted although {name} differs")
    simulator([base, setting(fedprox(mu=0.1), base.task, "fixed", seed=4)])


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
    mapped = replace(run, data=replace(run.federation, mapped=True))
    assert not simulator(mapped).workers[0].store.resident
    assert_agree(final("simulator", mapped), final("simulator", run), rtol=1e-5, atol=1e-6)
    assert_agree(Driven(simulator(mapped, chunk=2)).drive().reached, final("simulator", run))


@every_algorithm
@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_a_user_who_declines_leaves_the_divisor_alone(algorithm, engine, weighting):
    """Drawn but inactive users contribute zero: the mean is still over all who were drawn."""
    run = setting(algorithm, "logistic", "fixed", weighting=weighting, warm_rounds=0)
    drawn = np.array([0, 2, 5])
    means = {}
    for active in ([0, 2, 5], [0], [2, 5], []):
        one = ENGINES[engine](run)
        done = one.round(Draw(drawn, np.array(active, dtype=np.int64)))
        assert done.gathered.arrived == tuple(active)
        means[tuple(active)] = done.gathered.mean
        if not active:
            assert torch.equal(done.state.params.cpu(), run.task.initial(run.plan.public_seed))
    for key in ("params", *means[0,].totals):
        parts = {
            active: mean.params if key == "params" else mean.totals[key]
            for active, mean in means.items()
            if active
        }
        torch.testing.assert_close(parts[0,] + parts[2, 5], parts[0, 2, 5], rtol=1e-5, atol=1e-6)
    assert float(means[()].params.norm()) == 0


class Recorder(Randomness):
    """Streams that remember what they gave, by (round, user)."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.given: dict[tuple[str, int, int], np.ndarray] = {}

    def batches(self, round, user, *law, **more):
        """The real batches, remembered without their padding."""
        drawn = super().batches(round, user, *law, **more)
        assert ("batches", round, user) not in self.given, (
            "a user's batches were drawn twice in a round"
        )
        self.given["batches", round, user] = np.concatenate(
            [drawn.of(k) for k in range(len(drawn.count))]
        )
        return drawn

    def normals(self, round, user):
        """The real stream; its first numbers are remembered."""
        assert ("noise", round, user) not in self.given, "a user's noise was drawn twice in a round"
        self.given["noise", round, user] = super().normals(round, user).standard_normal(8)
        return super().normals(round, user)


@every_algorithm
@pytest.mark.parametrize("privacy", ["fixed", "poisson"])
def test_every_engine_and_chunk_makes_the_same_draws_once(algorithm, privacy):
    """Loop, simulator and any chunk ask for the same batches and noise, once per participant and
    round."""
    run = setting(algorithm, "logistic", privacy)
    recorders = [Recorder(run.plan.public_seed) for _ in range(3)]
    Driven(loop(run, recorders[0])).drive()
    Driven(simulator(run, recorders[1])).drive()
    Driven(simulator(run, recorders[2], chunk=2)).drive()
    first = recorders[0].given
    assert len(first) == 2 * run.plan.rounds * run.cohort_size
    for other in recorders[1:]:
        assert other.given.keys() == first.keys()
        assert all(np.array_equal(other.given[key], value) for key, value in first.items())
