"""The contract with Flower: the names and fields that ``dpscaffold.deployment.transports.flower``
uses, in seconds."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from concurrent.futures import Future

import numpy as np
import pytest
from refusals import refuses

from dpscaffold.algorithms import ALGORITHMS
from dpscaffold.deployment.protocol.messages import (
    SignedMessage,
    ask,
    new_key,
    pack,
    public_of,
    reply,
    sign,
)
from dpscaffold.deployment.protocol.shapes import broadcast_lengths, upload_lengths
from dpscaffold.deployment.transports import flower

flower.require()

from flwr.app import Array, Message  # noqa: E402
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects  # noqa: E402
from flwr.supercore.inflatable.inflatable_utils import (  # noqa: E402
    ObjectPullError,
    inflate_object_from_contents,
)
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from dpscaffold.deployment.transports.flower import gate, link, node, run, wire  # noqa: E402

KEY = new_key()


@pytest.mark.parametrize("version", ["1.40.9", "1.43.0", "2.0", "0.1"])
def test_an_unknown_version_is_refused_by_name(version):
    with refuses("package-version: 1.41 … 1.42"):
        flower.check_version(version)


def test_flower_is_quiet():
    assert {key: os.environ[key] for key in flower.QUIET} == flower.QUIET
    from flwr.common import constant
    from flwr.supercore import telemetry

    assert telemetry.FLWR_TELEMETRY_ENABLED == "0"
    assert constant.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE == 8 << 20


def test_importing_dpscaffold_imports_no_flwr():
    code = (
        "import sys, dpscaffold, dpscaffold.cli, dpscaffold.deployment.protocol.messages;"
        "import dpscaffold.deployment.provision;"
        "sys.exit(any(name.split('.')[0] == 'flwr' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("size", [3, 200_000])
def test_a_message_crosses_as_records(size):
    vectors = {name: np.random.default_rng(1).standard_normal(size) for name in ("params", "b.c")}
    vectors["b.number"] = np.array([0.5])
    signed = sign({"kind": "task", "round": 3}, vectors, KEY)
    content = wire.to_records(signed)
    assert len(content) == 2  # the header, and all vectors
    again = wire.from_records(content)
    assert pack(again) == pack(signed) and again.signed_by(public_of(KEY))


def test_the_vectors_of_a_round_are_one_object_for_all_sites():
    vectors = {"params": np.ones(5, "<f4"), "shared.control": np.ones(5, "<f4")}
    contents = [wire.to_records(sign({"site": name}, vectors, KEY)) for name in ("north", "east")]
    assert contents[0]["shared"].object_id == contents[1]["shared"].object_id
    assert contents[0]["message"].object_id != contents[1]["message"].object_id
    own = wire.to_records(sign({}, vectors | {"restore.control": np.ones(5, "<f4")}, KEY))
    assert own["shared"].object_id == contents[0]["shared"].object_id


@pytest.fixture
def one_task(monkeypatch):
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(node.TaskIdentity, name, 1)


def carried(signed):
    """The bytes that Flower counts of a message, and how many objects it has."""
    message = node.Message(
        content=wire.to_records(signed), dst_node_id=1 << 62, message_type="query"
    )
    message.metadata.__dict__["_message_id"] = message.object_id
    parts = node.get_all_nested_objects(message)
    head = node.message_to_proto(node.remove_content_from_message(message)).ByteSize()
    tree = node.get_object_tree(message).ByteSize()
    return head + tree + sum(len(part.deflate()) for part in parts.values()), len(parts)


@pytest.mark.parametrize(
    ("size", "objects", "most"), [(1_000, 4, 3_200), (40_000, 4, 3_200), (400_000, 6, 4_000)]
)
@pytest.mark.parametrize(
    ("algorithm", "vectors"),
    [("fedavg", 2), ("scaffold", 4), ("scaffold-balanced", 5)],
)
def test_a_participation_is_its_vectors_and_little_else(
    one_task, size, objects, most, algorithm, vectors
):
    phase = ALGORITHMS[algorithm]()
    down, up = broadcast_lengths(phase, size), upload_lengths(phase, size)
    fields = {"plan": "0" * 64, "round": 100, "acknowledged": "0" * 32, "seen": 9, "seen_total": 9}
    said = {"status": "yes", "upload": "0" * 32, "fresh": True, "participations": 9, "total": 9}
    told, sent = ({name: np.ones(n) for name, n in lengths.items()} for lengths in (down, up))
    asked = ask("task", "0" * 32, "north", fields, told, KEY)
    whole = 0
    for signed in (asked, reply(asked, "north", said, sent, KEY)):
        counted, parts = carried(signed)
        assert parts <= objects  # every object costs the SuperLink requests
        whole += counted
    assert 4 * size * vectors < whole <= 4 * size * vectors + most


def test_whatever_else_arrives_is_an_empty_message():
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    strange = [
        RecordDict(),
        RecordDict({"message": ConfigRecord({"header": "text", "signature": b""})}),
        RecordDict({"message": ConfigRecord({"header": b"{}", "signature": "text"})}),
        RecordDict({"message": ConfigRecord({"header": b"{}"})}),
        RecordDict(
            {
                "message": ConfigRecord({"header": b"{}", "signature": b""}),
                "shared": ConfigRecord({"params": [1.0, 2.0]}),
            }
        ),
        RecordDict(
            {
                "message": ConfigRecord({"header": b"{}", "signature": b""}),
                "shared": ArrayRecord([np.ones((2, 2))]),
            }
        ),
        RecordDict(
            {
                "message": ConfigRecord({"header": b"{}", "signature": b""}),
                "shared": ArrayRecord({"params:3": Array(np.ones(2, "<f4"))}),
            }
        ),
    ]
    for content in strange:
        signed = wire.from_records(content)
        assert dict(signed.header) == {} and not signed.vectors
        assert not signed.signed_by(public_of(KEY))


def test_the_superlinks_configuration_is_all_there(tmp_path):
    from flwr.superlink.config_loader import SuperLinkLifespanConfig

    from dpscaffold.deployment.provision import FederationFile, provision

    provision(FederationFile("127.0.0.1:8443", ("north",)), tmp_path)
    listeners = link.Listeners(("127.0.0.1", 8443), ("127.0.0.1", 8444), tmp_path / "server")
    config = link.superlink_config(listeners)
    assert {f.name for f in dataclasses.fields(SuperLinkLifespanConfig)} == set(vars(config))
    assert config.enable_supernode_auth and config.superexec_auth_secret
    assert config.isolation == "process" and not config.insecure


def test_the_names_that_are_used_are_there():
    used = {
        node.FleetHttpClient: (
            "ActivateNode DeactivateNode PullMessages PushMessages PullObject PushObject "
            "ConfirmMessageReceived SendNodeHeartbeat from_server_address close"
        ),
        run.HttpGrid: "push_messages pull_messages get_nodes set_run close _runtime_client",
        run.ControlHttpClient: "RegisterNode StartRun ListRuns close",
        run.RuntimeHttpClient: (
            "AcquireTask PullTaskInput PushTaskOutput SendTaskHeartbeat PullMessages PullObject "
            "ConfirmMessageReceived"
        ),
    }
    for owner, names in used.items():
        assert all(hasattr(owner, name) for name in names.split()), owner
    fields = {
        node.ActivateNodeRequest: "public_key heartbeat_interval",
        node.PushMessagesRequest: (
            "node messages_list message_object_trees clientapp_runtime_list"
        ),
        run.StartRunRequest: "fab override_config federation",
        run.AcquireTaskRequest: "supported_task_types",
        run.PushTaskOutputRequest: "sub_status details",
        run.PullAppMessagesRequest: "message_ids",
    }
    for message, names in fields.items():
        assert set(names.split()) <= {f.name for f in message.DESCRIPTOR.fields}, message
    given = inspect.signature(run.HttpGrid.__init__).parameters
    assert {"runtime_api_address", "insecure", "root_certificates", "token"} <= set(given)
    assert run.build_fab_from_files(run._BUNDLE)[0]


def test_the_layers_and_handlers_that_are_passed_by_are_there():
    from flwr.server.superlink.linkstate import InMemoryLinkState
    from flwr.superlink import main

    from dpscaffold.deployment.transports.flower import direct, link

    layers = {layer.cls.__name__ for layer in main._get_middleware()}
    assert layers >= {*link._WHERE, *link._IDLE}
    assert layers - {*link._WHERE, *link._IDLE} == {
        "BaseHTTPMiddleware", "ProtobufTranslationMiddleware"}  # fmt: skip
    paths = [
        *(f"/v1/fleet/{n}" for n in direct._FLEET),
        *(f"/v1/runtime/{n}" for n in direct._RUNTIME),
    ]
    assert all(("POST", path) in direct.PROTOBUF_REQUEST_TYPES for path in paths)
    needed = ("get_node_id_by_public_key", "get_task_by_token", "object_store")
    assert all(hasattr(InMemoryLinkState, name) for name in needed)


@pytest.mark.parametrize(
    ("path", "raw", "open_"),
    [
        ("/v1/fleet/pull-messages", None, True),
        ("/v1/fleet/", None, False),
        ("/v1/fleet/../control/start-run", None, False),
        ("/v1/fleet/pull-messages", b"/v1/%66leet/pull-messages", False),
        ("/v1/fleet/..%2fcontrol", None, False),
        ("//v1/fleet/pull-messages", None, False),
        ("/v1/control/start-run", None, False),
        ("/v1/runtime/acquire-task", None, False),
        ("/docs", None, False),
        ("/health", None, False),
    ],
)
def test_the_gate_lets_the_fleet_through_and_nothing_else(path, raw, open_):
    scope = {"type": "http", "path": path, "raw_path": raw or path.encode()}
    assert gate.FleetOnly._is_fleet(scope) is open_


def test_a_proxy_that_catches_loopback_is_refused(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    flower.check_proxy("127.0.0.1:8443")
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    flower.check_proxy("federation.example:8443")
    with refuses("proxy-set: https_proxy"):
        flower.check_proxy("127.0.0.1:8443")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    flower.check_proxy("127.0.0.1:8443")


def test_an_empty_message_is_a_message():
    assert pack(SignedMessage({})) == pack(wire.from_records(wire.to_records(SignedMessage({}))))


def test_what_no_waiting_mends_is_said_at_once():
    import httpx

    request = httpx.Request("POST", "https://127.0.0.1/")
    refused = httpx.HTTPStatusError("no", request=request, response=httpx.Response(401))
    with refuses("wrong-secret: superexec.secret"):
        run._refuse_for_good(refused)
    with refuses("wrong-certificate"):
        run._refuse_for_good(httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] unknown"))
    assert run._refuse_for_good(httpx.ConnectError("refused")) is None


# --- arrays without needless copies


@pytest.fixture
def parts(monkeypatch):
    """Arrays travel in parts of 1 MiB, and messages name a task."""
    monkeypatch.setattr(wire, "_STEP", 1 << 20)
    monkeypatch.setattr("flwr.app.message.array.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE", 1 << 20)
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def objects_of(signed):
    """The id of a Flower message with this content, and its objects as they travel."""
    message = Message(wire.to_records(signed), dst_node_id=7, message_type="query")
    contents = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    return message.object_id, contents


def large_message():
    stream = np.random.default_rng(3)
    vectors = {
        "params": stream.standard_normal(700_001).astype("<f4"),
        "shared.control": np.full(300_000, -0.0, "<f4"),
    }
    vectors["params"][:3] = np.nan, np.inf, -0.0
    return sign({"kind": "task"}, vectors, new_key())


def test_an_array_is_the_one_that_flower_makes(parts):
    """The bytes, the ids and the parts are Flower's own, so stock nodes read them."""
    signed = large_message()
    record = wire.to_records(signed).array_records["shared"]
    ((_, ours),) = record.items()
    theirs = Array(np.concatenate([signed.vectors[name] for name in sorted(signed.vectors)]))
    assert (ours.dtype, ours.shape, ours.stype) == (theirs.dtype, theirs.shape, theirs.stype)
    assert ours.data == theirs.data and len(ours.children) == 4
    assert list(ours.children) == list(theirs.children)
    assert all(isinstance(part, wire.ArrayPart) for part in ours.children.values())
    assert ours.object_id == theirs.object_id and ours.deflate() == theirs.deflate()
    for name, part in ours.children.items():
        assert part.deflate() == theirs.children[name].deflate()


