"""Sites over messages in memory: every algorithm ends bit for bit where the simulator does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deploy.world import World, uploads_of
from in_memory import Delivery
from small import Driven, simulator

from dpscaffold.algorithms import ITERATIVE
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.protocol.enrolment import NotEnrolled
from dpscaffold.deployment.server.sites import Stalled

FIXED = Gaussian(clip=0.7, noise=0.8)
POISSON = Gaussian(clip=0.7, noise=0.8, sampling="poisson")


def simulated(world, chunk=1):
    return Driven(simulator(world.setting, chunk=chunk)).drive()


def assert_parity(world, exactly=True):
    driven = simulated(world)
    assert torch.equal(world.state.params, driven.reached.params)
    for name, value in driven.reached.state.server.slots.items():
        assert torch.equal(world.state.server.slots[name], value)


@pytest.mark.parametrize("task", ["logistic", "mlp"])
@pytest.mark.parametrize("privacy", [None, FIXED, POISSON], ids=["none", "fixed", "poisson"])
@pytest.mark.parametrize("algorithm", ITERATIVE)
def test_every_algorithm_ends_where_the_simulator_does(tmp_path, algorithm, privacy, task):
    world = World(tmp_path, algorithm, task, privacy)
    world.enrol()
    world.drive()
    assert_parity(world)
    whole = simulated(world, chunk=None).reached.params
    torch.testing.assert_close(world.state.params, whole, rtol=1e-5, atol=1e-6)


def test_a_server_optimiser_is_the_servers_own(tmp_path):
    world = World(tmp_path, {"name": "fedavg", "server": "adam"}, privacy=FIXED)
    world.enrol()
    assert_parity(world.drive())


def test_the_controls_add_up(tmp_path):
    world = World(tmp_path, "scaffold", privacy=FIXED, rounds=6)
    world.enrol()
    world.drive()
    assert world.gap() < 1e-5
    drawn = sum(len(world.draw(t).drawn) for t in range(1, 7))
    assert sum(world.count(name) for name in world.names) == drawn
    mirror = world.engine.memories.recall(range(3))["control"]
    for user, name in enumerate(world.names):
        held = world.memory(name).acknowledged().slots["control"]
        np.testing.assert_allclose(mirror[user].numpy(), held, rtol=1e-4, atol=1e-6)


def test_faults_in_which_everybody_answers_change_nothing(tmp_path):
    """Lost, repeated, delayed and late messages, and any order: resent as they are."""
    world = World(tmp_path, "scaffold", privacy=FIXED, rounds=6)
    world.enrol()
    stream = np.random.default_rng(3)

    def fate(name, message, attempt):
        if attempt > 3:
            return Delivery()
        kind = stream.integers(6)
        return Delivery(kind == 1, kind == 2, kind == 3, kind == 4, kind == 5)

    world.exchange.attempts = 6
    world.exchange.fate = fate
    world.exchange.order = lambda names: list(stream.permutation(names))
    world.drive()
    assert_parity(world)
    drawn = sum(len(world.draw(t).drawn) for t in range(1, 7))
    assert sum(world.count(name) for name in world.names) == drawn
    assert len(uploads_of(world.exchange.answered)) == drawn
    assert world.gap() < 1e-5


def test_a_lost_reply_changes_no_memory(tmp_path):
    world = World(tmp_path, "scaffold", privacy=FIXED, rounds=6, user_ratio=1.0)
    world.enrol()
    away = {2: "north", 4: "east"}
    world.exchange.fate = lambda name, message, attempt: Delivery(
        lose_answer=away.get(message.header.get("round")) == name
    )
    arrived = []
    while world.state.round < 6:
        arrived.append(world.round().arrived)
    assert [len(who) for who in arrived] == [3, 2, 3, 2, 3, 3]
    assert world.gap() < 1e-5
    assert all(world.count(name) == 6 for name in world.names)


def test_a_server_that_dies_repeats_the_round_for_free(tmp_path):
    world = World(tmp_path, "scaffold", privacy=FIXED, rounds=5)
    world.enrol()
    for number in range(1, 6):
        world.round(save=False)  # asked, applied, and dead before the checkpoint
        world.resume()
        done = world.round()
        assert done.state.round == number and not world.engine.last.fresh
    assert_parity(world)
    assert world.gap() < 1e-5


def test_too_few_answers_make_a_round_void(tmp_path):
    world = World(tmp_path, "fedavg", privacy=FIXED, user_ratio=1.0)
    engine = world.enrol()
    engine.patience = type(engine.patience)(quorum=3, voids=2, pause=0.0)
    silent = {"left": 2}

    def fate(name, message, attempt):
        if name == "north" and message.header["kind"] == "task" and silent["left"]:
            silent["left"] -= 1
            return Delivery(lose_ask=True)
        return Delivery()

    world.exchange.fate = fate
    world.round()
    assert engine.last.voids == 2
    assert [world.count(name) for name in world.names] == [1, 1, 1]  # repeats are free
    silent["left"] = 100
    with pytest.raises(Stalled, match="2 of 3 sites answered and the quorum is 3"):
        world.round()
    silent["left"] = 0
    world.resume()
    assert_parity(world.drive())


def test_a_site_that_missed_the_draw_gets_it_again(tmp_path):
    world = World(tmp_path, "scaffold", privacy=FIXED)
    world.exchange.fate = lambda name, message, attempt: Delivery(
        lose_ask=message.header["kind"] == "draw"
    )
    world.enrol()
    world.exchange.fate = lambda name, message, attempt: Delivery()
    assert_parity(world.drive())


def test_refusals_are_listed_and_the_run_does_not_start(tmp_path):
    world = World(tmp_path, "scaffold", privacy=FIXED)
    world.policies["north"] = world.policies["north"].model_copy(update={"max_parameters": 1})
    world.write_data("east", 0, slice(0, 2))  # b_i would be 0
    with pytest.raises(NotEnrolled) as refused:
        world.enrol()
    assert refused.value.reasons == {"north": "policy-model", "east": "data-unfit"}
    assert "--without" in str(refused.value)


def test_a_site_that_refuses_is_left_out_by_name(tmp_path):
    world = World(tmp_path, "scaffold", privacy=FIXED)
    with pytest.raises(NotEnrolled):
        world.policies["north"] = world.policies["north"].model_copy(update={"max_parameters": 1})
        world.enrol()
    assert not world.ledger("east").runs[world.enrolled.run].began


def test_a_mirrored_memory_is_restored_to_the_last_bit(tmp_path):
    """Where the server mirrors memories, even a site that lost its folder ends where it should."""
    world = World(tmp_path, "scaffold-balanced", privacy=FIXED, rounds=6, user_ratio=1.0)
    world.enrol()
    world.drive(3)
    world.memory("north").forget()
    assert_parity(world.drive())


def test_no_message_leaves_before_the_last_round_is_saved(tmp_path):
    """What a checkpoint does not hold yet must not be acknowledged."""
    secret = Gaussian(clip=0.7, noise=20.0, secret=True)
    world = World(tmp_path, "scaffold", privacy=secret, rounds=4, user_ratio=1.0)
    world.enrol()
    world.round(save=False)
    with pytest.raises(RuntimeError, match="not saved"):
        world.round(save=False)
