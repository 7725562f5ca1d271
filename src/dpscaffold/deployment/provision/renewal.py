"""New certificates for a federation that exists, and a signed notice that tells its sites.

The operator renews the server's certificates, and the coordinator's key if asked. The notice holds
the new public things and is signed by the coordinator's key that the sites know. A site checks the
signature against its own ``site.toml``, so the notice may travel by any channel. Nothing in it is
secret.
"""

from __future__ import annotations

import datetime
import shutil
from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

from dpscaffold.atomic import put_in_place, write_text
from dpscaffold.deployment.protocol.messages import (
    canonical,
    checked_public,
    fingerprint,
    public_key,
    public_of,
)
from dpscaffold.deployment.provision.certificates import (
    CERTIFICATE_DAYS,
    certificate_in,
    days_left,
    make_ca,
    make_certificate,
    names_in,
)
from dpscaffold.deployment.provision.edges import read_toml
from dpscaffold.deployment.provision.keys import (
    make_signing_key,
    read_private_key,
    read_signing_key,
    write_whole,
)
from dpscaffold.errors import BadInput

_PURPOSE = "dpscaffold renewal 1"


@dataclass(frozen=True)
class Renewal:
    """A federation's new authority and coordinator's key, signed by its ``previous`` one."""

    previous: str
    coordinator: str
    ca: str
    signature: str = ""

    @property
    def content(self) -> bytes:
        """What is signed."""
        return canonical([_PURPOSE, self.previous, self.coordinator, self.ca])

    @property
    def fingerprint(self) -> str:
        """What people compare by another channel."""
        return fingerprint(self.content.hex())

    @property
    def genuine(self) -> bool:
        """Whether the holder of the previous key signed it."""
        try:
            public_key(self.previous).verify(bytes.fromhex(self.signature), self.content)
        except (InvalidSignature, ValueError):
            return False
        return True

    def to_toml(self) -> str:
        """As a file; :func:`read_renewal` reads it back."""
        return tomli_w.dumps({"renewal": 1, **vars(self)}, multiline_strings=True)


def read_renewal(path: Path) -> Renewal:
    """Read a notice and check its form and signature."""
    tables = read_toml(path, "the notice")
    try:
        if tables.pop("renewal") != 1:
            raise BadInput(
                "wrong-version", f"{path} is a notice of another version; ask for a new one"
            )
        notice = Renewal(**{key: str(value) for key, value in tables.items()})
    except (KeyError, TypeError):
        raise BadInput(
            "not-a-renewal", f"{path} is not a notice of 'dpscaffold provision renew'; ask for one"
        ) from None
    for name in ("previous", "coordinator"):
        checked_public(name, getattr(notice, name))
    certificate_in(notice.ca.encode(), path)
    if not notice.genuine:
        raise BadInput(
            "bad-notice", f"{path} is not signed by the key that it names; ask for a new one"
        )
    return notice


def renew(server: Path, out: Path, coordinator: bool, days: int = CERTIFICATE_DAYS) -> Renewal:
    """Renew the certificates in a server's folder, and the coordinator's key if asked.

    The authority keeps its key, so sites that have not renewed yet still accept the server until
    their old certificate ends. The notice is written first, then the folder is replaced whole.
    """
    if not (server / "ca.key").exists():
        raise BadInput(
            "not-provisioned", f"there is no server folder {server}; run dpscaffold provision first"
        )
    if out.exists():
        raise BadInput("file-exists", f"--out is {out}, which exists; name another file")
    ca_key = read_private_key(server / "ca.key")
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise BadInput("wrong-key-kind", f"{server / 'ca.key'} holds another kind of key")
    hosts = names_in(server / "server.crt")
    old = read_signing_key(server / "coordinator.key")
    draft = server.with_name(f".{server.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    shutil.copytree(server, draft)
    for name in ("ca.crt", "server.crt", "server.key"):
        (draft / name).unlink()
    ca = make_ca(draft, days, ca_key)[1]
    make_certificate(draft, ca_key, ca, hosts, days)
    public = public_of(old)
    if coordinator:
        (draft / "coordinator.key").unlink()
        public = make_signing_key(draft / "coordinator.key")
    unsigned = Renewal(public_of(old), public, (draft / "ca.crt").read_text())
    notice = Renewal(unsigned.previous, public, unsigned.ca, old.sign(unsigned.content).hex())
    write_text(out, notice.to_toml())
    put_in_place(draft, server)
    return notice


def accept_renewal(notice: Renewal, path: Path, coordinator: str, ca: Path) -> bool:
    """Take a notice over into a site's files; says whether anything changed.

    ``path`` is ``site.toml``, ``coordinator`` and ``ca`` what it names. ``ca.crt`` is replaced
    first: if this is cut short, the same command finishes it.
    """
    same = ca.read_bytes() == notice.ca.encode() if ca.exists() else False
    if same and coordinator == notice.coordinator:
        return False
    if notice.previous != coordinator:
        raise BadInput(
            "bad-notice",
            f"the notice is signed by {fingerprint(notice.previous)}, and this site obeys "
            f"{fingerprint(coordinator)}; it is of another federation, or older than your file",
        )
    text, quoted = path.read_text(encoding="utf-8"), f'"{coordinator}"'
    if text.count(quoted) != 1:
        raise BadInput(
            "bad-notice",
            f"{path} does not name the coordinator exactly once; set coordinator = "
            f'"{notice.coordinator}" by hand',
        )
    if ca.exists() and _made(ca.read_bytes(), ca) > _made(notice.ca.encode(), ca):
        raise BadInput(
            "bad-notice",
            "the notice has a certificate that is older than the one that this site has; ask for "
            "the latest notice",
        )
    write_text(ca, notice.ca)
    if notice.coordinator != coordinator:
        write_whole(path, text.replace(quoted, f'"{notice.coordinator}"').encode())
    return True


def _made(content: bytes, path: Path) -> datetime.datetime:
    return certificate_in(content, path).not_valid_before_utc


def expiry_warnings(paths: list[Path], remedy: str) -> list[str]:
    """A sentence for each certificate that ends within sixty days."""
    found = [(path, days_left(path)) for path in paths if path.exists()]
    return [f"{path} ends in {left} days; {remedy}" for path, left in found if left is not None]
