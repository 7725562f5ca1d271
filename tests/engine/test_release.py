"""One release: what a step adds, and what the account says of it, are made of the same fields."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import ENGINES, EQUAL, Scripted, draw_as_a_gpu, federation, setting, simulator, uploads
from stated import at_most

from dpscaffold import Gaussian
from dpscaffold.config import Secure
from dpscaffold.engine import work
from dpscaffold.engine.query import query_of
from dpscaffold.randomness.streams import BATCHES, NOISE, Randomness

BASE = Gaussian(clip=0.7, noise=5.0)
PLAN = {"local_steps": 1, "user_ratio": 1.0, "rounds": 1, "warm_rounds": 0, "data_ratio": 1 / 3}


def spreads(engine, run) -> np.ndarray:
    """The noise on every user's step, per standard normal: exactly, by normals that are 1 and 0."""
    sent = [
        uploads(engine, run, randomness=Scripted(0, lambda *at, value=value: value))[0]["move"]
        for value in (1.0, 0.0)
    ]
    apart = (sent[0] - sent[1]).double() / -run.plan.step_size
    assert bool(((apart - apart[:, :1]).abs() < 1e-4 * apart[:, :1].abs()).all())
    return apart.mean(dim=1).numpy()


#: Each field, what noise it makes on the mean of three of nine records, and whether ε moves.
CHANGES = {
    "nothing": ({}, {}, 2 * 0.7 * 5 / 3, False),
    "clip": ({"clip": 1.4}, {}, 2 * 1.4 * 5 / 3, False),
    "noise": ({"noise": 10.0}, {}, 2 * 0.7 * 10 / 3, True),
    "unit": ({"unit": "user"}, {}, 2 * 0.7 * 5, True),
    "sampling": ({"sampling": "poisson"}, {}, 2 * 0.7 * 5 / 3, True),
    "divisor": ({}, {"data_ratio": 2 / 3}, 2 * 0.7 * 5 / 6, True),
    "poisson divisor": ({"sampling": "poisson"}, {"data_ratio": 2 / 3}, 2 * 0.7 * 5 / 6, True),
    "one user": ({"noise": (5.0, 5.0, 20.0, 5.0, 5.0, 5.0)}, {}, None, False),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", CHANGES)
def test_every_field_moves_the_noise_and_the_account(change, engine):
    """ε is a function of σ_g in units of the sensitivity, so C alone does not move it: then it is
    the noise that follows C."""
    fields, plan, meant, moves = CHANGES[change]
    data = federation(EQUAL)
    base = setting("fedavg", "logistic", BASE, data, **PLAN)
    run = setting("fedavg", "logistic", BASE.changed(**fields), data, **{**PLAN, **plan})
    assert query_of(run).release == run.privacy.step
    found = spreads(engine, run)
    sensitivity = (
        2 * run.privacy.clip / (1 if run.privacy.unit == "user" else 9 * run.plan.data_ratio)
    )
    noises = np.array(run.privacy.noise_by_user or [run.privacy.noise] * 6)
    order = run.randomness(0).cohort(1, 6, 6)
    assert found == pytest.approx((sensitivity * noises)[order], rel=1e-3)
    stated = [run.mechanism.noise] * 6
    if run.privacy.noise_by_user:
        groups = [run.mechanism.groups[run.mechanism.place(user)] for user in range(6)]
        stated = [run.mechanism.noise * one.louder for one in groups]
    assert noises == pytest.approx(stated)
    if meant is not None:
        assert found == pytest.approx([meant] * 6, rel=1e-3)
        assert (at_most(run.mechanism, 3) != at_most(base.mechanism, 3)) == moves


SECRET = {
    "fixed": Gaussian(0.7, 0.8, secret=True),
    "poisson": Gaussian(0.7, 0.8, "poisson", secret=True),
    "user": Gaussian(0.7, 0.8, "poisson", "user", secret=True),
}


def forbid_seeds(monkeypatch):
    """Let nobody make a seeded generator for batches or noise."""
    real = np.random.SeedSequence

    def seeded(*given, spawn_key=(), **more):
        assert not spawn_key or spawn_key[0] not in (BATCHES, NOISE), "a seed for batches or noise"
        return real(*given, spawn_key=spawn_key, **more)

    def forbidden(*given, **more):
        raise AssertionError("a seed for batches or noise")

    monkeypatch.setattr(np.random, "SeedSequence", seeded)
    monkeypatch.setattr(work, "DeviceDraws", forbidden)
    for name in ("default_rng", "RandomState", "normal", "standard_normal"):
        monkeypatch.setattr(np.random, name, forbidden)
    for name in ("randn", "rand", "normal", "randperm", "randint", "randn_like", "rand_like"):
        monkeypatch.setattr(torch, name, forbidden)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("privacy", SECRET)
@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_a_secret_run_never_draws_from_a_seed(monkeypatch, task, privacy, engine):
    """Neither on the CPU nor where a GPU draws for itself; others do, so this test can fail."""
    data = federation()
    secret = setting("scaffold", task, SECRET[privacy], data)
    seeded = replace(secret, privacy=secret.privacy.changed(secret=False))
    draw_as_a_gpu(monkeypatch)
    forbid_seeds(monkeypatch)
    ENGINES[engine](secret).drive()
    with pytest.raises(AssertionError, match="a seed"):
        ENGINES[engine](seeded).drive()


class Own(Randomness):
    """An experiment's own streams."""


@pytest.mark.parametrize(
    "one",
    [
        setting(privacy=SECRET["poisson"]),
        setting(privacy="poisson", data=federation().declaring(9)),
        replace(setting("fedavg", privacy="fixed", **PLAN), secure=Secure(1)),
    ],
    ids=["secret", "declared sizes", "secure sums"],
)
def test_what_a_device_leaves_to_the_streams_of_the_cpu(monkeypatch, one):
    """Also in a stack with a run that it would draw for."""
    draw_as_a_gpu(monkeypatch)
    seeded = replace(one, privacy=one.privacy.changed(secret=False))
    for stack in ([one], [one, seeded], [seeded, one]):
        assert not simulator(stack).draws_on_device
    plain = setting(privacy="poisson")
    assert simulator(plain).draws_on_device
    assert not simulator(plain, Own(0)).draws_on_device
