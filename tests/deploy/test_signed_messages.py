"""Messages: whatever bytes arrive, nothing raises and nothing unsigned is believed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpscaffold.deployment.protocol.messages import (
    Refused,
    SignedMessage,
    ask,
    canonical,
    check_values,
    commitment,
    digest,
    joint_seed,
    new_key,
    pack,
    public_of,
    read_header,
    reply,
    sign,
    unpack,
    vector_digests,
    whole_of,
)

KEY, OTHER = new_key(), new_key()
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
HEADERS = st.dictionaries(st.text(max_size=8), JSON, max_size=5)
VECTORS = st.dictionaries(
    st.text(alphabet="abc.", min_size=1, max_size=6),
    st.lists(st.floats(width=32), max_size=5).map(lambda v: np.array(v, "<f4")),
    max_size=3,
)


@given(HEADERS, VECTORS)
@settings(max_examples=60, deadline=None)
def test_a_message_survives_its_bytes(header, vectors):
    message = sign(header, vectors, KEY)
    again = unpack(pack(message))
    assert again is not None and pack(again) == pack(message)
    assert again.signed_by(public_of(KEY)) and not again.signed_by(public_of(OTHER))
    for name, vector in vectors.items():
        assert again.vectors[name].tobytes() == vector.tobytes()


@given(HEADERS, VECTORS, st.data())
@settings(max_examples=60, deadline=None)
def test_a_changed_message_is_not_believed(header, vectors, data):
    raw = bytearray(pack(sign(header, vectors, KEY)))
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] ^= 1 << data.draw(st.integers(0, 7))
    changed = unpack(bytes(raw))
    assert changed is None or not changed.signed_by(public_of(KEY))


@given(st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_a_message_or_nothing(raw):
    for candidate in (raw, b"dpscaffold letter 1\n" + raw):
        message = unpack(candidate)
        assert message is None or not message.signed_by(public_of(KEY))
    assert read_header(raw) is None or canonical(read_header(raw)) == raw


@given(st.binary(max_size=120))
@settings(max_examples=60, deadline=None)
def test_cut_messages_are_nothing(tail):
    raw = pack(sign({"kind": "task"}, {"params": np.ones(3, "<f4")}, KEY))
    assert unpack(raw + tail) is None or not tail
    assert all(unpack(raw[:n]) is None for n in range(len(raw)))


def test_vectors_cannot_be_moved_between_names():
    message = sign({}, {"a": np.ones(2, "<f4"), "b": np.zeros(2, "<f4")}, KEY)
    swapped = SignedMessage(
        message.header, {"a": message.vectors["b"], "b": message.vectors["a"]}, message.signature
    )
    assert message.signed_by(public_of(KEY)) and not swapped.signed_by(public_of(KEY))


def test_shared_digests_give_the_same_signature():
    vectors = {"x": np.arange(5, dtype="<f4")}
    assert sign({}, vectors, KEY, vector_digests(vectors)).signature == (
        sign({}, vectors, KEY).signature
    )


def test_an_answer_must_repeat_the_question():
    asked = ask("task", "00", "north", {"round": 3}, {}, KEY)
    answer = reply(asked, "north", {"status": "yes"}, {}, OTHER)
    assert answer.names_question(asked) and answer.is_answer(public_of(OTHER))
    assert not answer.is_answer(public_of(KEY))
    assert not answer.names_question(ask("task", "00", "north", {"round": 3}, {}, KEY))
    assert not reply(asked, "east", {}, {}, OTHER).names_question(asked)
    assert not asked.is_answer(public_of(KEY))  # a question is nobody's answer


def test_non_canonical_headers_are_refused():
    for text in ('{"b":1,"a":2}', '{"a": 1}', '{"a":NaN}', "[1]", '{"a":1,"a":1}', "{" * 5000):
        assert read_header(text.encode()) is None
    assert read_header(b'{"a":1}') == {"a": 1}
    with pytest.raises(ValueError):
        canonical({"a": float("nan")})


def test_the_draw_depends_on_everybody():
    nonces = {"": "0a", "north": "1b", "east": "2c"}
    seed = joint_seed("r", nonces)
    assert seed == joint_seed("r", dict(reversed(nonces.items())))
    for name in nonces:
        assert joint_seed("r", nonces | {name: "ff"}) != seed
    assert joint_seed("s", nonces) != seed
    assert commitment("r", "north", "1b") != commitment("r", "east", "1b")
    assert digest("a", "b") != digest("ab", "")


@given(st.lists(st.floats(width=32), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_values_are_bounded(values):
    vector = np.array(values, "<f4")
    fits = bool(np.isfinite(vector).all() and (np.abs(vector) <= 10).all())
    try:
        check_values({"x": vector}, 10.0)
        assert fits
    except Refused as no:
        assert not fits
        assert (no.code == "not-finite") == (not np.isfinite(vector).all())


def test_fields_of_the_wrong_type_are_refused():
    for value in (True, 1.0, "1", None, -1, 2**60, [1]):
        with pytest.raises(Refused) as no:
            whole_of({"round": value}, "round", "bad-round")
        assert no.value.code == "bad-round"
    assert whole_of(json.loads('{"round": 3}'), "round", "bad-round") == 3
    assert Refused("no such code").code == "site-error"
