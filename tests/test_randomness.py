"""The streams: keyed, reproducible, exact in law.

False alarms of the statistical tests have chance 10⁻⁶.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import binom, chi2

from dpscaffold.randomness import streams as module
from dpscaffold.randomness.streams import NoiseStreams, Randomness, _draw_smallest, in_threads

ALARM = 1e-6

#: (records, batch) on both sides of the choice between two ways of drawing.
SMALL, LARGE = (13, 2), (6, 3)


def assert_uniform(counts: Counter, cells: list, total: int) -> None:
    """A chi-square test that all cells are equally likely."""
    assert set(counts) <= set(cells)
    expected = total / len(cells)
    statistic = sum((counts[cell] - expected) ** 2 / expected for cell in cells)
    assert statistic < chi2.isf(ALARM, len(cells) - 1)


def subsets(sampling: str, records: int, batch: int, draws: int, seed: int = 0) -> Counter:
    """How often each subset of records was a batch."""
    batches = Randomness(seed).batches(1, 0, records, batch, draws, sampling)
    return Counter(tuple(sorted(batches.of(k).tolist())) for k in range(draws))


@pytest.mark.parametrize(("records", "batch"), [SMALL, LARGE, (5, 1), (5, 4), (19, 3), (7, 2)])
def test_fixed_batches_are_uniform_over_all_subsets(records, batch):
    """Every subset of b records is equally likely: inclusions, pairs of inclusions and all else
    follow."""
    cells = list(combinations(range(records), batch))
    draws = 60 * len(cells)
    assert_uniform(subsets("fixed", records, batch, draws), cells, draws)


@pytest.mark.parametrize(("records", "batch"), [(400, 20), (400, 80), (400, 399)])
def test_records_and_pairs_are_included_equally_often(records, batch):
    """Inclusion counts of records (chi-square with the hypergeometric covariance) and of
    neighbouring pairs."""
    draws = 2000
    index = Randomness(1).batches(1, 0, records, batch, draws, "fixed").index
    present = np.zeros((draws, records), dtype=bool)
    np.put_along_axis(present, index, True, axis=1)
    assert (present.sum(1) == batch).all(), "a batch holds a record twice"
    q = batch / records
    spread = (
        ((present.sum(0) - draws * q) ** 2).sum() / (draws * q * (1 - q)) * (records - 1) / records
    )
    assert chi2.ppf(ALARM, records - 1) < spread < chi2.isf(ALARM, records - 1)
    pair = q * (batch - 1) / (records - 1)
    for gap in (1, 2, 5, 50, 200):
        both = int((present[:, 0::400] & present[:, gap::400]).sum())
        assert binom.ppf(ALARM / 2, draws, pair) <= both <= binom.isf(ALARM / 2, draws, pair)


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
@given(
    records=st.integers(1, 300),
    share=st.floats(0.0, 1.0),
    steps=st.integers(1, 5),
    seed=st.integers(0, 2**64),
)
def test_a_batch_holds_distinct_records_of_the_user(sampling, records, share, steps, seed):
    """Numbers lie in [0, R) and none twice; a fixed batch has exactly b of them; padding is index
    0."""
    batch = max(1, int(share * records))
    drawn = Randomness(seed).batches(2, 3, records, batch, steps, sampling)
    assert drawn.index.shape[0] == len(drawn.count) == steps
    for k in range(steps):
        chosen = drawn.of(k)
        assert len(chosen) == drawn.count[k] == len(set(chosen.tolist()))
        assert ((chosen >= 0) & (chosen < records)).all()
        assert not drawn.index[k, drawn.count[k] :].any()
        if sampling == "fixed":
            assert len(chosen) == batch


@pytest.mark.parametrize(("records", "batch"), [(4, 2), (5, 1), (7, 1), (4, 4)])
def test_poisson_batches_include_each_record_by_its_own_coin(records, batch):
    """P(S) = q^|S|·(1−q)^(R−|S|) for every subset, empty one included (both ways of drawing)."""
    draws, q = 20000, batch / records
    counts = subsets("poisson", records, batch, draws)
    cells = [s for n in range(records + 1) for s in combinations(range(records), n)]
    law = {s: q ** len(s) * (1 - q) ** (records - len(s)) for s in cells}
    common = [s for s in cells if draws * law[s] >= 5]
    rare = 1 - sum(law[s] for s in common)
    statistic = sum((counts[s] - draws * law[s]) ** 2 / (draws * law[s]) for s in common)
    assert statistic < chi2.isf(ALARM, max(1, len(common) - (rare < 1e-9)))
    seen = sum(counts[s] for s in cells if s not in common)
    assert seen <= binom.isf(ALARM, draws, rare) if rare > 1e-9 else seen == 0


@pytest.mark.parametrize("batch", [10, 100])
def test_the_size_of_a_poisson_batch_is_binomial(batch):
    """|S| ~ Binomial(R, b/R), and no batch is cut short."""
    records, draws = 400, 4000
    count = Randomness(4).batches(1, 0, records, batch, draws, "poisson").count
    q = batch / records
    variance = records * q * (1 - q)
    assert abs(count.mean() - batch) < 5 * np.sqrt(variance / draws)
    assert (
        chi2.ppf(ALARM, draws - 1)
        < ((count - batch) ** 2).sum() / variance
        < chi2.isf(ALARM, draws - 1) * 1.02
    )
    assert count.max() > batch + 2 * np.sqrt(variance)


def test_participants_are_uniform_over_all_subsets():
    """Every set of m users is equally likely in a round, and rounds do not repeat each other."""
    randomness, rounds = Randomness(5), 6000
    drawn = [tuple(randomness.cohort(t, 6, 2).tolist()) for t in range(1, rounds + 1)]
    cells = list(combinations(range(6), 2))
    assert_uniform(Counter(drawn), cells, rounds)
    pairs = Counter(zip(drawn[0::2], drawn[1::2], strict=True))
    assert_uniform(pairs, [(a, b) for a in cells for b in cells], rounds // 2)


@given(
    users=st.integers(1, 200),
    share=st.floats(0.0, 1.0),
    round=st.integers(1, 10**6),
    seed=st.integers(0, 2**70),
)
def test_participants_are_distinct_sorted_users(users, share, round, seed):
    """m different users in increasing order, the same whenever asked."""
    count = max(1, int(share * users))
    chosen = Randomness(seed).cohort(round, users, count)
    assert (
        len(chosen) == count
        and (np.diff(chosen) > 0).all()
        and chosen[0] >= 0
        and chosen[-1] < users
    )
    assert np.array_equal(chosen, Randomness(seed).cohort(round, users, count))


def test_every_stream_has_its_own_key():
    """Seeds, purposes, rounds and users never share a stream."""
    firsts = {}
    for seed in (0, 1, 2, 2**32, 2**64 + 1):
        randomness = Randomness(seed)
        firsts["weights", seed] = randomness.weights().random()
        for round in range(1, 12):
            for user in range(12):
                firsts["noise", seed, round, user] = randomness.normals(round, user).random()
                stream = randomness._stream(module.BATCHES, round, user)
                firsts["batches", seed, round, user] = stream.random()
            firsts["participants", seed, round] = randomness._stream(
                seed, module.PARTICIPANTS, round
            ).random()
    assert len(set(firsts.values())) == len(firsts)
    purposes = (module.PARTICIPANTS, module.BATCHES, module.NOISE, module.WEIGHTS)
    assert len(set(purposes)) == 4


def test_batches_differ_by_user_round_and_step():
    """No batch of another user, round or step is the same, in either way of drawing."""
    for records, batch in ((4000, 800), (4000, 100)):
        seen = set()
        for round in (1, 2, 3):
            for user in (0, 1, 2):
                drawn = Randomness(0).batches(round, user, records, batch, 4, "fixed")
                seen |= {tuple(sorted(drawn.of(k).tolist())) for k in range(4)}
        assert len(seen) == 36


@given(
    blocks=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    users=st.integers(1, 4),
    size=st.integers(1, 9),
)
def test_noise_does_not_depend_on_the_blocks_it_is_drawn_in(blocks, users, size):
    """Drawing a few steps at a time, all at once, or one vector at a time as the loop does, is the
    same noise."""
    randomness, steps = Randomness(8), sum(blocks)

    def streams() -> NoiseStreams:
        return NoiseStreams([randomness.normals(1, u) for u in range(users)], size)

    whole = streams().draw(steps)
    assert whole.shape == (steps, users, size) and whole.dtype == np.float32
    parts = streams()
    assert np.array_equal(np.concatenate([parts.draw(n) for n in blocks]), whole)
    for user in range(users):
        alone = randomness.normals(1, user)
        one_by_one = [alone.standard_normal(size, dtype="float32") for _ in range(steps)]
        assert np.array_equal(whole[:, user], np.stack(one_by_one))


def test_noise_drawn_in_threads_is_the_same_noise():
    """Large draws go to threads; each user's numbers are still those of its own stream."""
    made = NoiseStreams([Randomness(1).normals(1, u) for u in range(6)], 20000).draw(2)
    for user in range(6):
        alone = Randomness(1).normals(1, user).standard_normal((2, 20000), dtype=np.float32)
        assert np.array_equal(made[:, user], alone)
    assert in_threads(lambda u: u * u, 5) == [0, 1, 4, 9, 16]


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_batches_do_not_depend_on_how_many_numbers_are_held(sampling, monkeypatch):
    """Bounding the memory of a draw does not change the batches."""
    whole = Randomness(2).batches(1, 0, 50, 25, 40, sampling)
    monkeypatch.setattr(module, "_BLOCK", 120)
    held = Randomness(2).batches(1, 0, 50, 25, 40, sampling)
    assert np.array_equal(whole.count, held.count) and np.array_equal(whole.index, held.index)


