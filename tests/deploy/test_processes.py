"""Real processes on loopback, with TLS and node authentication; each test ends what it started."""

from __future__ import annotations

import json
import os
import signal
import ssl
import time

import httpx
import numpy as np
import pytest
import torch
from deploy.world import largest_gap, memories_of
from stated import summary_of
from typed import done_here

from deploy import tapped
from dpscaffold.deployment.transports import flower

flower.require()

from deploy_demo import (  # noqa: E402
    POLICY,
    demo_data,
    demo_tables,
    deployed,
    simulated,
    site_data,
)
from local_federation import (  # noqa: E402
    PATIENCE,
    LocalFederation,
    SlowLink,
    free_port,
)

from dpscaffold.deployment.provision import FederationFile, make_node_key, provision, read_node_key  # noqa: E402
from dpscaffold.deployment.site.ledger import SiteLedger  # noqa: E402
from dpscaffold.deployment.transports.flower.node import Address, Fleet, Refusal  # noqa: E402
from dpscaffold.deployment.transports.flower.run import SuperLinkAddress, flower_bytes  # noqa: E402
from dpscaffold.runs.folder import RunFolder  # noqa: E402

pytestmark = pytest.mark.processes

#: However busy the machine is, everybody answers in the end.
PATIENT = {"deadline": PATIENCE}
#: So many that a run goes on for seconds after the round in which a test interferes.
ROUNDS = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wait_for(what, local=None):
    """Until it happens, however long a busy machine takes; but not for a server that has ended."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if what():
            return
        server = local.processes.get("server") if local else None
        if server is not None and server.poll() is not None and not what():
            raise AssertionError(f"the server ended:\n{local.log('server')[-3000:]}")
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def assert_controls(local, out):
    """The server's control is the mean of those that the sites have on their disks."""
    saved = RunFolder(out).load_checkpoint()
    memories = memories_of(*(local.folder / name / "state" for name in local.names))
    assert len(memories) == len(local.names)
    assert largest_gap(saved.state.server.slots, memories) < 1e-5


def assert_booked(local):
    """No ledger is below the number of distinct uploads that left. Uploads are read first: they
    are noted before they leave, and a ledger only grows."""
    for name in local.names:
        left = tapped.uploads(local.folder / name)
        assert tapped.reserved(local.folder / name) >= len(left), name


def watched(folder, federation, policy=POLICY):
    """A federation whose sites note what leaves them."""
    return LocalFederation(folder, site_data(federation), policy, program=tapped.PROGRAM)


def rounds_done(out):
    path = out / "status.json"
    try:
        return json.loads(path.read_text())["round"]
    except (OSError, ValueError, KeyError):
        return -1


def assert_equal(out, federation, tables):
    found, wanted = deployed(out), simulated(federation, tables)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_three_sites_equal_the_simulator_through_a_site_kill_and_a_server_kill(tmp_path):
    federation, tables = demo_data(200), demo_tables(ROUNDS)
    tables["deploy"] |= PATIENT
    out = tmp_path / "run"
    with watched(tmp_path / "fed", federation) as local:
        local.start()
        config = local.config("plan", tables)
        local.start_server(config, out)
        wait_for(lambda: rounds_done(out) >= 2, local)
        local.kill("north")
        local.start_site("north")
        wait_for(lambda: rounds_done(out) >= 4, local)
        local.kill("server")
        assert local.run(config, out, resume=True) == 0, local.log("server")
        summary = summary_of(out)
        assert "no-answer" not in summary["refusals"], local.log("server")
        assert_equal(out, federation, tables)
        assert summary["ended"] == "completed"
        assert_controls(local, out)
        assert_booked(local)
        assert not [path for path in (out, *out.rglob("*")) if path.stat().st_mode & 0o077]
        for name in local.names:
            assert local.stop(name) == 0  # SIGTERM: deactivated, in order
            ledger = SiteLedger(local.folder / name / "state" / "ledger.jsonl", name)
            assert 0 <= ledger.total - ROUNDS <= (name == "north")  # once more where it died
            assert len(tapped.uploads(local.folder / name)) >= ROUNDS
            assert (local.folder / name / "state" / "ledger.jsonl").stat().st_mode & 0o077 == 0


class Stranger:
    """Somebody who reaches the public port."""

    def __init__(self, local: LocalFederation) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cafile=str(local.folder / "server" / "ca.crt"))
        self.client = httpx.Client(verify=context, timeout=10)
        self.public, self.inner = local.public, local.inner

    def post(self, path, port=None, **headers):
        return self.client.post(f"https://127.0.0.1:{port or self.public}{path}", headers=headers)


