"""Sums that are passed on have the bits of sums at one place."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
import torch

from dpscaffold.engines.aggregate import chained, weighted_sum
from dpscaffold.engines.fast.ordered import Chunks, RunningSum, keeps_order, narrow_sum

pytestmark = pytest.mark.cpu_only("about the order of a CPU's sums")


def added_in_groups(rows):
    """Oracle: sixteen rows one after the other, sixteen such sums, and so on; at the end what is
    left over, the smallest groups first."""
    sums, left = list(rows), []
    for size in (16, 16, 16, len(rows) + 1):
        full = len(sums) // size * size
        left += [reduce(add, sums[full:])] if sums[full:] else []
        sums = [reduce(add, sums[k : k + size]) for k in range(0, full, size)]
    return reduce(add, left)


@pytest.mark.parametrize("rows", [1, 4, 16, 33, 256, 290, 4500])
def test_a_running_sum_is_added_in_groups_wherever_it_is_cut(rows):
    random = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, 128, generator=random)
    for cuts in ([], [1], [rows // 2], [rows // 3, rows // 3, rows - 1]):
        sum, first = RunningSum(rows), 0
        for cut in [*cuts, rows]:
            levels = [k for k, level in enumerate(sum.levels) if level is not None]
            assert levels == sum.filled(first)
            sum.add(values[first:cut])
            first = cut
        assert torch.equal(sum.total(), added_in_groups(values))


def test_sums_are_passed_on_on_this_machine():
    for rows in (17, 40, 300):
        values = torch.randn(rows, 832, generator=torch.Generator().manual_seed(rows))
        if not torch.equal(values.sum(0), added_in_groups(values)):
            pytest.skip("sum(0) adds in another order on this machine: rank 0 gathers the rows")
    assert keeps_order(torch.get_num_threads())


@pytest.mark.parametrize("rows", [1, 5, 8, 40, 300])
@pytest.mark.parametrize("columns", [1, 64, 853])
def test_a_weighted_sum_is_added_row_by_row_whatever_the_processor(rows, columns):
    """Oracle: float64 holds each product of two float32 exactly. (The second rounding, from
    float64 to float32, differs from one rounding about once in 2^29.) A processor without fused
    multiply-adds rounds each product first."""
    random = torch.Generator().manual_seed(rows)
    values = torch.randn(rows, columns, generator=random)
    weights = torch.rand(rows, generator=random)
    fused, rounded = torch.zeros(columns), torch.zeros(columns)
    for row, weight in zip(values, weights, strict=True):
        fused = (fused.double() + row.double() * weight.double()).float()
        rounded = rounded + row * weight
    found = weighted_sum(weights, values)
    assert torch.equal(found, fused) or torch.equal(found, rounded)
    stacked = weighted_sum(weights, torch.stack([values, -values]))
    assert torch.equal(stacked, torch.stack([found, -found]))
    for cut in {0, 1, rows // 3, rows - 1}:
        first = chained(torch.zeros(columns), weights[:cut], values[:cut])
        assert torch.equal(chained(first, weights[cut:], values[cut:]), found)


@pytest.mark.parametrize("width", [1, 2, 40, 65, 97, 127])
def test_the_last_columns_of_a_table_are_added_as_in_the_table(width):
    values = torch.randn(45, width, generator=torch.Generator().manual_seed(width))
    wide = width // 64 * 64
    chunks = Chunks(45, 20, [45])
    expected = sum((values[k : k + 20].sum(0) for k in (0, 20, 40)), torch.zeros(width))[wide:]
    assert torch.equal(narrow_sum(values[:, wide:].contiguous(), chunks, not wide), expected)


def test_ranks_have_consecutive_rows_that_are_cut_where_chunks_end():
    chunks = Chunks(10, 4, [3, 3, 9, 10])
    pieces = [chunks.pieces(rank) for rank in range(4)]
    assert pieces == [[range(3)], [], [range(3, 4), range(4, 8), range(8, 9)], [range(9, 10)]]
    assert [[chunks.shared(p) for p in part] for part in pieces] == [
        [True],
        [],
        [True, False, True],
        [True],
    ]
    assert chunks.owners() == [0, 2, 3] and chunks.length(9) == 2
