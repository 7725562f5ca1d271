"""``plan.aggregation = "clipped"``: the same on all engines, bounded, post-processing alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deploy.test_sites import simulated
from deploy.world import World
from refusals import refuses
from small import assert_agree, final, setting
from stated import over_draw

from dpscaffold import Plan, fedavg
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.secure import Secure
from dpscaffold.deployment.protocol.messages import sign
from dpscaffold.engines.aggregate import clipped
from dpscaffold.privacy import THIRD_PARTY, describe, epsilon, noise_seen, participants

SECRET = Gaussian(clip=0.7, noise=20.0, secret=True)


def test_no_move_is_longer_than_the_median():
    stream = np.random.default_rng(0)
    for count in (1, 2, 5, 8):
        moves = [torch.from_numpy(stream.normal(size=7) * 10.0**k) for k in range(count)]
        norms = sorted(float(np.linalg.norm(move)) for move in moves)
        for before, after in zip(moves, clipped(moves), strict=True):
            length = float(np.linalg.norm(before))
            limit = norms[(count - 1) // 2]
            np.testing.assert_allclose(after, before * min(1.0, limit / length), rtol=1e-12)


def test_what_diverged_still_says_so():
    assert not all(
        torch.isfinite(move).all() for move in clipped([torch.ones(2), torch.full((2,), torch.inf)])
    )


@pytest.mark.parametrize("weighting", ["uniform", "records"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fednova"])
def test_engines_agree(algorithm, weighting):
    run = setting(algorithm, privacy="fixed", aggregation="clipped", weighting=weighting)
    assert_agree(final("loop", run), final("simulator", run))
    plain = setting(algorithm, privacy="fixed", weighting=weighting)
    assert not torch.allclose(final("loop", run).params, final("loop", plain).params)


def test_sites_end_where_the_simulator_does(tmp_path):
    """A rehearsal, bit for bit."""
    privacy = Gaussian(clip=0.7, noise=2.0)
    world = World(tmp_path, "scaffold", privacy=privacy, user_ratio=1.0, aggregation="clipped")
    world.enrol()
    world.drive()
    assert torch.equal(world.state.params, simulated(world).reached.params)


def test_one_site_cannot_move_the_model_far(tmp_path):
    """Without privacy there is no bound on uploads; a factor of a thousand changes little."""

    def driven(folder, aggregation, factor):
        world = World(folder, "fedavg", rounds=4, user_ratio=1.0, aggregation=aggregation)
        world.enrol()
        honest, start = world.exchange.sites["north"], world.state.params.clone()

        def scaled(message):
            said = honest(message)
            wrong = {key: factor * value for key, value in said.vectors.items()}
            return sign(dict(said.header), wrong, world.keys["north"])

        world.exchange.sites["north"] = scaled
        world.drive()
        return float((world.state.params - start).norm())

    far = driven(tmp_path / "a", "mean", 1000.0)
    near, honest = (driven(tmp_path / f"b{f}", "clipped", f) for f in (1000.0, 1.0))
    assert far > 50 * honest and near < 3 * honest


NUMBERS = {
    "rounds": 20,
    "local_steps": 1,
    "users": 8,
    "cohort_size": 8,
    "records": 50,
    "batch_sizes": 50,
    "noise": 20.0,
    "memory": False,
    "one_sum": True,
}


def test_post_processing_costs_nothing_towards_the_server():
    plain, robust = describe(**NUMBERS), describe(**NUMBERS, aggregation="clipped")
    assert over_draw(robust) == over_draw(plain)


def test_no_bound_that_needs_a_plain_sum_holds():
    """Theorem 2 would state less than is true: a clipped mean is no sum of Gaussian queries."""
    plain, robust = describe(**NUMBERS), describe(**NUMBERS, aggregation="clipped")
    for who in (THIRD_PARTY, participants(2)):
        assert noise_seen(plain, who).theorem == "2" and noise_seen(robust, who).theorem == "1"
        assert epsilon(robust, who) == over_draw(robust) > epsilon(plain, who)
        assert "no sum" in noise_seen(robust, who).not_more


def test_a_run_with_it_is_described_so_and_reads_back():
    run = setting(fedavg(), privacy="fixed", aggregation="clipped", local_steps=1).mechanism
    assert run.aggregation == "clipped" and type(run).from_dict(run.to_dict()) == run
    assert "aggregation" not in describe(**NUMBERS).to_dict()


def test_secure_sums_refuse_it():
    run = setting(fedavg(), privacy="fixed", local_steps=1, aggregation="clipped")
    with refuses("secure-not-proved: plan.aggregation is 'clipped'"):
        type(run)(run.roster, run.task, run.algorithm, run.plan, run.privacy, secure=Secure())


def test_another_word_is_refused():
    with refuses("unknown-choice: plan.aggregation is 'median'"):
        Plan(aggregation="median")
    with refuses("unknown-choice: aggregation='median'"):
        describe(**NUMBERS, aggregation="median")
