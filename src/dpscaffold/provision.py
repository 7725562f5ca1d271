"""Keys, certificates and invitations of a federation, with ``cryptography`` alone.

The federation's operator makes a certificate authority, the server's certificate, the coordinator's
signing key and the secret between server and SuperLink; and one *invitation* per site, which holds
public things only. A site makes its own keys, so private keys are made where they are used.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import secrets
import shutil
import stat
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dpscaffold.engines.letters import checked_public, new_key, public_of
from dpscaffold.errors import BadInput, nearest
from dpscaffold.whole import put_in_place, sync_folder, write_text

PEM = serialization.Encoding.PEM
_DAY = datetime.timedelta(days=1)
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")


@dataclass(frozen=True)
class FederationFile:
    """``federation.toml``: where the server is, under which names, and who is invited.

    ``address`` is what sites connect to; ``hosts`` are further names and addresses of the server's
    certificate; ``days`` is how long certificates are valid.
    """

    address: str
    sites: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    days: int = 825


@dataclass(frozen=True)
class Invitation:
    """What a site needs to know of a federation; nothing in it is secret."""

    name: str
    server: str
    coordinator: str
    ca: str

    def to_toml(self) -> str:
        """As a file; :func:`read_invitation` reads it back."""
        return tomli_w.dumps({"invitation": 1, **vars(self)}, multiline_strings=True)


@dataclass(frozen=True)
class Member:
    """A site as the server's roster knows it (``NAME.site``): its two public keys."""

    name: str
    signing_key: str
    node_key: str

    def to_toml(self) -> str:
        """As a file; :func:`read_member` reads it back."""
        return tomli_w.dumps({"site": 1, **vars(self)}, multiline_strings=True)


def read_federation(path: Path) -> FederationFile:
    """Read and check ``federation.toml``."""
    tables = read_toml(path, "the federation file")
    known = {"address", "sites", "hosts", "days"}
    for key in tables:
        if key not in known:
            raise BadInput(f"{path}: unknown key {key}{nearest(key, known)}")
    address = str(tables.get("address", ""))
    host_and_port("address", address)
    names = tables.get("sites")
    if not isinstance(names, list) or not names:
        raise BadInput(f"{path}: sites is {names!r}; list the names of the sites to invite")
    for name in names:
        site_name(name)
        if names.count(name) > 1:
            raise BadInput(f"{path}: the site {name!r} is named twice; names must differ")
    hosts = tables.get("hosts", [])
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise BadInput(f"{path}: hosts is {hosts!r}; list names and addresses of the server")
    days = tables.get("days", 825)
    if isinstance(days, bool) or not isinstance(days, int) or not 1 <= days <= 3650:
        raise BadInput(f"{path}: days is {days!r}; give a whole number from 1 to 3650")
    return FederationFile(address, tuple(names), tuple(hosts), days)


def provision(federation: FederationFile, out: Path) -> list[Path]:
    """Make the server's folder and the invitations under ``out``; nothing is overwritten.

    Returns the invitations' paths. ``out/server`` holds the certificate authority (ca.key, ca.crt),
    the server's certificate, the coordinator's key and the SuperExec secret. It appears last and
    whole: what a killed attempt left behind is made anew.
    """
    finished, server = out / "server", out / ".server.partial"
    if finished.exists():
        raise BadInput(
            f"--out is {out}, where a federation was provisioned before; keys are never "
            f"overwritten, so name another folder"
        )
    host, _ = host_and_port("address", federation.address)
    shutil.rmtree(server, ignore_errors=True)
    server.mkdir(parents=True, mode=0o700)
    ca_key, ca = _make_ca(server, federation.days)
    _make_certificate(server, ca_key, ca, (host, *federation.hosts), federation.days)
    coordinator = make_signing_key(server / "coordinator.key")
    write_secret(server / "superexec.secret", secrets.token_hex(32).encode())
    (server / "roster").mkdir()
    authority = (server / "ca.crt").read_text()
    invitations = []
    for name in federation.sites:
        path = out / f"{name}.invitation"
        invitation = Invitation(name, federation.address, coordinator, authority)
        write_text(path, invitation.to_toml())
        invitations.append(path)
    put_in_place(server, finished)
    return invitations


def read_invitation(path: Path) -> Invitation:
    """Read and check an invitation."""
    tables = read_toml(path, "the invitation")
    try:
        if tables.pop("invitation") != 1:
            raise BadInput(f"{path} is an invitation of another version; ask for a new one")
        invitation = Invitation(**{key: str(value) for key, value in tables.items()})
    except (KeyError, TypeError):
        raise BadInput(f"{path} is not an invitation; ask the federation's operator") from None
    site_name(invitation.name)
    host_and_port("server", invitation.server)
    checked_public("coordinator", invitation.coordinator)
    try:
        x509.load_pem_x509_certificate(invitation.ca.encode())
    except ValueError:
        raise BadInput(f"{path}: ca is not a certificate; ask for a new invitation") from None
    return invitation


def read_member(path: Path) -> Member:
    """Read and check a ``NAME.site`` file."""
    tables = read_toml(path, "the site's public file")
    try:
        if tables.pop("site") != 1:
            raise BadInput(f"{path} is of another version; run dpscaffold site init again")
        member = Member(**{key: str(value) for key, value in tables.items()})
    except (KeyError, TypeError):
        raise BadInput(
            f"{path} is not a site's public file; dpscaffold site init prints one"
        ) from None
    site_name(member.name)
    checked_public("signing_key", member.signing_key)
    try:
        key = serialization.load_pem_public_key(member.node_key.encode())
    except ValueError:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadInput(f"{path}: node_key is not an elliptic-curve public key in PEM")
    return member


