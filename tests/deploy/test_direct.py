"""Requests that are answered without Flower's layers are answered as Flower answers them."""

from __future__ import annotations

import asyncio
import datetime
import importlib
from base64 import b64encode

import pytest

from dpscaffold.deployment.transports import flower

flower.require()

from flwr.app import Message, RecordDict  # noqa: E402
from flwr.common.constant import TIMESTAMP_HEADER  # noqa: E402
from flwr.proto.fleet_pb2 import PullMessagesRequest  # noqa: E402
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse  # noqa: E402
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.proto.runtime_pb2 import GetNodesRequest  # noqa: E402
from flwr.supercore.constant import (  # noqa: E402
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    TASK_TOKEN_HEADER,
)
from flwr.supercore.object_store import NoObjectInStoreError  # noqa: E402
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from flwr.superlink.main import create_app  # noqa: E402

from dpscaffold.deployment.provision import (  # noqa: E402
    FederationFile,
    admit,
    provision,
    read_invitation,
    read_node_key,
)
from dpscaffold.deployment.site.begin import make_site  # noqa: E402
from dpscaffold.deployment.transports.flower.direct import (  # noqa: E402
    _FLEET,
    direct_fleet,
    direct_runtime,
)
from dpscaffold.deployment.transports.flower.link import Listeners, lighten, superlink_config  # noqa: E402


@pytest.fixture
def world(tmp_path):
    """Flower's application as it is, a lightened one, and one behind the direct way."""
    (invitation,) = provision(FederationFile("127.0.0.1:1", ("north",)), tmp_path)
    make_site(read_invitation(invitation), tmp_path / "north")
    admit(tmp_path / "server", tmp_path / "north" / "north.site")
    key = read_node_key(tmp_path / "north" / "node.key")
    listeners = Listeners(("127.0.0.1", 1), ("127.0.0.1", 2), tmp_path / "server")
    lifespan = importlib.import_module("flwr.superlink.cli.flower_superlink").SuperLinkLifespan
    app = create_app(superlink_config(listeners), lifespan)
    light = create_app(superlink_config(listeners), lifespan)
    light.state.linkstate_factory = app.state.linkstate_factory
    lighten(light)
    state = app.state.linkstate_factory.state
    node = state().create_node("nobody", "nobody", public_key_to_bytes(key.public_key()), 30.0)
    ways = [app, light, direct_fleet(light, state), direct_runtime(light, state)]
    return {"ways": ways, "key": key, "node": node, "app": app}


def headers(key, ahead=0.0):
    moment = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead)
    stamp = moment.isoformat().encode()
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())),
        TIMESTAMP_HEADER: stamp,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, stamp)),
    }


def asked(world, way, path, message, given, media=b"application/protobuf", got=None):
    """Status and body of an answer."""
    sent = [{"type": "http.request", "body": message.SerializeToString()}]
    got = [] if got is None else got
    plain = [(name.lower().encode(), value) for name, value in given.items()]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", media), *plain],
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "scheme": "https",
        "root_path": "",
    }

    async def receive():
        return sent.pop() if sent else await asyncio.sleep(60)

    async def send(part):
        got.append(part)

    asyncio.run(way(scope, receive, send))
    return got[0]["status"], b"".join(part.get("body", b"") for part in got[1:])