def test_what_arrived_in_parts_is_read_bit_for_bit(parts):
    signed = large_message()
    identity, contents = objects_of(signed)
    lean = wire.from_objects(identity, dict(contents))
    stock = inflate_object_from_contents(identity, dict(contents))
    assert lean.header == signed.header and lean.signature == signed.signature
    for name, vector in signed.vectors.items():
        assert lean.vectors[name].tobytes() == vector.tobytes()
        assert wire.from_records(stock.content).vectors[name].tobytes() == vector.tobytes()


def test_damaged_objects_are_no_message(parts):
    """A site may send anything; neither a server nor a site ends by it."""
    public = public_of(KEY)
    signed = sign({"kind": "task"}, large_message().vectors, KEY)
    identity, contents = objects_of(signed)
    assert wire.from_objects(identity, dict(contents)).signed_by(public)
    for name, raw in contents.items():
        for changed in (None, b"", raw[:-1], raw[:40], b"x" + raw, raw[:-9] + b"x" + raw[-8:]):
            damaged = {k: v for k, v in contents.items() if k != name}
            damaged |= {} if changed is None else {name: changed}
            read = wire.from_objects(identity, damaged)
            assert not read.signed_by(public) or pack(read) == pack(signed)


def test_what_is_no_message_is_an_answer_that_never_comes(parts):
    """A server drops such an answer (``_whole``), as one whose sender has died."""
    identity, contents = objects_of(large_message())
    for name in contents:
        if name != identity:
            with pytest.raises(ObjectPullError, match="no message"):
                wire.inflated(name, dict(contents))
    for damaged in ({}, {identity: b"Message"}, {identity: contents[identity]}):
        with pytest.raises(ObjectPullError, match="no message"):
            wire.inflated(identity, damaged)
    failed: Future[Message] = Future()
    failed.set_exception(ObjectPullError(identity, "it is no message"))
    assert run._whole(failed) is None


def test_messages_of_one_round_share_their_array():
    made, signed = wire.Made(), large_message()
    other = sign({"kind": "other"}, signed.vectors, new_key())
    first, second = (wire.to_records(one, made).array_records["shared"] for one in (signed, other))
    assert first is second
    third = sign({}, {k: v + 1 for k, v in signed.vectors.items()}, new_key())
    assert wire.to_records(third, made).array_records["shared"] is not first
