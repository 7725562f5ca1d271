"""Clipping over all floats: whatever records and parameters hold, a record adds at most C.

A seed of ordinary numbers rarely leaves the range in which squares are harmless. Here every number
is any float32: subnormal, huge, infinite, NaN.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from refusals import refuses
from torch import Tensor
from world import (
    TASKS,
    clip_factor,
    clipped_products,
    clipped_sums,
    federation,
    final,
    mean_of,
    released,
    row_squares,
    setting,
)

from dpscaffold import Gaussian, Task

DIMENSION, CLASSES, RECORDS = 3, 3, 4
ALLOWED = 1 + 1e-6
HUGE = float(np.finfo(np.float32).max)

#: Numbers at which float32 squares, products or exponentials turn over, and any other float32.
edges = st.sampled_from(
    [0.0, 1.0, -1.0, 1e-45, 1e-38, 1e-23, 1e-19, 1e5, 1e10, 1e19, -1.8e19, 1e20, 1e30, 1e37, HUGE,
     -HUGE, math.inf, -math.inf, math.nan]
)  # fmt: skip
anything = st.one_of(edges, st.floats(width=32), st.floats(-3, 3, width=32))
tables = arrays(np.float32, (RECORDS + 1, DIMENSION), elements=anything)
label_lists = st.lists(st.integers(0, CLASSES - 1), min_size=RECORDS + 1, max_size=RECORDS + 1)
clips = st.one_of(
    st.sampled_from([1e-20, 1e-12, 1e-5, 1.0, 1e6, 1e30]),
    st.floats(-18, 9).map(lambda exponent: 10.0**exponent),
)
each_task = pytest.mark.parametrize("task", TASKS)
each_path = pytest.mark.parametrize("engine", ["loop", "simulator"])


def make(task: str) -> Task:
    return TASKS[task](DIMENSION, CLASSES)


def parameters(task: Task):
    """Zero, ordinary, near the end of float32, or any floats."""
    size = task.parameters
    ordinary = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    fixed = [0 * ordinary, ordinary, 1e10 * ordinary, 1e37 * ordinary, np.sign(ordinary) * HUGE]
    return st.one_of(st.sampled_from(fixed), arrays(np.float32, size, elements=anything))


def clipped(task: Task, params, x, y, clip, weight: Tensor | None = None) -> Tensor:
    """The clipped sum of one user, (P,)."""
    share = None if weight is None else weight[None]
    return clipped_sums(task, params[None], x[None], y[None], torch.tensor([clip]), share)[0][0]


def length(value: Tensor) -> float:
    return float(value.double().norm())


def drawn(data: st.DataObject, task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters, and one record more than a batch holds."""
    params = torch.from_numpy(data.draw(parameters(task)).astype(np.float32))
    return params, torch.from_numpy(data.draw(tables)), torch.tensor(data.draw(label_lists))


def overflows(params: Tensor, row: Tensor) -> bool:
    """Whether a product may be infinite: of two such, inf − inf depends on the order of a sum, and
    that on the processor and on how many rows there are."""
    return not float(params.abs().max()) * float(row.abs().max()) < 1e37


# --- the laws ---


@each_task
@settings(max_examples=60)
@given(data=st.data(), clip=clips)
def test_no_record_adds_more_than_c_and_replacing_one_moves_the_sum_by_at_most_2c(task, data, clip):
    """Over all floats: the sum is finite, a record alone is at most C(1 + 1e-6) long, padding adds
    nothing to it (but may decide whether a record that overflows counts), and the sums of
    neighbouring batches differ by at most twice that (and by the rounding of the sums
    themselves)."""
    made = make(task)
    params, x, y = drawn(data, made)
    clip = float(np.float32(clip))
    for j in range(RECORDS):
        alone = clipped(made, params, x[j : j + 1], y[j : j + 1], clip)
        assert bool(alone.isfinite().all())
        assert length(alone) <= clip * ALLOWED
        padded = clipped(made, params, x, y, clip, torch.eye(RECORDS + 1)[j])
        if alone.any() == padded.any() or not overflows(params, x[j]):
            assert torch.equal(alone, padded) or length(alone - padded) <= 1e-6 * clip
        assert length(padded) <= clip * ALLOWED
    whole = clipped(made, params, x[:-1], y[:-1], clip)
    other = clipped(made, params, x[1:], y[1:], clip)
    rounding = 2 * RECORDS**2 * 2.0**-24 * clip
    assert bool(whole.isfinite().all())
    assert length(whole.double() - other.double()) <= 2 * clip * ALLOWED + rounding


