"""Who can do what: the lines of the table in docs/deploy-protocol.md that no other test holds.

Strangers are in ``test_processes``, a hostile server in ``test_hostile``, a thief in
``test_faults`` (``test_a_copied_site_…``); a registered site and a local user are here.
"""

from __future__ import annotations

import errno
import http.server
import json
import os
import re
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import httpx
import pytest
from deploy.world import World
from refusals import refuses

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.deployment.protocol.enrolment import offer_to
from dpscaffold.deployment.protocol.messages import SignedMessage, sign, unpack
from dpscaffold.deployment.provision import (
    FederationFile,
    admit,
    provision,
    read_invitation,
    roster,
)
from dpscaffold.deployment.site.begin import make_site
from dpscaffold.deployment.transports import flower

flower.require()

from dpscaffold.deployment.transports.flower.node import Address, Fleet  # noqa: E402
from dpscaffold.deployment.transports.flower.operation import check_site  # noqa: E402

SECRET = Gaussian(clip=0.7, noise=20.0, secret=True)


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path, "scaffold", privacy=SECRET, rounds=4, user_ratio=1.0)
    made.enrol()
    return made


# --- a registered site


def test_a_site_cannot_speak_for_another(world):
    """East answers north's messages, with north's name on them; they are waited past."""
    north, east = world.answering("north"), world.keys["east"]

    def forged(message: SignedMessage) -> SignedMessage:
        answer = north(message)
        return sign(answer.header, answer.vectors, east)

    world.exchange.sites["north"] = forged
    assert world.round().arrived == (0, 2)
    assert world.engine.last.reasons == {"north": "no-answer"}


def test_a_site_cannot_answer_with_an_old_letter(world):
    """An answer repeats its question's nonce, so one of an earlier round is no answer."""
    first = []
    north = world.answering("north")

    def replayed(message: SignedMessage) -> SignedMessage:
        first.append(north(message))
        return first[0]

    world.exchange.sites["north"] = replayed
    assert len(world.round().arrived) == 3
    assert world.round().arrived == (0, 2)


def test_a_site_sees_nothing_of_another_but_its_name_and_size(world):
    """All that is sent to east: no message carries anything of north's uploads or policy."""
    world.exchange.sent.clear()
    world.drive()
    world.engine.settle(world.state.output)
    told, uploaded = set(), set()
    for name, raw in world.exchange.sent:
        message = unpack(raw)
        if name == "east":
            told |= {*message.header, *message.vectors}
            assert "north" not in json.dumps(
                {k: v for k, v in message.header.items() if k not in ("roster", "commitments")}
            )
    for name, raw in world.exchange.answered:
        if name == "north":
            uploaded |= {v.tobytes() for v in unpack(raw).vectors.values() if len(v) > 1}
    sent_to_east = {
        v.tobytes()
        for name, raw in world.exchange.sent
        if name == "east"
        for v in unpack(raw).vectors.values()
    }
    assert uploaded and not uploaded & sent_to_east
    assert told == {
        *("version", "kind", "direction", "run", "site", "nonce", "seen", "seen_total"),
        *("heads", "plan", "round", "acknowledged", "params", "shared.control"),
        *("over", "model.params"),
    }


def test_a_refusal_names_a_code_and_not_the_policy(tmp_path):
    world = World(tmp_path, "scaffold", privacy=SECRET, policy={"epsilon": 0.07725}, rounds=4)
    with refuses("not-enrolled: policy-epsilon") as refused:
        offer_to(world.post, world.enrolled)
    assert "07725" not in str(refused.value)
    assert all(b"07725" not in raw for _, raw in world.exchange.answered)


# --- a local user


