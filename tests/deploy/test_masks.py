"""Masks cancel for members that agree on everything, and for nobody else."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from dpscaffold.deployment.protocol.masks import (
    BadKeys,
    EpochKey,
    Session,
    SignedKey,
    agreement_digest,
    announce,
    as_vector,
    from_vector,
    mask,
    pair_keys,
    verified_keys,
)
from dpscaffold.deployment.protocol.messages import new_key, public_of

NAMES = ("east", "north", "south", "west")
SESSION = Session(b"test", run="00ff", plan="plan", roster="roster")
SIGNERS = {name: new_key() for name in NAMES}
PUBLICS = {name: public_of(key) for name, key in SIGNERS.items()}
SECRET = {name: EpochKey.fresh() for name in NAMES}


def keys_of(session=SESSION, names=NAMES, secret=SECRET):
    return [announce(session, name, secret[name], SIGNERS[name]) for name in names]


def mask_of(name, session=SESSION, names=NAMES, round=1, attempt=1, x=b"x", bits=64, keys=None):
    """The mask that a member makes from what it was given."""
    keys = keys_of(session, names) if keys is None else keys
    trusted = verified_keys(session, keys, PUBLICS)
    agreed = agreement_digest({key.name: key.epoch for key in keys}, x)
    pairs = pair_keys(session, name, SECRET[name], trusted)
    return mask(pairs, name, round, attempt, agreed, 64, bits)


def total(masks):
    return sum(masks[1:], masks[0].copy())


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.sampled_from(NAMES), min_size=2),
    st.integers(1, 9),
    st.integers(1, 9),
    st.binary(max_size=9),
    st.sampled_from([32, 64]),
)
def test_masks_of_equal_lists_cancel_exactly(names, round, attempt, x, bits):
    names = tuple(sorted(names))
    same = {"names": names, "round": round, "attempt": attempt, "x": x, "bits": bits}
    assert not total([mask_of(name, **same) for name in names]).any()


def test_the_order_in_which_keys_arrive_does_not_matter():
    backwards = mask_of("east", keys=keys_of()[::-1])
    assert not total([backwards, *(mask_of(name) for name in NAMES[1:])]).any()


@pytest.mark.parametrize(
    "other",
    [
        {"round": 2},
        {"attempt": 2},
        {"x": b"y"},
        {"names": NAMES[:3]},
        {"session": replace(SESSION, run="00fe")},
        {"session": replace(SESSION, plan="a weaker plan")},
        {"session": replace(SESSION, roster="another roster")},
        {"session": replace(SESSION, label=b"other")},
    ],
    ids=str,
)
def test_nothing_cancels_between_members_that_were_given_different_values(other):
    honest = [mask_of(name) for name in NAMES[1:]]
    found = total([mask_of("east", **other), *honest])
    # Each number is random: the chance of one collision in 64 is below 2⁻⁵⁷.
    assert found.all()
    # Nor does any pair of uploads have a stream in common.
    for one in honest:
        assert (mask_of("east", **other) + one).all() and (mask_of("east", **other) - one).all()


def test_a_part_of_the_masks_is_spread_evenly():
    pairs = pair_keys(SESSION, "east", SECRET["east"], verified_keys(SESSION, keys_of(), PUBLICS))
    wide = mask(pairs, "east", 1, 1, "agreed", 100_000, 32)
    counts = np.bincount(wide >> np.uint32(28), minlength=16)
    assert (abs(counts - 6250) < 6 * 6250**0.5).all()


def test_a_restart_makes_other_masks():
    again = {**SECRET, "north": EpochKey.fresh()}
    assert again["north"].epoch != SECRET["north"].epoch
    assert (mask_of("east") != mask_of("east", keys=keys_of(secret=again))).all()


def test_a_copied_key_is_refused():
    copied = keys_of(secret={**SECRET, "west": SECRET["north"]})
    with pytest.raises(BadKeys, match="same key"):
        verified_keys(SESSION, copied, PUBLICS)


def test_a_member_does_not_see_its_own_key_under_another_name():
    """The list may lack the member whose key was copied."""
    thief = announce(SESSION, "west", replace(SECRET["east"], epoch="other"), SIGNERS["west"])
    trusted = verified_keys(SESSION, [thief, *keys_of()[1:3]], PUBLICS)
    with pytest.raises(BadKeys, match="has the key of 'east'"):
        pair_keys(SESSION, "east", SECRET["east"], trusted)


def test_streams_with_a_copied_key_do_not_cancel():
    """Even without the refusal: west signs north's key, and no two masks of east cancel."""
    copied = announce(SESSION, "west", replace(SECRET["north"], epoch="copy"), SIGNERS["west"])
    keys = {key.name: key for key in (*keys_of(names=("east", "north")), copied)}
    pairs = pair_keys(SESSION, "east", SECRET["east"], keys)
    assert pairs["north"] != pairs["west"]