@each_path
@each_task
@settings(max_examples=60)
@given(data=st.data(), clip=st.sampled_from([1e-5, 0.7, 100.0]), unit=st.sampled_from(["a", "b"]))
def test_the_query_of_either_engine_is_bounded_and_finite(engine, task, data, clip, unit):
    """What is released before its noise: at most C(1 + 1e-6)·records/b for records, and C(1 + 1e-6)
    for a whole user with a Poisson batch of any size."""
    made = make(task)
    params, x, y = drawn(data, made)
    sampling = "fixed" if unit == "a" else "poisson"
    privacy = Gaussian(clip, 1.0, sampling, "record" if unit == "a" else "user")
    query = released(engine, made, privacy, params, x, y, 2, CLASSES)
    most = clip * (RECORDS + 1) / 2 if unit == "a" else clip
    assert bool(query.isfinite().all())
    assert length(query) <= most * ALLOWED


@each_path
@each_task
@settings(max_examples=40)
@given(data=st.data())
def test_the_median_clip_survives_every_float(engine, task, data):
    """No guarantee is stated for it, but gradients that are not finite neither count nor spread."""
    made = make(task)
    params, x, y = drawn(data, made)
    query = released(engine, made, Gaussian("median", 1.0), params, x, y, 2, CLASSES)
    assert bool(query.isfinite().all())


@each_task
@settings(max_examples=40)
@given(clip=st.sampled_from([1e-5, 0.5, 3.0]), wild=anything, seed=st.integers(0, 10**6))
def test_a_wild_record_changes_no_other(task, clip, wild, seed):
    """The sum with it is the sum without it plus what it adds alone."""
    made = make(task)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(RECORDS, DIMENSION, generator=generator)
    y = torch.randint(0, CLASSES, (RECORDS,), generator=generator)
    params = torch.randn(made.parameters, generator=generator)
    x[1, 2] = wild
    rest = torch.tensor([1.0, 0.0, 1.0, 1.0])
    whole = clipped(made, params, x, y, clip)
    parts = clipped(made, params, x, y, clip, rest) + clipped(made, params, x, y, clip, 1 - rest)
    assert length(whole - parts) <= 1e-6 * RECORDS * clip
    tame = torch.where(rest[:, None] == 1, x, 0.0)
    assert torch.equal(
        clipped(made, params, x, y, clip, rest), clipped(made, params, tame, y, clip, rest)
    )


@each_task
def test_every_magnitude_that_float32_holds_is_clipped_in_its_own_direction(task):
    """A finite gradient is shortened to C, not dropped: its direction is that of float64."""
    made = make(task)
    params = torch.zeros(made.parameters) if task == "logistic" else made.initial(0)
    for exponent in range(-30, 38):
        x = torch.tensor([[1.0, -2.0, 0.5]]) * 10.0**exponent
        if task == "module" and exponent > 18:  # its own forward pass overflows
            break
        found = clipped(made, params, x, torch.tensor([1]), 1e-5).double()
        exact = torch.func.grad(
            lambda p, x=x: made.losses(p, made.prepare(x.double()), torch.tensor([1]))[0]
        )(params.double())
        exact *= 1e-5 / exact.norm()
        assert length(found - exact) <= 1e-5 * (1e-4 if task == "module" else 2e-6), exponent


# --- each case that was seen ---


@each_path
@pytest.mark.parametrize(("task", "size"), [("logistic", 1e20), ("mlp", 1e19), ("module", 1e19)])
def test_one_huge_finite_record_leaves_the_upload_finite(engine, task, size):
    """A record of 10²⁰ (10¹⁹ for a network) made the whole upload NaN."""
    data = federation()
    data.train.features[2] = size
    run = setting("scaffold", task, "fixed", data, user_ratio=1.0, data_ratio=1.0, local_steps=9)
    assert bool(final(engine, run, rounds=2).params.isfinite().all())


