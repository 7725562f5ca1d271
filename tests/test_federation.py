"""Records and federations: their views, their hashes, and what they refuse."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from small import UNEQUAL, federation

from dpscaffold.federation import Federation, Records
from dpscaffold.federation import records as module
from dpscaffold.federation.schema import Target


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_users_hold_their_own_rows(sizes):
    """of(i) gives user i's rows in order, sizes and offsets agree, and selecting copies them."""
    tables = [
        torch.full((n, 2), float(i)) + torch.arange(n)[:, None] / 10 for i, n in enumerate(sizes)
    ]
    records = Records.from_users(tables, [torch.full((n,), i) for i, n in enumerate(sizes)])
    assert (
        records.users == len(sizes)
        and records.sizes.tolist() == sizes
        and len(records) == sum(sizes)
    )
    for i, table in enumerate(tables):
        x, y = records.of(i)
        assert torch.equal(x, table) and (y == i).all()
    backwards = records.select(range(len(sizes))[::-1])
    assert backwards.sizes.tolist() == sizes[::-1]
    assert torch.equal(backwards.of(0)[0], tables[-1])


def test_the_digest_sees_every_number():
    """Any changed feature, label or boundary gives another hash; the same contents give the
    same."""
    one = federation(UNEQUAL).train
    assert one.digest() == federation(UNEQUAL).train.digest()
    x = one.features.clone()
    x[-1, -1] += 1e-6
    y = one.labels.clone()
    y[0] = (y[0] + 1) % 3
    offsets = one.offsets.clone()
    offsets[1] += 1
    others = [Records(x, one.labels, one.offsets), Records(one.features, y, one.offsets)]
    others.append(Records(one.features, one.labels, offsets))
    assert len({r.digest() for r in (one, *others)}) == 4


def test_looking_in_blocks_finds_the_same(monkeypatch):
    """A bad value in any block is found, with its user and its row."""
    data = federation(UNEQUAL).train
    monkeypatch.setattr(module, "BLOCK", 12)
    x = data.features.clone()
    x[30, 2] = float("nan")
    with refuses("not-finite: user 3"):
        Records(x, data.labels, data.offsets).validate(Target.numbered(3), "train")
    data.validate(Target.numbered(3), "train")


def test_numpy_arrays_will_do():
    """float64 and int32 arrays become float32 and int64 tensors; classes are counted where not
    given."""
    data = Federation.from_arrays(
        [(np.zeros((2, 3)), np.array([0, 4], dtype=np.int32))], [(np.ones((1, 3)), np.array([1]))]
    )
    assert (
        data.classes == 5
        and data.train.features.dtype == torch.float32
        and data.train.labels.dtype == torch.int64
    )
    assert data.names == ("0",)


X, Y = torch.zeros(3, 2), torch.tensor([0, 1, 0])
GOOD = [(X, Y)]


@pytest.mark.parametrize(
    ("train", "test", "named", "message"),
    [
        ([], GOOD, {}, "no-users"),
        (GOOD, [], {}, "no-users"),
        ([(X, Y[:2])], GOOD, {}, "count-differs: user 0"),
        ([(X, Y), (torch.zeros(3, 5), Y)], GOOD * 2, {}, "wrong-shape: user 1"),
        ([(torch.zeros(3), Y)], GOOD, {}, "wrong-shape: user 0"),
        ([(X, Y), (X[:0], Y[:0])], GOOD * 2, {}, "user-without-records: user 1"),
        (GOOD * 2, [(X, Y), (X[:0], Y[:0])], {}, "user-without-records: user 1"),
        ([(X[:0], Y[:0])], GOOD, {}, "user-without-records: user 0"),
        (GOOD, GOOD * 2, {}, "count-differs: have 1 … data 2"),
        (GOOD, [(torch.zeros(3, 4), Y)], {}, "count-differs: have 2 … data 4"),
        ([(X, Y + 2)], GOOD, {"classes": 3}, "bad-labels: contain 3 … in 0"),
        (GOOD, [(X, Y - 1)], {"classes": 3}, "bad-labels: contain -1"),
        (GOOD, GOOD, {"classes": 1}, "too-few-classes: classes is 1"),
        (GOOD, GOOD, {"names": ["a", "b"]}, "count-differs: 2 names … for 1"),
        ([(X, Y[:, None])], GOOD, {}, "wrong-shape: user 0"),
        ([(X, torch.tensor([0.0, 0.5, 1.0]))], GOOD, {}, "bad-labels: user 0"),
    ],
)  # fmt: skip
def test_bad_tables_are_refused_by_name(train, test, named, message):
    """Empty users, shapes that disagree, labels out of range: one sentence with the user and the
    numbers."""
    with refuses(message):
        Federation.from_arrays(train, test, **named)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["train", "test"])
def test_features_must_be_finite(value, side):
    """NaN and infinities are found wherever they are, and the user is named."""
    bad = X.clone()
    bad[2, 1] = value
    tables = {"train": GOOD * 2, "test": GOOD * 2} | {side: [(X, Y), (bad, Y)]}
    with refuses(f"not-finite: {side} … user 1"):
        Federation.from_arrays(**tables)


def test_large_finite_features_are_not_mistaken_for_infinite_ones():
    """A sum that overflows is looked at again, value by value."""
    huge = torch.full((3, 2), 3e38)
    assert Federation.from_arrays([(huge, Y)], GOOD).users == 1


def test_the_repr_is_one_line_a_person_can_read():
    """Users, sizes, features, classes."""
    assert "6 users, 4 to 15 train records each, 4 features, 3 classes" in repr(federation(UNEQUAL))
    assert federation().titled("mine").title == "mine"
