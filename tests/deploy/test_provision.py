"""Keys and certificates: private ones stay private, nothing is overwritten, names are unique."""

from __future__ import annotations

import datetime
import ssl
import stat

import pytest
from cryptography import x509
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.deployment.provision import (
    FederationFile,
    admit,
    check_certificate,
    make_signing_key,
    provision,
    read_federation,
    read_invitation,
    read_member,
    read_node_key,
    read_signing_key,
    remove,
    roster,
)
from dpscaffold.deployment.site.begin import make_site
from dpscaffold.errors import BadInput

FEDERATION = FederationFile("federation.example:8443", ("north", "east"), ("10.0.0.7",))


@pytest.fixture
def made(tmp_path):
    provision(FEDERATION, tmp_path)
    return tmp_path


def test_secrets_are_for_their_owner_alone(made):
    for name in ("ca.key", "server.key", "coordinator.key", "superexec.secret"):
        assert stat.S_IMODE((made / "server" / name).stat().st_mode) == 0o600
    invitation = (made / "north.invitation").read_text()
    assert "PRIVATE" not in invitation
    with refuses("keys-exist"):
        provision(FEDERATION, made)


def test_the_certificate_names_the_server_and_is_signed(made):
    certificate = check_certificate(made / "server" / "server.crt")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "federation.example" in names.get_values_for_type(x509.DNSName)
    shown = [str(a) for a in names.get_values_for_type(x509.IPAddress)]
    assert shown == ["10.0.0.7", "127.0.0.1"]
    authority = check_certificate(made / "server" / "ca.crt")
    certificate.verify_directly_issued_by(authority)
    context = ssl.create_default_context(cafile=str(made / "server" / "ca.crt"))
    assert len(context.get_ca_certs()) == 1


def test_an_expired_certificate_is_refused(made, monkeypatch):
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=4000)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return later

    monkeypatch.setattr("dpscaffold.deployment.provision.certificates.datetime.datetime", Later)
    with refuses("certificate-expired"):
        check_certificate(made / "server" / "server.crt")


def test_sites_join_by_their_public_halves(made):
    for name in ("north", "east"):
        member = make_site(read_invitation(made / f"{name}.invitation"), made / name)
        assert admit(made / "server", made / name / f"{name}.site") == member
        assert "PRIVATE" not in (made / name / f"{name}.site").read_text()
        read_node_key(made / name / "node.key"), read_signing_key(made / name / "site.key")
    assert [member.name for member in roster(made / "server")] == ["east", "north"]
    with refuses("site-exists: 'north'"):
        admit(made / "server", made / "north" / "north.site")
    copied = made / "copy.site"
    copied.write_text((made / "north" / "north.site").read_text().replace('"north"', '"copy"'))
    with refuses("key-shared: 'north'"):
        admit(made / "server", copied)
    copied.write_text((made / "north" / "north.site").read_text() + "epsilon = 0.5\n")
    with refuses("not-a-site-file"):  # what a roster cannot keep is not taken and forgotten
        admit(made / "server", copied)
    remove(made / "server", "north")
    assert [member.name for member in roster(made / "server")] == ["east"]
    with refuses("unknown-site: 'east'"):
        remove(made / "server", "eats")
    with refuses("site-exists"):
        make_site(read_invitation(made / "east.invitation"), made / "east")


def test_a_key_that_others_can_read_is_refused(tmp_path):
    make_signing_key(tmp_path / "a.key")
    (tmp_path / "a.key").chmod(0o640)
    with refuses("key-readable-by-others"):
        read_signing_key(tmp_path / "a.key")
    with refuses("file-unreadable"):
        read_signing_key(tmp_path / "none.key")
    (tmp_path / "a.key").chmod(0o600)
    with refuses("wrong-key-kind"):
        read_node_key(tmp_path / "a.key")
    (tmp_path / "a.key").write_text("nonsense")
    with refuses("not-a-private-key"):
        read_signing_key(tmp_path / "a.key")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('address = "a:1"\nsites = ["x", "x"]', "site-named-twice"),
        ('address = "a"\nsites = ["x"]', "bad-address"),
        ('address = "a:1"\nsites = []', "not-a-list"),
        ('address = "a:1"\nsites = ["X Y"]', "bad-site-name: 's name is '"),
        ('address = "a:1"\nsites = ["x"]\nhost = 1', "unknown-key: 'hosts'"),
        ("address =", "not-toml"),
    ],
)
def test_a_wrong_federation_file_is_one_sentence(tmp_path, text, says):
    (tmp_path / "federation.toml").write_text(text)
    with refuses(says):
        read_federation(tmp_path / "federation.toml")


def test_files_of_another_kind_are_refused(made):
    for read in (read_invitation, read_member):
        with pytest.raises(BadInput):
            read(made / "server" / "ca.crt")
        (made / "odd").write_text('name = "x"')
        with pytest.raises(BadInput):
            read(made / "odd")


def test_the_command_says_what_it_made(tmp_path):
    (tmp_path / "f.toml").write_text('address = "127.0.0.1:8443"\nsites = ["north"]\n')
    arguments = ["provision", str(tmp_path / "f.toml"), "--out", str(tmp_path / "fed")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and "north.invitation is for the site north" in result.output
    assert not (tmp_path / "fed" / "north").exists()
    demo = CliRunner().invoke(app, [*arguments[:3], str(tmp_path / "demo"), "--with-keys"])
    assert demo.exit_code == 0 and "demonstrations and tests only" in demo.output
    assert [member.name for member in roster(tmp_path / "demo" / "server")] == ["north"]