@each_path
@each_task
@pytest.mark.parametrize("size", [1e19, 1e20, 1e30])
@pytest.mark.parametrize("label", range(CLASSES))
def test_a_huge_record_that_is_classified_beyond_doubt_adds_no_nan(engine, task, size, label):
    """An error of exactly 0 times an overflowing norm was NaN: so was everyone's sum."""
    made = make(task)
    params = torch.randn(made.parameters, generator=torch.Generator().manual_seed(1))
    x = torch.cat([torch.full((1, DIMENSION), size), torch.randn(2, DIMENSION)])
    labels = torch.tensor([label, 0, 1])
    query = released(engine, made, Gaussian(1.0, 1.0), params, x, labels, 3, CLASSES)
    assert bool(query.isfinite().all()) and 0 < length(query) <= ALLOWED


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5, 1e10, 1e15, 1e18, 1.8e19, 1e25, 1e38])
@pytest.mark.parametrize("clip", [1e-19, 1e-12, 1e-5])
def test_underflow_lets_no_record_through(size, clip):
    """An error δ whose square vanishes, times large features: 47 C were added at C = 10⁻⁵ and
    features of 1.8·10¹⁹. The sweep is over all δ that float32 holds."""
    made = make("logistic")
    x, y = torch.tensor([[size, 0.0, 0.0]]), torch.tensor([0])
    seen = 0.0
    for margin in np.linspace(5, 103, 99):  # the logit by which the right class leads
        params = torch.zeros(made.parameters)
        params[0] = margin / size
        seen = max(seen, length(clipped(made, params, x, y, clip)) / float(np.float32(clip)))
    assert 1 - 1e-6 <= seen <= ALLOWED


def test_the_loop_drops_a_gradient_that_is_not_finite_as_a_whole():
    """Its finite numbers may be of any size: they do not pass next to a NaN."""
    task, privacy = make("logistic"), Gaussian(0.7, 1.0)
    for wild in (math.nan, math.inf, -math.inf):
        gradients = torch.zeros(2, 12)
        gradients[0], gradients[0, 3] = 1e30, wild
        gradients[1, 0] = 0.5
        found = mean_of(gradients, task, privacy, DIMENSION, CLASSES)
        assert torch.equal(found, gradients[1])


@each_task
@pytest.mark.parametrize("clip", [None, 0.5, "median"])
@pytest.mark.parametrize("wild", [math.nan, math.inf, 1e38])
def test_padding_that_is_not_finite_poisons_nobody(task, clip, wild):
    """A padded row has weight 0 and adds nothing, whatever it holds."""
    made = make(task)
    x, y = torch.randn(1, 3, DIMENSION), torch.tensor([[0, 1, 2]])
    weight = torch.tensor([[1.0, 1.0, 0.0]])
    params = torch.randn(1, made.parameters)
    asked = torch.tensor([clip]) if isinstance(clip, float) else clip
    expected = clipped_sums(made, params, x, y, asked, weight)
    x = x.clone()
    x[0, 2] = wild
    found = clipped_sums(made, params, x, y, asked, weight)
    torch.testing.assert_close(found, expected)


@each_path
@each_task
@pytest.mark.parametrize("size", [3e38, -3e38, 1e30])
def test_no_record_decides_whether_an_upload_is_finite(engine, task, size):
    """Parameters near 3·10³⁸ made the gradients of ordinary records NaN; they add zero now."""
    made = make(task)
    signs = torch.randn(made.parameters, generator=torch.Generator().manual_seed(3)).sign()
    x, y = torch.randn(5, DIMENSION), torch.tensor([0, 1, 2, 0, 1])
    query = released(engine, made, Gaussian(0.7, 1.0), size * signs, x, y, 2, CLASSES)
    assert bool(query.isfinite().all())
    assert length(query) <= 0.7 * 5 / 2 * ALLOWED


# --- the parts ---


@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_a_batch_of_no_records_is_a_zero_sum(task):
    """Poisson batches of all users may be empty at once."""
    made = make(task)
    x, y = torch.zeros(2, 0, DIMENSION), torch.zeros(2, 0, dtype=torch.int64)
    total, _ = clipped_sums(made, torch.ones(2, made.parameters), x, y, torch.ones(2))
    assert not total.any()