@pytest.mark.slow  # tests/deploy/test_gate.py asks the gate itself
def test_strangers_are_refused(tmp_path):
    """Wrong CA, unknown key, no key, plain text; foreign applications, tasks without the secret,
    control and runtime paths from the public port."""
    federation = demo_data(60)
    with watched(tmp_path / "fed", federation) as local:
        local.start_link()
        server = f"127.0.0.1:{local.public}"
        ca = (local.folder / "server" / "ca.crt").read_bytes()
        # another federation's CA
        provision(FederationFile(server, ("x",)), tmp_path / "other")
        wrong = (tmp_path / "other" / "server" / "ca.crt").read_bytes()
        own = read_node_key(local.folder / "north" / "node.key")
        with pytest.raises(httpx.ConnectError):
            Fleet(Address(server, wrong), own, tmp_path / "id").join()
        # a key that nobody registered
        make_node_key(tmp_path / "unknown.key")
        unknown = read_node_key(tmp_path / "unknown.key")
        with pytest.raises(Refusal, match="its key is not registered"):
            Fleet(Address(server, ca), unknown, tmp_path / "id2").join()
        # plain text
        with pytest.raises((httpx.HTTPError, OSError)):
            Fleet(Address(server, None), own, tmp_path / "id3").join()
        stranger = Stranger(local)
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

        # no key at all
        content = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
        assert stranger.post("/v1/fleet/pull-messages", **content).status_code == 401
        # everything but the fleet is not there
        for path in (
            "/v1/control/start-run",
            "/v1/control/list-runs",
            "/v1/runtime/acquire-task",
            "/v1/runtime/get-nodes",
            "/health",
            "/docs",
            "/openapi.json",
            "/v1/fleet/../control/start-run",
            "/v1/fleet/%2e%2e/control/start-run",
            "//v1/control/start-run",
        ):
            assert stranger.post(path, **content).status_code == 404, path
            assert stranger.client.get(f"https://{server}{path}").status_code == 404
        # a task is not handed out without the secret, even on loopback
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        thief = RuntimeHttpClient.from_server_address(
            server_address=f"127.0.0.1:{local.inner}",
            insecure=False,
            root_certificates=ca,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec")],
        )
        with pytest.raises(httpx.HTTPStatusError) as refused:
            thief.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-serverapp"]))
        assert refused.value.response.status_code == 401
        foreign_application(local, ca, tmp_path)


def foreign_application(local, ca, tmp_path):
    """An application submitted on the loopback side runs nowhere: a site fetches no bundle."""
    import hashlib

    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import ListNodesRequest, StartRunRequest, UnregisterNodeRequest
    from flwr.supercore.constant import NOOP_FEDERATION_ID
    from flwr.supercore.fab import Fab

    from dpscaffold.deployment.transports.flower.run import (
        _BUNDLE,
        SuperLinkAddress,
        control_client,
    )

    local.start_site("north")
    wait_for(lambda: "online" in local.log("north"))
    mark = tmp_path / "it-ran"
    bundle = dict(_BUNDLE) | {"nothing.py": f"open({str(mark)!r}, 'w').write('x')\n".encode()}
    content, _ = build_fab_from_files(bundle)
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    asked = StartRunRequest(
        fab=fab_to_proto(fab),
        override_config=user_config_to_proto({}),
        federation=NOOP_FEDERATION_ID,
    )
    address, server = f"127.0.0.1:{local.inner}", local.folder / "server"
    other_user = control_client(SuperLinkAddress(address, ca, b"not the secret"))
    for call in (
        lambda: other_user.StartRun(asked),
        lambda: other_user.ListNodes(ListNodesRequest()),
        lambda: other_user.UnregisterNode(UnregisterNodeRequest(node_id=1)),
    ):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            call()
        assert refused.value.response.status_code == 401
    secret = (server / "superexec.secret").read_bytes()
    control_client(SuperLinkAddress(address, ca, secret)).StartRun(asked)
    before = tapped.polls(local.folder / "north")
    wait_for(lambda: tapped.polls(local.folder / "north") >= before + 8)
    assert not mark.exists() and not tapped.uploads(local.folder / "north")


# --- the rest, in make test-all


