"""Uploads that no honest site can send: refused and named, and the run goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from deploy.world import World

from dpscaffold.algorithms import ITERATIVE
from dpscaffold.config.personal import PersonalSettings
from dpscaffold.deployment.protocol.messages import sign
from dpscaffold.setting.gaussian import Gaussian

SECRET = Gaussian(clip=0.7, noise=2.0, secret=True)
POISSON = replace(SECRET, sampling="poisson")
QUIET = replace(SECRET, noise=0.05)


def scaled(world, name, factor, kind="params"):
    """From now on a site multiplies one of its vectors."""
    honest = world.exchange.sites[name]

    def answer(message):
        said = honest(message)
        wrong = {
            key: value * factor if key.startswith(kind) else value
            for key, value in said.vectors.items()
        }
        return sign(dict(said.header), wrong, world.keys[name])

    world.exchange.sites[name] = answer


@pytest.mark.parametrize("privacy", [SECRET, POISSON, QUIET], ids=["fixed", "poisson", "quiet"])
@pytest.mark.parametrize("algorithm", list(ITERATIVE))
def test_honest_uploads_are_below_the_bound(tmp_path, algorithm, privacy):
    """And not far below: the bound is no more than a few times what is seen."""
    world = World(tmp_path, algorithm, privacy=privacy, rounds=8, user_ratio=1.0)
    world.enrol()
    ratios = []
    while world.state.round < 8:
        world.round()
        assert world.engine.last.reasons == {}
        norms = world.engine.last.norms.values()
        ratios += [norm / bound for norm, bound in norms if bound is not None and norm]
    if ratios:
        assert 0.05 < max(ratios) < 1


@pytest.mark.parametrize("regularisation", [0.0, 0.5])
def test_the_bound_has_the_terms_of_the_regularisation(tmp_path, regularisation):
    """Far from the start λx moves a site, which is honest."""
    world = World(
        tmp_path,
        {"name": "fedprox", "mu": 0.3},
        privacy=QUIET,
        rounds=4,
        user_ratio=1.0,
        regularisation=regularisation,
    )
    world.enrol()
    world.state = replace(
        world.state, server=replace(world.state.server, params=world.state.params + 30.0)
    )
    world.drive()
    assert not world.post.refusals


@pytest.mark.parametrize("factor", [30.0, -30.0, 1e6])
@pytest.mark.parametrize(("algorithm", "kind"), [("fedavg", "params"), ("scaffold", "totals")])
def test_a_scaled_upload_is_refused_and_named(tmp_path, algorithm, kind, factor):
    world = World(tmp_path, algorithm, privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    world.drive(3)
    scaled(world, "north", factor, kind)
    before = world.state.params.clone()
    done = world.round()
    assert world.engine.last.reasons == {"north": "bad-upload"}
    assert 1 not in done.gathered.arrived
    assert float((world.state.params - before).norm()) < 100
    del world.exchange.sites["north"]
    world.exchange.sites["north"] = world.answering("north")
    assert len(world.round().gathered.arrived) == 3  # and is welcome again
    assert world.gap() < 1e-4
    assert torch.isfinite(world.state.params).all()


def test_a_run_is_not_ended_by_one_site(tmp_path):
    """A factor of a million once, which put the model out of every site's range."""
    world = World(tmp_path, "scaffold", privacy=SECRET, policy={"largest_value": 100.0}, rounds=6)
    world.enrol()
    scaled(world, "north", 1e6, "")
    world.drive()
    assert world.state.round == 6
    assert np.abs(world.state.params.numpy()).max() < 100


def test_without_a_public_bound_nothing_is_refused(tmp_path):
    """Without privacy no clipping bounds a gradient."""
    world = World(tmp_path, "fedavg", rounds=3, user_ratio=1.0)
    world.enrol()
    world.round()
    assert all(bound is None for _, bound in world.engine.last.norms.values())


@pytest.mark.parametrize("strength", ["auto", 0.5])
def test_models_of_the_sites_own_have_no_bound(tmp_path, strength):
    """Nobody else knows where they are; what is not finite is refused."""
    personal = PersonalSettings(kind="mean-regularised", strength=strength)
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0, personal=personal)
    world.enrol()
    world.round()
    assert all(bound is None for _, bound in world.engine.last.norms.values())
    scaled(world, "north", float("nan"), "params")
    world.round()
    assert world.engine.last.reasons == {"north": "bad-upload"}
