"""Who is in a federation: what sites send back, and the server's roster of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from dpscaffold.deployment.protocol.messages import checked_public, fingerprint
from dpscaffold.deployment.provision.edges import read_toml, site_name
from dpscaffold.deployment.provision.keys import write_whole
from dpscaffold.errors import BadInput, nearest


@dataclass(frozen=True)
class Member:
    """A site as the server's roster knows it (``NAME.site``): its two public keys."""

    name: str
    signing_key: str
    node_key: str

    @property
    def fingerprint(self) -> str:
        """What people compare by another channel: that of the signing key."""
        return fingerprint(self.signing_key)

    def to_toml(self) -> str:
        """As a file; :func:`read_member` reads it back."""
        return tomli_w.dumps({"site": 1, **vars(self)}, multiline_strings=True)


def read_member(path: Path) -> Member:
    """Read and check a ``NAME.site`` file."""
    tables = read_toml(path, "the site's public file")
    try:
        if tables.pop("site") != 1:
            raise BadInput(
                "wrong-version", f"{path} is of another version; run dpscaffold site init again"
            )
        member = Member(**{key: str(value) for key, value in tables.items()})
    except (KeyError, TypeError):
        raise BadInput(
            "not-a-site-file",
            f"{path} is not a site's public file; dpscaffold site init prints one",
        ) from None
    site_name(member.name)
    checked_public("signing_key", member.signing_key)
    try:
        key = serialization.load_pem_public_key(member.node_key.encode())
    except ValueError:
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise BadInput(
            "bad-public-key", f"{path}: node_key is not an elliptic-curve public key in PEM"
        )
    return member


def admit(server: Path, path: Path) -> Member:
    """Add a site to the server's roster; a name or a key twice is refused."""
    member = read_member(path)
    for other in roster(server):
        if other.name == member.name:
            raise BadInput(
                "site-exists", f"the roster already has a site {member.name!r}; remove it first"
            )
        for kind in ("signing_key", "node_key"):
            if getattr(other, kind) == getattr(member, kind):
                raise BadInput(
                    "key-shared",
                    f"{path}: the {kind} of {member.name!r} is that of {other.name!r}; every site "
                    f"needs keys of its own",
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
            "unknown-site",
            f"the roster has no site {name!r}{nearest(name, names)}; it has "
            f"{', '.join(names) or 'none'}",
        )
    path.unlink()


def roster(server: Path) -> tuple[Member, ...]:
    """The admitted sites, by name."""
    folder = server / "roster"
    if not server.is_dir():
        raise BadInput(
            "not-provisioned", f"there is no server folder {server}; run dpscaffold provision first"
        )
    members = [read_member(path) for path in sorted(folder.glob("*.site"))]
    for kind in ("name", "signing_key", "node_key"):
        values = [getattr(member, kind) for member in members]
        twice = [member.name for member in members if values.count(getattr(member, kind)) > 1]
        if twice:
            raise BadInput(
                "key-shared",
                f"the roster {folder} has one {kind} twice ({', '.join(twice)}); remove one of the "
                f"files",
            )
    return tuple(sorted(members, key=lambda member: member.name))
