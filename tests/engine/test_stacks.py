"""Runs that share an engine: each is the run that it is alone, whatever becomes of the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import refuses
from small import (
    CPU,
    EQUAL,
    UNEQUAL,
    Driven,
    assert_agree,
    assert_identical,
    draw_as_a_gpu,
    federation,
    final,
    setting,
    simulator,
)

from dpscaffold import Gaussian
from dpscaffold.algorithms import fedavg, with_momentum
from dpscaffold.engine import Draw
from dpscaffold.training.stack import train_stack


@pytest.fixture(params=[False, True], ids=["streams of the CPU", "draws of the device"])
def on_device(request, monkeypatch):
    if request.param:
        draw_as_a_gpu(monkeypatch)
    return request.param


def looking(server, cohort):
    """An announcement that depends on a number which the host would have to see."""
    return {"control": server.slots["control"] * (2.0 if bool(server.params.sum() > 0) else 1.0)}


def naming(server, cohort):
    """An announcement that depends on who takes part."""
    return {"control": server.slots["control"] * float(cohort.users[0])}


def plans(algorithm="scaffold", **changes):
    """Four runs on two federations that differ in seed and step size."""
    return [
        setting(algorithm, data=data, seed=seed, learning_rate=rate, averaging="tail", **changes)
        for data in (federation(UNEQUAL), federation(UNEQUAL, seed=1))
        for seed, rate in ((0, 0.1), (1, 0.4))
    ]


def varied(**values):
    """Runs that differ in one number of the plan."""
    ((name, given),) = values.items()
    data = federation()
    return [setting(data=data, privacy="poisson", **{name: value}) for value in given]


STACKS = {
    "seeds, rates and records": plans(privacy="poisson"),
    "balanced controls": plans("scaffold-balanced-warm", privacy="fixed"),
    "momentum": plans(with_momentum(fedavg(), 0.5)),
    "announcements that look": plans(setting().algorithm.replace(announce=looking)),
    "announcements that name": plans(setting().algorithm.replace(announce=naming)),
    "clips and noises": [
        setting("scaffold-balanced", data=federation(), privacy=Gaussian(clip, noise, "poisson"))
        for clip in (0.3, 0.7)
        for noise in (0.2, 2.0)
    ],
    "server rates": varied(server_rate=(1.0, 0.5)),
    "regularisation": varied(regularisation=(0.0, 0.5)),
    "averaged shares": varied(averaging=(0.25, "tail", 1.0)),
    "users": [setting(data=federation(sizes)) for sizes in (EQUAL, UNEQUAL[:4])],
}


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_is_each_of_its_runs(name, on_device):
    together = Driven(simulator(STACKS[name])).drive().all_reached
    for run, found in zip(STACKS[name], together, strict=True):
        assert_agree(found, final("simulator", run))


@pytest.mark.parametrize("privacy", ["none", "poisson"])
def test_a_run_that_diverges_leaves_the_others_alone_bit_for_bit(privacy, on_device):
    data = federation()
    calm = [setting(data=data, privacy=privacy, seed=seed, learning_rate=0.1) for seed in (0, 1)]
    ends = []
    for rate in (0.1, 1e36):
        wild = setting(data=data, privacy=privacy, learning_rate=rate, regularisation=1.0)
        ends.append(Driven(simulator([calm[0], wild, calm[1]])).drive().all_reached)
    assert not ends[1][1].params.isfinite().all()
    for k in (0, 2):
        assert_identical(ends[0][k], ends[1][k])
    stack = [calm[0], wild]
    outcomes = train_stack(stack, [data] * 2)
    assert [one.diverged is None for one in outcomes] == [True, False]


def poisoned(value: float, user: int = 0, records: slice = slice(None)):
    """A federation in which some records of a user hold this value."""
    data = federation()
    first = int(data.train.offsets[user])
    own = data.train.features[first : first + UNEQUAL[user]]
    own[records] = value
    return data


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("privacy", ["none", "fixed"])
def test_padding_is_left_out_whatever_it_holds(privacy, value, on_device):
    """A run with fewer participants than another is padded with its first user."""
    runs = [setting("scaffold", privacy=privacy, data=poisoned(value), seed=k) for k in (0, 1)]
    draws = [Draw.all(np.array(users)) for users in ([1, 2, 4], [1, 3])]
    stack, alone = Driven(simulator(runs)), Driven(simulator(runs[1]))
    for _ in range(2):
        done = stack.rounds(*draws)
        single = alone.rounds(draws[1])
    assert_agree(stack.all_reached[1], alone.reached)
    assert stack.all_reached[1].params.isfinite().all()
    found, meant = (one.uploads[-1].metrics["largest_drift"] for one in (done, single))
    assert float(found) == pytest.approx(float(meant), rel=1e-5)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_a_record_that_is_no_number_adds_nothing(task, sampling, engine):
    """Clipped, it contributes zero: all other records count as they would with another such."""
    ends = []
    for value in (float("nan"), float("inf")):
        data = poisoned(value, records=slice(0, 2))
        run = setting("scaffold", task, sampling, data, data_ratio=0.8, user_ratio=1.0)
        ends.append(final(engine, run).params)
    assert ends[0].isfinite().all() and torch.equal(*ends)


def test_padding_of_a_batch_is_left_out_whatever_it_holds(on_device):
    """Smaller batches are padded with their user's first record, here one that is no number: what
    does not depend on it is as it is without."""
    finite = []
    for seed in range(20):
        data = poisoned(float("nan"), 2, slice(0, 1))
        driven = Driven(simulator(setting("fedavg", data=data, local_steps=1, seed=seed)))
        driven.rounds(Draw.all(np.arange(6)))
        finite.append(bool(driven.reached.params.isfinite().all()))
    assert 8 <= sum(finite) < 20  # three rounds of four draw another one of its four records


def test_a_stack_of_nothing_is_refused():
    with refuses("too-few-runs"):
        train_stack([], [], None, CPU)