def test_all_ways_answer_alike(world):
    """What is plain, and what is not: a wrong clock, another's node, no key, another content."""
    own, node = headers(world["key"]), Node(node_id=world["node"])
    pull, beat = PullMessagesRequest(node=node), SendNodeHeartbeatRequest(node=node)
    beat.heartbeat_interval = 30.0
    cases = [
        ("/v1/fleet/pull-messages", pull, own),
        ("/v1/fleet/send-node-heartbeat", beat, own),
        ("/v1/fleet/send-node-heartbeat", SendNodeHeartbeatRequest(node=node), own),
        ("/v1/fleet/pull-object", PullObjectRequest(node=node, object_id="0"), own),
        ("/v1/fleet/pull-messages", pull, headers(world["key"], ahead=3600)),
        ("/v1/fleet/pull-messages", pull, headers(world["key"], ahead=-3600)),
        ("/v1/fleet/pull-messages", PullMessagesRequest(node=Node(node_id=7)), own),
        ("/v1/fleet/pull-messages", pull, {}),
        ("/v1/runtime/get-nodes", GetNodesRequest(), {}),
        ("/v1/runtime/get-nodes", GetNodesRequest(), {TASK_TOKEN_HEADER: b"no token"}),
        ("/v1/nothing", pull, own),
    ]
    statuses = []
    for case in cases:
        found = [asked(world, way, *case) for way in world["ways"]]
        assert all(one == found[0] for one in found), (case[0], found)
        statuses.append(found[0][0])
    assert statuses[:2] == [200, 200] and 401 in statuses and 404 in statuses
    for way in world["ways"]:
        assert asked(world, way, *cases[0], b"text/plain")[0] >= 400
        assert asked(world, way, "/v1/control/list-nodes", GetNodesRequest(), {})[0] == 200


class Queue:
    """Messages for a node as Flower keeps them, of which some were withdrawn: their objects are
    gone. Counts are those of the messages that are left."""

    def __init__(self, sent, withdrawn):
        self.left, self.withdrawn, self.object_store = list(sent), set(withdrawn), self

    def num_message_ins(self):
        return len(self.left)

    def get_message_ins(self, node_id, limit):
        waiting = [one for one in self.left if not one.metadata.delivered_at]
        for one in waiting[:limit]:
            one.metadata.delivered_at = "now"
        return waiting[:limit]

    def get_object_tree(self, identity):
        if identity in self.withdrawn:
            raise NoObjectInStoreError(identity)
        return ObjectTree(object_id=identity)

    def delete_messages(self, message_ins_ids):
        self.left = [one for one in self.left if one.metadata.message_id not in message_ins_ids]

    def store_traffic(self, run_id, bytes_sent, bytes_recv):
        pass


def test_a_site_that_was_away_gets_the_present_message_at_once():
    sent, identity = [], TaskIdentity
    identity.run_id, identity.node_id, identity.task_id = 1, 1, 0  # of whoever makes messages
    for number in ("1", "2", "3"):
        message = Message(content=RecordDict(), dst_node_id=5, message_type="query")
        message.metadata.__dict__["_message_id"] = number
        sent.append(message)
    pull = _FLEET["pull-messages"]
    asked, queue = PullMessagesRequest(node=Node(node_id=5)), Queue(sent, {"1", "2"})
    assert [one.object_id for one in pull(asked, queue).message_object_trees] == ["3"]
    assert not pull(asked, queue).messages_list and queue.num_message_ins() == 1
    assert not pull(asked, Queue(sent[:2], {"1", "2"})).messages_list


def test_a_plain_request_does_not_reach_the_application(world):
    async def nobody(scope, receive, send):
        raise AssertionError("Flower's layers were called")

    state = world["app"].state.linkstate_factory.state
    way = direct_fleet(nobody, state)
    beat = SendNodeHeartbeatRequest(node=Node(node_id=world["node"]), heartbeat_interval=30.0)
    status, body = asked(world, way, "/v1/fleet/send-node-heartbeat", beat, headers(world["key"]))
    assert status == 200 and SendNodeHeartbeatResponse.FromString(body) is not None


def test_a_large_object_crosses_in_slices(world):
    """A connection holds copies of what was handed to it and not yet read."""
    from flwr.proto.message_pb2 import PullObjectResponse

    from dpscaffold.deployment.transports.flower import direct

    content = bytes(range(256)) * 3_000
    lengths = []

    class Slices(list):
        def append(self, part):
            lengths.append(len(part.get("body", b"")))
            super().append(part)

    answer = PullObjectResponse(object_found=True, object_available=True, object_content=content)
    way = direct.Direct(None, lambda: None, {"/v1/fleet/pull-object": lambda *given: answer})
    asking = PullObjectRequest(node=Node(node_id=1), object_id="0")
    status, body = asked(world, way, "/v1/fleet/pull-object", asking, {}, got=Slices())
    assert status == 200 and PullObjectResponse.FromString(body) == answer
    assert max(lengths) <= 256 << 10 and len(lengths) > 3
