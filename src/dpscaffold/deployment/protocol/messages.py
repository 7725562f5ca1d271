"""Messages: what a server and a site say to one another, signed, whoever carries it.

A message is a *header* (canonical JSON), named float32 *vectors*, and an Ed25519 *signature* over
SHA-256 of the header and of every vector's digest. Whoever carries it (Flower, a test, a courier)
can lose, repeat, delay or reorder messages, but can neither read meaning into one nor change it
unnoticed. Reading is total: any bytes become a message or None, never an exception.

>>> key = new_key()
>>> message = sign({"kind": "task", "round": 3}, {"params": np.ones(2, "<f4")}, key)
>>> again = unpack(pack(message))
>>> again.signed_by(public_of(key)), again.header["round"], again.vectors["params"].tolist()
(True, 3, [1.0, 1.0])
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from dpscaffold import __version__
from dpscaffold.errors import BadInput
from dpscaffold.runs.journal import Anchor

#: The version of the protocol. Messages of another one are refused (``version``).
VERSION = 3
KINDS = ("offer", "begin", "draw", "key", "task", "settle")
ASK, ANSWER = "ask", "answer"
#: The name under which the server commits to its own share of the draw; no site can have it.
SERVER = ""

#: Everything that a site may say besides its uploads. Each is a function of public numbers: the
#: offer, the policy, counts, columns, and R_i where it is public; none of what a record holds.
REASONS = {
    "bad-signature": "the message is not correctly signed",
    "not-for-me": "the message names another site",
    "version": "the protocol or the package has another version at the server",
    "bad-offer": "the offer is not a plan",
    "policy-epsilon": "the site's budget does not allow enough participations",
    "policy-noise": "there is no noise",
    "policy-clip": "the clip bound is not one the site accepts",
    "policy-steps": "more local steps, or larger batches, than the site accepts",
    "policy-unit": "what is protected (record or user) is not what the site wants protected",
    "policy-sampling": "the site does not accept this sampling of batches",
    "policy-algorithm": "the site does not accept this algorithm",
    "policy-model": "the site does not accept this task, or one of this size",
    "policy-unprotected": "the site accepts no run without privacy, and no noise from a known seed",
    "policy-runs": "the site has taken part in as many runs as it wants to",
    "policy-secure": "the site does not accept these secure sums, or wants secure sums",
    "policy-members": "more members are unconfirmed at the site than may collude",
    "member-changed": "a member's key is not the one that the site's people confirmed",
    "awaiting-approval": "a person at the site has not decided about the run yet",
    "not-approved": "a person at the site refused the run",
    "data-unfit": "the site's data do not have the offer's columns, or too few records for a batch",
    "data-changed": "the number of the site's records is not the one it enrolled with",
    "preparation": "the site's policy does not allow that preparation is fitted on its records",
    "unknown-run": "the site is not enrolled in this run",
    "plan-changed": "the plan is not the one the site enrolled in",
    "run-continued": "the run goes on as another run at the site, and is over under this name",
    "bad-continuation": "the site does not continue a run of its own as it is offered",
    "roster-changed": "the roster is not the one the run began with",
    "bad-draw": "the nonces do not fit their commitments, or were never shown",
    "not-drawn": "the site was not drawn for this round",
    "bad-round": "there is no such round",
    "stale-round": "the site has taken part in a later round",
    "bad-list": "the list of members is not a part of the draw, or is too short for the site",
    "bad-keys": "a member's key is copied, weak, or not signed by the member for this run",
    "stale-key": "the site has started again and has another key",
    "attempt-used": "the site answers an attempt with one upload, and has none for this question",
    "voids-spent": "more attempts had no result than the site accepts",
    "bad-shape": "the vectors do not have the names or lengths of the plan",
    "not-finite": "a number is not finite",
    "out-of-range": "a number is larger than the site accepts",
    "budget-spent": "the site has taken part as often as it granted",
    "state-mismatch": "the acknowledged upload is not one the site knows",
    "ledger-behind": "the server has seen participations that the site's ledger does not hold",
    "ledger-damaged": "the site's ledger cannot be read",
    "state-damaged": "the site's memory cannot be read",
    "busy": "the site is answering another message",
    "paused": "the site's operator has paused it",
    "site-error": "something unforeseen happened at the site; its log says what",
}

#: No header is longer, whoever sends it: an offer with a large schema has some kilobytes.
LONGEST_HEADER = 1 << 22
_MOST_VECTORS = 64
_MAGIC = b"dpscaffold letter 1\n"

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Header = Mapping[str, Json]
Vectors = Mapping[str, np.ndarray]


def compatible(package: object) -> bool:
    """Whether another version of this package can take part in a run with this one. Before 1.0 the
    first two numbers must agree, later the first. One that is not told is not compared.

    >>> compatible(None), compatible(__version__), compatible("99.0.0"), compatible([1])
    (True, True, False, False)
    """
    if package is None:
        return True
    own, other = __version__.split("."), str(package).split(".")
    count = 2 if own[0] == "0" else 1
    return own[:count] == other[:count]


class Refused(Exception):
    """A site's no: a code of :data:`REASONS`, which leaves, and a detail, which never does."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.code = reason if reason in REASONS else "site-error"
        self.detail = detail


