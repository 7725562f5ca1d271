"""Secure sums as numbers: the grid, the integers, the noise of a list, and what is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.config.secure import SUM_GRID_BITS, Secure, SumGrid, SumPlan
from dpscaffold.errors import BadInput

WIDTHS = [32, 64]
finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


def reduced(value: float, step: float, bits: int) -> int:
    """rint(value/step) modulo 2^bits, centred, in exact integers."""
    whole = round(Fraction(value) / Fraction(step))  # half to even, as rint
    return (whole + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


@pytest.mark.parametrize("bits", WIDTHS)
@given(values=st.lists(finite, min_size=1, max_size=8), power=st.integers(-30, 3))
def test_rounding_is_exact_modulo_the_range(values, power, bits):
    """Each integer is what exact arithmetic gives, however large the value is."""
    values = [v for v in values if abs(v) < 1e290]
    grid = SumGrid(2.0**power, bits)
    found = grid.quantise(torch.tensor(values, dtype=torch.float64)).tolist()
    assert found == [reduced(v, grid.step, bits) for v in values]


@pytest.mark.parametrize("bits", WIDTHS)
def test_nothing_in_the_values_raises(bits):
    """A wrapped, an infinite or an undefined value is an integer like any other."""
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1e308, -1e308, 2.0**70, -(2.0**63)])
    found = SumGrid(2.0**-20, bits).quantise(odd.double())
    assert found.dtype == torch.int64
    assert all(-(2 ** (bits - 1)) <= one < 2 ** (bits - 1) for one in found.tolist())
    assert found[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("bits", WIDTHS)
def test_sums_of_words_are_sums_of_integers(bits):
    """Adding words, adding integers in any order and exact arithmetic agree, wrapped or not."""
    grid = SumGrid(2.0**-10, bits)
    values = torch.randn(7, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    parts = grid.quantise(values * 2.0 ** (bits - 12))
    exact = [
        (sum(column) + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for column in parts.T.tolist()
    ]
    words = sum(grid.words(part) for part in parts)
    assert isinstance(words, np.ndarray) and words.dtype == grid.dtype
    assert grid.integers(words).tolist() == exact
    assert grid.add(parts).tolist() == grid.add(parts.flip(0)).tolist() == exact
    assert grid.total(grid.integers(grid.words(parts[0]))).tolist() == parts[0].tolist()


def test_a_sum_in_range_is_restored():
    """The restored sum is the sum of the rounded values; each was moved by half a step at most."""
    grid = SumGrid.of(0.5, reach=1e4)
    values = torch.randn(9, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    restored = grid.restore(grid.add(grid.quantise(values)), divisor=9)
    assert restored.dtype == torch.float64
    assert float((restored - values.mean(0)).abs().max()) <= grid.step / 2


@given(deviation=st.floats(1e-12, 1e12), reach=st.floats(1e-6, 1e9))
def test_the_grid_follows_from_the_deviation(deviation, reach):
    """At least 2¹⁰ and fewer than 2¹¹ steps for a deviation; as few bits as hold the range."""
    try:
        grid = SumGrid.of(deviation, reach)
    except BadInput:
        assert reach / deviation > 2.0**50
        return
    assert 2**SUM_GRID_BITS <= deviation / grid.step < 2 ** (SUM_GRID_BITS + 1)
    assert (reach / grid.step < 2**31) == (grid.bits == 32)


@pytest.mark.parametrize("members", [3, 10, 29, 30])
def test_the_noise_of_the_honest_members_is_enough(members):
    """|A| − k members' noise together is that of all honest ones who were drawn, for every list."""
    plan = SumPlan.of(Secure(1, least=3), [1.0] * 30, [0.1] * 30, [1.0] * 30, 30, noise=1.41)
    assert math.isclose(plan.noise_for(members) * math.sqrt(members - 1), 1.41 * math.sqrt(29))


def test_a_plan_weighs_and_divides():
    """The mean of a list is that of its members, with the weights that were agreed."""
    plan = SumPlan.of(Secure(1, least=3), [100, 300, 200, 400], [0.4, 0.1, 0.2, 0.1], [1.0] * 4,
                      participants=4, noise=2.0)  # fmt: skip
    assert plan.grid.step * 2**SUM_GRID_BITS <= 0.1 * 300 / 400
    values = torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    users = [0, 1, 3]
    found = plan.mean(plan.grid.add(plan.quantise(users, values)), users)
    weights = torch.tensor([100.0, 300.0, 400.0], dtype=torch.float64)[:, None]
    wanted = (weights * values).sum(0) / 800
    assert torch.allclose(found, wanted, atol=3 * plan.grid.step)
    assert math.isclose(plan.noise_for(3), 2.0 * math.sqrt(3 / 2)) and plan.noise_for(4) == 2.0
    with refuses("too-few-sites: list has 2 … secure.least is 3"):
        plan.noise_for(2)
    with refuses("too-many-sites: list has 5 … 4 were drawn"):
        plan.noise_for(5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"colluders": -1}, "out-of-range: secure.colluders is -1"),
        ({"colluders": True}, "not-a-whole-number: secure.colluders"),
        ({"voids": 0.5}, "not-a-whole-number: secure.voids is 0.5"),
        ({"colluders": 1, "least": 2}, "too-few-sites: secure.least is 2 … give 3"),
        ({"colluders": 0, "least": 1}, "too-few-sites: secure.least is 1 … give 2"),
    ],
)
def test_what_hides_nobody_is_refused(given, said):
    """At least two honest sites, and whole numbers."""
    with refuses(said):
        Secure(**given)


@pytest.mark.parametrize(
    ("secure", "participants", "said"),
    [
        (Secure(1), 2, "too-few-sites: secure.colluders is 1"),
        (Secure(2, least=5), 4, "too-few-sites: secure.least is 5"),
    ],
)
def test_too_few_participants_are_refused(secure, participants, said):
    """Where the cohort cannot hold a list that is allowed."""
    with refuses(said):
        secure.smallest_list(participants)


def test_a_sum_without_noise_has_no_grid():
    with refuses("no-noise"):
        SumGrid.of(0.0, 1.0)
