"""Draws on the device: known answers, exact laws, and streams that depend on their address alone.

Every test runs on the CPU, and on a GPU where there is one (``pytest tests/test_devicedraws.py``).
False alarms of the statistical tests have chance 10⁻⁶.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, chi2, kstest, norm

from dpscaffold.engine import draws as devicedraws
from dpscaffold.engine.draws import DeviceDraws, poisson_width, sizes_of, stream_keys
from dpscaffold.randomness.philox import philox, standard_normals, whole_numbers

ALARM = 1e-6
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
each_device = pytest.mark.parametrize("device", [torch.device(name) for name in DEVICES], ids=str)
CPU = torch.device("cpu")


def drawn_at(device, addresses, records=None, batches=None) -> DeviceDraws:
    """The draws at these (seed, round, user), of R_u and b_u."""
    where = [[user, round, *stream_keys(seed)] for seed, round, user in addresses]
    sizes = sizes_of(np.array(records or [1] * len(where)), np.array(batches or [1] * len(where)))
    return DeviceDraws(torch.tensor(where, device=device), torch.from_numpy(sizes).to(device))


def draws(device, users=1, seed=0, round=1, first=0, records=None, batches=None) -> DeviceDraws:
    addresses = [(seed, round, user) for user in range(first, first + users)]
    return drawn_at(device, addresses, records, batches)


def fixed(made: DeviceDraws, steps: int):
    """Batches with no more room than they need."""
    records, batches = made.sizes[:, 0].tolist(), made.sizes[:, 1].tolist()
    return made.fixed(steps, max(records), max(batches), len(set(batches)) == 1)


def poisson(made: DeviceDraws, steps: int, width: int | None = None):
    """Batches with room for all records."""
    most = int(made.sizes[:, 0].max())
    return made.poisson(steps, most, width or most)


DRAWN = {"fixed": fixed, "poisson": poisson}


# --- the generator ---

#: Random123's published answers for philox4x32 with ten rounds: counter, key, output.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@each_device
@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(device, counter, key, answer):
    """The vectors that its authors published."""
    found = philox(
        tuple(torch.tensor(word, device=device) for word in words(counter)),
        tuple(torch.tensor(word, device=device) for word in words(key)),
    )
    assert [int(word) for word in found] == words(answer)


def slow_philox(counter: list[int], key: list[int]) -> list[int]:
    """The definition in Python's own integers."""
    for _ in range(10):
        left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            (right >> 32) ^ counter[1] ^ key[0],
            right & 0xFFFFFFFF,
            (left >> 32) ^ counter[3] ^ key[1],
            left & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


@each_device
@settings(max_examples=50)
@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_every_word_is_that_of_the_definition(device, values):
    """Whatever counter and key, in a tensor of several."""
    tensors = [torch.tensor([value, value ^ 1], device=device) for value in values]
    found = philox(tuple(tensors[:4]), tuple(tensors[4:]))
    assert [int(word[0]) for word in found] == slow_philox(values[:4], values[4:])


@each_device
def test_a_stream_is_where_its_address_says(device):
    """Word by word: key from seed and purpose, counter (place, step, user, round)."""
    made = drawn_at(device, [(9, 5, 70), (9, 5, 71)], [8, 8], [8, 8])
    keys = made._whole(3, 5, 8)
    normals = made.normals(3, 2, 16)
    for k, user, at in product(range(2), range(2), range(4)):
        counter = [at, 3 + k, 70 + user, 5]
        key = stream_keys(9)
        batches = whole_numbers(torch.tensor(slow_philox(counter, list(key[:2])))[:, None])
        assert [
            int(one) for one in keys[k, user, 2 * at : 2 * at + 2]
        ] == batches.flatten().tolist()
        noise = standard_normals(torch.tensor(slow_philox(counter, list(key[2:])))[:, None])
        found = normals[k, user, 4 * at : 4 * at + 4].cpu()
        torch.testing.assert_close(found, noise.flatten(), rtol=1e-6, atol=1e-6)


def test_keys_differ_by_seed_and_purpose():
    """For any integer as a seed."""
    seeds = [0, 1, 2, 11, 12, 2**32, 2**64 + 1, 10**40]
    keys = [key for seed in seeds for key in (stream_keys(seed)[:2], stream_keys(seed)[2:])]
    assert len(set(keys)) == len(keys)


GOLDEN = {
    "fixed": [
        [[0, 0, 0, 0, 1, 8], [3, 6, 9, 12, 15, 18]],
        [[0, 0, 0, 0, 4, 8], [10, 14, 15, 16, 18, 19]],
    ],
    "poisson": [
        [[0, 1, 2, 7, 8, 0, 0], [3, 6, 8, 9, 12, 15, 18]],
        [[4, 8, 0, 0, 0, 0, 0], [10, 18, 0, 0, 0, 0, 0]],
    ],
    "normals": [[-0.13755, 0.823, 0.62001], [-1.4651, 1.69031, 0.42362]],
}