@dataclass(frozen=True, eq=False)
class SignedMessage:
    """A header, named float32 vectors (n,) and a signature. Build it with :func:`sign`."""

    header: Header
    vectors: Vectors = field(default_factory=dict)
    signature: bytes = b""

    @cached_property
    def digests(self) -> Mapping[str, bytes]:
        """SHA-256 of every vector; they are hashed once, however often they are looked at."""
        return vector_digests(self.vectors)

    @cached_property
    def ledger_head(self) -> Anchor | None:
        """The head of its ledger that a site shows in an answer, if it does."""
        try:
            return Anchor.read(self.header.get("ledger"), "an answer")
        except BadInput:
            return None

    def signed_by(self, public: str) -> bool:
        """Whether the holder of ``public`` ("ed25519:…") signed this very message."""
        try:
            content = _to_sign(self.header, self.vectors, self.digests)
            public_key(public).verify(self.signature, content)
        except (InvalidSignature, ValueError, TypeError):
            return False
        return True

    def names_question(self, asked: SignedMessage) -> bool:
        """Whether the header names that question: same run, kind, site and nonce."""
        return all(
            self.header.get(key) == asked.header.get(key)
            for key in ("version", "kind", "run", "site", "nonce")
        )

    def is_answer(self, public: str) -> bool:
        """Whether this is an answer, to whatever question, that the holder of ``public`` signed."""
        return self.header.get("direction") == ANSWER and self.signed_by(public)


def canonical(value: object) -> bytes:
    """A JSON value as bytes, the same for everybody: sorted keys, no spaces, no NaN, UTF-8.

    >>> canonical({"b": 1, "a": [0.5, "é"]})
    b'{"a":[0.5,"\\xc3\\xa9"],"b":1}'
    """
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def digest(*parts: object) -> str:
    """SHA-256 of several JSON values, in hexadecimal: a plan's identity, a commitment, a seed."""
    return hashlib.sha256(canonical(list(parts))).hexdigest()


def commitment(run: str, site: str, nonce: str) -> str:
    """What a party shows before all have committed: SHA-256(run, site, nonce)."""
    return digest("commitment", run, site, nonce)


def joint_seed(run: str, nonces: Mapping[str, str]) -> int:
    """The seed of the draw, to which every party contributed: SHA-256(run, all nonces)."""
    return int(digest("seed", run, dict(nonces)), 16)


def fresh_id() -> str:
    """128 random bits: a run, an upload, a message's nonce."""
    return secrets.token_hex(16)


def vector_digests(vectors: Vectors) -> dict[str, bytes]:
    """SHA-256 of every vector's little-endian float32 bytes."""
    return {name: hashlib.sha256(_raw(vector)).digest() for name, vector in vectors.items()}


