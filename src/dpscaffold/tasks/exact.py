"""Sums of products that are added without any rounding.

Numbers of a record are rounded to multiples of 2⁻²⁰, by themselves. Then a product of two is a
multiple of 2⁻⁴⁰ of at most 1, and float64 adds 2¹³ of these exactly, in every order and on every
device; the sums of such blocks are added as integers. So one record changes a sum by exactly what
it adds, however many others there are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpscaffold.errors import BadInput
from dpscaffold.privacy.sums import MOST_RECORDS

#: One unit of a record's numbers is 2⁻²⁰.
UNITS = 2.0**20
#: Records whose products float64 adds exactly: 2¹³·2⁴⁰ = 2⁵³.
_BLOCK = 1 << 13
#: Records whose products integers of 64 bits add without wrapping around.
_GROUP = 1 << 22


def unit_rows(features: Tensor, bound: float, columns: int = 0) -> Tensor:
    """Rows (…, d) over ``bound`` in units of 2⁻²⁰, rounded, with norm at most 1 (longer ones are
    scaled down), followed by ``columns`` columns of 1, in float64. A row that is not finite is 0.

    >>> unit_rows(torch.tensor([[0.5, float("inf")], [0.5, 0.0]]), 1.0).tolist()
    [[0.0, 0.0], [524288.0, 0.0]]
    """
    *lead, d = features.shape
    out = features.new_empty(*lead, d + columns, dtype=torch.float64)
    rows = out[..., :d]
    rows.copy_(features).mul_(UNITS / bound)
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    finite = norms.isfinite()
    # Rounding makes a row longer by at most √d/2; the last term is for the norm's own rounding.
    longest = UNITS - math.sqrt(d) / 2 - 2.0**-10
    rows.mul_((longest / norms).clamp_max_(1.0)).round_()
    rows.masked_fill_(~finite, 0.0)
    out[..., d:] = torch.where(finite, UNITS, 0.0)
    return out


def unit_numbers(values: Tensor) -> Tensor:
    """Numbers in [−1, 1] (others count as the nearer end) in units of 2⁻²⁰, in float64."""
    return (values.double().clamp(-1.0, 1.0) * UNITS).round_()


def exact_products(left: Tensor, right: Tensor) -> Tensor:
    """Σ_j l_j·r_jᵀ of whole numbers (U, B, p) and (U, B, q) of at most 2²⁰, (U, p, q) float64:
    exact sums of up to 2²² records, added with one rounding each."""
    total = left.new_zeros(left.shape[0], left.shape[2], right.shape[2])
    for group in _groups(left.shape[1]):
        found = torch.zeros_like(total, dtype=torch.int64)
        for start in range(group.start, group.stop, _BLOCK):
            block = slice(start, min(start + _BLOCK, group.stop))
            found += torch.bmm(left[:, block].transpose(1, 2), right[:, block]).long()
        total += found
    return total


def exact_sum(values: Tensor) -> Tensor:
    """Σ_j of whole numbers (U, B, d) of at most 2⁴⁰, (U, d) float64, likewise."""
    total = values.new_zeros(values.shape[0], values.shape[2])
    for group in _groups(values.shape[1]):
        total += values[:, group].long().sum(1)
    return total


def check_records(records: int) -> None:
    """Refuse more records than sums have room for."""
    if records > MOST_RECORDS:
        raise BadInput(
            "too-many-records",
            f"a site has {records} records, and a bounded sum is over at most {MOST_RECORDS}; "
            f"divide them among several sites",
        )


def _groups(records: int) -> list[slice]:
    check_records(records)
    return [slice(at, min(at + _GROUP, records)) for at in range(0, records, _GROUP)]
