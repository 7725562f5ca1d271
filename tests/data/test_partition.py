"""Partitions, for any labels, sizes and seed: nobody shares a record, sizes are as asked, seeds
repeat."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.data import partition

Partition = Callable[[np.ndarray, np.ndarray, int], list[np.ndarray]]

PARTITIONS: dict[str, Partition] = {
    "iid": lambda labels, sizes, seed: partition.iid(labels, sizes, seed),
    "similarity 0": lambda labels, sizes, seed: partition.similarity(labels, sizes, 0, seed),
    "similarity 37": lambda labels, sizes, seed: partition.similarity(labels, sizes, 37, seed),
    "dirichlet 0.01": lambda labels, sizes, seed: partition.dirichlet(labels, sizes, 0.01, seed),
    "dirichlet 5": lambda labels, sizes, seed: partition.dirichlet(labels, sizes, 5.0, seed),
}


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Labels (not all classes need occur), sizes that they can serve, a seed."""
    sizes = np.array(draw(st.lists(st.integers(2, 30), min_size=1, max_size=8)))
    spare = draw(st.integers(0, 20))
    classes = draw(st.integers(1, 7))
    seed = draw(st.integers(0, 2**32))
    labels = np.random.default_rng(seed).integers(0, classes, sizes.sum() + spare)
    return labels, sizes, seed