def sign(
    header: Header,
    vectors: Vectors,
    key: Ed25519PrivateKey,
    digests: Mapping[str, bytes] | None = None,
) -> SignedMessage:
    """A signed message. ``digests`` may hold those of the vectors where many messages share
    them."""
    plain = {name: np.ascontiguousarray(vector, "<f4") for name, vector in vectors.items()}
    return SignedMessage(dict(header), plain, key.sign(_to_sign(header, plain, digests)))


def ask(
    kind: str,
    run: str,
    site: str,
    fields: Header,
    vectors: Vectors,
    key: Ed25519PrivateKey,
    digests: Mapping[str, bytes] | None = None,
) -> SignedMessage:
    """A message of the server, with a nonce of its own."""
    head: Header = {
        "version": VERSION,
        "kind": kind,
        "direction": ASK,
        "run": run,
        "site": site,
        "nonce": fresh_id(),
    }
    return sign({**fields, **head}, vectors, key, digests)


def reply(
    asked: SignedMessage, site: str, fields: Header, vectors: Vectors, key: Ed25519PrivateKey
) -> SignedMessage:
    """A site's answer: it repeats the nonce, and what it says of kind and run is the asker's."""
    head: dict[str, Json] = {"version": VERSION, "direction": ANSWER, "site": site}
    for name in ("kind", "run", "nonce"):
        said = asked.header.get(name)
        head[name] = said if isinstance(said, str) and len(said) <= 64 else ""
    return sign({**fields, **head}, vectors, key)


def _to_sign(header: Header, vectors: Vectors, digests: Mapping[str, bytes] | None = None) -> bytes:
    """SHA-256 of the header's digest and of each vector's name and digest, in order of names."""
    known = digests or {}
    whole = hashlib.sha256(_MAGIC + hashlib.sha256(canonical(header)).digest())
    for name in sorted(vectors):
        whole.update(hashlib.sha256(name.encode()).digest())
        whole.update(known.get(name) or hashlib.sha256(_raw(vectors[name])).digest())
    return whole.digest()


def _raw(vector: np.ndarray) -> memoryview:
    """Little-endian float32 bytes, without a copy where they are that already."""
    return np.ascontiguousarray(vector, "<f4").data.cast("B")


# --- bytes -----------------------------------------------------------------------------------


def read_header(raw: bytes) -> dict[str, Json] | None:
    """The header in these bytes, or None where they are not one in canonical form."""
    if not isinstance(raw, bytes) or len(raw) > LONGEST_HEADER:
        return None
    try:
        header = json.loads(raw)
        if isinstance(header, dict) and canonical(header) == raw:
            return header
    except (ValueError, RecursionError):
        pass
    return None


def read_vector(raw: object) -> np.ndarray | None:
    """The float32 vector in these bytes, or None."""
    if not isinstance(raw, bytes | memoryview) or len(raw) % 4:
        return None
    return np.frombuffer(raw, dtype="<f4").copy()


def pack(message: SignedMessage) -> bytes:
    """A message as bytes; :func:`unpack` reads them back."""
    return b"".join(packed(message))


def packed(message: SignedMessage) -> list[bytes | memoryview]:
    """The pieces of :func:`pack`; those of the vectors are not copied."""
    header = canonical(message.header)
    parts: list[bytes | memoryview] = [_MAGIC]
    parts += [struct.pack("<IH", len(header), len(message.signature)), header]
    parts += [message.signature, struct.pack("<H", len(message.vectors))]
    for name in sorted(message.vectors):
        raw = _raw(message.vectors[name])
        parts += [struct.pack("<HQ", len(name.encode()), len(raw)), name.encode(), raw]
    return parts


def unpack(raw: bytes | memoryview) -> SignedMessage | None:
    """The message in these bytes, or None; never an exception, and nothing is left over."""
    try:
        return _unpack(memoryview(raw))
    except (struct.error, ValueError, IndexError):
        return None


