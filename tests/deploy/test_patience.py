"""A message whose sender died before its objects came holds up the next one's messages only
briefly, and at the server nobody at all."""

import threading
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from dpscaffold.deployment.transports import flower

flower.require()

from flwr.supercore.inflatable.inflatable_utils import (  # noqa: E402
    ObjectPullError,
    ObjectUnavailableError,
)

from dpscaffold.deployment.transports.flower import node, run  # noqa: E402


def test_objects_that_never_come_are_waited_for_briefly_and_longer_each_time(tmp_path, monkeypatch):
    """Time passes only in sleeps between two attempts at an object."""
    clock, there = [0.0], {}

    def pull_all(parts, fetch, **options):
        assert options["max_time"] is options["max_tries_per_object"] is None
        while True:
            try:
                return {part: fetch(part) for part in parts}
            except ObjectUnavailableError:
                clock[0] += 0.5

    def pull(part):
        if part not in there:
            raise ObjectUnavailableError(part)
        if there[part] is None:
            raise ObjectPullError(part, "it was deleted")
        return b""

    for name, stand_in in {
        "pull_objects": pull_all,
        "iterate_object_tree": lambda tree: [tree],
        "make_pull_object_fn_protobuf": lambda *given: pull,
    }.items():
        monkeypatch.setattr(node, name, stand_in)
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    key = ec.generate_private_key(ec.SECP384R1())
    fleet = node.Fleet(node.Address("127.0.0.1:1", None), key, tmp_path)
    fleet.node = node.Node(node_id=1)
    head = SimpleNamespace(metadata=SimpleNamespace(run_id=1))
    asked = node.Incoming(head, SimpleNamespace(object_id="o"))

    def waited():
        began = clock[0]
        with pytest.raises(RuntimeError, match="do not come"):
            fleet.fetch(asked)
        return clock[0] - began

    for patience in (2, 4, 8, 16, 32, 60, 60):
        assert patience < waited() < patience + 0.6
    there["o"] = b""
    assert fleet.fetch(asked) is not None
    del there["o"]
    assert waited() < 2.6  # what came whole is forgotten
    there["o"] = None
    assert fleet.fetch(asked) is None  # taken back: no trouble at all
    del there["o"]
    assert waited() < 2.6


@pytest.fixture
def office(monkeypatch):
    """A server's open run, to which answers are announced by hand; their objects are ``there``."""
    announced, asked, there, lost = [], [], set(), set()

    def pull_messages(request):
        asked.append(list(request.message_ids))
        found = [one for one in announced if one[0] in request.message_ids]
        for one in found:  # Flower hands an answer out once
            announced.remove(one)
        heads = [
            SimpleNamespace(metadata=SimpleNamespace(message_id=own, reply_to_message_id=to))
            for to, own in found
        ]
        trees = [SimpleNamespace(object_id=own) for _, own in found]
        return SimpleNamespace(messages_list=heads, message_object_trees=trees)

    def pull_object(part):
        if part in lost:
            raise ObjectPullError(part, "its sender is gone")
        if part not in there:
            raise ObjectUnavailableError(part)
        return b""

    for name, stand_in in {
        "iterate_object_tree": lambda tree: [tree],
        "make_pull_object_fn_protobuf": lambda *given: pull_object,
        "make_confirm_message_received_fn_protobuf": lambda *given: lambda identity: None,
        "inflated": lambda identity, contents: SimpleNamespace(
            metadata=SimpleNamespace(), name=identity
        ),
    }.items():
        monkeypatch.setattr(run, name, stand_in)
    monkeypatch.setattr(run, "_AT_ONCE", 0.2)
    grid = run.OpenRun.__new__(run.OpenRun)
    client = SimpleNamespace(
        PullMessages=pull_messages, PullObject=None, ConfirmMessageReceived=None
    )
    grid.grid = SimpleNamespace(_runtime_client=client, node=None)
    grid._run, grid._stopped, grid._coming = 1, threading.Event(), {}
    grid._threads = run.ThreadPoolExecutor(4)
    yield SimpleNamespace(grid=grid, announced=announced, there=there, lost=lost, asked=asked)
    grid.give_up()
    grid._threads.shutdown(wait=True)  # what is fetched in vain ends with the connection


def test_an_answer_whose_sender_died_holds_up_nobody(office):
    office.announced += [("to east", "dead"), ("to north", "whole")]
    office.there.add("whole")
    (found,) = office.grid.replies(["to east", "to north"])
    assert found[0] == "to north" and found[1].name == "whole"
    # The same message was sent again meanwhile, and its answer comes; the first is asked no more.
    office.announced.append(("to east again", "second"))
    office.there.add("second")
    (found,) = office.grid.replies(["to east", "to east again"])
    assert found[0] == "to east again" and found[1].name == "second"
    assert office.asked == [["to east", "to north"], ["to east again"]]
    assert office.grid.replies(["to east"]) == [] and len(office.asked) == 2


def test_an_answer_that_comes_late_is_taken_and_one_that_never_will_is_told(office):
    office.announced += [("to east", "late"), ("to north", "never")]
    assert office.grid.replies(["to east", "to north"]) == []
    office.there.add("late")
    office.lost.add("never")
    found = {}
    while len(found) < 2:
        found |= dict(office.grid.replies(["to east", "to north"]))
    assert found["to east"].name == "late" and found["to north"] is None
