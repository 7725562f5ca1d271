"""Uploads that no honest site can send: refused and named, and the run goes on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from deploy.world import World

from dpscaffold.algorithms import ITERATIVE
from dpscaffold.algorithms.base import Broadcast
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.personal import PersonalSettings
from dpscaffold.deployment.protocol.messages import sign
from dpscaffold.deployment.server import sites
from dpscaffold.deployment.server.bounds import upload_bounds

SECRET = Gaussian(clip=0.7, noise=2.0, secret=True)
POISSON = SECRET.changed(sampling="poisson")
QUIET = SECRET.changed(noise=0.05)


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
    assert 1 not in done.arrived
    assert float((world.state.params - before).norm()) < 100
    del world.exchange.sites["north"]
    world.exchange.sites["north"] = world.answering("north")
    assert len(world.round().arrived) == 3  # and is welcome again
    assert world.gap() < 1e-4
    assert torch.isfinite(world.state.params).all()


def test_a_run_is_not_ended_by_one_site(tmp_path):
    """A factor of a million once, which put the model out of every site's range."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=6)
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


# --- users with models of their own

OWN = {
    str(strength): PersonalSettings(kind="mean-regularised", strength=strength)
    for strength in ("auto", 0.0, 0.5)
}
BASES = ("fedavg", "scaffold", "scaffold-balanced")
personally = pytest.mark.parametrize("personal", OWN.values(), ids=OWN.keys())


def all_ratios(world, rounds):
    """‖v‖/bound of every vector of every upload of the next rounds."""
    found = []
    seen = sites.is_too_large

    def too_large(norms, bounds):
        assert set(bounds) == set(norms)
        found.append({key: norms[key] / bounds[key] for key in bounds})
        return seen(norms, bounds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sites, "is_too_large", too_large)
        for _ in range(rounds):
            world.round()
    return found


@personally
@pytest.mark.parametrize(
    ("privacy", "regularisation"),
    [(SECRET, 0.0), (POISSON, 0.0), (SECRET, 0.4), (QUIET, 0.4)],
    ids=["fixed", "poisson", "decay", "quiet"],
)
@pytest.mark.parametrize("algorithm", BASES)
def test_honest_uploads_of_own_models_are_below_the_bound(
    tmp_path, algorithm, privacy, regularisation, personal
):
    world = World(tmp_path, algorithm, privacy=privacy, rounds=6, user_ratio=1.0,
                  regularisation=regularisation, personal=personal)  # fmt: skip
    world.enrol()
    ratios = all_ratios(world, 6)
    assert not world.post.refusals and len(ratios) == 18
    assert max(max(one.values()) for one in ratios) < 1
    least = 0.05 if regularisation == 0 else 0.02
    assert max(one["params"] for one in ratios) > least


@personally
def test_a_model_that_stayed_far_away_is_honest(tmp_path, personal):
    """The server's model comes back from far away, and the sites' own are still there: their
    gradients have λw, which the server cannot see."""
    world = World(tmp_path, "fedavg", privacy=QUIET, rounds=6, user_ratio=1.0,
                  regularisation=0.05, learning_rate=0.1, personal=personal)  # fmt: skip
    world.enrol()
    away = replace(world.state.server, params=world.state.params + 30.0)
    world.state = replace(world.state, server=away)
    world.round()
    back = replace(world.state.server, params=0 * world.state.params)
    world.state = replace(world.state, server=back)
    world.checkpoint()
    world.resume()  # and the server remembers how far
    before = world.engine._farthest
    assert before is not None and before > 30
    world.drive()
    assert not world.post.refusals
    assert world.engine._farthest == before


@personally
@pytest.mark.parametrize("kind", ["params", "totals"])
def test_a_scaled_upload_of_a_run_with_own_models_is_refused(tmp_path, personal, kind):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=6, user_ratio=1.0, personal=personal)
    world.enrol()
    scaled(world, "north", 30.0, kind)
    world.round()
    assert world.engine.last.reasons == {"north": "bad-upload"}
    world.exchange.sites["north"] = world.answering("north")
    assert len(world.round().arrived) == 3


def test_one_site_cannot_decide_on_the_pull(tmp_path):
    """λ = "auto" is estimated from numbers that sites send in the first round."""
    world = World(tmp_path, "fedavg", privacy=SECRET, rounds=4, user_ratio=1.0,
                  personal=OWN["auto"])  # fmt: skip
    world.enrol()
    scaled(world, "north", 1e6, "totals.first_noise")
    world.round()
    assert world.engine.last.reasons == {"north": "bad-upload"}


def test_no_bound_where_steps_may_run_away(tmp_path):
    """A pull beyond x doubles the distance at every step; without the norms of earlier rounds
    nobody knows how far a site's own model is."""
    world = World(tmp_path, "fedavg", privacy=SECRET, rounds=4, user_ratio=1.0,
                  regularisation=0.1, personal=OWN["0.5"])  # fmt: skip
    sent = Broadcast(1, world.state.params, {})
    given = (world.setting.algorithm, sent, {0: {}})
    assert upload_bounds(world.setting, *given, 1.0)[0] is not None
    assert upload_bounds(world.setting, *given, None) == {0: None}
    strong = PersonalSettings(kind="mean-regularised", strength=1e4)
    wild = World(tmp_path / "wild", "fedavg", privacy=SECRET, rounds=4, user_ratio=1.0,
                 regularisation=0.1, personal=strong)  # fmt: skip
    assert upload_bounds(wild.setting, wild.setting.algorithm, *given[1:], 1.0) == {0: None}


def test_no_bound_for_private_memory_that_is_not_known(tmp_path):
    world = World(tmp_path, "fedavg", privacy=SECRET, rounds=4, personal=OWN["0.5"])
    sent = Broadcast(1, world.state.params, {})
    algorithm = world.setting.algorithm
    for changed in (
        algorithm.replace(begin_at=lambda at: at.broadcast.params),
        algorithm.replace(direction=lambda gradient, y, at: gradient),
        algorithm.replace(finish=lambda local, at: (None, {})),
    ):
        assert upload_bounds(world.setting, changed, sent, {0: {}}, 1.0) == {0: None}
