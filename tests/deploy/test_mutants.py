"""Each rule of the protocol, removed: a test that passes with the rule must then fail."""

from __future__ import annotations

import os

import numpy as np
import pytest
from deploy import test_faults, test_hostile, test_sites
from deploy.world import World

from dpscaffold.books.journal import Journal
from dpscaffold.engines.letters import Letter, Refused, fresh_id
from dpscaffold.engines.sites import Sites
from dpscaffold.randomness import Randomness
from dpscaffold.site import answer, checking
from dpscaffold.site.answer import Site
from dpscaffold.site.ledger import SiteLedger
from dpscaffold.site.memory import Acknowledged, RunMemory


def hostile_world(folder):
    made = World(
        folder,
        "scaffold",
        privacy=test_hostile.SECRET,
        policy=test_hostile.STRICT,
        rounds=8,
        user_ratio=1.0,
    )
    made.enrol()
    return made


def acknowledged_too_early(monkeypatch):
    """An upload becomes memory as soon as it is made."""
    real = RunMemory.write_pending

    def write(self, pending):
        real(self, pending)
        self._write("memory.box", {"upload": self.acknowledged().upload}, pending.slots)

    monkeypatch.setattr(RunMemory, "write_pending", write)


def acknowledged_before_the_checkpoint(monkeypatch):
    """The server acknowledges what no checkpoint holds."""
    real = Sites._apply

    def apply(self, *given):
        gathered = real(self, *given)
        self.saved()
        return gathered

    monkeypatch.setattr(Sites, "_apply", apply)


def no_repetition(monkeypatch):
    """The same question is answered afresh."""
    monkeypatch.setattr(answer, "question_of", lambda *given: fresh_id())


def computed_before_it_is_counted(monkeypatch):
    """The ledger line is written after the computation."""
    real = SiteLedger.participate
    late = {}

    def participate(self, run, round):
        late["line"] = (self, run, round)
        return self.runs[run].participations + 1

    stored = RunMemory.write_pending

    def write(self, pending):
        ledger, run, round = late.pop("line")
        real(ledger, run, round)
        stored(self, pending)

    monkeypatch.setattr(SiteLedger, "participate", participate)
    monkeypatch.setattr(RunMemory, "write_pending", write)


def unsynced(owner, name):
    """What is written is not brought to the disk."""

    def remove(monkeypatch):
        real = getattr(owner, name)

        def write(self, *given):
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(os, "fsync", lambda handle: None)
                return real(self, *given)

        monkeypatch.setattr(owner, name, write)

    return remove


def stored_after_it_left(monkeypatch):
    """The upload is stored once the answer is made."""
    real, late = RunMemory.write_pending, []
    monkeypatch.setattr(RunMemory, "write_pending", lambda self, p: late.append((self, p)))
    answered = Site.answer

    def answer_first(self, letter):
        reply = answered(self, letter)
        while late:
            real(*late.pop())
        return reply

    monkeypatch.setattr(Site, "answer", answer_first)


def order_of_syncs(folder):
    with pytest.MonkeyPatch.context() as inner:
        test_faults.test_the_ledger_is_on_disk_before_and_the_upload_after_the_steps(folder, inner)


def no_seen(monkeypatch):
    """Counts of the server are not looked at."""
    monkeypatch.setattr(answer, "check_seen", lambda *given: None)


def without(reason):
    """A check whose refusal is swallowed."""

    def remove(monkeypatch):
        real = answer.check_round

        def check(*given):
            try:
                real(*given)
            except Refused as no:
                if no.reason != reason:
                    raise

        monkeypatch.setattr(answer, "check_round", check)

    return remove


def no_commitments(monkeypatch):
    """Nonces are not compared with their commitments."""

    def draw(self, letter, run, memory, ledger):
        known = self._enrolment(memory)
        memory.amend(known, nonces=dict(letter.header["nonces"]))
        return {"status": "yes"}, {}

    monkeypatch.setattr(Site, "_draw", draw)


def no_signature(monkeypatch):
    """Whoever signs is believed."""
    monkeypatch.setattr(Letter, "signed_by", lambda self, public: True)


def no_fresh_key(monkeypatch):
    """Noise is keyed by round and user, as a simulation's is."""
    real = Randomness.__init__

    def init(self, seed, secret=False):
        real(self, seed, False)

    monkeypatch.setattr(Randomness, "__init__", init)


