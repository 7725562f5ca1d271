"""Two copies of a site: the law is that no ledger in use records less than what left the site."""

from __future__ import annotations

import shutil

import pytest
from deploy.sums import SECRET as SECRET_SUM
from deploy.sums import SumWorld
from deploy.world import World, uploads_of
from in_memory import Delivery

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.site.ledger import SiteLedger
from dpscaffold.deployment.site.recovery import recover

SECRET = Gaussian(clip=0.7, noise=20.0, secret=True)


class TwoNorths:
    """The site north and a copy of its state folder, both online; ``to_copy(turn)`` says which of
    them the transport hands a message to."""

    def __init__(self, world, to_copy=lambda turn: turn % 2 == 1):
        self.world, self.turn, self.to_copy = world, -1, to_copy
        self.original = world.sites["north"]
        shutil.copytree(world.folder / "north" / "state", world.folder / "copy")
        self.copy = world.open("north", world.folder / "copy")
        world.sites["north"] = self.original
        world.exchange.sites["north"] = self.answer

    def answer(self, message):
        self.turn += 1
        return (self.copy if self.to_copy(self.turn) else self.original).answer(message)

    def ledgers(self):
        run = self.world.enrolled.run
        paths = [self.world.folder / "north" / "state", self.world.folder / "copy"]
        return [SiteLedger(path / "ledger.jsonl", "north").runs[run] for path in paths]

    def left(self):
        """Distinct uploads that left north."""
        return len([one for one in uploads_of(self.world.exchange.answered) if one[0] == "north"])


def slow(name, message, attempt):
    """North's first answer to a task takes longer than the server waits before it asks again."""
    task = message.header["kind"] == "task"
    return Delivery(late=name == "north" and task and attempt == 0)


def plain_pair(folder):
    world = World(folder, "scaffold", privacy=SECRET, rounds=16, user_ratio=1.0)
    world.enrol()
    world.drive(4)
    world.exchange.attempts, world.exchange.fate = 2, slow
    return TwoNorths(world)


def secure_pair(folder):
    """The original's answer to an attempt is lost, and the copy answers the next one; then the
    transport changes between them."""
    world = SumWorld(folder, SECRET_SUM, rounds=16)
    world.enrol()
    world.drive(4)
    pair = TwoNorths(world, lambda turn: turn % 4 in (1, 2))
    world.exchange.fate = lambda name, *asked: Delivery(
        lose_answer=name == "north" and pair.turn < 0
    )
    return pair


@pytest.fixture(params=[plain_pair, secure_pair])
def pair(request, tmp_path):
    return request.param(tmp_path)


def test_two_copies_cannot_both_answer_the_rounds(pair):
    """As soon as both have answered, neither does: what left is one upload more, not one more in
    every round."""
    world = pair.world
    world.drive(12)
    reserved = [entry.participations for entry in pair.ledgers()]
    assert min(reserved) > 4  # both have answered
    assert pair.left() <= max(reserved) + 2
    assert world.post.refusals["ledger-behind"] >= 2
    left = pair.left()
    for site in (pair.original, pair.copy):
        world.exchange.sites["north"] = site.answer
        world.round()
        assert pair.left() == left


def test_after_recovery_either_ledger_covers_both_copies(pair):
    """Whichever copy is kept, what its ledger records is at least what left both."""
    world = pair.world
    world.drive(10)
    for site, path in ((pair.original, "north/state"), (pair.copy, "copy")):
        said = recover(site.state, "north", world.policies["north"])
        assert any("another ledger" in sentence for sentence in said)
        ledger = SiteLedger(world.folder / path / "ledger.jsonl", "north")
        assert ledger.total >= pair.left()
        grant = ledger.runs[world.enrolled.run].grant
        left = ledger.left(world.policies["north"])
        assert left.epsilon <= world.policies["north"].epsilon - 2 * grant.epsilon + 1e-9
        assert left.delta <= world.policies["north"].delta - 2 * grant.delta + 1e-18


def test_a_recovered_site_takes_part_in_the_next_run(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    world.drive(2)
    world.exchange.attempts, world.exchange.fate = 2, slow
    pair = TwoNorths(world)
    world.drive(6)
    recover(pair.original.state, "north", world.policies["north"])
    pair.copy.state.close()
    world.exchange.sites["north"] = pair.original.answer
    world.exchange.fate, heads = (lambda *asked: Delivery()), world.post.heads
    world.fresh_server()
    world.post.heads = heads
    world.enrol()
    assert len(world.round().arrived) == 3


def test_a_copy_is_found_out_in_the_next_run(tmp_path):
    """Heads count over all runs: a copy from before the last run cannot take part in a new one,
    even if its counts were as large."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=3, user_ratio=1.0)
    world.enrol()
    pair = TwoNorths(world)
    world.exchange.sites["north"] = pair.original.answer
    world.drive()
    heads = world.post.heads
    world.fresh_server()
    world.post.heads = heads
    world.exchange.sites["north"] = pair.copy.answer
    from refusals import refuses

    with refuses("not-enrolled: ledger-behind"):
        world.enrol()


def test_a_server_restored_from_a_backup_locks_nobody_out(tmp_path):
    """A site is ahead of what an old server has seen; its ledger contains that, so it answers."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    world.drive(2)
    backup = dict(world.post.heads)
    world.drive(4)
    assert backup["north"] != world.post.heads["north"]
    world.post.heads = backup
    assert len(world.round().arrived) == 3
    assert not world.post.refusals


def test_an_answer_without_a_head_or_with_a_strange_one_is_harmless(tmp_path):
    """What a site says of its ledger can only make that site refuse."""
    world = World(tmp_path, "scaffold", privacy=SECRET, rounds=8, user_ratio=1.0)
    world.enrol()
    for told in (None, 7, [], {"lines": "3", "head": "x"}, {"lines": 3}):
        assert world.reason("north", world.task("north", 1, heads=told)) in ("", "bad-offer")
    assert world.reason("north", world.task("north", 1, heads=[{"lines": 2, "head": "f" * 64}]))
    assert world.reason("north", world.task("north", 1)) == "ledger-behind"  # and stays so
    assert world.reason("east", world.task("east", 1)) == ""
