"""What strangers cost the SuperLink: nothing is read of them, and they cannot crowd sites out."""

from __future__ import annotations

import asyncio
import socket
from base64 import b64encode

import pytest

pytest.importorskip("flwr")

from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
)
from flwr.supercore.primitives.asymmetric import (
    public_key_to_bytes,
    sign_message,
)

from dpscaffold.deployment.provision import (
    FederationFile,
    admit,
    make_node_key,
    provision,
    read_invitation,
    read_node_key,
    remove,
)
from dpscaffold.deployment.site.begin import make_site
from dpscaffold.deployment.transports.flower import gate
from dpscaffold.deployment.transports.flower.revoking import LiveRoster

STAMP = b"2026-11-16T00:00:00+00:00"


@pytest.fixture
def federation(tmp_path):
    (invitation,) = provision(FederationFile("127.0.0.1:1", ("north",)), tmp_path)
    make_site(read_invitation(invitation), tmp_path / "north")
    admit(tmp_path / "server", tmp_path / "north" / "north.site")
    return tmp_path


class Asked:
    """One request to an application; ``read`` counts the pieces of the body that were read."""

    def __init__(self, app, path, headers, pieces=(b"",)):
        self.read, self.status, self.reached, self.closes = 0, 0, None, False
        self.pieces = list(pieces)
        plain = [(name.lower().encode(), value) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "raw_path": path.encode(), "headers": plain}
        asyncio.run(app(self)(scope, self.receive, self.send))

    async def receive(self):
        self.read += 1
        body = self.pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self.pieces)}

    async def send(self, message):
        self.status = message.get("status", self.status)
        self.closes |= (b"connection", b"close") in message.get("headers", [])

    async def app(self, scope, receive, send):
        self.reached = (await receive())["body"]


def signed(path, stamp=STAMP):
    key = read_node_key(path)
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())),
        TIMESTAMP_HEADER: stamp,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(sign_message(key, STAMP)),
    }


def asked(federation, headers, pieces=(b"",), path="/v1/fleet/pull-messages"):
    keys = LiveRoster(federation / "server")
    return Asked(lambda own: gate.FleetOnly(own.app, keys), path, headers, pieces)


def test_a_site_gets_through_with_its_whole_body(federation):
    headers = signed(federation / "north" / "node.key")
    got = asked(federation, headers, [b"one ", b"two"])
    assert got.reached == b"one two"


def test_nothing_is_read_of_a_stranger(federation, tmp_path):
    """No headers, some of them, another's key, another time stamp: refused from the headers."""
    own = signed(federation / "north" / "node.key")
    make_node_key(tmp_path / "stranger.key")
    strange = [
        {},
        {name: own[name] for name in list(own)[:2]},
        signed(tmp_path / "stranger.key"),
        signed(federation / "north" / "node.key", stamp=b"2026-11-16T00:00:01+00:00"),
        own | {FLEET_HTTP_SIGNATURE_HEADER: b"?"},
    ]
    for headers in strange:
        got = asked(federation, headers, [b"x" * 1000] * 10)
        assert (got.status, got.read, got.reached, got.closes) == (401, 0, None, True)
    got = asked(federation, own, path="/v1/control/start-run")
    assert (got.status, got.read, got.closes) == (404, 0, True)


def test_a_site_that_was_removed_is_out_at_once(federation):
    headers = signed(federation / "north" / "node.key")
    keys = LiveRoster(federation / "server")
    app = gate.FleetOnly(None, keys)
    given = {name.lower(): value for name, value in headers.items()}
    assert app._is_signed(given)
    remove(federation / "server", "north")
    assert not app._is_signed(given)


def test_a_body_is_bounded_even_of_a_site(federation, monkeypatch):
    monkeypatch.setattr(gate, "LARGEST_BODY", 100)
    own = signed(federation / "north" / "node.key")
    declared = asked(federation, own | {"content-length": b"101"}, [b"x"])
    assert (declared.status, declared.read) == (413, 0)
    endless = asked(federation, own, [b"x" * 60] * 50)
    assert (endless.status, endless.read) == (413, 2)


def test_no_part_of_a_large_model_is_longer_than_a_body(federation):
    """Of 30 million parameters, both vectors: the parts and the head are within the limit."""
    import numpy as np
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    from dpscaffold.deployment.protocol.messages import SignedMessage
    from dpscaffold.deployment.transports.flower.wire import to_records

    part = np.arange(6_000_000, dtype="<f4")  # a tenth of it, to spare the memory
    message = to_records(SignedMessage({}, {"params": part}))
    parts = [len(one.deflate()) for one in get_all_nested_objects(message).values()]
    assert sum(parts) > 24e6 and max(parts) + 1_000 < gate.LARGEST_BODY
    tree = get_object_tree(message)
    head = PushMessagesRequest(message_object_trees=[tree] * 10).ByteSize()
    assert head < gate.LARGEST_BODY / 100