def test_a_local_user_cannot_read_keys_ledger_or_memory(world, tmp_path):
    world.drive()
    state = tmp_path / "north" / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700  # what is in it is behind it
    for invitation in provision(FederationFile("127.0.0.1:1", ("north",)), tmp_path / "fed"):
        make_site(read_invitation(invitation), tmp_path / "new")
    for name in ("site.toml", "site.key", "node.key"):
        assert stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) == 0o600
    for name in ("ca.key", "server.key", "coordinator.key", "superexec.secret"):
        mode = (tmp_path / "fed" / "server" / name).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600


# --- failures and bad input that no other test holds


@pytest.mark.parametrize("trouble", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize(("file", "counted"), [("ledger.jsonl", 1), (".pending.box.partial", 2)])
def test_a_disk_that_fails_is_a_code_and_files_stay_whole(
    world, monkeypatch, trouble, file, counted
):
    world.round()
    real = os.open

    def refuse(path, *rest, **kinds):
        if str(path).endswith(file):
            raise OSError(trouble, os.strerror(trouble), str(path))
        return real(path, *rest, **kinds)

    with monkeypatch.context() as broken:
        broken.setattr(os, "open", refuse)
        assert world.reason("north", world.task("north", 2)) == "site-error"
    assert world.count("north") == counted
    assert world.reason("north", world.task("north", 2)) == ""


def test_a_roster_with_a_name_or_a_key_twice_is_refused(tmp_path):
    server = tmp_path / "fed" / "server"
    for invitation in provision(FederationFile("127.0.0.1:1", ("a", "b")), tmp_path / "fed"):
        make_site(read_invitation(invitation), tmp_path / invitation.stem)
        admit(server, tmp_path / invitation.stem / f"{invitation.stem}.site")
    assert [member.name for member in roster(server)] == ["a", "b"]
    text = (server / "roster" / "a.site").read_text()
    (server / "roster" / "c.site").write_text(text)
    with refuses("key-shared"):
        roster(server)
    (server / "roster" / "c.site").write_text(text.replace('name = "a"', 'name = "c"'))
    with refuses("key-shared: signing_key"):
        roster(server)


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(90, r"differ by 9\d s \(this one is ahead"), (-900, r"differ by (900|8\d\d) s .*behind"),
     (0, "its key is not registered there")],
)  # fmt: skip
def test_a_401_is_one_sentence(tmp_path, seconds, says):
    from cryptography.hazmat.primitives.asymmetric import ec

    fleet = Fleet(Address("127.0.0.1:1", None), ec.generate_private_key(ec.SECP384R1()), tmp_path)
    date = format_datetime(datetime.now(UTC) - timedelta(seconds=seconds), usegmt=True)
    response = httpx.Response(401, headers={"date": date})
    fleet._note_clock(response)
    assert re.search(says, str(fleet._refusal(response)))


class Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404)
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def served(tmp_path):
    """Two servers with this federation's certificate: at 127.0.0.1, and at a host not in it."""
    provision(FederationFile("federation.example:8443", ("north",)), tmp_path / "fed")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = tmp_path / "fed" / "server"
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    servers = [http.server.ThreadingHTTPServer((h, 0), Quiet) for h in ("127.0.0.1", "127.0.0.2")]
    for server in servers:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"{server.server_address[0]}:{server.server_address[1]}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_certificate_of_another_host_or_authority_is_said(tmp_path, served):
    site, (right, wrong) = tmp_path / "north", served
    make_site(read_invitation(tmp_path / "fed" / "north.invitation"), site)
    (site / "records.csv").write_text("a,label\n1,0\n")
    text = (site / "site.toml").read_text()

    def refused(server):
        (site / "site.toml").write_text(text.replace("federation.example:8443", server))
        return [said for said, fine in check_site(site / "site.toml", None, True) if not fine]

    assert refused(right) == []
    assert len(refused(wrong)) == 1 and "not for this host" in refused(wrong)[0]
    provision(FederationFile("federation.example:8443", ("north",)), tmp_path / "other")
    (site / "ca.crt").write_bytes((tmp_path / "other" / "server" / "ca.crt").read_bytes())
    assert len(refused(right)) == 1 and "not of this federation" in refused(right)[0]
