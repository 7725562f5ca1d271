"""Splitting users' records and building the federation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.data import Pool, assemble
from dpscaffold.data.pool import held_out_size, split_rows


def numbered(records: int, classes: int = 3) -> Pool:
    """Record i has the one feature i, so that rows can be followed."""
    return Pool(
        np.arange(records, dtype=np.float32)[:, None],
        np.arange(records) % classes,
        classes,
        "numbers",
    )


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 40), min_size=1, max_size=6),
    ratio=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_train_and_test_share_a_users_rows_between_them(
    sizes: list[int], ratio: float, seed: int
) -> None:
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    federation = assemble(numbered(sum(sizes)), parts, ratio, seed)
    for user, rows in enumerate(parts):
        train, test = (table.of(user) for table in (federation.train, federation.test))
        found = np.concatenate([train[0].numpy().ravel(), test[0].numpy().ravel()])
        assert sorted(found.astype(int).tolist()) == rows.tolist()
        assert len(test[1]) == min(max(1, round(ratio * len(rows))), len(rows) - 1)
        labels = np.concatenate([train[1].numpy(), test[1].numpy()])
        np.testing.assert_array_equal(labels, found.astype(int) % 3)


def test_the_paper_sizes() -> None:
    assert [held_out_size(n, 0.2) for n in (5000, 2500, 1000, 2)] == [1000, 500, 200, 1]


def test_the_split_is_random_and_repeats_with_its_seed() -> None:
    parts = [np.arange(100)]
    first, again, other = (split_rows(parts, ["0"], 0.2, seed)[1][0] for seed in (0, 0, 1))
    assert first.tolist() == again.tolist() != other.tolist()
    assert sorted(first.tolist()) != list(range(20))


def test_a_user_with_one_record_is_named() -> None:
    with refuses("too-few-records: b has 1 … at least 2"):
        assemble(numbered(4), [np.array([0, 1, 2]), np.array([3])], names=["a", "b"])


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.1, float("nan")])
def test_ratios_outside_the_open_interval(ratio: float) -> None:
    with refuses("out-of-range: test_ratio"):
        assemble(numbered(10), [np.arange(10)], ratio)


def test_pools_that_do_not_fit() -> None:
    with refuses("wrong-shape"):
        Pool(np.zeros((3, 2), dtype=np.float32), np.zeros(2, dtype=np.int64), 2, "x")
    with refuses("bad-labels: contain 5"):
        Pool(np.zeros((2, 2), dtype=np.float32), np.array([0, 5]), 2, "x")


def test_infinite_features_are_refused() -> None:
    pool = Pool(np.full((4, 2), np.inf, dtype=np.float32), np.array([0, 1, 0, 1]), 2, "x")
    with refuses("not-finite"):
        assemble(pool, [np.arange(4)])
