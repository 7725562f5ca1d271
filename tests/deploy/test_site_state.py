"""The site's ledger and memory: what was reserved stays reserved, whatever happens to the files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from deploy.world import World
from refusals import refuses

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.site.file import Policy, SiteGrant
from dpscaffold.deployment.site.ledger import GrantedRun, RecoveryEntry, SiteLedger
from dpscaffold.deployment.site.memory import (
    Enrolment,
    OpenBoxes,
    PendingUpload,
    RunMemory,
    StateFolder,
)
from dpscaffold.runs import journal

POLICY = Policy(epsilon=1.0, delta=1e-6, max_runs=3)


def ledger_at(path):
    return SiteLedger(path / "ledger.jsonl", "north")


def with_run(path, run="aa", epsilon=0.3):
    ledger = ledger_at(path)
    ledger.reserve(GrantedRun(run, "plan", SiteGrant(5, epsilon, 3e-7), {"records": 400}))
    ledger.begin(run, "fixed")
    return ledger


def test_what_was_written_is_read(tmp_path):
    ledger = with_run(tmp_path)
    assert [ledger.participate("aa", round) for round in (2, 7, 7)] == [1, 2, 3]
    again = ledger_at(tmp_path)
    assert again.runs == ledger.runs and again.total == 3
    entry = again.runs["aa"]
    assert (entry.remaining, entry.last_round, entry.began) == (2, 7, True)
    again.begin("aa", "fixed")
    with refuses("roster-changed"):
        again.begin("aa", "another roster")
    assert again.anchor == ledger.anchor


def test_epsilon_and_delta_add_across_runs(tmp_path):
    ledger = with_run(tmp_path)
    ledger.reserve(GrantedRun("bb", "plan", SiteGrant(5, 0.5, 3e-7), {}))
    left = ledger.left(POLICY)
    assert left.epsilon == pytest.approx(0.2) and left.delta == pytest.approx(4e-7)
    assert left.runs == 1
    assert ledger.left(POLICY, "aa").epsilon == pytest.approx(0.5)
    assert ledger.unused(besides="cc") == ["aa", "bb"] and ledger.unused(besides="bb") == ["aa"]
    ledger.release(["bb"])
    assert ledger.left(POLICY).epsilon == pytest.approx(0.7)
    ledger.participate("aa", 1)
    assert ledger.unused(besides="cc") == []
    assert ledger_at(tmp_path).left(POLICY) == ledger.left(POLICY)


def test_a_recovery_books_the_rest(tmp_path):
    ledger = with_run(tmp_path)
    ledger.participate("aa", 1)
    ledger.recover(["aa"], RecoveryEntry(4, 0.25, 1e-7, ""))
    again = ledger_at(tmp_path)
    assert again.runs["aa"].remaining == 0 and again.total == 5 + 4
    assert again.left(POLICY).epsilon == pytest.approx(1 - 0.3 - 0.25)


def test_an_infinite_epsilon_is_never_granted(tmp_path):
    with refuses("policy-epsilon"):
        asked = GrantedRun("aa", "plan", SiteGrant(5, float("inf"), 0.0), {})
        ledger_at(tmp_path).reserve(asked)


@pytest.mark.parametrize("place", range(0, 900, 37))
def test_a_flipped_byte_is_noticed(tmp_path, place):
    with_run(tmp_path).participate("aa", 1)
    path = tmp_path / "ledger.jsonl"
    raw = bytearray(path.read_bytes())
    raw[place % (len(raw) - 1)] ^= 1
    path.write_bytes(bytes(raw))
    with refuses("ledger-damaged"):
        ledger_at(tmp_path)


def test_a_torn_last_line_was_never_acted_upon(tmp_path):
    ledger = with_run(tmp_path)
    path = tmp_path / "ledger.jsonl"
    whole = path.read_bytes()
    ledger.participate("aa", 1)
    line = path.read_bytes()[len(whole) :]
    for cut in (1, len(line) // 2, len(line) - 2):
        path.write_bytes(whole + line[:cut])
        torn = ledger_at(tmp_path)
        assert torn.runs["aa"].participations == 0
        assert torn.participate("aa", 1) == 1
        assert ledger_at(tmp_path).runs["aa"].participations == 1


def test_an_emptied_or_shortened_ledger_does_not_follow_its_anchor(tmp_path):
    ledger = with_run(tmp_path)
    before = ledger.anchor
    ledger.participate("aa", 1)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    assert ledger_at(tmp_path).follows([ledger.anchor, before]) and ledger.follows([before])
    for kept in (0, 1, len(lines) - 1):
        path.write_bytes(b"".join(lines[:kept]))
        assert not ledger_at(tmp_path).follows([ledger.anchor])


def test_another_sites_ledger_is_refused(tmp_path):
    with_run(tmp_path)
    with refuses("folder-of-another-site: 'north'"):
        SiteLedger(tmp_path / "ledger.jsonl", "east")


def test_a_full_disk_leaves_the_ledger_whole(tmp_path, monkeypatch):
    ledger = with_run(tmp_path)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    import os

    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, raw: real(handle, bytes(raw)[:10]))
    with pytest.raises(OSError):
        ledger.participate("aa", 1)
    monkeypatch.undo()
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
    assert ledger.runs["aa"].participations == 0
    assert ledger.participate("aa", 1) == 1


# --- memory ------------------------------------------------------------------------------------


def vector(*values):
    return np.array(values, "<f4")


def pending(upload, round=1, value=1.0, anchor=None):
    from dpscaffold.runs.journal import Anchor

    return PendingUpload(
        upload,
        f"question of round {round}",
        round,
        round,
        anchor or Anchor(2, "ab"),
        {"params": vector(value), "totals.control": vector(2 * value)},
        {"control": vector(3 * value)},
    )


def settle(memory, acknowledged, restore=None):
    return memory.settle(acknowledged, restore, memory.pending())


def test_settle_follows_the_acknowledgement(tmp_path):
    memory = RunMemory(tmp_path)
    assert settle(memory, "").slots == {}
    memory.write_pending(pending("u1"))
    assert settle(memory, "").slots == {}  # not acknowledged: memory unchanged, upload kept
    assert memory.pending() is not None
    assert settle(memory, "u1").slots["control"].tolist() == [3.0]
    assert memory.pending() is None
    memory.write_pending(pending("u2", 2, 5.0))
    assert settle(memory, "u1").slots["control"].tolist() == [3.0]
    memory.write_pending(pending("u3", 3, 7.0))  # u2 was never applied, and is gone
    with refuses("state-mismatch"):
        settle(memory, "u2")
    assert settle(memory, "u3").slots["control"].tolist() == [21.0]
    with refuses("state-mismatch"):
        settle(memory, "")
    restored = settle(memory, "u9", {"control": vector(9.0)})
    assert restored.slots["control"].tolist() == [9.0]
    assert RunMemory(tmp_path).acknowledged().upload == "u9"


def test_the_pending_upload_is_read_back_whole(tmp_path):
    memory = RunMemory(tmp_path)
    memory.write_pending(pending("u1"))
    found = RunMemory(tmp_path).pending()
    assert found is not None and found.question == "question of round 1" and found.count == 1
    assert found.vectors["totals.control"].tolist() == [2.0]


@pytest.mark.parametrize("older", [False, True], ids=["now", "older"])
def test_messages_that_set_the_slots_are_remembered(tmp_path, older):
    """Also where a pending upload becomes the memory; one that was written by a version that did
    not name them is written again."""
    memory = RunMemory(tmp_path)
    memory.settle("u0", {"control": vector(4.0)}, None, "first")
    memory.write_pending(pending("u1"))
    if older:
        box = memory._read("pending.box")
        head = {name: value for name, value in box.header.items() if name != "restores"}
        memory._write("pending.box", head, box.vectors)
    kept = (tmp_path / "pending.box").stat().st_ino
    assert settle(memory, "u1").slots["control"].tolist() == [3.0]
    assert ((tmp_path / "memory.box").stat().st_ino == kept) is not older
    again = RunMemory(tmp_path).acknowledged()
    assert again.restores == ("first",) and again.upload == "u1"
    assert {name: value.tolist() for name, value in again.slots.items()} == {"control": [3.0]}
    with refuses("state-mismatch"):
        RunMemory(tmp_path).settle("u9", {"control": vector(9.0)}, None, "first")


def test_a_process_remembers_its_boxes_as_long_as_nobody_changes_them(tmp_path, monkeypatch):
    boxes, read = OpenBoxes(), []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (real(path), read.append(path.name))[0])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    memory = RunMemory(tmp_path / "a", boxes)
    memory.write_pending(pending("u1"))
    assert settle(memory, "u1").slots["control"].tolist() == [3.0]
    memory.write_pending(pending("u2", 2))
    found = RunMemory(tmp_path / "a", boxes)
    assert found.pending().upload == "u2" and found.acknowledged().upload == "u1" and not read
    for kept in (*found.pending().vectors.values(), *found.acknowledged().slots.values()):
        with pytest.raises(ValueError, match="read-only"):
            kept[:] = 0.0
    box = tmp_path / "a" / "memory.box"
    whole = real(box)
    box.write_bytes(whole[:-1])
    with refuses("state-damaged"):
        found.acknowledged()
    box.write_bytes(whole)
    assert found.acknowledged().slots["control"].tolist() == [3.0] and read
    RunMemory(tmp_path / "b", boxes).write_pending(pending("u7"))  # another run's take their place
    read.clear()
    assert found.pending().upload == "u2" and read == ["pending.box"]
    (tmp_path / "a" / "pending.box").unlink()
    assert found.pending() is None


@pytest.mark.parametrize("name", ["memory.box", "pending.box"])
def test_a_damaged_box_is_noticed(tmp_path, name):
    memory = RunMemory(tmp_path)
    memory.write_pending(pending("u1"))
    settle(memory, "u1")
    memory.write_pending(pending("u2"))
    raw = bytearray((tmp_path / name).read_bytes())
    for change in (lambda r: r[:-5], lambda r: r[:3] + b"x" + r[4:], lambda r: b""):
        (tmp_path / name).write_bytes(change(bytes(raw)))
        with refuses("state-damaged"):
            settle(memory, "u2")


def test_a_damaged_enrolment_is_noticed(tmp_path):
    memory = RunMemory(tmp_path / "aa")
    assert memory.enrolment() is None
    enrolment = Enrolment("aa", "plan", {"task": {}}, 400, False, "n", "c", {"lines": 1})
    memory.write_enrolment(enrolment)
    assert memory.enrolment() == enrolment
    amended = memory.amend(enrolment, roster=("east", "north"), nonces={"north": "n"})
    assert memory.enrolment() == amended and amended.roster == ("east", "north")
    path = tmp_path / "aa" / "enrolment.json"
    path.write_text(path.read_text().replace('"records": 400', '"records": 401'))
    with refuses("state-damaged"):
        memory.enrolment()


def test_one_process_at_a_time_and_one_site(tmp_path):
    state = StateFolder(tmp_path / "state", "north")
    with refuses("folder-in-use"):
        StateFolder(tmp_path / "state", "north")
    state.close()
    with refuses("folder-of-another-site: 'north'"):
        StateFolder(tmp_path / "state", "east")
    again = StateFolder(tmp_path / "state", "north")
    for odd in ("", "../x", "A", "a" * 65, "0/1"):
        with refuses("unknown-run"):
            again.run(odd)
    again.close()
    (tmp_path / "state" / "site.json").write_text('{"format": 2, "site": "north"}')
    with refuses("wrong-version: format 2"):
        StateFolder(tmp_path / "state", "north")


def test_a_message_reads_the_ledger_again_only_where_the_file_changed(tmp_path, monkeypatch):
    """So a run costs as many lines as it writes, not their square; a changed file is seen."""
    world = World(tmp_path, "fedavg", privacy=Gaussian(noise=0.8), rounds=6, user_ratio=1.0)
    world.enrol()
    world.drive(until=2)
    read, real = [], journal._decoded
    monkeypatch.setattr(journal, "_decoded", lambda raw, head: read.append(1) or real(raw, head))
    world.drive(until=5)
    assert not read
    name = world.names[0]
    path = world.sites[name].state.ledger
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"round": 2', b'"round": 1'))
    assert world.reason(name, world.task(name, 6)) == "ledger-damaged"
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert world.reason(name, world.task(name, 6)) == "ledger-behind"
    assert read