def test_one_site_cannot_have_many_bodies_read_at_a_time(federation):
    own, keys = signed(federation / "north" / "node.key"), LiveRoster(federation / "server")
    plain = [(name.lower().encode(), value) for name, value in own.items()]
    path = "/v1/fleet/push-object"
    scope = {"type": "http", "path": path, "raw_path": path.encode(), "headers": plain}
    statuses, reached = [], []

    async def send(message):
        if "status" in message:
            statuses.append(message["status"])

    async def app(scope, receive, send):
        reached.append(await receive())

    async def flood():
        done = asyncio.Event()

        async def receive():
            await done.wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        door = gate.FleetOnly(app, keys)
        tasks = [
            asyncio.create_task(door(scope, receive, send)) for _ in range(gate.MOST_BODIES + 5)
        ]
        await asyncio.sleep(0.05)
        assert statuses == [429] * 5
        done.set()
        await asyncio.gather(*tasks)
        await door(scope, receive, send)

    asyncio.run(flood())
    assert len(reached) == gate.MOST_BODIES + 1


def test_of_two_headers_the_gate_and_flower_read_the_same():
    from starlette.requests import Request

    scope = {"type": "http", "headers": [(b"a", b"first"), (b"a", b"second")]}
    assert gate.headers_of(scope)["a"].decode() == Request(scope).headers["a"] == "first"


@pytest.fixture
def door():
    """A port behind the protocol of the public side, whose application reads nothing."""
    import threading

    import uvicorn

    async def app(scope, receive, send):
        await gate.refuse(send, 404)

    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="off", http=gate.Hurried, ws="none", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize(
    "begin",
    [b"GET /", b"GET / HTTP/1.1\r\nx: ", b"GET / HTTP/1.1\r\n"],
    ids=["url", "value", "many"],
)
def test_a_head_without_end_is_cut_off(door, begin):
    """A parser would keep all of it in memory, of everybody who likes to send it."""
    with socket.create_connection(("127.0.0.1", door), timeout=10) as one:
        sent = 0
        with pytest.raises(OSError):
            one.sendall(begin)
            while sent < 64 << 20:
                one.sendall(b"x: y\r\n" * 1_000 if begin.endswith(b"\n") else b"x" * 6_000)
                sent += 6_000
        assert sent < 32 << 20  # what the kernel's buffers take, and not more


def test_a_usual_head_gets_its_answer(door):
    with socket.create_connection(("127.0.0.1", door), timeout=10) as one:
        one.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 30_000 + b"\r\n\r\n")
        assert one.recv(100).startswith(b"HTTP/1.1 404")


def test_a_body_that_never_ends_is_given_up():
    async def nothing():
        await asyncio.sleep(60)

    async def read():
        return await gate.body_of({"headers": []}, nothing, seconds=0.01)

    assert asyncio.run(read()) == 408


def test_control_paths_need_the_secret():
    def app(own):
        return gate.OperatorOnly(own.app, b"the secret")

    right = {gate.CONTROL_HEADER: gate.control_token(b"the secret").encode()}
    wrong = {gate.CONTROL_HEADER: gate.control_token(b"another").encode()}
    for path in ("/v1/control/unregister-node", "/v1/control/stop-run", "/docs", "/v1/fleet/x"):
        assert Asked(app, path, right).reached == b""
        for headers in ({}, wrong):
            got = Asked(app, path, headers)
            assert (got.status, got.read, got.reached) == (401, 0, None)
    assert Asked(app, "/v1/runtime/pull-object", {}).reached == b""


# --- connections


def test_one_address_cannot_take_all_connections():
    clock = [0.0]
    limits = gate.ConnectionLimits(each=5, total=7, burst=20, rate=1.0, now=lambda: clock[0])
    assert [limits.admit("a") for _ in range(7)] == [True] * 5 + [False] * 2
    assert [limits.admit("b") for _ in range(3)] == [True] * 2 + [False]
    limits.closed("a")
    assert limits.admit("b") and limits.open == {"a": 4, "b": 3}


def test_one_address_cannot_open_connections_without_end():
    clock = [0.0]
    limits = gate.ConnectionLimits(each=5, total=100, burst=3, rate=0.5, now=lambda: clock[0])

    def tries(count):
        got = [limits.admit("a") for _ in range(count)]
        for _ in range(sum(got)):
            limits.closed("a")
        return sum(got)

    assert tries(10) == 3
    clock[0] += 4.0
    assert tries(10) == 2
    assert limits.admit("b")


def test_connections_beyond_the_limit_are_closed_before_anything_is_read():
    limits = gate.ConnectionLimits(each=2, total=10, burst=100, rate=100)
    with gate.GuardedSocket.listening("127.0.0.1", 0, limits) as door:
        door.listen()
        door.setblocking(False)
        address = door.getsockname()
        clients = [socket.create_connection(address) for _ in range(4)]
        taken = []
        with pytest.raises(BlockingIOError):
            while True:
                taken.append(door.accept()[0])
        assert len(taken) == 2 and limits.open == {"127.0.0.1": 2}
        assert clients[3].recv(1) == b""
        for one in (*taken, *clients):
            one.close()
        taken[0].close()  # twice is once
        assert limits.open == {}
