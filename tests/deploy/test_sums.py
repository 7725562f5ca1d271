"""Secure sums between sites: the server gets the sum of a whole list, or nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deploy.sums import SECRET, SEEDED, SumWorld
from deploy.test_sites import simulated
from in_memory import Crash, Delivery

from dpscaffold.config.secure import Secure
from dpscaffold.deployment.protocol.messages import unpack
from dpscaffold.deployment.server.sites import Stalled


@pytest.fixture
def world(tmp_path):
    made = SumWorld(tmp_path)
    made.enrol()
    return made


def plain_sum(world, number=1, members=None):
    """Σ of the integers of a seeded round, computed at each site without a mask."""
    members = members or world.names
    whole = world.sites["east"]._works[world.enrolled.run]
    told = {"params": world.state.params.numpy()}
    from dpscaffold.deployment.protocol.enrolment import members_in

    everybody = members_in(world.post, world.enrolled)
    words = []
    for name in members:
        work = world.sites[name]._works[world.enrolled.run]
        words.append(work.integers(number, name, told, everybody, len(members)))
    assert whole is not None
    return world.total(words)


def test_the_sum_of_masked_uploads_is_the_sum_of_the_integers(world):
    keys = world.keys_of()
    words = [world.words(name, keys) for name in world.names]
    assert (world.total(words) == plain_sum(world)).all()


def test_fewer_uploads_than_members_look_random(world):
    keys = world.keys_of()
    words = [world.words(name, keys) for name in world.names]
    meant = plain_sum(world)
    for left in range(4):
        part = world.total(word for place, word in enumerate(words) if place != left)
        assert (abs(part - meant) > 2**20).mean() > 0.9


def test_every_site_gives_the_same_sum_in_any_order(world):
    keys = world.keys_of()
    words = {name: world.words(name, keys[::-1]) for name in reversed(world.names)}
    assert (world.total(words.values()) == plain_sum(world)).all()


def test_a_run_ends_with_every_attempt_in_the_ledgers(world):
    world.drive()
    assert [world.count(name) for name in world.names] == [3, 3, 3, 3]
    lines = [(b.last_round, b.last_attempt, b.voids) for b in entries(world)]
    assert lines == [(3, 1, 0)] * 4


def entries(world):
    return [world.ledger(name).runs[world.enrolled.run] for name in world.names]


# --- absent sites, lost messages, crashes


def lose(world, *lost):
    """Answers to these (site, round, attempt) never arrive."""

    def fate(site, message, tried):
        label = (site, message.header.get("round"), message.header.get("attempt"))
        return Delivery(lose_answer=label in lost)

    world.exchange.fate = fate


def test_a_missing_upload_makes_the_attempt_void_and_the_next_one_is_fresh(world):
    lose(world, ("south", 1, 1))
    world.round()
    assert world.engine.last.voids == 1
    assert world.engine.last.reasons == {}
    # Those who answered were asked again, and south was passed over although it had uploaded.
    assert [world.count(name) for name in world.names] == [2, 2, 1, 2]
    assert [b.voids for b in entries(world)] == [1, 1, 0, 1]
    assert world.engine.acknowledged.keys() == {"east", "north", "west"}


def test_an_absent_site_comes_back_and_the_draw_never_changes(world):
    drawn = [world.draw(t).drawn.tolist() for t in (1, 2, 3)]
    lose(world, ("south", 1, 1))
    seen = []
    while world.state.round < 3:
        seen.append(len(world.round().arrived))
    assert seen == [3, 4, 4]
    assert [world.draw(t).drawn.tolist() for t in (1, 2, 3)] == drawn


def test_a_site_that_stays_away_costs_few_attempts(tmp_path):
    world = SumWorld(tmp_path, rounds=20)
    world.enrol()
    answering = world.exchange.sites.pop("south")
    world.drive(8)
    assert world.count("east") == 8  # it never gave a key, so no attempt was made with it
    asked = [unpack(raw).header["kind"] for name, raw in world.exchange.sent if name == "south"]
    assert asked.count("key") == 4  # in rounds 1, 2, 4 and 8
    world.exchange.sites["south"] = answering
    world.drive()
    assert world.count("east") == 20 and world.count("south") == 5  # from round 16 on


def test_noise_follows_the_list(tmp_path):
    """In a list of 3 of 4, with one colluder, each adds √(3/2) times the noise."""
    world = SumWorld(tmp_path, privacy=SECRET)
    world.enrol()
    work = world.sites["east"]
    whole = world.engine.sums
    assert whole.noise_for(4) == SECRET.noise
    assert whole.noise_for(3) == pytest.approx(SECRET.noise * (3 / 2) ** 0.5)
    spread = {}
    from dpscaffold.deployment.protocol.enrolment import members_in

    everybody = members_in(world.post, world.enrolled)
    for count in (3, 4):
        told = {"params": np.zeros(15, "<f4")}
        inner = work._works[world.enrolled.run]
        drawn = [inner.integers(1, "east", told, everybody, count) for _ in range(200)]
        spread[count] = np.stack([whole.grid.integers(words).numpy() for words in drawn]).std()
    assert spread[3] / spread[4] == pytest.approx((3 / 2) ** 0.5, rel=0.1)


def test_too_few_sites_stall_the_run(world):
    for name in ("south", "west"):
        world.exchange.sites.pop(name)
    with pytest.raises(Stalled, match="needs all members of a list of 3 or more"):
        world.round()
    assert [world.count(name) for name in world.names] == [0, 0, 0, 0]


@pytest.mark.parametrize("step", ["checked", "counted", "computed", "stored"])
def test_a_site_that_dies_in_a_task(tmp_path, step):
    """Whatever it had done, it never answers one attempt with two values."""
    world = SumWorld(tmp_path)
    world.enrol()
    world.exchange.attempts = 3
    killed = []

    def steps(name, now):
        if (name, now) == ("south", step) and not killed:
            killed.append(now)
            raise Crash

    world.steps = steps
    world.drive()
    assert killed
    # One attempt is void: this one, or, where south's upload was stored, the next round's first,
    # in which south has another key.
    assert world.count("east") == 4
    assert world.count("south") == {"checked": 3, "counted": 4, "computed": 4, "stored": 3}[step]
    assert values_by_label(world) == {}
    assert torch.equal(world.state.params, undisturbed(tmp_path, world).state.params)


def undisturbed(folder, world):
    """The same rehearsal without a fault."""
    other = SumWorld(folder / "again", rounds=world.setting.plan.rounds)
    other.enrol()
    return other.drive()


def values_by_label(world):
    """The labels (site, round, attempt) under which two different values left."""
    asked, found = {}, {}
    for name, raw in world.exchange.sent:
        message = unpack(raw)
        asked[name, message.header["nonce"]] = message.header
    for name, raw in world.exchange.answered:
        answer = unpack(raw)
        if answer.header["kind"] == "task" and answer.header["status"] == "yes":
            question = asked[name, answer.header["nonce"]]
            label = (name, question["round"], question["attempt"])
            found.setdefault(label, set()).add(answer.vectors["sum"].tobytes())
    return {label: values for label, values in found.items() if len(values) > 1}


def test_a_server_that_dies_asks_the_same_question_again(world):
    world.round()
    world.round(save=False)  # it dies before its checkpoint
    world.resume()
    world.drive()
    assert [world.count(name) for name in world.names] == [3, 3, 3, 3]
    assert values_by_label(world) == {}


def test_a_server_that_lost_its_note_takes_the_next_attempt(world):
    world.round(save=False)
    (world.folder / "run" / "attempt.json").unlink()
    world.resume()
    world.drive()
    assert [b.last_attempt for b in entries(world)] == [1] * 4
    assert [b.voids for b in entries(world)] == [1] * 4
    assert values_by_label(world) == {}


def test_a_site_that_lost_its_folder_of_the_run_enrols_again(world):
    world.round()
    folder = world.memory("south").folder
    for path in folder.iterdir():
        path.unlink()
    world.restart("south")
    world.exchange.sites["south"] = world.answering("south")
    world.drive()
    assert world.count("south") >= 2
    assert values_by_label(world) == {}


def test_the_next_attempt_has_fresh_noise(tmp_path):
    world = SumWorld(tmp_path, privacy=SECRET)
    world.enrol()
    keys = world.keys_of()
    sums = []
    for attempt in (1, 2):
        sums.append(world.total(world.words(name, keys, attempt) for name in world.names))
    step = world.engine.sums.grid.step
    deviation = (sums[0] - sums[1]).std() * step
    work = world.sites["east"]._works[world.enrolled.run]
    one = float(SECRET.scale(0.7, work.batch))
    assert deviation > one  # two independent draws of the noise of four sites


def test_shares_below_one_sum_over_the_draw(tmp_path):
    world = SumWorld(tmp_path, user_ratio=0.75, rounds=4)
    world.enrol()
    for number in range(1, 5):
        done = world.round()
        assert len(done.arrived) == 3
        assert done.arrived == tuple(world.draw(number).drawn.tolist())


def test_wide_integers_work_as_well(tmp_path):
    world = SumWorld(tmp_path, privacy=SEEDED.changed(noise=1e-7, sampling="fixed"))
    world.enrol()
    assert world.engine.sums.grid.bits == 64
    keys = world.keys_of()
    words = [world.words(name, keys) for name in world.names]
    assert (world.total(words) == plain_sum(world)).all()


def test_least_is_all_that_are_drawn_by_default(tmp_path):
    world = SumWorld(tmp_path, secure=Secure(colluders=1, voids=3))
    world.enrol()
    assert world.no("east", world.keys_of()[:3]) == "bad-list"


# --- the simulator


@pytest.mark.parametrize("weighting", ["uniform", "records"])
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_a_rehearsal_ends_bit_for_bit_where_the_simulator_does(tmp_path, task, sampling, weighting):
    world = SumWorld(
        tmp_path,
        privacy=SEEDED.changed(sampling=sampling),
        task=task,
        user_ratio=0.75,
        rounds=4,
        weighting=weighting,
        regularisation=0.1,
    )
    world.enrol()
    world.drive()
    whole = simulated(world)
    assert torch.equal(world.state.params, whole.reached.params)
    assert torch.equal(world.state.output, whole.reached.state.output)


def test_a_server_optimiser_moves_by_the_sum(tmp_path):
    world = SumWorld(tmp_path, algorithm={"name": "fedavg", "server": "momentum"})
    world.enrol()
    assert torch.equal(world.drive().state.params, simulated(world).reached.params)


def test_a_whole_user_can_be_the_unit(tmp_path):
    world = SumWorld(tmp_path, privacy=SEEDED.changed(unit="user"))
    world.enrol()
    assert world.enrolled.sizes == ()
    assert torch.equal(world.drive().state.params, simulated(world).reached.params)
