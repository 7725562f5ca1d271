"""Signed messages as Flower messages.

Every object of a Flower message costs the SuperLink a request of 7 to 10 ms, so one has few: its
header in one record, and all vectors in one other record, which is the same object for all sites of
a round and therefore reaches the SuperLink once. Vectors that are for one site only (``restore.*``)
have a record of their own. Up to 1 MiB travels as bytes, which is one object less; more as one
array, end to end, which Flower handles at about a fifth of the CPU of bytes.
"""

from __future__ import annotations

import hashlib

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from dpscaffold.deployment.protocol.messages import (
    SignedMessage,
    canonical,
    read_header,
    read_vector,
)

#: Up to this many bytes ride in a record of plain values.
SMALL = 1 << 20
_PARTS = ("shared", "own")
#: The type of a message that is to be answered again, also by a site that has answered it.
AGAIN = "query.again"


def question_id(signed: SignedMessage) -> str:
    """What tells a node that a message is one which it has answered, before it fetches anything.
    The signature covers the vectors, so two messages with one id are the same in every bit."""
    return hashlib.sha256(canonical(signed.header) + signed.signature).hexdigest()


def to_records(signed: SignedMessage) -> RecordDict:
    """A signed message as the content of a Flower message."""
    head = ConfigRecord({"header": canonical(signed.header), "signature": signed.signature})
    content: dict[str, ConfigRecord | ArrayRecord] = {"letter": head}
    own = {name for name in signed.vectors if name.startswith("restore.")}
    for part, names in zip(_PARTS, (set(signed.vectors) - own, own), strict=True):
        if names:
            content[part] = _vectors({name: signed.vectors[name] for name in sorted(names)})
    return RecordDict(content)


def _vectors(vectors: dict[str, np.ndarray]) -> ConfigRecord | ArrayRecord:
    plain = {name: np.ascontiguousarray(vector, "<f4") for name, vector in vectors.items()}
    if sum(vector.nbytes for vector in plain.values()) <= SMALL:
        return ConfigRecord({name: vector.tobytes() for name, vector in plain.items()})
    names = ",".join(f"{name}:{len(vector)}" for name, vector in plain.items())
    return ArrayRecord({names: Array(np.concatenate(list(plain.values())))})


def _cut(names: str, whole: np.ndarray) -> dict[str, np.ndarray] | None:
    """The vectors of one array by its label, ``name:length,name:length``."""
    said = [part.rpartition(":") for part in names.split(",")]
    lengths = [int(length) for _, _, length in said]
    fits = min(lengths) >= 0 and sum(lengths) == len(whole)
    if whole.dtype != np.dtype("<f4") or whole.ndim != 1 or not fits:
        return None
    ends = np.cumsum(lengths)[:-1]
    return {name: row for (name, _, _), row in zip(said, np.split(whole, ends), strict=True)}


def from_records(content: RecordDict) -> SignedMessage:
    """The signed message in a Flower message. Whatever is not one becomes an empty message, which
    no signature fits."""
    try:
        return _from_records(content) or SignedMessage({})
    except Exception:  # whatever a stranger sent, and however Flower chokes on it
        return SignedMessage({})


def _from_records(content: RecordDict) -> SignedMessage | None:
    head = content.config_records["letter"]
    raw, signature = head["header"], head["signature"]
    header = read_header(raw) if isinstance(raw, bytes) else None
    if header is None or not isinstance(signature, bytes):
        return None
    vectors: dict[str, np.ndarray] = {}
    for part in _PARTS:
        if part in content.config_records:
            for name, body in content.config_records[part].items():
                vector = read_vector(body)
                if vector is None:
                    return None
                vectors[name] = vector
        elif part in content.array_records:
            for names, array in content.array_records[part].items():
                cut = _cut(names, array.numpy())
                if cut is None:
                    return None
                vectors.update(cut)
    return SignedMessage(header, vectors, signature)