@pytest.mark.parametrize("name", PARTITIONS)
@settings(max_examples=40, deadline=None)
@given(problem=problems())
def test_every_partition(name: str, problem: tuple[np.ndarray, np.ndarray, int]) -> None:
    labels, sizes, seed = problem
    parts = PARTITIONS[name](labels, sizes, seed)
    assert [len(rows) for rows in parts] == sizes.tolist()
    everyone = np.concatenate(parts)
    assert len(np.unique(everyone)) == len(everyone)
    assert everyone.min() >= 0 and everyone.max() < len(labels)
    again = PARTITIONS[name](labels, sizes, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("name", PARTITIONS)
def test_another_seed_gives_other_rows(name: str) -> None:
    labels = np.arange(400) % 8
    sizes = np.full(8, 40)
    a, b = (np.concatenate(PARTITIONS[name](labels, sizes, seed)) for seed in (0, 1))
    assert not np.array_equal(a, b)


@settings(max_examples=60, deadline=None)
@given(
    percent=st.floats(0, 100),
    users=st.integers(2, 9),
    records=st.integers(1, 40),
    classes=st.integers(2, 6),
    seed=st.integers(0, 1000),
)
def test_similarity_is_exact(
    percent: float, users: int, records: int, classes: int, seed: int
) -> None:
    """The sorted part of each user has R − round(γR) rows, and over users it runs through the
    labels."""
    labels = np.random.default_rng(seed).integers(0, classes, users * records)
    parts = partition.similarity(labels, np.full(users, records), percent, seed)
    mixed = round(percent * records / 100)
    sorted_parts = [labels[rows[mixed:]] for rows in parts]
    assert all(len(part) == records - mixed for part in sorted_parts)
    run = np.concatenate(sorted_parts)
    assert np.all(np.diff(run) >= 0)


def test_similarity_zero_gives_the_fewest_labels_and_hundred_the_pooled_mix() -> None:
    labels = np.repeat(np.arange(10), 600)
    apart = partition.similarity(labels, np.full(60, 100), 0)
    assert all(len(np.unique(labels[rows])) == 1 for rows in apart)
    mixed = partition.similarity(labels, np.full(60, 100), 100)
    counts = np.array([np.bincount(labels[rows], minlength=10) for rows in mixed])
    # χ² of 60 users × 9 degrees of freedom; the fixed seed makes it a number, the bounds catch any
    # sorting.
    chi2 = ((counts - 10) ** 2 / 10).sum()
    assert 400 < chi2 < 700


def test_the_iid_share_of_similarity_is_a_sample_of_the_whole() -> None:
    labels = np.repeat(np.arange(10), 1000)
    parts = partition.similarity(labels, np.full(10, 1000), 50)
    counts = np.array([np.bincount(labels[rows[:500]], minlength=10) for rows in parts])
    assert np.abs(counts - 50).max() < 36  # over 5 standard deviations of 6.5


def test_dirichlet_goes_from_single_labels_to_iid() -> None:
    labels = np.repeat(np.arange(10), 1000)
    sizes = np.full(20, 200)

    def largest_share(alpha: float) -> float:
        parts = partition.dirichlet(labels, sizes, alpha)
        return float(np.mean([np.bincount(labels[rows]).max() / 200 for rows in parts]))

    assert largest_share(0.005) > 0.9
    assert 0.2 < largest_share(1.0) < 0.5
    assert largest_share(1e4) < 0.17


def test_dirichlet_follows_its_law() -> None:
    """Var of a share under Dirichlet(α·1) is (1/C)(1 − 1/C)/(Cα + 1), plus the multinomial's
    part."""
    classes, alpha, users, size = 5, 0.5, 400, 100
    labels = np.repeat(np.arange(classes), 100_000)  # plenty: no label runs out
    parts = partition.dirichlet(labels, np.full(users, size), alpha)
    shares = np.array([np.bincount(labels[rows], minlength=classes) / size for rows in parts])
    p = 1 / classes
    law = p * (1 - p) / (classes * alpha + 1)
    expected = law + (p * (1 - p) - law) / size
    assert abs(shares.var(axis=0).mean() / expected - 1) < 0.12


@settings(max_examples=60, deadline=None)
@given(
    users=st.integers(1, 30),
    mean=st.integers(2, 50),
    seed=st.integers(0, 99),
)
def test_uneven_sizes_add_up(users: int, mean: int, seed: int) -> None:
    sizes = partition.lognormal_sizes(users * mean, users, 1.0, seed)
    assert sizes.sum() == users * mean and sizes.min() >= 2


@settings(max_examples=40, deadline=None)
@given(
    users=st.lists(st.integers(0, 6), min_size=20, max_size=60),
    minimum=st.integers(1, 3),
    most=st.integers(1, 9),
)
def test_natural_users_keep_their_own_rows(users: list[int], minimum: int, most: int) -> None:
    codes = np.array(users)
    parts, kept = partition.natural(codes, 7, None, minimum, most)
    sizes = np.bincount(codes, minlength=7)
    assert kept.tolist() == [i for i in range(7) if sizes[i] >= minimum]
    for user, rows in zip(kept, parts, strict=True):
        assert set(codes[rows]) == {user}
        assert len(rows) == len(np.unique(rows)) == min(most, sizes[user])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (
            lambda y: partition.equal_sizes(len(y), 40, 2500),
            "too-few-records: 2500 … 100000 … 100",
        ),
        (lambda y: partition.equal_sizes(len(y), 101), "too-few-records: 100"),
        (lambda y: partition.equal_sizes(len(y), 0), "out-of-range: users is 0"),
        (lambda y: partition.similarity(y, [60, 60], 10), "too-few-records: 120 … 100"),
        (lambda y: partition.similarity(y, [10], 101), "out-of-range: similarity is 101"),
        (lambda y: partition.similarity(y, [10], float("nan")), "out-of-range: similarity is nan"),
        (lambda y: partition.similarity(y, [10, 0], 10), "user-without-records: user 1"),
        (lambda y: partition.dirichlet(y, [10], 0.0), "out-of-range: alpha is 0.0"),
        (lambda y: partition.lognormal_sizes(10, 6, 1.0), "too-few-records: need 12 … are 10"),
        (lambda y: partition.natural(y, 10, 11, 1, None), "too-few-users: 10 of 10"),
        (
            lambda y: partition.natural(y, 10, None, 11, None),
            "too-few-records: user has 11 … largest has 10",
        ),
    ],
)
def test_bad_requests(ask: Callable[[np.ndarray], object], said: str) -> None:
    with refuses(said):
        ask(np.arange(100) % 10)
