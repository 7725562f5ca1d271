"""A federation's file, its server's folder, and one invitation a site."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography import x509
from pydantic import ConfigDict

from dpscaffold.atomic import put_in_place, write_text
from dpscaffold.deployment.protocol.messages import canonical, checked_public, fingerprint
from dpscaffold.deployment.provision.certificates import (
    CERTIFICATE_DAYS,
    make_ca,
    make_certificate,
)
from dpscaffold.deployment.provision.edges import host_and_port, read_toml, site_name
from dpscaffold.deployment.provision.keys import make_signing_key, write_secret
from dpscaffold.errors import BadInput, nearest


@dataclass(frozen=True)
class FederationFile:
    """``federation.toml``: where the server is, under which names, and who is invited."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    address: str
    """The address that sites connect to, as 'host:port': the server's name or IP address, and the
    port. Example: ``"fl.example.org:8443"``"""
    sites: tuple[str, ...]
    """The sites to invite, each once; one invitation is written for each. A name has lowercase
    letters, digits, '_', '.' and '-'. Example: ``["north", "east", "south"]``"""
    hosts: tuple[str, ...] = ()
    """Further names and addresses in the server's certificate. Example: ``["10.0.0.5"]``"""


@dataclass(frozen=True)
class Invitation:
    """What a site needs to know of a federation; nothing in it is secret."""

    name: str
    server: str
    coordinator: str
    ca: str

    @property
    def fingerprint(self) -> str:
        """What people compare by another channel: it covers the whole invitation."""
        return fingerprint(canonical(vars(self)).hex())

    def to_toml(self) -> str:
        """As a file; :func:`read_invitation` reads it back."""
        return tomli_w.dumps({"invitation": 1, **vars(self)}, multiline_strings=True)


def _site_names(path: Path, names: object) -> list[str]:
    if not isinstance(names, list) or not names:
        raise BadInput(
            "not-a-list", f"{path}: sites is {names!r}; list the names of the sites to invite"
        )
    for name in names:
        site_name(name)
        if names.count(name) > 1:
            raise BadInput(
                "site-named-twice", f"{path}: the site {name!r} is named twice; names must differ"
            )
    return names


def read_federation(path: Path) -> FederationFile:
    """Read and check ``federation.toml``."""
    tables = read_toml(path, "the federation file")
    known = {"address", "sites", "hosts"}
    for key in tables:
        if key not in known:
            raise BadInput("unknown-key", f"{path}: unknown key {key}{nearest(key, known)}")
    address = str(tables.get("address", ""))
    host_and_port("address", address)
    names = _site_names(path, tables.get("sites"))
    hosts = tables.get("hosts", [])
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise BadInput(
            "not-a-list", f"{path}: hosts is {hosts!r}; list names and addresses of the server"
        )
    return FederationFile(address, tuple(names), tuple(hosts))


def provision(federation: FederationFile, out: Path, days: int = CERTIFICATE_DAYS) -> list[Path]:
    """Make the server's folder and the invitations under ``out``; nothing is overwritten.

    Returns the invitations' paths. ``out/server`` holds the certificate authority (ca.key, ca.crt),
    the server's certificate, the coordinator's key and the SuperExec secret. It appears last and
    whole: what a killed attempt left behind is made again.
    """
    finished, server = out / "server", out / ".server.partial"
    if finished.exists():
        raise BadInput(
            "keys-exist",
            f"--out is {out}, where a federation was provisioned before; keys are never "
            f"overwritten, so name another folder",
        )
    host, _ = host_and_port("address", federation.address)
    shutil.rmtree(server, ignore_errors=True)
    server.mkdir(parents=True, mode=0o700)
    ca_key, ca = make_ca(server, days)
    make_certificate(server, ca_key, ca, (host, *federation.hosts), days)
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
            raise BadInput(
                "wrong-version", f"{path} is an invitation of another version; ask for a new one"
            )
        invitation = Invitation(**{key: str(value) for key, value in tables.items()})
    except (KeyError, TypeError):
        raise BadInput(
            "not-an-invitation", f"{path} is not an invitation; ask the federation's operator"
        ) from None
    site_name(invitation.name)
    host_and_port("server", invitation.server)
    checked_public("coordinator", invitation.coordinator)
    try:
        x509.load_pem_x509_certificate(invitation.ca.encode())
    except ValueError:
        raise BadInput(
            "not-a-certificate", f"{path}: ca is not a certificate; ask for a new invitation"
        ) from None
    return invitation