@pytest.mark.slow
def test_a_superlink_kill_is_survived(tmp_path):
    federation, tables = demo_data(200), demo_tables(ROUNDS)
    tables["deploy"] |= PATIENT
    out = tmp_path / "run"
    with watched(tmp_path / "fed", federation) as local:
        local.start()
        local.start_server(local.config("plan", tables), out)
        wait_for(lambda: rounds_done(out) >= 3, local)
        local.kill("link")
        local.start_link()
        assert local.processes["server"].wait(PATIENCE) == 0, local.log("server")
        assert_equal(out, federation, tables)
        assert_booked(local)


@pytest.mark.slow
def test_a_server_told_to_stop_while_the_superlink_is_away_stops_and_goes_on_later(tmp_path):
    federation, tables = demo_data(200), demo_tables(ROUNDS)
    tables["deploy"] |= PATIENT
    out = tmp_path / "run"
    with watched(tmp_path / "fed", federation) as local:
        local.start()
        config = local.config("plan", tables)
        local.start_server(config, out)
        wait_for(lambda: rounds_done(out) >= 2, local)
        local.kill("link")
        wait_for(lambda: "the SuperLink is away" in local.log("server"), local)
        assert local.stop("server") == 143, local.log("server")
        assert "stopped by SIGTERM (asked to stop while the SuperLink was away)" in local.log(
            "server"
        )
        summary = summary_of(out)
        assert summary["ended"] == "interrupted" and summary["rounds"] >= 2
        local.start_link()
        assert local.run(config, out, resume=True) == 0, local.log("server")
        assert_equal(out, federation, tables)
        assert_booked(local)


@pytest.mark.slow
def test_a_slow_or_absent_site_is_waited_for_and_passed_over(tmp_path):
    federation, tables = demo_data(200), demo_tables(ROUNDS)
    tables["deploy"] |= {"deadline": 6.0}
    out = tmp_path / "run"
    with LocalFederation(tmp_path / "fed", site_data(federation), POLICY) as local:
        local.start()
        local.start_server(local.config("plan", tables), out)
        wait_for(lambda: rounds_done(out) >= 1, local)
        local.processes["north"].send_signal(signal.SIGSTOP)
        wait_for(lambda: rounds_done(out) >= 3, local)
        local.processes["north"].send_signal(signal.SIGCONT)
        assert local.processes["server"].wait(PATIENCE) == 0, local.log("server")
        summary = summary_of(out)
        missed = summary["refusals"].get("no-answer", 0)
        assert 1 <= missed < ROUNDS / 2  # it is asked again as soon as it is back
        assert_controls(local, out)


@pytest.mark.slow
def test_a_site_that_dies_within_its_upload_costs_nobody_a_round(tmp_path):
    """Flower waits three minutes for objects that were announced: longer than the deadline here,
    so a server that waited with it would have to pass the site over."""
    federation, tables = demo_data(200), demo_tables(ROUNDS)
    tables["deploy"] |= {"deadline": 120.0}
    out = tmp_path / "run"
    with watched(tmp_path / "fed", federation) as local:
        local.start()
        local.start_server(local.config("plan", tables), out)
        wait_for(lambda: rounds_done(out) >= 2, local)
        mark = local.folder / "north" / "dies"
        mark.touch()
        wait_for(lambda: local.processes["north"].poll() is not None, local)
        assert not mark.exists() and local.processes["north"].returncode == -signal.SIGKILL
        local.start_site("north")
        assert local.processes["server"].wait(PATIENCE) == 0, local.log("server")
        summary = summary_of(out)
        assert summary["ended"] == "completed" and "no-answer" not in summary["refusals"]
        assert_equal(out, federation, tables)
        assert_booked(local)