def test_bounds_out_of_float32s_reach_are_refused_or_count_as_zero():
    """A subnormal C could not be kept to 1e-6; sums of gradients of length 3e38 overflow."""
    for clip in (1e-40, 1e-21, 1e31, HUGE):
        with refuses("clip-not-exact: from 1e-20"):
            Gaussian(clip=clip)
    assert Gaussian(clip=math.inf, noise=0.0).clip == math.inf
    assert not clip_factor(torch.tensor([[1.0, 1e-30]]), torch.tensor([1e-25])).any()


def test_an_infinite_clip_still_sums_to_something_finite():
    """Without noise nothing is guaranteed, but long gradients end at 1e30 and others are whole."""
    left = torch.tensor([[[1.0, 1.0, HUGE]]])
    right = torch.tensor([[[2.0, HUGE, HUGE]]])
    total, errors = clipped_products(left, right, torch.tensor([math.inf]))
    assert errors[0, 0, 0] == 1.0
    torch.testing.assert_close(total, torch.tensor([[[2e30]]]))


@example(columns=3073, value=1.1)
@given(columns=st.integers(1, 4000), value=st.floats(1 / 128, 128, width=32))
def test_squares_of_long_rows_are_exact_to_their_last_bit(columns, value):
    """A float32 dot product of 3073 equal numbers is 2e-5 off, which would pass the clip."""
    rows = torch.full((2, columns), value)
    exact = columns * float(np.float32(value)) ** 2
    assert float(row_squares(rows)[0]) == pytest.approx(exact, rel=1e-7)


# --- the form without a look, for GPUs --------------------------------------------------------


@given(
    left=arrays(np.float32, (1, 2, 3), elements=anything),
    right=arrays(np.float32, (1, 4, 3), elements=anything),
    clip=clips,
    bias=st.booleans(),
    weight=st.sampled_from([None, (1.0, 0.0, 1.0)]),
)
@settings(max_examples=100)
def test_clipping_without_a_look_bounds_every_record(left, right, clip, bias, weight):
    """Each record alone adds at most C whatever it holds, and padding adds nothing."""
    bound = torch.tensor([clip], dtype=torch.float32)
    for record in range(3):
        only = slice(record, record + 1)
        sides = torch.from_numpy(left[..., only].copy()), torch.from_numpy(right[..., only].copy())
        share = None if weight is None else torch.tensor([[weight[record]]])
        total, _ = clipped_products(*sides, bound, bias=bias, weight=share, looks=False)
        assert length(total) <= float(bound) * ALLOWED
        if share is not None and float(share) == 0.0:
            assert length(total) == 0.0


@pytest.mark.parametrize("bias", [False, True])
def test_clipping_without_a_look_agrees_with_the_other(bias):
    stream = torch.Generator().manual_seed(1)
    left, right = torch.randn(3, 5, 7, generator=stream), torch.randn(3, 4, 7, generator=stream)
    weight = (torch.rand(3, 7, generator=stream) > 0.3).float()
    bounds = torch.tensor([0.5, 1.0, 100.0])
    totals = [
        clipped_products(left, right, bounds, bias=bias, weight=weight, looks=looks)[0]
        for looks in (True, False)
    ]
    torch.testing.assert_close(totals[0], totals[1])


@given(
    left=arrays(np.float32, (1, 2, 3), elements=anything),
    right=arrays(np.float32, (1, 3, 3), elements=st.floats(-1e4, 1e4, width=32)),
    clip=clips,
)
@settings(max_examples=100)
def test_tame_inputs_need_no_rescaling(left, right, clip):
    """With inputs of ordinary length every record adds at most C, whatever its error is, and the
    same as where nothing is known of them."""
    right[:, 0] = 1.0  # a column of ones, as linear models have it
    bound = torch.tensor([clip], dtype=torch.float32)
    known = torch.from_numpy((right.astype(np.float64) ** 2).sum(1).astype(np.float32))
    for record in range(3):
        only = slice(record, record + 1)
        sides = torch.from_numpy(left[..., only].copy()), torch.from_numpy(right[..., only].copy())
        tame, _ = clipped_products(*sides, bound, looks=False, known=known[:, only])
        other, _ = clipped_products(*sides, bound, looks=False)
        assert length(tame) <= float(bound) * ALLOWED
        torch.testing.assert_close(tame, other, rtol=1e-5, atol=1e-5 * clip)
