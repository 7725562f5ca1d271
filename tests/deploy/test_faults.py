"""What happens to sites: killed at any step, restored, copied, emptied, full disks, other data."""

from __future__ import annotations

import errno
import os
import shutil

import numpy as np
import pytest
import torch
from deploy.test_sites import assert_parity
from deploy.world import World, uploads_of
from in_memory import Crash, Delivery
from refusals import refuses

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.protocol.enrolment import offer_to
from dpscaffold.deployment.protocol.messages import ask
from dpscaffold.deployment.site.answer import MOST_OPEN, MOST_UNUSED
from dpscaffold.deployment.site.ledger import SiteLedger
from dpscaffold.deployment.site.recovery import recover

FIXED = Gaussian(clip=0.7, noise=0.8)
SECRET = Gaussian(clip=0.7, noise=20.0, secret=True)
STEPS = ["checked", "settled", "counted", "computed", "stored"]


@pytest.mark.parametrize("step", STEPS)
def test_a_site_killed_at_any_step_takes_part_in_the_same_round(tmp_path, step):
    """Counted once more only if it died between the ledger and the stored upload."""
    world = World(tmp_path, "scaffold", privacy=FIXED, rounds=4, user_ratio=1.0)
    world.enrol()
    deaths = {"left": 2}

    def die(name, at):
        if name == "north" and at == step and deaths["left"] and world.state.round >= 1:
            deaths["left"] -= 1
            raise Crash

    world.steps = die
    world.exchange.attempts = 4
    world.drive()
    assert_parity(world)
    assert world.gap() < 1e-5
    more = 2 if step in ("counted", "computed") else 0
    assert world.count("north") == 4 + more and world.count("east") == 4


def test_a_site_killed_while_enrolling_enrols_once(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=4)
    deaths = {"left": 1}

    def die(name, at):
        if name == "north" and at == "reserved" and deaths["left"]:
            deaths["left"] -= 1
            raise Crash

    world.steps = die
    world.exchange.attempts = 3
    world.enrol()
    assert len(world.ledger("north").runs) == 1
    world.drive()


def test_an_interrupted_participation_is_in_the_grant(tmp_path):
    """The few beyond T: a killed site does not miss the last round."""
    world = World(tmp_path, "scaffold", privacy=FIXED, rounds=3, user_ratio=1.0)
    world.enrol()
    deaths = {"left": 2}

    def die(name, at):
        if at == "counted" and name == "north" and deaths["left"]:
            deaths["left"] -= 1
            raise Crash

    world.steps, world.exchange.attempts = die, 4
    world.drive()
    assert world.count("north") == 5
    assert_parity(world)


def test_a_restored_run_folder_costs_no_round(tmp_path):
    """state-mismatch: the next task carries the slots from the mirror."""
    world = World(tmp_path, "scaffold", privacy=FIXED, rounds=6, user_ratio=1.0)
    world.enrol()
    folder = world.memory("north").folder
    world.drive(2)
    shutil.copytree(folder, tmp_path / "backup")
    world.drive(4)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    done = world.round()
    assert 1 in done.arrived and world.post.refusals["state-mismatch"] == 1
    world.drive()
    assert world.gap() < 1e-5
    assert world.count("north") == 6


def test_a_lost_run_folder_is_enrolled_again(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=6, user_ratio=1.0)
    world.enrol()
    world.drive(3)
    world.memory("north").forget()
    grants = world.ledger("north").runs[world.enrolled.run].grant
    world.drive()
    assert world.gap() < 1e-4
    assert world.ledger("north").runs[world.enrolled.run].grant == grants
    assert world.count("north") == 6


def restored(world, name, backup):
    world.close(name)
    state = world.folder / name / "state"
    shutil.rmtree(state)
    if backup is not None:
        shutil.copytree(backup, state)
    world.open(name)


def test_a_restored_site_refuses_and_is_recovered_by_its_operator(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    world.drive(2)
    shutil.copytree(tmp_path / "north" / "state", tmp_path / "backup")
    world.drive(5)
    restored(world, "north", tmp_path / "backup")
    done = world.round()
    assert 1 not in done.arrived
    assert world.engine.last.reasons == {"north": "ledger-behind"}
    said = recover(world.sites["north"].state, "north", world.policies["north"])
    assert "the rest of the grant of run" in said[0]
    world.round()
    assert world.engine.last.reasons == {"north": "budget-spent"}
    entry = world.ledger("north").runs[world.enrolled.run]
    assert entry.participations == entry.grant.participations
    assert recover(world.sites["north"].state, "north", world.policies["north"]) == []


def test_a_copied_site_is_noticed_as_soon_as_both_answer(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    world.drive(2)
    shutil.copytree(tmp_path / "north" / "state", tmp_path / "copy")
    original = world.sites["north"]
    world.drive(4)
    world.open("north", tmp_path / "copy")  # a thief's copy stands in
    world.round()
    assert world.engine.last.reasons == {"north": "ledger-behind"}
    world.sites["north"].state.close()
    world.sites["north"] = original
    assert len(world.round().arrived) == 3


def test_a_lost_state_books_all_that_is_left(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    world.drive(3)
    restored(world, "north", None)
    world.round()
    assert world.engine.last.reasons == {"north": "ledger-behind"}
    recover(world.sites["north"].state, "north", world.policies["north"])
    ledger = world.ledger("north")
    assert ledger.total >= 3 and ledger.left(world.policies["north"]).epsilon == 0
    world.fresh_server()
    world.post.totals = {"north": 3}
    message = world.post.message("offer", world.enrolled.run, "north", {
        "offer": dict(world.enrolled.offer), "commitment": "c"})  # fmt: skip
    assert world.reason("north", message) == "policy-epsilon"


@pytest.mark.parametrize("kept", [0, 2])
def test_an_emptied_ledger_is_noticed_without_the_server(tmp_path, kept):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    world.drive(3)
    path = tmp_path / "north" / "state" / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]))
    assert world.reason("north", world.task("north", 4, seen=0)) == "ledger-behind"
    path.write_bytes(b"".join(lines[:-1]))
    assert world.reason("north", world.task("north", 4, seen=0)) == "ledger-behind"
    changed = lines[-1].replace(b'"round": 3', b'"round": 9')
    path.write_bytes(b"".join([*lines[:-1], changed]))
    assert world.reason("north", world.task("north", 4)) == "ledger-damaged"


