"""Slots that never leave their user: in the loop, in the simulator, and at deployed sites."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deploy.test_sites import FIXED, assert_parity
from deploy.world import World
from refusals import refuses
from small import Driven, loop, setting, simulator

from dpscaffold import fedavg, scaffold
from dpscaffold.algorithms import ALGORITHMS, Upload
from dpscaffold.algorithms.scaffold import along_corrected, send_move_and_control, tell_control
from dpscaffold.deployment.protocol.shapes import upload_lengths
from dpscaffold.training.training import slot_metrics


def tell_shared(server, cohort):
    """The server's control; it must not see what users keep for themselves."""
    assert set(cohort.memories) == {"control"}
    return tell_control(server, cohort)


def along_habit(gradient, y, at):
    return along_corrected(gradient, y, at) + 0.1 * at.memory["habit"]


def keep_habit(local, at):
    upload, kept = send_move_and_control(local, at)
    return upload, {**kept, "habit": at.memory["habit"] / 2 + local.mean_gradient}


def send_habit(local, at):
    upload, kept = keep_habit(local, at)
    return Upload(upload.params, {**upload.totals, "habit": kept["habit"]}), kept


def personal():
    """SCAFFOLD whose users each keep a vector of their own, which also moves them."""
    return scaffold().replace(
        name="personal", direction=along_habit, finish=keep_habit, announce=tell_shared,
        remembers={"control": "vector", "habit": "vector"}, private=("habit",), mirrored=True,
    )  # fmt: skip


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "personal", personal)
    return World(
        tmp_path, "personal", privacy=FIXED, rounds=6, user_ratio=1.0,
        policy={"algorithms": ("personal",)},
    )  # fmt: skip


def habits(world):
    """What the sites hold on their disks."""
    return [world.memory(name).acknowledged().slots["habit"] for name in world.names]


def test_loop_and_simulator_keep_it_and_neither_shows_it():
    run = setting(personal(), privacy="fixed")
    made = [Driven(make(run)).drive() for make in (loop, simulator)]
    one, other = (drive.reached for drive in made)
    torch.testing.assert_close(one.params, other.params, rtol=1e-4, atol=1e-6)
    for reached in (one, other):
        assert float(reached.memories["habit"].norm()) > 0
    torch.testing.assert_close(one.memories["habit"], other.memories["habit"], rtol=1e-4, atol=1e-6)
    engine = made[1].engine
    shown = slot_metrics(run.algorithm, other.state.server, engine.norms())
    assert "largest_user_control" in shown and "largest_user_habit" not in shown


def test_a_deployed_run_ends_where_the_simulator_does(world):
    world.enrol()
    assert_parity(world.drive())
    assert all(float(np.linalg.norm(habit)) > 0 for habit in habits(world))
    assert set(world.engine.memories.recall([0])) == {"control"}


def test_it_is_in_no_message(world):
    """Neither its name nor its values are among what a site sends, nor is it restored."""
    sent = []
    answer = {name: site.answer for name, site in world.sites.items()}
    for name, site in world.sites.items():
        site.answer = lambda message, name=name: sent.append(answer[name](message)) or sent[-1]
    world.enrol()
    world.drive()
    world.engine._restore |= set(world.names)
    answers, _ = world.engine.settle(None)
    assert all(not message.vectors for message in answers.values())
    assert set(world.engine._mirrored(world.names[0])) == {"restore.control"}
    vectors = [vector for message in sent for vector in message.vectors.values()]
    assert not any("habit" in name for message in sent for name in message.vectors)
    for habit in habits(world):
        assert not any(len(v) == len(habit) and np.allclose(v, habit) for v in vectors)


def test_a_site_keeps_it_when_the_server_restores_the_rest(world):
    """A site goes back to an older copy of its memory: the server restores the control, and the
    private slot is that of the copy."""
    world.enrol()
    world.drive(until=3)
    name = world.names[0]
    memory = world.memory(name)
    box = memory.folder / "memory.box"
    copy, old = box.read_bytes(), memory.acknowledged().slots
    world.drive(until=5)
    box.write_bytes(copy)
    memory.drop_pending()
    assert not world.round().state.round % 6 and not world.engine.last.reasons
    found = memory.acknowledged().slots
    np.testing.assert_array_equal(found["habit"], old["habit"])
    assert float(np.linalg.norm(found["habit"])) > 0
    assert not np.array_equal(found["control"], old["control"])


def test_a_site_refuses_a_private_slot_from_the_server(world):
    world.enrol()
    world.drive(until=1)
    name = world.drawn_name(2)
    size = world.setting.task.parameters
    restore = {f"restore.{slot}": np.zeros(size, "<f4") for slot in ("control", "habit")}
    task = world.task(name, 2, restore)
    assert world.reason(name, task) == "bad-shape"


@pytest.mark.parametrize("make", [loop, simulator])
def test_uploading_it_is_refused(make):
    leaking = personal().replace(finish=send_habit)
    with refuses("private-memory-uploaded: 'habit'"):
        Driven(make(setting(leaking, privacy="fixed"))).drive()
    with refuses("private-memory-uploaded: 'habit'"):
        upload_lengths(leaking, 5)


def test_private_names_slots_that_exist_in_every_phase():
    with refuses("bad-algorithm"):
        scaffold().replace(private=("habit",))
    with refuses("bad-algorithm"):
        personal().replace(warm_up=scaffold())


@pytest.mark.parametrize("algorithm", ["fedavg", "habit-alone"])
def test_a_site_that_shares_no_slot_goes_on_from_an_older_copy(tmp_path, monkeypatch, algorithm):
    """There is nothing to restore, so the server's word on where it stands is enough."""
    alone = personal().replace(
        finish=lambda local, at: (
            Upload(local.params - at.broadcast.params),
            {"habit": at.memory["habit"] / 2 + local.mean_gradient},
        ),
        direction=lambda gradient, y, at: gradient + 0.1 * at.memory["habit"],
        update=fedavg().update, announce=fedavg().announce, mirrored=False, keeps={},
        remembers={"habit": "vector"},
    )  # fmt: skip
    monkeypatch.setitem(ALGORITHMS, "habit-alone", lambda: alone)
    policy = {"algorithms": (algorithm,)}
    world = World(tmp_path, algorithm, privacy=FIXED, rounds=5, user_ratio=1.0, policy=policy)
    world.enrol()
    world.drive(until=2)
    memory = world.memory(world.names[0])
    box = memory.folder / "memory.box"
    copy = box.read_bytes()
    world.drive(until=4)
    box.write_bytes(copy)
    memory.drop_pending()
    assert len(world.round().arrived) == 3