@pytest.mark.slow
def test_a_campaign_of_kills_ends_where_the_simulator_does(tmp_path):
    """Random kill −9 of sites, server and SuperLink; DEPLOY_KILLS sets how many (100 in all). Every
    kill hits a process that runs in a run that is not over, and they are counted."""
    wanted = int(os.environ.get("DEPLOY_KILLS", "20"))
    rounds = 3 * wanted  # more than there are between the kills, on any machine
    federation, tables = demo_data(200), demo_tables(rounds=rounds)
    tables["deploy"] |= PATIENT
    policy = POLICY | {"epsilon": "100000.0"}
    out, stream = tmp_path / "run", np.random.default_rng(11)
    killed = dict.fromkeys([*site_data(federation), "server", "link"], 0)
    with watched(tmp_path / "fed", federation, policy) as local:
        local.start()
        config = local.config("plan", tables)
        local.start_server(config, out)
        for _ in range(wanted):
            # a random moment of a round that was not there at the last kill, or of an outage
            reached = rounds_done(out)
            if stream.random() < 0.7:
                wait_for(lambda: rounds_done(out) > reached, local)  # noqa: B023
            time.sleep(float(stream.uniform(0, 1)))
            assert rounds_done(out) < rounds, "the run was over before the last kill"
            victim = str(stream.choice(list(killed)))
            assert local.processes[victim].poll() is None, local.log(victim)[-3000:]
            local.kill(victim)
            killed[victim] += 1
            assert_booked(local)
            if victim == "server":
                local.start_server(config, out, resume=True)
            elif victim == "link":
                local.start_link()
            else:
                local.start_site(victim)
        assert local.processes["server"].wait(4 * PATIENCE) == 0, local.log("server")[-3000:]
        assert sum(killed.values()) == wanted
        assert_equal(out, federation, tables)
        assert_booked(local)
        assert_controls(local, out)
        counts = {name: tapped.reserved(local.folder / name) for name in local.names}
        left = {name: len(tapped.uploads(local.folder / name)) for name in local.names}
        print(f"kills: {killed}; rounds: {rounds}; reserved: {counts}; uploads: {left}")


@pytest.mark.slow
def test_eight_sites_and_a_million_parameters(tmp_path):
    stream = np.random.default_rng(2)
    data = {
        f"site{k}": (
            (stream.standard_normal((20, 99_999)) / 300).astype(np.float32),
            stream.integers(0, 10, 20),
        )
        for k in range(8)
    }
    tables = demo_tables(rounds=3)
    tables["schema"] = {"features": 99_999, "classes": 10}
    tables["plan"] |= {"local_steps": 2, "data_ratio": 0.5}
    tables["deploy"] |= {"deadline": PATIENCE}  # every vector crosses once
    with LocalFederation(tmp_path / "fed", data, POLICY) as local:
        local.start()
        server = local.folder / "server"
        assert local.run(local.config("plan", tables), tmp_path / "run") == 0, local.log("server")
        summary = summary_of(tmp_path / "run")
        assert not summary["refusals"]
        assert_controls(local, tmp_path / "run")
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert all(site["participations"] == 3 for site in status["sites"].values())
        # By Flower's own count: three participations a site; then the model.
        ca, secret = ((server / name).read_bytes() for name in ("ca.crt", "superexec.secret"))
        office = SuperLinkAddress(f"127.0.0.1:{local.inner}", ca, secret)
        counted = flower_bytes(office) / 8
        assert 52e6 < counted <= 3 * (16e6 + 5_000) + 4e6 + 30_000


@pytest.mark.slow
def test_the_demonstration_ends_with_equality(tmp_path, capsys):
    from deploy_demo import main

    assert main(tmp_path / "federation") == 0
    assert "equals the simulator's" in capsys.readouterr().out.splitlines()[-1]


def test_a_taken_address_is_one_sentence(tmp_path):
    import socket

    provision(FederationFile("127.0.0.1:8443", ("x",)), tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        public, inner = (f"127.0.0.1:{port}" for port in (taken.getsockname()[1], free_port()))
        words = ("--server", tmp_path / "server", "--public", public, "--inner", inner)
        said = done_here("server", "start", *words)
    assert said.returncode == 2 and "is taken" in said.stderr


@pytest.mark.slow
def test_slow_links_carry_every_vector_once(tmp_path):
    """Each way is as slow as a resend; nothing crosses twice, and nobody is passed over."""
    federation, tables = demo_data(200), demo_tables(rounds=4)
    tables["deploy"] |= {"deadline": 120.0}
    size = 4 * 2 * (10 * 40)  # both vectors of the demonstration's model
    out = tmp_path / "run"
    with LocalFederation(tmp_path / "fed", site_data(federation), POLICY) as local:
        links = {name: SlowLink(local.public, 1e9) for name in local.names}
        for name, link in links.items():
            link.carry(local, name)
        local.start()
        for link in links.values():
            link.rate = 1_000.0  # bytes a second, from here on
        local.start_server(local.config("plan", tables), out)
        assert local.processes["server"].wait(PATIENCE) == 0, local.log("server")
        summary = summary_of(out)
        assert not summary["refusals"] and summary["seconds"] > 3 * size / 1_000
        assert_equal(out, federation, tables)
        assert_booked(local)
