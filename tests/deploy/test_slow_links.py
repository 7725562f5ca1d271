"""Slow links and silent sites, on a virtual clock: the real exchange and the real node, and between
them a link whose every byte takes its time."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from dpscaffold.deployment.protocol.messages import SignedMessage, ask, new_key, reply
from dpscaffold.deployment.provision import Member
from dpscaffold.deployment.transports import flower

flower.require()

from dpscaffold.deployment.transports.flower import node, run  # noqa: E402
from dpscaffold.deployment.transports.flower.wire import from_records  # noqa: E402

KEY = new_key()
#: Bytes a second of 10 Mbit/s, and what a header costs.
RATE, HEADER = 1.25e6, 1_000


@dataclass
class Copy:
    """One message at the SuperLink."""

    name: str
    envelope: run.Envelope
    at: float
    taken: bool = False
    gone: float = float("inf")


@dataclass
class SlowSite:
    """A site's process and its link: a fleet whose clock runs ahead while bytes pass."""

    name: str
    link: Link
    compute: float = 0.0
    now: float = 0.0
    online: bool = True
    down: float = 0.0
    up: float = 0.0
    answered: int = 0
    last: node.LastAnswer = field(default_factory=node.LastAnswer)

    def restart(self):
        self.last, self.now, self.online = node.LastAnswer(), self.link.now, True

    def work(self, until):
        """Take up what has come by now, as the loop of a site does."""
        while self.online and self.now <= until:
            found = [
                (identity, copy)
                for identity, copy in self.link.copies.items()
                if copy.name == self.name and not copy.taken and copy.at <= until
            ]
            if not found:
                self.now = until
                return
            identity, copy = found[0]
            self.now, copy.taken = max(self.now, copy.at), True
            kind = run.AGAIN if copy.envelope.again else "query"
            metadata = SimpleNamespace(
                run_id=1, message_type=kind, group_id=copy.envelope.question, identity=identity
            )
            asked = node.Incoming(SimpleNamespace(metadata=metadata), None)
            node.respond(self, asked, self.answer, self.last)

    def answer(self, message):
        self.answered += 1
        self.now += self.compute
        size = len(message.vectors["params"])
        return reply(message, self.name, {"status": "yes"}, {"params": np.ones(size, "<f4")}, KEY)

    def fetch(self, asked):
        copy = self.link.copies[asked.head.metadata.identity]
        if copy.gone <= self.now:
            return None
        message = from_records(copy.envelope.content)
        self.down += run._size(message)
        self.now += run._size(message) / self.link.rate
        return message

    def reply(self, asked, signed):
        self.up += run._size(signed)
        self.now += run._size(signed) / self.link.rate
        self.link.answers[asked.head.metadata.identity] = (self.now, signed)

    def confirm(self, asked):
        self.down += HEADER
        copy = self.link.copies[asked.head.metadata.identity]
        copy.gone = min(copy.gone, self.now)


@dataclass
class Link:
    """The SuperLink, as an exchange sees it."""

    names: tuple[str, ...]
    rate: float = RATE
    now: float = 0.0
    copies: dict[str, Copy] = field(default_factory=dict)
    answers: dict[str, tuple[float, SignedMessage | None]] = field(default_factory=dict)
    coming: set[str] = field(default_factory=set)

    def __post_init__(self):
        self.sites = {name: SlowSite(name, self) for name in self.names}

    def sleep(self, seconds):
        self.now += seconds
        for site in self.sites.values():
            site.work(self.now)

    def nodes(self):
        return {f"key of {n}": k for k, n in enumerate(self.names) if self.sites[n].online}

    def send(self, envelopes):
        ids = []
        for envelope in envelopes:
            ids.append(f"message {len(self.copies)}")
            self.copies[ids[-1]] = Copy(self.names[envelope.node], envelope, self.now)
        return ids

    def is_coming(self, identity):
        return identity in self.coming

    def is_confirmed(self, identity):
        return self.copies[identity].gone <= self.now

    def withdraw(self, identities):
        for identity in identities:
            self.copies[identity].gone = min(self.now, self.copies[identity].gone)

    def replies(self, asked):
        ready = [i for i in asked if i in self.answers and self.answers[i][0] <= self.now]
        found = []
        for identity in ready:
            _, signed = self.answers.pop(identity)
            lost = SimpleNamespace(has_error=lambda: True)
            whole = SimpleNamespace(has_error=lambda: False, content=signed)
            found.append((identity, lost if signed is None else whole))
        return found


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(
        run, "from_records", lambda c: c if isinstance(c, SignedMessage) else from_records(c)
    )

    def made(*names, parameters=2_000_000, **options):
        link = Link(names)
        members = tuple(Member(name, "", f"key of {name}") for name in names)
        given = {"deadline": 300.0, "clock": lambda: link.now, "sleep": link.sleep} | options
        exchange = run.FlowerExchange(None, members, **given)
        exchange._grid, exchange.traffic.opened = link, 1
        x = np.ones(parameters, "<f4")

        def a_round(kind="task"):
            questions = {n: ask(kind, "run", n, {}, {"params": x}, KEY) for n in names}
            began = link.now
            found = exchange.ask(questions, lambda n, a: a.names_question(questions[n]))
            return set(found), link.now - began

        return SimpleNamespace(link=link, exchange=exchange, round=a_round, sites=link.sites)

    return made


