"""Key files and sum files: signed, small enough for an e-mail, and refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from dpscaffold import __version__
from dpscaffold.deployment.protocol.masks import (
    BadKeys,
    SignedKey,
    as_vector,
    from_vector,
    verified_keys,
)
from dpscaffold.deployment.protocol.messages import (
    Json,
    SignedMessage,
    digest,
    fingerprint,
    pack,
    public_of,
    sign,
    unpack,
)
from dpscaffold.errors import BadInput
from dpscaffold.sums.plan import FORMAT, SumsPlan


@dataclass(frozen=True)
class KeyFile:
    """A site's public keys for one attempt: ``public`` signs, ``key`` makes masks."""

    plan: str
    public: str
    key: SignedKey

    def to_json(self) -> str:
        """As it is e-mailed."""
        entry = {"format": FORMAT, "version": __version__, "plan": self.plan}
        return json.dumps({**entry, "public": self.public, "key": vars(self.key)}, indent=2) + "\n"


def read_key_file(path: Path) -> KeyFile:
    """Read a key file; its signature is checked with the others by :func:`session_of`."""
    try:
        said = json.loads(path.read_bytes())
        if said["format"] != FORMAT or said["version"] != __version__:
            raise BadInput(
                "version-differs",
                f"{path} was made by dpscaffold {said['version']!r:.40}, and this is "
                f"{__version__}; use one version at all sites",
            )
        return KeyFile(str(said["plan"]), str(said["public"]), SignedKey.read(said["key"]))
    except OSError as error:
        raise BadInput("file-unreadable", f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            "not-a-key-file", f"{path} is not a key file of 'dpscaffold sums keys'"
        ) from error


def key_files(paths: Sequence[Path]) -> list[Path]:
    """Key files, and those in folders."""
    return [
        one
        for path in paths
        for one in (sorted(path.glob("*.sumkey")) if path.is_dir() else [path])
    ]


def session_of(plan: SumsPlan, files: Sequence[KeyFile]) -> str:
    """The identity of a session: of the plan and of all key files, which must be those of the
    plan's members, each signed by its owner. Without masks, of the plan alone."""
    if not plan.masked:
        return digest("session", plan.digest)
    for file in files:
        if file.plan != plan.digest:
            raise BadInput(
                "other-federation",
                f"the key file of {file.key.name!r} is for another plan; make key files again "
                f"with this plan at all sites",
            )
    publics = {file.key.name: file.public for file in files}
    missing = [name for name in plan.members if name not in publics]
    if missing or len(files) != len(plan.members) or len(set(publics.values())) != len(files):
        raise BadInput(
            "bad-members",
            f"the key files are those of {', '.join(file.key.name for file in files) or 'nobody'}, "
            f"and the plan's members are {', '.join(plan.members)}; give one file of each",
        )
    try:
        verified_keys(plan.session, [file.key for file in files], publics)
    except BadKeys as error:
        raise BadInput("bad-signature", f"the key files cannot be used: {error}") from error
    whole = sorted([file.key.name, file.public, file.key.epoch, file.key.key] for file in files)
    return digest("session", plan.digest, whole)


def write_sums(
    plan: SumsPlan, session: str, site: str, words: np.ndarray, key: Ed25519PrivateKey
) -> bytes:
    """The signed file of a site."""
    header: dict[str, Json] = {
        "format": FORMAT,
        "version": __version__,
        "plan": plan.digest,
        "session": session,
        "site": site,
        "public": public_of(key),
        "masked": plan.masked,
    }
    return pack(sign(header, {"sums": as_vector(words.astype("<u8"))}, key))


@dataclass(frozen=True)
class SumFile:
    """A site's file, checked by itself: its words (P,) are uint64."""

    site: str
    public: str
    version: str
    plan: str
    session: str
    masked: bool
    words: np.ndarray

    @property
    def fingerprint(self) -> str:
        """What people compare by telephone."""
        return fingerprint(self.public)


def read_sums(path: Path) -> SumFile:
    """Read a site's file and check its signature."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadInput("file-unreadable", f"{path} cannot be read: {error.strerror}") from error
    message = unpack(raw)
    if (
        message is None
        or message.header.get("format") != FORMAT
        or set(message.vectors) != {"sums"}
    ):
        raise BadInput("not-a-sums-file", f"{path} is not a file of 'dpscaffold sums make'")
    return _checked(path, message)


def _checked(path: Path, message: SignedMessage) -> SumFile:
    header = message.header
    texts = [header.get(key) for key in ("site", "public", "version", "plan", "session")]
    vector, masked = message.vectors["sums"], header.get("masked")
    if not all(isinstance(text, str) for text in texts) or not isinstance(masked, bool):
        raise BadInput("not-a-sums-file", f"{path} is not a file of 'dpscaffold sums make'")
    site, public, version, plan, session = map(str, texts)
    if not message.signed_by(public):
        raise BadInput(
            "bad-signature", f"{path} was changed after it was signed; ask {site!r} for it again"
        )
    if len(vector) % 2:
        raise BadInput("wrong-shape", f"{path} does not hold whole integers of 64 bits")
    return SumFile(site, public, version, plan, session, masked, from_vector(vector, 64))