def _unpack(raw: memoryview) -> SignedMessage | None:
    if raw[: len(_MAGIC)] != _MAGIC:
        return None
    at = len(_MAGIC)
    long, sealed = struct.unpack_from("<IH", raw, at)
    at += 6
    header = read_header(bytes(raw[at : at + long]))
    signature = bytes(raw[at + long : at + long + sealed])
    at += long + sealed
    (count,) = struct.unpack_from("<H", raw, at)
    at += 2
    if header is None or count > _MOST_VECTORS:
        return None
    vectors: dict[str, np.ndarray] = {}
    for _ in range(count):
        named, size = struct.unpack_from("<HQ", raw, at)
        at += 10
        name = bytes(raw[at : at + named]).decode()
        body = raw[at + named : at + named + size]
        at += named + size
        vector = read_vector(body)
        if vector is None or len(body) != size or name in vectors:
            return None
        vectors[name] = vector
    return SignedMessage(header, vectors, signature) if at == len(raw) else None


# --- keys ------------------------------------------------------------------------------------


def new_key() -> Ed25519PrivateKey:
    """A signing key."""
    return Ed25519PrivateKey.generate()


def public_of(key: Ed25519PrivateKey) -> str:
    """The public half as it stands in files: ``ed25519:`` and 64 hexadecimal digits."""
    return "ed25519:" + key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def checked_public(name: str, text: object) -> str:
    """``text`` as a public signing key, or a refusal that names it."""
    try:
        public_key(str(text))
    except ValueError:
        raise BadInput(
            "bad-public-key", f"{name} is {text!r}; it must be 'ed25519:' and 64 hexadecimal digits"
        ) from None
    return str(text)


def fingerprint(public: str) -> str:
    """What people compare by another channel: 128 bits of SHA-256 of a public signing key.

    >>> fingerprint("ed25519:" + 64 * "0")
    '2414-be14-a0ea-7ff3-1e76-35f9-0995-4303'
    """
    digits = hashlib.sha256(public.encode()).hexdigest()[:32]
    return "-".join(digits[start : start + 4] for start in range(0, 32, 4))


def public_key(text: str) -> Ed25519PublicKey:
    """The key that a text like ``ed25519:…`` means, or a ValueError."""
    kind, _, digits = text.partition(":")
    raw = bytes.fromhex(digits)
    if kind != "ed25519" or len(raw) != 32:
        raise ValueError("not an Ed25519 public key")
    return Ed25519PublicKey.from_public_bytes(raw)


# --- reading a message's fields -----------------------------------------------------------------


def text_of(header: Header, key: str, reason: str, longest: int = 256) -> str:
    """A header's text, or a refusal with that reason."""
    value = header.get(key)
    if not isinstance(value, str) or len(value) > longest:
        raise Refused(reason, f"{key} is {value!r:.100}")
    return value


def whole_of(header: Header, key: str, reason: str, least: int = 0) -> int:
    """A header's integer, or a refusal with that reason."""
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 53:
        raise Refused(reason, f"{key} is {value!r:.100}")
    return value


def texts_of(header: Header, key: str, reason: str) -> dict[str, str]:
    """A header's table of texts, or a refusal with that reason."""
    value = header.get(key)
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise Refused(reason, f"{key} is {value!r:.100}")
    return {name: str(text) for name, text in value.items()}


def largest_of(vector: np.ndarray) -> float:
    """max |v|, without a copy of the vector; NaN where there is one, 0 where there is nothing.

    >>> largest_of(np.array([1.0, -2.0])), largest_of(np.array([np.nan, 1.0]))
    (2.0, nan)
    """
    return max(float(vector.max()), -float(vector.min())) if len(vector) else 0.0


def is_finite(vector: np.ndarray) -> bool:
    """Whether every number is finite."""
    return math.isfinite(largest_of(vector))


def check_values(vectors: Vectors, largest: float) -> None:
    """Refuse numbers that are not finite, or larger than ``largest``: near the end of the range
    of floats one record could decide whether an upload is finite."""
    for name, vector in vectors.items():
        top = largest_of(vector)
        if not math.isfinite(top):
            raise Refused("not-finite", name)
        if top > largest:
            raise Refused("out-of-range", f"{name} has a value of {top:g}")