def test_a_link_of_10_mbit_carries_every_vector_once(world):
    """x and c down, both moves up: 12.8 s by arithmetic, with resends after 6 s."""
    slow = world("north", "east")
    for number in range(1, 6):
        found, seconds = slow.round()
        assert found == {"north", "east"}
        assert 12.8 <= seconds < 1.05 * 12.8
        for site in slow.sites.values():
            assert site.up < 1.001 * number * 8e6 and site.down < 1.001 * number * 8e6


def test_a_question_is_sent_again_after_waits_that_double(world):
    slow = world("north", parameters=10)
    slow.sites["north"].compute = 100.0
    assert slow.round()[0] == {"north"}
    times = [copy.at for copy in slow.link.copies.values()]
    assert times == pytest.approx([0, 6, 18, 42, 90], abs=0.6)
    assert slow.sites["north"].answered == 1
    slow.sites["north"].compute = 0.0
    assert slow.round()[1] < 1  # none of the copies costs anything
    assert slow.sites["north"].answered == 2


def test_what_is_confirmed_is_not_sent_again(world):
    """The answer has left, but Flower takes its time to hand it over."""
    slow = world("north", parameters=10)
    real = slow.link.replies
    slow.link.replies = lambda asked: real(asked) if slow.link.now > 15 else []
    slow.round()
    assert len(slow.link.copies) == 1


def test_a_site_that_died_with_the_question_answers_the_copy(world):
    slow = world("north", parameters=10)
    north = slow.sites["north"]
    real, north.reply = north.reply, lambda asked, signed: setattr(north, "online", False)
    north.confirm = lambda asked: None

    def sleep(seconds, inner=slow.link.sleep):
        if not north.online:
            north.reply = real
            del north.confirm
            north.restart()
        inner(seconds)

    slow.exchange.sleep = sleep
    found, seconds = slow.round()
    assert found == {"north"} and seconds < 7 and north.answered == 2


def test_a_site_that_died_within_its_upload_answers_the_copy(world):
    """Flower has announced the answer, and waits three minutes for objects that never come."""
    slow = world("north", parameters=10)
    north = slow.sites["north"]
    real = north.reply

    def dies(asked, signed):
        slow.link.coming.add(asked.head.metadata.identity)
        north.reply = real
        raise ConnectionError

    north.reply = dies
    work = north.work

    def restarted(until):
        try:
            work(until)
        except ConnectionError:
            north.restart()

    north.work = restarted
    found, seconds = slow.round()
    assert found == {"north"} and seconds < 7 and north.answered == 2


def test_an_answer_that_flower_lost_is_sent_again_from_memory(world):
    slow = world("north", parameters=10)
    slow.link.answers["message 0"] = (0.5, None)
    north = slow.sites["north"]
    real, lost = north.reply, []

    def reply(asked, signed):
        if not lost:
            return lost.append(signed)  # Flower has answered in the site's place
        return real(asked, signed)

    north.reply = reply
    found, seconds = slow.round()
    assert found == {"north"} and seconds < 3
    assert north.answered == 1 and [c.envelope.again for c in slow.link.copies.values()] == [0, 1]


def test_a_confirmed_question_without_any_answer_is_asked_again_in_the_end(world):
    slow = world("north", parameters=10)
    north = slow.sites["north"]
    real, lost = north.reply, []
    north.reply = lambda asked, signed: real(asked, signed) if lost else lost.append(signed)
    found, seconds = slow.round()
    assert found == {"north"} and 18 <= seconds < 20 and north.answered == 1


def test_a_dead_site_costs_one_deadline_until_it_is_heard_again(world):
    slow = world("north", "east", parameters=10, deadline=60.0)
    assert slow.round()[0] == {"north", "east"}
    north = slow.sites["north"]
    north.online = False
    assert slow.round() == ({"east"}, pytest.approx(60, abs=0.5))
    for _ in range(5):
        found, seconds = slow.round()
        assert found == {"east"} and seconds < 1
    north.restart()
    assert slow.round()[0] == {"north", "east"} and north.answered == 2


def test_a_hung_site_gets_only_the_question_that_counts(world):
    """Its connection stays open, so it is asked, but nobody waits; what it missed is taken back."""
    slow = world("north", "east", parameters=10, deadline=30.0)
    north = slow.sites["north"]
    north.now = 40.0
    assert slow.round() == ({"east"}, pytest.approx(30, abs=0.5))
    for _ in range(3):
        assert slow.round()[1] < 1
    slow.link.sleep(20.0)
    assert north.answered == 0
    assert slow.round()[0] == {"north", "east"} and north.answered == 1


def test_a_straggler_is_waited_for_again_once_its_late_answer_is_there(world):
    slow = world("north", "east", parameters=10, deadline=10.0)
    north = slow.sites["north"]
    north.compute = 15.0
    assert slow.round()[0] == {"east"}
    north.compute = 0.0
    slow.link.sleep(6.0)
    assert slow.round()[0] == {"north", "east"} and not slow.exchange.silent


@pytest.mark.parametrize(("kind", "enough"), [("settle", 1), ("task", 2)])
def test_a_silent_site_is_waited_for_where_it_matters(world, kind, enough):
    """The model at the end of a run, and a round that has no quorum without it."""
    slow = world("north", "east", parameters=10, deadline=20.0, enough=enough)
    slow.sites["north"].online = False
    slow.round()
    assert slow.round(kind) == ({"east"}, pytest.approx(20, abs=0.5))


def test_nobody_is_passed_over_where_nobody_answers(world):
    slow = world("north", "east", parameters=10, deadline=20.0)
    for site in slow.sites.values():
        site.online = False
    for _ in range(2):
        assert slow.round() == (set(), pytest.approx(20, abs=0.5))
