"""Fingerprints at every hand-over, renewed certificates and keys, and sites that are shut out."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import shutil

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from deploy.world import World
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold import Gaussian
from dpscaffold.cli import app
from dpscaffold.deployment.protocol.messages import public_of
from dpscaffold.deployment.provision import (
    FederationFile,
    admit,
    expiry_warnings,
    provision,
    read_invitation,
    read_member,
    read_signing_key,
    remove,
    renew,
)
from dpscaffold.deployment.site.begin import make_site
from dpscaffold.deployment.site.file import read_site_file
from dpscaffold.deployment.transports import flower

flower.require()
from dpscaffold.deployment.transports.flower.revoking import LiveRoster  # noqa: E402

PRINTED = re.compile(r"(?:[0-9a-f]{4}-){7}[0-9a-f]{4}")


@pytest.fixture
def federation(tmp_path):
    """A federation of one site, which is admitted."""
    (invitation,) = provision(FederationFile("127.0.0.1:1", ("north",)), tmp_path / "fed", 30)
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


def test_renewed_certificates_are_accepted_before_and_after_the_site_renews(federation):
    server, site = federation / "fed" / "server", federation / "north" / "site.toml"
    before = {path.name: path.read_bytes() for path in server.iterdir() if path.is_file()}
    old = (federation / "north" / "ca.crt").read_bytes()
    notice = renew(server, federation / "n", coordinator=False)
    after = {path.name: path.read_bytes() for path in server.iterdir() if path.is_file()}
    assert before.keys() == after.keys() and (server / "roster" / "north.site").exists()
    kept = {name for name in before if before[name] == after[name]}
    assert kept == {"ca.key", "coordinator.key", "superexec.secret"}
    assert trusts(old, after["server.crt"]) and trusts(after["ca.crt"], after["server.crt"])
    other = provision(FederationFile("127.0.0.1:1", ("x",)), federation / "other")[0]
    assert not trusts(read_invitation(other).ca.encode(), after["server.crt"])
    text = site.read_text()
    done = said("site", "renew", federation / "n", site, "--yes")
    assert shown(done) == {notice.fingerprint} and "start the site again" in done.output
    assert read_site_file(site).ca.read_bytes() == after["ca.crt"] and site.read_text() == text
    assert "already" in said("site", "renew", federation / "n", site, "--yes").output


def test_the_coordinators_key_is_replaced_by_a_notice_that_the_old_one_signed(federation):
    server, site = federation / "fed" / "server", federation / "north" / "site.toml"
    old = read_site_file(site).coordinator
    renew(server, federation / "first", coordinator=True)
    new = public_of(read_signing_key(server / "coordinator.key"))
    assert old != new
    comments = [line for line in site.read_text().splitlines() if old not in line]
    assert said("site", "renew", federation / "first", site, "--yes").exit_code == 0
    assert read_site_file(site).coordinator == new
    assert [line for line in site.read_text().splitlines() if new not in line] == comments
    renew(server, federation / "second", coordinator=True)
    shutil.copy(federation / "second", federation / "forged")
    forged = (federation / "forged").read_text().replace(new, old)
    (federation / "forged").write_text(forged)
    kept = site.read_text()
    with refuses("bad-notice: is not signed by the key"):
        raise said("site", "renew", federation / "forged", site, "--yes").exception
    assert "already" in said("site", "renew", federation / "first", site, "--yes").output
    assert site.read_text() == kept


def test_notices_that_are_not_for_this_site_change_nothing(federation):
    site = federation / "north" / "site.toml"
    provision(FederationFile("127.0.0.1:1", ("x",)), federation / "other")
    renew(federation / "other" / "server", federation / "foreign", coordinator=False)
    files = {path: path.read_bytes() for path in (site, federation / "north" / "ca.crt")}
    with refuses("bad-notice: this site obeys"):
        raise said("site", "renew", federation / "foreign", site, "--yes").exception
    with refuses("not-a-renewal"):
        raise said("site", "renew", site, site, "--yes").exception
    with refuses("not-confirmed"):
        raise said("site", "renew", federation / "foreign", site).exception
    assert all(path.read_bytes() == content for path, content in files.items())


def test_renewing_refuses_in_one_sentence_and_changes_nothing(federation):
    server = federation / "fed" / "server"
    files = {path: path.read_bytes() for path in server.iterdir() if path.is_file()}
    (federation / "taken").touch()
    for words, code in (
        (["--server", federation / "none"], "not-provisioned"),
        (["--server", server, "--out", federation / "taken"], "file-exists"),
    ):
        with refuses(code):
            raise said("provision", "renew", *words).exception
    assert all(path.read_bytes() == content for path, content in files.items())


def test_certificates_that_end_soon_are_warned_of(federation, tmp_path):
    ca = federation / "north" / "ca.crt"
    (warning,) = expiry_warnings([ca], "do something")
    assert "29 days" in warning and "do something" in warning
    checked = said("site", "check", federation / "north" / "site.toml", "--offline")
    assert "ends in 29 days" in checked.output
    renew(federation / "fed" / "server", tmp_path / "n", coordinator=False, days=62)
    assert not expiry_warnings([federation / "fed" / "server" / "ca.crt"], "x")
    left = x509.load_pem_x509_certificate(ca.read_bytes()).not_valid_after_utc
    assert left - datetime.datetime.now(datetime.UTC) < datetime.timedelta(days=30)


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
    assert world.names.index("north") not in done.arrived
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
    assert world.names.index("north") not in done.arrived
    assert world.post.seen["north"] == world.count("north") == 1
