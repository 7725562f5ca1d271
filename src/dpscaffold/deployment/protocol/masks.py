"""Masks: whoever adds the uploads of all members gets their sum, and sees no single upload.

Each pair of members derives one random stream that only the two know. One of them adds the stream
to its integers and the other subtracts it, modulo 2³² or 2⁶⁴. So all masks cancel in the sum of all
uploads, and any smaller set of uploads looks uniformly random.

A stream depends on everything that the two must agree on: the session (label, run, plan, roster),
their names, epochs and keys, the round, the attempt, and the digest of the list of members and of
the model (:func:`agreement_digest`). If two members were given different values of any of these,
their streams differ, nothing cancels, and nothing is revealed.

Nothing here needs a running federation. A session, one key per member, and the same call at each:

>>> from dpscaffold.deployment.protocol.messages import new_key, public_of
>>> session = Session(b"example", run="00ff", plan="a plan", roster="a roster")
>>> signers = {name: new_key() for name in ("east", "north", "south")}
>>> secret = {name: EpochKey.fresh() for name in signers}
>>> keys = [announce(session, name, secret[name], signers[name]) for name in signers]
>>> publics = {name: public_of(key) for name, key in signers.items()}
>>> agreed = agreement_digest({key.name: key.epoch for key in keys}, b"the model")
>>> total = np.zeros(2, np.uint64)
>>> for name in signers:
...     pairs = pair_keys(session, name, secret[name], verified_keys(session, keys, publics))
...     total += np.array([1, 2], np.uint64) + mask(pairs, name, 1, 1, agreed, 2, 64)
>>> total.tolist()
[3, 6]
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from dpscaffold.deployment.protocol.messages import canonical, digest, public_key

#: The width of the integers of a sum.
Bits = Literal[32, 64]


class BadKeys(ValueError):
    """Keys that a member must not use, or a session without enough of them."""


@dataclass(frozen=True)
class Session:
    """What the keys of one run are for. Keys of another session are refused.

    ``label`` names the protocol, so that no signature or stream of one use is valid in another.
    ``plan`` and ``roster`` are digests: a member that was offered another plan has other keys.
    """

    label: bytes
    run: str
    plan: str
    roster: str

    @property
    def identity(self) -> list[str]:
        """The session as JSON values."""
        return [self.label.hex(), self.run, self.plan, self.roster]


@dataclass(frozen=True, repr=False)
class EpochKey:
    """A member's secret key for one start of its process: an *epoch*. It is kept in memory only,
    so a restart makes another one."""

    epoch: str
    private: X25519PrivateKey

    @classmethod
    def fresh(cls) -> EpochKey:
        """A new key with a new epoch."""
        return cls(secrets.token_hex(16), X25519PrivateKey.generate())

    @property
    def public(self) -> str:
        """The public half, 64 hexadecimal digits."""
        raw = self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        return raw.hex()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("an EpochKey is never pickled: it must not be written anywhere")


@dataclass(frozen=True)
class SignedKey:
    """A member's public key for one epoch, signed with its lasting Ed25519 key."""

    name: str
    epoch: str
    key: str
    signature: str

    @classmethod
    def read(cls, value: object) -> SignedKey:
        """From the table that ``vars`` gives. Raises :class:`BadKeys` for anything else."""
        fields: Any = value
        try:
            texts = {name: fields[name] for name in ("name", "epoch", "key", "signature")}
        except (KeyError, TypeError, IndexError):
            raise BadKeys("a signed key has a name, an epoch, a key and a signature") from None
        if not all(isinstance(text, str) and len(text) <= 128 for text in texts.values()):
            raise BadKeys("the parts of a signed key are short texts")
        if texts["key"] != texts["key"].lower() or len(texts["key"]) != 64:
            raise BadKeys(f"the key of {texts['name']!r} is not 64 hexadecimal digits")
        return cls(**texts)


def announce(session: Session, name: str, key: EpochKey, signer: Ed25519PrivateKey) -> SignedKey:
    """The public half of a member's key, signed for one session."""
    signature = signer.sign(_signed(session, name, key.epoch, key.public))
    return SignedKey(name, key.epoch, key.public, signature.hex())