@pytest.mark.parametrize(("records", "batch"), [(50, 25), (50, 3), (9, 9)])
def test_batches_drawn_into_place_are_the_same_batches(records, batch):
    """An array that is handed in, even a strided view, receives the very indices a new one
    would."""
    fresh = Randomness(2).batches(1, 0, records, batch, 7, "fixed")
    place = np.full((7, batch + 4), -1)
    given = Randomness(2).batches(1, 0, records, batch, 7, "fixed", place[:, :batch])
    assert np.array_equal(given.index, fresh.index) and np.array_equal(
        place[:, :batch], fresh.index
    )
    assert (place[:, batch:] == -1).all()


def test_a_full_batch_is_every_record():
    """b = R leaves nothing to draw."""
    assert (np.sort(Randomness(0).batches(1, 0, 7, 7, 3, "fixed").index) == np.arange(7)).all()
    assert (Randomness(0).batches(1, 0, 7, 7, 3, "poisson").count == 7).all()


@given(
    numbers=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=60, unique=True),
    share=st.floats(0, 1),
)
@example(numbers=[0.99 + k / 10_000 for k in range(40)], share=0.1)  # all beyond any bound
@example(numbers=[k / 40 for k in range(40)], share=0.5)
def test_the_smallest_keys_are_told_exactly(numbers, share):
    batch = max(1, round(share * len(numbers)))
    rows = np.array([numbers, numbers[::-1], sorted(numbers)]) + 0.0  # no minus zero: its pattern
    index = np.empty((3, batch), dtype=np.int64)  # would be the largest
    _draw_smallest(Given(rows), len(numbers), index)
    low = (1 << max(1, (len(numbers) - 1).bit_length())) - 1
    for row, found in zip(rows, index, strict=True):
        keys = [(key & ~low) | k for k, key in enumerate(row.view(np.uint64).tolist())]
        assert sorted(found) == sorted(key & low for key in sorted(keys)[:batch])


class Given:
    """A stream that hands out what it is given."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.numbers = numbers

    def random(self, out: np.ndarray) -> np.ndarray:
        out[:] = self.numbers
        return out


@pytest.mark.parametrize("batch", [900, 1000, 1100, 1200, 1300, 1400])
def test_the_order_within_a_batch_is_that_of_the_keys_below_the_bound(batch):
    """Sums are taken in that order, so it is part of what a seed means. Keys near the bound share
    its upper bits, and their numbers decide on which side they are."""
    stream, records = np.random.default_rng(4), 6000
    bound = (batch + 6 * (batch * (1 - batch / records)) ** 0.5) / records
    low = np.uint64(8191)
    rows = stream.random((20, records))
    rows[:, 100::70] = bound
    keys = (rows.view(np.uint64) & ~low) | np.arange(records, dtype=np.uint64)
    index = np.empty((20, batch), dtype=np.int64)
    _draw_smallest(Given(rows), records, index)
    for row, found in zip(keys, index, strict=True):
        few = row[row.view(np.float64) < bound]
        few.partition(batch - 1)
        assert np.array_equal(found, few[:batch] & low)
