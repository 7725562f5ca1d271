"""A message whose sender died before its objects came holds up the next one's letters only
briefly."""

from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

pytest.importorskip("flwr", reason="flwr is not installed")

from dpscaffold.flower import node


def test_objects_that_never_come_are_waited_for_briefly_and_longer_each_time(tmp_path, monkeypatch):
    waited, whole = [], []

    def pull(objects, fetch, initial_backoff, max_time):
        waited.append(max_time)
        if not whole:
            raise node.ObjectPullError("o", "it is not there")
        return {}

    head = SimpleNamespace(metadata=SimpleNamespace(run_id=1, message_id="m"))
    answer = SimpleNamespace(
        messages_list=[None], message_object_trees=[SimpleNamespace(object_id="o")]
    )
    for name, stand_in in {
        "pull_objects": pull,
        "message_from_proto": lambda found: head,
        "iterate_object_tree": lambda tree: [],
        "make_pull_object_fn_protobuf": lambda *given: None,
        "make_confirm_message_received_fn_protobuf": lambda *given: lambda identity: None,
        "inflate_object_from_contents": lambda identity, contents: head,
    }.items():
        monkeypatch.setattr(node, name, stand_in)
    key = ec.generate_private_key(ec.SECP384R1())
    fleet = node.Fleet(node.Address("127.0.0.1:1", None), key, tmp_path)
    fleet.node = node.Node(node_id=1)
    fleet._client = SimpleNamespace(
        PullMessages=lambda request: answer, PullObject=None, ConfirmMessageReceived=None
    )
    for _ in range(7):
        with pytest.raises(node.ObjectPullError):
            fleet.receive()
    assert waited == [2, 4, 8, 16, 32, 60, 60]
    whole.append(True)
    fleet.receive()
    whole.clear()
    with pytest.raises(node.ObjectPullError):
        fleet.receive()
    assert waited[-2:] == [60, 2]  # what came whole is forgotten