def test_a_damaged_memory_is_a_code(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    world.drive(2)
    path = world.memory("north").folder / "memory.box"
    path.write_bytes(path.read_bytes()[:-1])
    assert world.reason("north", world.task("north", 3)) == "state-damaged"


def test_other_data_in_mid_run_are_declined_and_serve_the_next_run(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    world.enrol()
    world.drive(2)
    world.write_data("north", 1, slice(1, None))  # a deleted patient is no longer there
    assert len(world.round().arrived) == 3  # the process holds what it enrolled with
    world.restart("north")
    assert world.round().arrived == (0, 2)
    assert world.engine.last.reasons == {"north": "data-changed"}
    spent = world.ledger("north").total
    world.fresh_server()
    world.enrol()
    assert world.enrolled.sizes == (9, 11, 7)
    assert len(world.round().arrived) == 3
    assert world.ledger("north").total == spent + 1


def full(monkeypatch, name):
    """The disk is full for files of this name."""
    real = os.open

    def refuse(path, *rest, **kinds):
        if str(path).endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *rest, **kinds)

    monkeypatch.setattr(os, "open", refuse)


def test_a_full_disk_before_the_ledger_line_counts_nothing(tmp_path, monkeypatch):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    world.enrol()
    world.round()
    full(monkeypatch, "ledger.jsonl")
    assert world.reason("north", world.task("north", 2)) == "site-error"
    monkeypatch.undo()
    assert world.count("north") == 1
    assert world.reason("north", world.task("north", 2)) == ""


def test_a_full_disk_after_the_ledger_line_is_counted_and_refused(tmp_path, monkeypatch):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    world.enrol()
    world.round()
    full(monkeypatch, ".pending.box.partial")
    assert world.reason("north", world.task("north", 2)) == "site-error"
    monkeypatch.undo()
    assert world.count("north") == 2
    assert world.reason("north", world.task("north", 2)) == "" and world.count("north") == 3


def test_the_budget_may_end_in_mid_run(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=6, user_ratio=1.0)
    world.enrol()
    world.drive(2)
    stricter = {"epsilon": world.cost("north", 3)}
    world.policies["north"] = world.policies["north"].model_copy(update=stricter)
    arrived = [world.round().arrived for _ in range(4)]
    assert arrived == [(0, 1, 2), (0, 2), (0, 2), (0, 2)]
    assert world.engine.last.reasons == {"north": "budget-spent"}
    assert world.gap() < 1e-4


def test_the_end_of_a_run_leaves_its_model_at_the_sites(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=3, user_ratio=1.0)
    world.enrol()
    world.drive()
    _, no = world.engine.settle(world.state.output)
    assert not no and world.gap() < 1e-4
    assert torch.equal(world.model("north").params, world.state.output)


def test_slots_stay_at_home(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=2, user_ratio=1.0)
    world.enrol()
    world.drive()
    yes, _ = world.engine.settle(None)
    assert all(not message.vectors for message in yes.values())


def test_no_ledger_is_below_the_uploads_that_left(tmp_path):
    world = World(tmp_path, "scaffold", privacy=FIXED, rounds=6, user_ratio=1.0)
    world.enrol()
    stream = np.random.default_rng(5)

    def die(name, at):
        if stream.random() < 0.15:
            raise Crash

    world.steps, world.exchange.attempts = die, 30
    world.drive()
    assert_parity(world)
    left = uploads_of(world.exchange.answered)
    for name in world.names:
        assert world.count(name) >= len({upload for who, upload in left if who == name})


def test_the_ledger_is_on_disk_before_and_the_upload_after_the_steps(tmp_path, monkeypatch):
    """The order of rule 2, by what the operating system was told: the ledger's line is synced, then
    the steps are computed, then the upload is synced under its name, then the answer leaves."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    world.enrol()
    world.round()
    told = []
    sync, move = os.fsync, os.replace

    def noted_sync(handle):
        told.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{handle}'))}")
        sync(handle)

    def noted_move(old, new):
        told.append(f"name {os.path.basename(new)}")
        move(old, new)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_move)
    world.steps = lambda name, step: told.append(step)
    assert world.reason("north", world.task("north", 2)) == ""
    told.append("answered")
    run = world.enrolled.run
    wanted = ["settled", "sync ledger.jsonl", "counted", "computed", "sync .pending.box.partial",
              "name pending.box", f"sync {run}", "stored", "sync audit.jsonl",
              "answered"]  # fmt: skip
    assert told[told.index("settled") :] == wanted


# --- starts that fail, servers from a backup, hostile carriers


def test_starts_that_fail_cost_nobody_a_run(tmp_path):
    """South begins nothing, four times. Grants are final with the first upload, so the others take
    part in the fifth run, although each accepts two runs in all."""
    world = World(tmp_path, "scaffold", privacy=SECRET, policy={"max_runs": 2}, rounds=4)
    world.exchange.fate = lambda name, message, attempt: Delivery(
        lose_ask=name == "south" and message.header["kind"] == "begin"
    )
    for _ in range(4):
        with refuses("not-enrolled: --resume"):
            world.enrol()
        world.fresh_server()
    world.exchange.fate = lambda *asked: Delivery()
    world.enrol()
    world.drive()
    for name in world.names:
        assert len([b for b in world.ledger(name).runs.values() if not b.released]) <= 2
    world.fresh_server()
    world.enrol()
    world.drive()
    world.fresh_server()
    with refuses("not-enrolled: policy-runs"):  # a run with an upload stays booked
        world.enrol()


def test_a_run_whose_grant_was_taken_back_can_go_on(tmp_path):
    """Another run needed the grant and was given up: the first is offered again by its server."""
    world = World(
        tmp_path, "scaffold", privacy=SECRET, policy={"max_runs": 1}, rounds=4, user_ratio=1.0
    )
    world.enrol()
    first = world.enrolled, world.engine
    world.fresh_server()
    offer_to(world.post, world.enrolled)
    assert world.ledger("north").runs[first[0].run].released
    world.enrolled, world.engine = first
    world.post = world.engine.post
    world.drive()
    assert world.count("north") > 0 and not world.ledger("north").runs[first[0].run].released


def test_offers_that_never_begin_are_bounded(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, policy={"max_runs": 1000}, rounds=4)
    for _ in range(30):
        offer_to(world.post, world.enrolled)
        world.fresh_server()
    site = world.sites["north"]
    assert len(site._works) == MOST_OPEN
    assert len(world.ledger("north").unused("")) == MOST_UNUSED
    assert sum(memory.enrolment() is not None for memory in site.state.runs()) == MOST_UNUSED
    world.enrol()
    world.drive()


@pytest.mark.parametrize("ratio", [1.0, 0.7])
def test_a_server_restored_from_a_backup_goes_on(tmp_path, ratio):
    """Rounds that the sites have taken part in since are passed over; no new grant is needed, and
    no upload is asked for again but that of the last round."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=9, user_ratio=ratio)
    world.enrol()
    world.drive(2)
    backup = world.saved
    world.drive(6)
    counts = {name: world.count(name) for name in world.names}
    world.saved = backup
    world.resume()
    world.drive()
    assert world.state.round == 9
    assert all(world.count(name) <= counts[name] + 4 for name in world.names)
    assert all(len(world.ledger(name).runs) == 1 for name in world.names)


def test_a_message_that_restored_slots_cannot_do_so_again(tmp_path):
    """Whoever carries messages repeats one with ``restore.*`` after its acknowledgement."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=6, user_ratio=1.0)
    world.enrol()
    world.drive(2)
    mirror = {"restore.control": np.zeros(world.setting.task.parameters, "<f4")}
    asked = world.task("north", 3, mirror, acknowledged="a" * 32)
    upload = world.send("north", asked).header["upload"]
    counted = world.count("north")
    last = {"acknowledged": upload, "over": False, "seen": 0, "seen_total": 0}
    settled = ask("settle", world.enrolled.run, "north", last, {}, world.key)
    assert world.reason("north", settled) == ""
    assert world.reason("north", asked) == "state-mismatch"
    assert world.count("north") == counted


def test_the_ledger_is_verified_once_and_again_if_somebody_touches_it(tmp_path, monkeypatch):
    """A message costs the same after ten thousand rounds; another process's line is noticed."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=9, user_ratio=1.0)
    opened: list[str] = []
    real = SiteLedger.__init__

    def counted(self, path, site):
        opened.append(site)
        real(self, path, site)

    monkeypatch.setattr(SiteLedger, "__init__", counted)
    world.enrol()
    world.drive(6)
    assert sorted(opened) == sorted(world.names)
    path = tmp_path / "north" / "state" / "ledger.jsonl"
    path.write_text(path.read_text().replace('"round": 3', '"round": 4'))
    done = world.round()
    assert world.names.index("north") not in done.arrived
    assert "ledger-damaged" in "".join(world.logs["north"])
