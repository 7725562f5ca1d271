"""The contract with Flower: the names and fields that ``dpscaffold.deployment.transports.flower``
uses, in seconds."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys

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
    assert constant.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE == 64 << 20


def test_importing_dpscaffold_imports_no_flwr():
    code = (
        "import sys, dpscaffold, dpscaffold.cli, dpscaffold.deployment.protocol.messages;"
        "import dpscaffold.deployment.provision;"
        "sys.exit(any(name.split('.')[0] == 'flwr' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("size", [3, 200_000])
def test_a_letter_crosses_as_records(size):
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
    assert contents[0]["letter"].object_id != contents[1]["letter"].object_id
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


def test_whatever_else_arrives_is_an_empty_letter():
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    strange = [
        RecordDict(),
        RecordDict({"letter": ConfigRecord({"header": "text", "signature": b""})}),
        RecordDict({"letter": ConfigRecord({"header": b"{}", "signature": "text"})}),
        RecordDict({"letter": ConfigRecord({"header": b"{}"})}),
        RecordDict(
            {
                "letter": ConfigRecord({"header": b"{}", "signature": b""}),
                "shared": ConfigRecord({"params": [1.0, 2.0]}),
            }
        ),
        RecordDict(
            {
                "letter": ConfigRecord({"header": b"{}", "signature": b""}),
                "shared": ArrayRecord([np.ones((2, 2))]),
            }
        ),
        RecordDict(
            {
                "letter": ConfigRecord({"header": b"{}", "signature": b""}),
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


def test_an_empty_letter_is_a_letter():
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