def no_cap(monkeypatch):
    """The grant does not bound participations."""
    monkeypatch.setattr(Site, "_cap", lambda self, *given: 10**9)


def no_anchor(monkeypatch):
    """An emptied ledger is taken as it is."""
    monkeypatch.setattr(SiteLedger, "follows", lambda self, anchor: True)


def no_value_limit(monkeypatch):
    """Any number is accepted."""
    for room in (answer, checking):
        monkeypatch.setattr(room, "check_values", lambda vectors, largest: None)


def no_settling(monkeypatch):
    """Any acknowledgement is taken as the one in memory."""

    def settle(self, acknowledged, restore, pending):
        memory = self.acknowledged()
        slots = pending.slots if pending and pending.upload == acknowledged else memory.slots
        self._write("memory.box", {"upload": acknowledged}, slots)
        return Acknowledged(acknowledged, slots)

    monkeypatch.setattr(RunMemory, "settle", settle)


def lost_reply(folder):
    test_sites.test_a_lost_reply_changes_no_memory(folder)


def not_saved(folder):
    """No letter leaves before the last round's checkpoint."""
    world = World(folder, "scaffold", privacy=test_faults.SECRET, rounds=4, user_ratio=1.0)
    world.enrol()
    world.round(save=False)
    with pytest.raises(RuntimeError, match="not saved"):
        world.round(save=False)


def server_dies(folder):
    test_sites.test_a_server_that_dies_repeats_the_round_for_free(folder)


def killed_while_computing(folder):
    """What was computed and shown to nobody is counted all the same."""
    world = World(folder, "scaffold", privacy=test_faults.SECRET, rounds=4, user_ratio=1.0)
    world.enrol()

    def die(name, at):
        if name == "north" and at == "computed":
            raise RuntimeError("dead")

    world.steps = die
    world.send("north", world.task("north"))
    assert world.count("north") == 1


def restored(folder):
    test_faults.test_a_restored_site_refuses_and_is_recovered_by_its_operator(folder)


def hostile(test, **more):
    return lambda folder: test(hostile_world(folder), **more)


NAN = {"params": np.full(15, np.nan, "<f4")}
SENDS = test_hostile.test_it_cannot_send_what_makes_a_record_show

#: The rule, without it, and a test that passes with it and fails without it.
MUTANTS = [
    ("acknowledgement at the site", acknowledged_too_early, lost_reply),
    ("acknowledgement after the checkpoint", acknowledged_before_the_checkpoint, not_saved),
    ("repetition", no_repetition, server_dies),
    ("ledger before computation", computed_before_it_is_counted, killed_while_computing),
    ("sync of the ledger", unsynced(Journal, "append"), order_of_syncs),
    ("sync of the upload", unsynced(RunMemory, "_write"), order_of_syncs),
    ("upload stored before it leaves", stored_after_it_left, order_of_syncs),
    ("seen", no_seen, restored),
    ("stale-round", without("stale-round"),
     hostile(test_hostile.test_it_cannot_go_back_to_an_earlier_round)),
    ("not-drawn", without("not-drawn"), test_hostile.test_it_cannot_choose_the_draw),
    ("commitments", no_commitments, test_hostile.test_it_cannot_choose_the_draw),
    ("signature", no_signature, hostile(test_hostile.test_strangers_and_mistakes_are_refused)),
    ("fresh keys", no_fresh_key, test_hostile.test_it_cannot_make_a_site_repeat_its_noise),
    ("cap", no_cap, hostile(test_hostile.test_it_cannot_have_more_rounds_than_were_granted)),
    ("anchor", no_anchor,
     lambda folder: test_faults.test_an_emptied_ledger_is_noticed_without_the_server(folder, 2)),
    ("values", no_value_limit, hostile(SENDS, vectors=NAN, code="not-finite")),
    ("settling", no_settling, hostile(test_hostile.test_it_cannot_acknowledge_what_it_never_had)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mutate", "test"), [case[1:] for case in MUTANTS], ids=[case[0] for case in MUTANTS]
)
def test_a_rule_that_is_removed_is_missed(tmp_path, monkeypatch, mutate, test):
    test(tmp_path / "with")
    mutate(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(tmp_path / "without")
