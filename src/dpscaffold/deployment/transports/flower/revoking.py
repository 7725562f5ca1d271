"""A site that is removed from the roster is shut out at once, by the gate and by a running server.

The gate compares the public key of each request with this roster, so no restart is needed. A
run in progress asks a removed site nothing more, and takes none of its uploads.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization

from dpscaffold.deployment.provision import roster
from dpscaffold.errors import BadInput


class LiveRoster:
    """Names and node keys on the roster, read again when a file of it changes. A roster that cannot
    be read has nobody on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamp: object = None
        self._members: dict[str, bytes] = {}

    def members(self) -> dict[str, bytes]:
        """The sites by name, each with the bytes of its node key."""
        stamp = self._read_stamp()
        if stamp is None or stamp != self._stamp:
            self._stamp, self._members = stamp, self._read()
        return self._members

    def _read_stamp(self) -> object:
        try:
            found = sorted((self._folder / "roster").iterdir())
            stats = [(path.name, path.stat()) for path in found]
            return [(name, s.st_ino, s.st_ctime_ns, s.st_mtime_ns, s.st_size) for name, s in stats]
        except OSError:
            return None

    def _read(self) -> dict[str, bytes]:
        try:
            return {member.name: _key_bytes(member.node_key) for member in roster(self._folder)}
        except (BadInput, ValueError, OSError):
            return {}

    def admits(self, key: bytes) -> bool:
        """Whether a node key is on the roster."""
        return key in self.members().values()


def _key_bytes(pem: str) -> bytes:
    """A public key as Flower sends it."""
    key = serialization.load_pem_public_key(pem.encode())
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