def verified_keys(
    session: Session, keys: Iterable[SignedKey], members: Mapping[str, str]
) -> dict[str, SignedKey]:
    """The keys by name, or :class:`BadKeys`.

    ``members`` gives the lasting public key ("ed25519:…") of each member. A name, an epoch or a key
    that occurs twice is refused, and so is a key that its member did not sign for this session.
    """
    found: dict[str, SignedKey] = {}
    for key in keys:
        if key.name not in members:
            raise BadKeys(f"{key.name!r} is not a member")
        if key.name in found:
            raise BadKeys(f"{key.name!r} has two keys")
        for other in found.values():
            if key.key == other.key or key.epoch == other.epoch:
                raise BadKeys(f"{key.name!r} and {other.name!r} have the same key or epoch")
        if not _is_signed(session, key, members[key.name]):
            raise BadKeys(f"the key of {key.name!r} is not signed by that member for this session")
        found[key.name] = key
    return found


def _is_signed(session: Session, key: SignedKey, public: str) -> bool:
    try:
        content = _signed(session, key.name, key.epoch, key.key)
        public_key(public).verify(bytes.fromhex(key.signature), content)
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(session: Session, name: str, epoch: str, key: str) -> bytes:
    return canonical(["mask key", *session.identity, name, epoch, key])


def pair_keys(
    session: Session, name: str, key: EpochKey, keys: Mapping[str, SignedKey]
) -> dict[str, bytes]:
    """The secret that member ``name`` shares with each other member, by that member's name.

    ``keys`` are :func:`verified_keys`. Names, epochs and public keys enter the secret: without
    them, a member that signs somebody else's public key as its own would make two masks cancel.
    """
    own = SignedKey(name, key.epoch, key.public, "")
    for other in keys.values():
        if other.name != name and other.key == own.key:
            raise BadKeys(f"{other.name!r} has the key of {name!r}")
    return {
        other.name: _pair_key(session, key, own, other)
        for other in keys.values()
        if other.name != name
    }


def _pair_key(session: Session, key: EpochKey, own: SignedKey, other: SignedKey) -> bytes:
    try:
        shared = key.private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other.key)))
    except ValueError:  # the library refuses a point of small order
        shared = bytes(32)
    if shared == bytes(32):
        raise BadKeys(f"the key of {other.name!r} gives no shared secret")
    ends = sorted([end.name, end.epoch, end.key] for end in (own, other))
    info = canonical(["pair key", *session.identity, *ends])
    return HKDF(SHA256(), length=32, salt=None, info=info).derive(shared)


def agreement_digest(epochs: Mapping[str, str], model: bytes) -> str:
    """The digest of what all members of one attempt must have been given alike: the list of
    members with their epochs, and the model (or whatever else the sum depends on)."""
    return digest("agreement", dict(epochs), hashlib.sha256(model).hexdigest())


def mask(
    pairs: Mapping[str, bytes],
    name: str,
    round: int,
    attempt: int,
    agreed: str,
    count: int,
    bits: Bits,
) -> np.ndarray:
    """The mask of member ``name``, (count,) of unsigned integers: the sum of its streams.

    ``pairs`` are the :func:`pair_keys` with the *other members of the list*, nobody else;
    ``agreed`` is :func:`agreement_digest` of that list. In each pair the member whose name comes
    first adds the stream, and the other one subtracts it.
    """
    kind = np.dtype("<u4" if bits == 32 else "<u8")
    total: np.ndarray = np.zeros(count, kind)
    info = canonical(["stream", round, attempt, agreed, bits])
    for other, pair in pairs.items():
        if other == name:
            raise BadKeys(f"{name!r} has no mask with itself")
        words = np.frombuffer(_stream(pair, info, total.nbytes), kind)
        total += words if name < other else -words
    return total


def _stream(pair: bytes, info: bytes, size: int) -> bytes:
    """``size`` bytes of ChaCha20 under a key that is used for nothing else, hence nonce 0."""
    key = HKDFExpand(SHA256(), length=32, info=info).derive(pair)
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))


def as_vector(words: np.ndarray) -> np.ndarray:
    """Unsigned integers as the float32 vector of a message with the same bytes.

    >>> from_vector(as_vector(np.array([1, 2**63], np.uint64)), 64).tolist()
    [1, 9223372036854775808]
    """
    return np.ascontiguousarray(words, words.dtype.newbyteorder("<")).view("<f4")


def from_vector(vector: np.ndarray, bits: int) -> np.ndarray:
    """The inverse of :func:`as_vector`."""
    return np.ascontiguousarray(vector, "<f4").view("<u4" if bits == 32 else "<u8")