def test_streams_are_those_of_ever():
    """A seed means the same run in every version: the numbers of 0.2.0."""
    made = drawn_at(CPU, [(7, 3, 5), (8, 2, 2**31)], [9, 20], [3, 6])
    assert {
        "fixed": fixed(made, 2).index.sort(dim=-1).values.tolist(),
        "poisson": poisson(made, 2, 7).index.tolist(),
        "normals": [[round(x, 5) for x in row] for row in made.normals(1, 1, 3)[0].tolist()],
    } == GOLDEN


@each_device
@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4))
def test_every_bit_of_the_words_is_used(device, values):
    """Whole numbers of 63 bits; radius and angle of 40 and 24 bits, against the formula."""
    four = tuple(torch.tensor([value], device=device) for value in values)
    a, b, c, d = values
    pair = [(a % 2**31) * 2**32 + b, (c % 2**31) * 2**32 + d]
    assert whole_numbers(four).tolist() == pair
    exact = []
    for high, low in ((a, b), (c, d)):
        radius = math.sqrt(-2 * math.log(((high * 256 + low // 2**24) + 0.5) / 2**40))
        angle = 2 * math.pi * ((low % 2**24) + 0.5) / 2**24
        exact += [radius * math.cos(angle), radius * math.sin(angle)]
    assert standard_normals(four).tolist() == pytest.approx(exact, rel=1e-6, abs=1e-9)


# --- addresses ---


@each_device
@pytest.mark.parametrize("what", ["normals", "fixed", "poisson"])
def test_draws_depend_on_their_address_alone(device, what, monkeypatch):
    """Alone or stacked with other users, rounds and runs of other sizes, all steps or some, with
    little memory or much: the same draws."""
    seeds, rounds, users = [3, 3, 8, 8], [1, 1, 7, 7], [0, 5, 5, 2**32 - 1]
    records, batches = [40, 9, 23, 40], [8, 9, 3, 1]

    def drawn(these, first, steps):
        addresses = [(seeds[u], rounds[u], users[u]) for u in these]
        made = drawn_at(device, addresses, *([own[u] for u in these] for own in (records, batches)))
        if what == "normals":
            return [made.normals(first, steps, 11)[:, i] for i in range(len(these))]
        got = DRAWN[what](made, first + steps)
        weight = torch.ones_like(got.index) if got.weight is None else got.weight
        return [
            [
                sorted(got.index[k, i][weight[k, i] > 0].tolist())
                for k in range(first, first + steps)
            ]
            for i in range(len(these))
        ]

    def same(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    whole = drawn([0, 1, 2, 3], 0, 6)
    for u in range(4):
        assert same(drawn([u], 0, 6)[0], whole[u])
        assert same(drawn([3, u], 2, 3)[1], whole[u][2:5])
    monkeypatch.setattr(devicedraws, "_HELD", 1)
    assert all(same(a, b) for a, b in zip(drawn([0, 1, 2, 3], 0, 6), whole, strict=True))


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs a GPU")
def test_both_devices_draw_the_same():
    """The same integers; normals to the last digits of float32."""
    sizes = {"records": [50, 9, 20], "batches": [9, 3, 20]}
    here, there = draws(CPU, 3, **sizes), draws(torch.device("cuda"), 3, **sizes)
    for draw in DRAWN.values():
        a, b = (draw(made, 4).index.cpu().sort(dim=-1).values for made in (here, there))
        assert torch.equal(a, b)
    torch.testing.assert_close(
        here.normals(0, 4, 999), there.normals(0, 4, 999).cpu(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.skipif(len(DEVICES) < 2, reason="needs a GPU")
def test_nothing_waits_for_the_device():
    """Drawing does not synchronise."""
    device = torch.device("cuda")
    made = draws(device, 2, records=[50, 9], batches=[9, 3])

    def draw():
        made.normals(0, 3, 10)
        made.fixed(3, 50, 9, False)
        made.poisson(3, 50, 50)

    draw()  # compiled, and that waits
    torch.cuda.set_sync_debug_mode("error")
    try:
        draw()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- batches ---


@each_device
@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**64), steps=st.integers(1, 4))
def test_batches_hold_distinct_records_and_are_padded_with_weight_zero(device, data, seed, steps):
    """Of every user's own records, none twice; a fixed batch has exactly b_i."""
    records = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    batches = [data.draw(st.integers(1, count)) for count in records]
    made = draws(device, len(records), seed, records=records, batches=batches)
    for what, draw in DRAWN.items():
        got = draw(made, steps)
        weight = torch.ones_like(got.index) if got.weight is None else got.weight
        for u, k in product(range(len(records)), range(steps)):
            real = got.index[k, u][weight[k, u] == 1].sort().values
            assert bool((real[1:] > real[:-1]).all())
            assert len(real) == 0 or 0 <= int(real[0]) <= int(real[-1]) < records[u]
            assert bool((got.index[k, u][weight[k, u] == 0] == 0).all())
            assert what == "poisson" or len(real) == batches[u]


def assert_uniform(counts: Counter, cells: list, total: int) -> None:
    """A chi-square test that all cells are equally likely."""
    assert set(counts) <= set(cells)
    expected = total / len(cells)
    statistic = sum((counts[cell] - expected) ** 2 / expected for cell in cells)
    assert statistic < chi2.isf(ALARM, len(cells) - 1)


@each_device
@pytest.mark.parametrize(("records", "batch"), [(5, 1), (5, 4), (6, 3), (13, 2), (9, 4)])
@pytest.mark.parametrize("axis", ["steps", "users"])
def test_fixed_batches_are_uniform_over_all_subsets(device, records, batch, axis):
    """Every subset of b records is equally likely, over the steps of one user and over users."""
    cells = list(combinations(range(records), batch))
    total = 60 * len(cells) + 40
    users, steps = (1, total) if axis == "steps" else (total, 1)
    made = draws(device, users, records=[records] * users, batches=[batch] * users)
    index = fixed(made, steps).index.sort(dim=-1).values
    counts = Counter(tuple(row) for row in index.view(-1, batch).tolist())
    assert_uniform(counts, cells, total)


@each_device
def test_records_are_included_equally_often_in_large_batches(device):
    """Inclusion counts, with the hypergeometric covariance, neither too uneven nor too even; pairs
    of consecutive steps overlap as often as independent ones."""
    records, batch, steps = 400, 80, 2000
    index = fixed(draws(device, records=[records], batches=[batch]), steps).index[:, 0].cpu()
    present = torch.zeros(steps, records).scatter_(1, index, 1.0).double()
    q = batch / records
    spread = float(((present.sum(0) - steps * q) ** 2).sum() / (steps * q * (1 - q)))
    spread *= (records - 1) / records
    assert chi2.ppf(ALARM, records - 1) < spread < chi2.isf(ALARM, records - 1)
    overlap = float((present[1:] * present[:-1]).sum(1).mean())
    deviation = math.sqrt(batch * q * (1 - q) ** 2 * records / (records - 1) / (steps - 1))
    assert abs(overlap - batch * q) < norm.isf(ALARM / 2) * deviation


@each_device
@pytest.mark.parametrize(("records", "batch"), [(4, 1), (5, 3), (3, 3)])
def test_poisson_batches_hold_each_record_independently(device, records, batch):
    """All subsets, each with its own probability q^n(1 − q)^(R−n)."""
    total, q = 20_000, batch / records
    got = poisson(draws(device, records=[records], batches=[batch]), total)
    kept = [
        tuple(index[weight > 0].tolist())
        for index, weight in zip(got.index[:, 0].cpu(), got.weight[:, 0].cpu(), strict=True)
    ]
    counts = Counter(kept)
    cells = [c for n in range(records + 1) for c in combinations(range(records), n)]
    chances = {c: q ** len(c) * (1 - q) ** (records - len(c)) for c in cells}
    possible = [c for c in cells if chances[c] > 0]
    assert set(counts) <= set(possible)
    statistic = sum((counts[c] - total * chances[c]) ** 2 / (total * chances[c]) for c in possible)
    assert statistic < chi2.isf(ALARM, max(1, len(possible) - 1))


@each_device
def test_sizes_of_poisson_batches_are_binomial(device):
    """Mean and variance of 4,000 sizes, within their confidence; a rate 2 % off is rejected."""
    records, batch, total = 500, 100, 4000
    made = draws(device, records=[records], batches=[batch])
    sizes = poisson(made, total).weight.sum((1, 2)).double().cpu()
    mean, variance = batch, batch * (1 - batch / records)
    limit = norm.isf(ALARM / 2)
    assert abs(float(sizes.mean()) - mean) < limit * math.sqrt(variance / total) < 0.02 * mean
    assert chi2.ppf(ALARM / 2, total) < total * float(sizes.var()) / variance
    assert total * float(sizes.var()) / variance < chi2.isf(ALARM / 2, total)


@each_device
def test_a_poisson_batch_is_never_truncated(device):
    """With too little room the batch says so; with enough it is the same in any width."""
    made = draws(device, 2, records=[30, 40], batches=[15, 10])
    whole, short, wide = (poisson(made, 20, width) for width in (40, 12, 50))
    assert not bool(whole.overflowed) and bool(short.overflowed) and not bool(wide.overflowed)
    assert torch.equal(wide.weight[..., :40], whole.weight) and not wide.weight[..., 40:].any()
    assert torch.equal(wide.index[..., :40], whole.index)


@settings(max_examples=150)
@given(records=st.integers(1, 200_000), share=st.floats(0, 1))
def test_the_width_is_passed_with_a_chance_below_2_to_the_minus_128(records, share):
    """By scipy's binomial tail; and it is not far wider than needed."""
    batch = max(1, int(share * records))
    width = poisson_width(records, batch)
    assert batch <= width <= records
    tail = binom.logsf(width, records, batch / records) / math.log(2)
    assert width == records or tail < -128
    spread = math.sqrt(batch * (1 - batch / records))
    assert width <= batch + 14 * spread + 100


# --- normals ---


@each_device
def test_normals_are_standard_normal(device):
    """Kolmogorov–Smirnov over a million, mean and variance within their confidence, and the same
    test refuses a scale that is 1 % off."""
    values = draws(device, 4).normals(0, 25, 10_000).flatten().double().cpu().numpy()
    count = len(values)
    assert count == 10**6 and values.dtype == np.float64

    def accepted(sample):
        variance = count * sample.var()
        return (
            kstest(sample, "norm", method="asymp").pvalue > ALARM
            and abs(sample.mean()) < norm.isf(ALARM / 2) / math.sqrt(count)
            and chi2.ppf(ALARM / 2, count) < variance < chi2.isf(ALARM / 2, count)
        )

    assert accepted(values)
    assert not accepted(1.01 * values) and not accepted(0.99 * values)
    assert not accepted(values + 0.01)
    fourth = np.mean(values**4)  # its variance is 96/n
    assert abs(fourth - 3) < norm.isf(ALARM / 2) * math.sqrt(96 / count)


@each_device
@pytest.mark.parametrize("size", [1, 2, 3, 5, 10])
def test_every_place_of_a_vector_is_standard_normal(device, size):
    """The four normals of a block, and vectors that end within one."""
    values = draws(device, 200).normals(0, 100, size).double().cpu()
    squares = values.square().sum((0, 1))
    assert bool((squares > chi2.ppf(ALARM, 20_000)).all())
    assert bool((squares < chi2.isf(ALARM, 20_000)).all())
    if size > 1:
        correlation = torch.corrcoef(values.flatten(0, 1).T) - torch.eye(size)
        assert float(correlation.abs().max()) < norm.isf(ALARM / 2 / size**2) / math.sqrt(20_000)
        squared = torch.corrcoef(values.flatten(0, 1).square().T) - torch.eye(size)
        assert float(squared.abs().max()) < norm.isf(ALARM / 2 / size**2) / math.sqrt(20_000) * 1.5


@each_device
def test_tails_are_full(device):
    """Ten million draws beyond 3, 4 and 5 deviations, and the farthest that a block can reach."""
    values = draws(device, 10).normals(0, 10, 100_000).abs()
    for limit in (3.0, 4.0, 5.0):
        found, chance = int((values > limit).sum()), 2 * norm.sf(limit)
        low, high = binom.ppf(ALARM / 2, 10**7, chance), binom.isf(ALARM / 2, 10**7, chance)
        assert low <= found <= high
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    farthest = standard_normals((zero, zero, zero, zero))
    assert float(farthest.max()) == pytest.approx(math.sqrt(2 * 41 * math.log(2)), rel=1e-6)
    ones = zero + 0xFFFFFFFF
    assert bool(standard_normals((ones, ones, ones, ones)).isfinite().all())


@each_device
def test_streams_of_other_users_rounds_steps_runs_and_purposes_are_independent(device):
    """Neighbouring addresses: correlations of values and of squares are zero within their
    confidence."""
    size = 50_000
    addresses = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 2, 1), (0, 0, 1), (0, 1, 2**31)]
    made = drawn_at(device, addresses)
    rows = made.normals(0, 3, size).flatten(0, 1).double().cpu()
    count = len(rows)
    limit = norm.isf(ALARM / count**2) / math.sqrt(size)
    for values in (rows, rows.square()):
        apart = torch.corrcoef(values) - torch.eye(count)
        assert float(apart.abs().max()) < 1.1 * limit
    keys = made.where[:, 2:4], made.where[:, 4:6]
    assert not bool((keys[0] == keys[1]).all(dim=1).any())  # batches and noise share no key
