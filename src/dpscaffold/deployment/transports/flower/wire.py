"""Signed messages as Flower messages.

Every object of a Flower message costs the SuperLink a request of 7 to 10 ms, so one has few: its
header in one record, and all vectors in one other record, which is the same object for all sites of
a round and therefore reaches the SuperLink once. Vectors that are for one site only (``restore.*``)
have a record of their own. Up to 1 MiB travels as bytes, which is one object less; more as one
array, end to end, which Flower handles at about a fifth of the CPU of bytes.

Of such an array Flower would make some ten copies on its way, and hash it as often. Here it is
copied once into the parts that travel and once out of them, and hashed once; the bytes are Flower's
own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from io import BytesIO
from typing import cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, SType
from flwr.supercore.constant import HEAD_BODY_DIVIDER, HEAD_VALUE_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    InflatableObject,
    get_object_body,
    get_object_head_values_from_object_content,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
)
from numpy.lib import format as npy

from dpscaffold.deployment.protocol.messages import (
    SignedMessage,
    canonical,
    read_header,
    read_vector,
)

#: Up to this many bytes ride in a record of plain values.
SMALL = 1 << 20
_PARTS = ("shared", "own")
#: Bytes of an array that travel together.
_STEP = FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
#: How the objects of records with arrays, and of parts of arrays, begin.
_RECORD, _PART = (
    f"{kind.__qualname__}{HEAD_VALUE_DIVIDER}".encode() for kind in (ArrayRecord, ArrayChunk)
)
#: No description of an array is longer.
_LONGEST_HEAD = 1 << 12
#: The type of a message that is to be answered again, also by a site that has answered it.
AGAIN = "query.again"


def question_id(signed: SignedMessage) -> str:
    """What tells a node that a message is one which it has answered, before it fetches anything.
    The signature covers the vectors, so two messages with one id are the same in every bit."""
    return hashlib.sha256(canonical(signed.header) + signed.signature).hexdigest()


#: Records that were made already, by the names and identities of their vectors.
Made = dict[tuple[tuple[str, int], ...], ConfigRecord | ArrayRecord]


def to_records(signed: SignedMessage, made: Made | None = None) -> RecordDict:
    """A signed message as the content of a Flower message. Messages that share vectors and are sent
    together may share ``made``, so that their records are made once."""
    head = ConfigRecord({"header": canonical(signed.header), "signature": signed.signature})
    content: dict[str, ConfigRecord | ArrayRecord] = {"message": head}
    own = {name for name in signed.vectors if name.startswith("restore.")}
    for part, names in zip(_PARTS, (set(signed.vectors) - own, own), strict=True):
        if names:
            vectors = {name: signed.vectors[name] for name in sorted(names)}
            key = tuple((name, id(vector)) for name, vector in vectors.items())
            known = None if made is None else made.get(key)
            content[part] = _vectors(vectors) if known is None else known
            if made is not None:
                made[key] = content[part]
    return RecordDict(content)


def _vectors(vectors: dict[str, np.ndarray]) -> ConfigRecord | ArrayRecord:
    plain = {name: np.ascontiguousarray(vector, "<f4") for name, vector in vectors.items()}
    if sum(vector.nbytes for vector in plain.values()) <= SMALL:
        return ConfigRecord({name: vector.tobytes() for name, vector in plain.items()})
    names = ",".join(f"{name}:{len(vector)}" for name, vector in plain.items())
    record = ArrayRecord()
    record[names] = _array(list(plain.values()))  # its constructor would make an array of its own
    return record


class ArrayPart(ArrayChunk):  # type: ignore[misc]
    """A chunk of an array that never changes: its id is computed once, and without a copy."""

    is_dirty = False

    @cached_property
    def _head(self) -> bytes:
        fields = (ArrayChunk.__qualname__, "", str(len(self.data)))
        return f"{HEAD_VALUE_DIVIDER}".join(fields).encode() + bytes(HEAD_BODY_DIVIDER)

    @cached_property
    def object_id(self) -> str:
        """SHA-256 of the head and the bytes."""
        whole = hashlib.sha256(self._head)
        whole.update(self.data)
        return whole.hexdigest()

    def deflate(self) -> bytes:
        """As it travels."""
        return b"".join((self._head, self.data))


def _array(vectors: list[np.ndarray]) -> Array:
    """``Array(np.concatenate(vectors))``, with one copy."""
    head, shape = BytesIO(), (sum(map(len, vectors)),)
    described = {"descr": "<f4", "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(head, described)
    data = b"".join([head.getvalue(), *(vector.view(np.uint8).data for vector in vectors)])
    array, whole, step = Array("float32", shape, SType.NUMPY, data), memoryview(data), _STEP
    parts = [ArrayPart(whole[start : start + step]) for start in range(0, len(whole), step)]
    array.__dict__["_chunks"] = [(part.object_id, part) for part in parts]
    return array


class _Joined(Array):  # type: ignore[misc]
    """An array that arrived in parts."""

    def numpy(self) -> np.ndarray:
        """The array, with one copy where it is a float32 vector."""
        pieces: list[memoryview] = self.__dict__["pieces"]
        whole, at = np.empty(sum(map(len, pieces)), np.uint8), 0
        for piece in pieces:
            whole[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
        stream = BytesIO(whole[:_LONGEST_HEAD].tobytes())
        if npy.read_magic(stream) == (1, 0):
            shape, _, kind = npy.read_array_header_1_0(stream)
            numbers = whole[stream.tell() :]
            if kind == np.dtype("<f4") and len(shape) == 1 and 4 * shape[0] == len(numbers):
                return numbers.view("<f4")
        return cast("np.ndarray", np.load(BytesIO(whole.tobytes()), allow_pickle=False))


def inflated(identity: str, contents: dict[str, bytes]) -> Message:
    """The Flower message whose objects these are; arrays stay in the parts that they came in.
    Objects that are no message raise an ObjectPullError, whatever is wrong with them."""
    try:
        records: dict[str, InflatableObject] = {
            name: _record(content, contents)
            for name, content in contents.items()
            if content.startswith(_RECORD)
        }
        message = inflate_object_from_contents(identity, contents, objects=records)
        if not isinstance(message, Message) or not (message.has_content() or message.has_error()):
            raise TypeError("it has neither content nor an error")
        return message
    except Exception as error:  # whatever a site sent, and however Flower chokes on it
        raise ObjectPullError(identity, f"it is no message ({type(error).__name__})") from error


def _record(content: bytes, contents: Mapping[str, bytes]) -> ArrayRecord:
    """What ``ArrayRecord.inflate`` makes of the same objects, which would copy the arrays."""
    record = ArrayRecord()
    for name, array in json.loads(get_object_body(content, ArrayRecord)).items():
        record[name] = _joined(contents[array], contents)
    return record


def _joined(content: bytes, contents: Mapping[str, bytes]) -> Array:
    """What ``Array.inflate`` makes of the same parts."""
    _, children, _ = get_object_head_values_from_object_content(content)
    bodies = {name: _body(contents[name]) for name in children}
    described = json.loads(get_object_body(content, Array))
    shape = tuple(described["shape"])
    array = _Joined(described["dtype"], shape, described["stype"], b"")
    array.__dict__["pieces"] = [bodies[children[k]] for k in described["arraychunk_ids"]]
    return array


def _body(content: bytes) -> memoryview:
    """The bytes of a part."""
    if not content.startswith(_PART):
        raise ValueError("a part of an array is something else")
    return memoryview(content)[content.index(HEAD_BODY_DIVIDER) + len(HEAD_BODY_DIVIDER) :]


def _cut(names: str, whole: np.ndarray) -> dict[str, np.ndarray] | None:
    """The vectors of one array by its label, ``name:length,name:length``."""
    said = [part.rpartition(":") for part in names.split(",")]
    lengths = [int(length) for _, _, length in said]
    fits = min(lengths) >= 0 and sum(lengths) == len(whole)
    if whole.dtype != np.dtype("<f4") or whole.ndim != 1 or not fits:
        return None
    ends = np.cumsum(lengths)[:-1]
    return {name: row for (name, _, _), row in zip(said, np.split(whole, ends), strict=True)}


def from_objects(identity: str, contents: dict[str, bytes]) -> SignedMessage:
    """The signed message in the objects of a Flower message, or an empty one."""
    try:
        return from_records(inflated(identity, contents).content)
    except (ObjectPullError, ValueError):  # a Flower message without content raises one
        return SignedMessage({})


def from_records(content: RecordDict) -> SignedMessage:
    """The signed message in a Flower message. Whatever is not one becomes an empty message, which
    no signature fits."""
    try:
        return _from_records(content) or SignedMessage({})
    except Exception:  # whatever a stranger sent, and however Flower chokes on it
        return SignedMessage({})


def _from_records(content: RecordDict) -> SignedMessage | None:
    head = content.config_records["message"]
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