# --- the server's roster ---------------------------------------------------------------------


def admit(server: Path, path: Path) -> Member:
    """Add a site to the server's roster; a name or a key twice is refused."""
    member = read_member(path)
    for other in roster(server):
        if other.name == member.name:
            raise BadInput(f"the roster already has a site {member.name!r}; remove it first")
        for kind in ("signing_key", "node_key"):
            if getattr(other, kind) == getattr(member, kind):
                raise BadInput(
                    f"{path}: the {kind} of {member.name!r} is that of {other.name!r}; every site "
                    f"needs keys of its own"
                )
    folder = server / "roster"
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"{member.name}.site", member.to_toml().encode())
    return member


def remove(server: Path, name: str) -> None:
    """Take a site off the roster."""
    path = server / "roster" / f"{name}.site"
    if not path.exists():
        names = [member.name for member in roster(server)]
        raise BadInput(
            f"the roster has no site {name!r}{nearest(name, names)}; it has "
            f"{', '.join(names) or 'none'}"
        )
    path.unlink()


def roster(server: Path) -> tuple[Member, ...]:
    """The admitted sites, by name."""
    folder = server / "roster"
    if not server.is_dir():
        raise BadInput(f"there is no server folder {server}; run dpscaffold provision first")
    members = [read_member(path) for path in sorted(folder.glob("*.site"))]
    for kind in ("name", "signing_key", "node_key"):
        values = [getattr(member, kind) for member in members]
        twice = [member.name for member in members if values.count(getattr(member, kind)) > 1]
        if twice:
            raise BadInput(
                f"the roster {folder} has one {kind} twice ({', '.join(twice)}); remove one of the "
                f"files"
            )
    return tuple(sorted(members, key=lambda member: member.name))


# --- keys ------------------------------------------------------------------------------------


def make_signing_key(path: Path) -> str:
    """A new Ed25519 key in a file of mode 0600; returns its public half."""
    key = new_key()
    write_secret(path, _private_pem(key))
    return public_of(key)


def make_node_key(path: Path) -> str:
    """A new ECDSA P-384 key in a file of mode 0600; returns its public half in PEM."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_secret(path, _private_pem(key))
    public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return public.decode()


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """The Ed25519 key in a file that only its owner can read."""
    key = _read_private(path)
    if not isinstance(key, Ed25519PrivateKey):
        raise BadInput(f"{path} holds another kind of key; an Ed25519 key is needed")
    return key


def read_node_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The node key in a file that only its owner can read."""
    key = _read_private(path)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.curve.name != "secp384r1":
        raise BadInput(f"{path} holds another kind of key; an ECDSA P-384 key is needed")
    return key


def _read_private(path: Path) -> object:
    content = read_secret(path)
    try:
        return serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError) as error:
        raise BadInput(f"{path} is not a private key in PEM without a password") from error


def read_secret(path: Path) -> bytes:
    """A file's content, refused where others can read it."""
    try:
        mode = path.stat().st_mode
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise BadInput(
            f"{path} can be read by others (mode {stat.S_IMODE(mode):04o}); run chmod 600 {path}"
        )
    return content


def write_secret(path: Path, content: bytes) -> None:
    """A new file of mode 0600; an existing one is never overwritten."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadInput(f"{path} exists, and keys are never overwritten") from None
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file whole, readable by its owner alone; on disk when this returns."""
    partial = path.with_name(f".{path.name}.partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(handle, rest) :]  # a full disk raises on the next, empty write
        os.fsync(handle)
    finally:
        os.close(handle)
    os.replace(partial, path)
    sync_folder(path.parent)


# --- certificates ----------------------------------------------------------------------------


def _private_pem(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _make_ca(folder: Path, days: int) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP384R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dpscaffold federation")])
    certificate = (
        _begun(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_certificates(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA384())
    )
    write_secret(folder / "ca.key", _private_pem(key))
    (folder / "ca.crt").write_bytes(certificate.public_bytes(PEM))
    return key, certificate


def _make_certificate(
    folder: Path,
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    hosts: Sequence[str],
    days: int,
) -> None:
    """The server's certificate, for its public names and for loopback (where its own processes
    connect)."""
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_general_name(host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    certificate = (
        _begun(subject, ca.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA384())
    )
    write_secret(folder / "server.key", _private_pem(key))
    (folder / "server.crt").write_bytes(certificate.public_bytes(PEM))


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + days * _DAY)
    )


def _signs_certificates() -> x509.KeyUsage:
    used = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(key_cert_sign=True, crl_sign=True, **used)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def check_certificate(path: Path) -> x509.Certificate:
    """A certificate that is readable and valid today, or a refusal."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise BadInput(f"{path} is not a certificate in PEM") from error
    if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise BadInput(
            f"{path} expired on {certificate.not_valid_after_utc:%Y-%m-%d}; provision a new one"
        )
    return certificate


# --- edges -----------------------------------------------------------------------------------


def site_name(name: object) -> str:
    """A site's name: lower case, digits, dash, dot, underscore; it becomes a file's name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadInput(
            f"the site's name is {name!r}; use lower-case letters, digits, '-', '_' and '.', "
            f"beginning with a letter or digit"
        )
    return name


def host_and_port(what: str, address: str) -> tuple[str, int]:
    """``host:port`` in its parts.

    >>> host_and_port("server", "federation.example:8443")
    ('federation.example', 8443)
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput(f"{what} is {address!r}; write host:port, e.g. federation.example:8443")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("example.org")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_toml(path: Path, what: str) -> dict[str, object]:
    """A TOML file's tables, or a refusal."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{what} {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{what} {path} is not valid TOML: {error}") from error
