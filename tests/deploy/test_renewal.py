"""Fingerprints at every hand-over, renewed certificates and keys, sites that are shut out."""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from deploy.world import World
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold import Gaussian
from dpscaffold.cli import app
from dpscaffold.deployment.protocol.messages import new_key
from dpscaffold.deployment.provision import (
    FederationFile,
    admit,
    expiry_warnings,
    provision,
    read_invitation,
    read_member,
    remove,
    renew,
)
from dpscaffold.deployment.site.begin import make_site
from dpscaffold.deployment.transports import flower

flower.require()
from dpscaffold.deployment.transports.flower.revoking import LiveRoster  # noqa: E402

PRINTED = re.compile(r"(?:[0-9a-f]{4}-){7}[0-9a-f]{4}")


@pytest.fixture
def federation(tmp_path):
    """A federation of one site, which is admitted."""
    (invitation,) = provision(FederationFile("127.0.0.1:1", ("north",), days=30), tmp_path / "fed")
    make_site(read_invitation(invitation), tmp_path / "north")
    admit(tmp_path / "fed" / "server", tmp_path / "north" / "north.site")
    return tmp_path


def said(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def shown(result):
    assert result.exit_code == 0, (result.output, result.exception)
    return set(PRINTED.findall(result.output))


def trusts(ca, certificate):
    """Whether a certificate verifies for the server's address, by another implementation."""
    store = Store([x509.load_pem_x509_certificate(ca)])
    verifier = (
        PolicyBuilder()
        .store(store)
        .build_server_verifier(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
    )
    try:
        verifier.verify(x509.load_pem_x509_certificate(certificate), [])
    except VerificationError:
        return False
    return True


def test_the_same_fingerprints_are_shown_on_both_sides(tmp_path):
    (tmp_path / "f.toml").write_text('address = "127.0.0.1:1"\nsites = ["north"]\n')
    made = shown(said("provision", tmp_path / "f.toml", "--out", tmp_path / "fed"))
    begun = shown(said("site", "init", tmp_path / "fed" / "north.invitation",
                       "--out", tmp_path / "north"))  # fmt: skip
    admitted = shown(said("server", "admit", tmp_path / "north" / "north.site",
                          "--server", tmp_path / "fed" / "server"))  # fmt: skip
    assert len(made) == len(admitted) == 1 and begun == made | admitted
    changed = (tmp_path / "fed" / "north.invitation").read_text().replace("127.0.0.1", "127.0.0.2")
    (tmp_path / "changed").write_text(changed)
    assert not shown(said("site", "init", tmp_path / "changed", "--out", tmp_path / "b")) & made
    told = json.loads(said("provision", tmp_path / "f.toml", "--out", tmp_path / "c", "--json")
                      .output)  # fmt: skip
    assert PRINTED.fullmatch(told["fingerprints"]["north"])


def test_a_renewed_certificate_is_accepted_by_sites_that_do_nothing(federation):
    server, ca = federation / "fed" / "server", federation / "north" / "ca.crt"
    before = {path.name: path.read_bytes() for path in server.iterdir() if path.is_file()}
    (warning,) = expiry_warnings([server / "ca.crt", server / "server.crt"], "do something")
    assert "server.crt ends in 29 days" in warning and "do something" in warning
    done = said("server", "renew", "--server", server, "--days", "400")
    assert done.exit_code == 0, done.exception
    after = {path.name: path.read_bytes() for path in server.iterdir() if path.is_file()}
    assert {name for name in before if before[name] != after[name]} == {"server.crt", "server.key"}
    assert before.keys() == after.keys() and (server / "roster" / "north.site").exists()
    assert (server / "server.key").stat().st_mode & 0o077 == 0
    assert not expiry_warnings([server / "ca.crt", server / "server.crt"], "x")
    assert trusts(ca.read_bytes(), after["server.crt"])
    other = provision(FederationFile("127.0.0.1:1", ("x",)), federation / "other")[0]
    assert not trusts(read_invitation(other).ca.encode(), after["server.crt"])


def test_a_renewal_that_was_cut_short_is_finished(federation, monkeypatch):
    server, replace = federation / "fed" / "server", Path.replace

    def cut_short(path, to):
        if path.name == "server.crt":
            raise KeyboardInterrupt
        return replace(path, to)

    monkeypatch.setattr(Path, "replace", cut_short)
    with pytest.raises(KeyboardInterrupt):
        renew(server, 400)
    monkeypatch.undo()
    renew(server, 400)
    certificate = x509.load_pem_x509_certificate((server / "server.crt").read_bytes())
    key = load_pem_private_key((server / "server.key").read_bytes(), None)
    assert certificate.public_key() == key.public_key()
    assert not [path for path in server.iterdir() if path.name.startswith(".")]


def test_renewing_refuses_in_one_sentence_and_changes_nothing(federation):
    server = federation / "fed" / "server"
    files = {path: path.read_bytes() for path in server.iterdir() if path.is_file()}
    for words, code in (
        (["--server", federation / "none"], "not-provisioned"),
        (["--server", server, "--days", "0"], "out-of-range: --days is 0"),
    ):
        with refuses(code):
            raise said("server", "renew", *words).exception
    assert all(path.read_bytes() == content for path, content in files.items())


def test_a_new_coordinator_is_obeyed_under_the_same_ledger(tmp_path):
    """A new invitation: the state folder stays, and what was granted before still counts."""
    privacy = Gaussian(clip=0.7, noise=20.0, secret=True)
    world = World(tmp_path, "scaffold", privacy=privacy, rounds=2, user_ratio=1.0)
    world.enrol()
    world.drive()
    before, left = world.enrolled.run, world.ledger("north").left(world.policies["north"])
    world.key = new_key()
    for name in world.names:
        world.restart(name)
    world.fresh_server()
    world.enrol()
    world.drive()
    ledger = world.ledger("north")
    assert list(ledger.runs) == [before, world.enrolled.run] and ledger.total == 4
    assert ledger.left(world.policies["north"]).epsilon < left.epsilon


# --- sites that are shut out


def test_a_removed_site_is_shut_out_at_once(federation):
    """The gate asks this roster for the key of every request (``test_gate.py``)."""
    server = federation / "fed" / "server"
    sites = LiveRoster(server)
    key = read_member(federation / "north" / "north.site").node_key.encode()
    assert sites.admits(key) and not sites.admits(b"other") and not sites.admits(b"")
    remove(server, "north")
    assert not sites.admits(key)
    admit(server, federation / "north" / "north.site")
    assert sites.admits(key)
    (server / "roster" / "north.site").write_text("damage")
    assert not sites.admits(key)


def test_the_keys_of_the_gate_are_those_that_flower_sends(federation):
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    from dpscaffold.deployment.provision import read_node_key

    key = read_node_key(federation / "north" / "node.key").public_key()
    assert LiveRoster(federation / "fed" / "server").admits(public_key_to_bytes(key))


def test_a_running_server_asks_a_removed_site_nothing_more(tmp_path):
    privacy = Gaussian(clip=0.7, noise=20.0, secret=True)
    world = World(tmp_path, "scaffold", privacy=privacy, rounds=4, user_ratio=1.0)
    admitted = set(world.names)
    world.post.admitted = lambda: admitted
    world.enrol()
    world.round()
    admitted.remove("north")
    done = world.round()
    assert world.names.index("north") not in done.gathered.arrived
    assert world.count("north") == 1 and world.count("east") == 2
    admitted.add("north")
    world.round()
    assert world.count("north") == 2


def test_the_upload_of_a_site_that_is_removed_within_the_round_is_not_used(tmp_path):
    """It is counted all the same: it has left."""
    privacy = Gaussian(clip=0.7, noise=20.0, secret=True)
    world = World(tmp_path, "scaffold", privacy=privacy, rounds=4, user_ratio=1.0)
    admitted = set(world.names)
    world.post.admitted = lambda: admitted
    world.enrol()
    honest = world.exchange.sites["north"]

    def removed_meanwhile(message):
        admitted.discard("north")
        return honest(message)

    world.exchange.sites["north"] = removed_meanwhile
    done = world.round()
    assert world.names.index("north") not in done.gathered.arrived
    assert world.post.seen["north"] == world.count("north") == 1