def test_the_same_key_in_two_encodings_gives_two_streams():
    """X25519 ignores the highest bit, so one key has two spellings."""
    raw = bytearray.fromhex(SECRET["north"].public)
    raw[31] ^= 0x80
    spelled = SignedKey("west", "copy", bytes(raw).hex(), "")
    keys = {key.name: key for key in (*keys_of(names=("east", "north")), spelled)}
    pairs = pair_keys(SESSION, "east", SECRET["east"], keys)
    assert pairs["north"] != pairs["west"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda key: replace(key, name="nobody"), "not a member"),
        (lambda key: replace(key, name="north"), "two keys"),
        (lambda key: replace(key, epoch="other"), "not signed"),
        (lambda key: replace(key, key=EpochKey.fresh().public), "not signed"),
        (lambda key: replace(key, signature="00"), "not signed"),
        (lambda key: replace(key, signature="not hex"), "not signed"),
        (lambda key: replace(key, epoch=SECRET["north"].epoch), "same key or epoch"),
    ],
)
def test_a_changed_key_is_refused(change, said):
    keys = keys_of()
    with pytest.raises(BadKeys, match=said):
        verified_keys(SESSION, [*keys[:3], change(keys[3])], PUBLICS)


def test_a_key_signed_by_somebody_else_is_refused():
    forged = announce(SESSION, "west", SECRET["west"], SIGNERS["north"])
    with pytest.raises(BadKeys, match="not signed"):
        verified_keys(SESSION, [*keys_of()[:3], forged], PUBLICS)


@pytest.mark.parametrize("field", ["run", "plan", "roster"])
def test_a_key_of_another_session_is_refused(field):
    old = keys_of(replace(SESSION, **{field: "another"}))
    with pytest.raises(BadKeys, match="for this session"):
        verified_keys(SESSION, old, PUBLICS)


@pytest.mark.parametrize("key", ["00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f"])
def test_a_key_without_a_shared_secret_is_refused(key):
    """Points of small order make the shared secret zero, whoever's key it meets."""
    with pytest.raises(BadKeys, match="no shared secret"):
        pair_keys(SESSION, "east", SECRET["east"], {"west": SignedKey("west", "e", key, "")})


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        "text",
        {},
        {"name": "east", "epoch": "e", "key": "00" * 32, "signature": 3},
        {"name": "east", "epoch": "e", "key": "AB" * 32, "signature": ""},
        {"name": "east", "epoch": "e" * 129, "key": "00" * 32, "signature": ""},
        {"name": "east", "epoch": "e", "key": "00", "signature": ""},
    ],
    ids=repr,
)
def test_what_is_not_a_signed_key_is_refused(value):
    with pytest.raises(BadKeys):
        SignedKey.read(value)


def test_a_signed_key_can_be_written_and_read():
    key = keys_of()[0]
    assert SignedKey.read(vars(key)) == key


def test_a_secret_key_is_neither_shown_nor_pickled():
    key = EpochKey("e", X25519PrivateKey.from_private_bytes(bytes(range(32))))
    assert bytes(range(32)).hex() not in repr(key)
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(key)


@pytest.mark.parametrize("bits", [32, 64])
def test_integers_keep_every_bit_in_a_message(bits):
    words = np.random.default_rng(1).integers(0, 2**bits, 4096, dtype=f"u{bits // 8}")
    vector = as_vector(words)
    assert vector.dtype == np.float32
    assert (from_vector(vector.copy(), bits) == words).all()


def test_the_stream_is_the_one_that_the_protocol_names():
    """HKDF-SHA256 and ChaCha20, from their definitions by hand."""
    import hashlib
    import hmac

    from dpscaffold.deployment.protocol.messages import canonical

    pair = bytes(range(32))
    info = canonical(["stream", 3, 2, "agreed", 64])
    key = hmac.new(pair, info + b"\x01", hashlib.sha256).digest()
    expected = np.frombuffer(_chacha20(key, 2), "<u8")[:10]
    assert (mask({"west": pair}, "east", 3, 2, "agreed", 10, 64) == expected).all()
    assert (mask({"west": pair}, "xyz", 3, 2, "agreed", 10, 64) == -expected).all()


def _chacha20(key, blocks):
    """RFC 8439's block function with counter 0, 1, … and nonce 0."""

    def turn(state, a, b, c, d):
        for left, right, changed, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            state[left] = (state[left] + state[right]) % 2**32
            mixed = state[changed] ^ state[left]
            state[changed] = (mixed << by | mixed >> (32 - by)) % 2**32

    out = b""
    for counter in range(blocks):
        start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
        start += [int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4)]
        start += [counter, 0, 0, 0]
        state = list(start)
        for _ in range(10):
            for column in range(4):
                turn(state, *(column + 4 * row for row in range(4)))
            for column in range(4):
                turn(state, *(4 * row + (column + row) % 4 for row in range(4)))
        words = [(a + b) % 2**32 for a, b in zip(state, start, strict=True)]
        out += b"".join(word.to_bytes(4, "little") for word in words)
    return out
