"""Bounded sums: how far one record can move the sum of a bounded vector over all records.

A sum Σ f(x) with Gaussian noise of standard deviation z·Δ in every direction is one Gaussian
mechanism of multiplier z, where Δ is the largest distance that one change of a record causes. The
proofs are in docs/privacy-proofs.md (Bounded sums).

=================================  ===========  ====================  ========================
sum                                bound        replace-one           zero-out and add-remove
=================================  ===========  ====================  ========================
any vector f(x)                    ‖f(x)‖ ≤ B   2B                    B
squares (x_1², …, x_d²)            ‖x‖ ≤ B      √2·B²                 B²
Gram matrix x xᵀ                   ‖x‖ ≤ B      √2·B²                 B²
√a·x and √b·x² together            ‖x‖ ≤ 1      √(4a + 2b)            √(a + b)
√a·x xᵀ and √b·x yᵀ together       ‖x‖, ‖y‖ ≤ 1  see :func:`joint`     √(a + b)
=================================  ===========  ====================  ========================
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpscaffold.errors import BadInput
from dpscaffold.privacy.mechanism import Relation

#: What records are multiplied by before they are added, so that the rounding of computed sums of
#: up to :data:`MOST_RECORDS` records stays within Δ (docs/privacy-proofs.md, Rounding of sums).
ROUNDING_ROOM = 1 - 2.0**-16
#: The most records of one sum.
MOST_RECORDS = 1 << 25


def sum_sensitivity(bound: float, relation: Relation = "replace-one") -> float:
    """Δ of Σ f(x) for vectors of norm at most ``bound``: two such vectors are 2B apart.

    >>> sum_sensitivity(3.0), sum_sensitivity(3.0, "zero-out")
    (6.0, 3.0)
    """
    return 2 * bound if relation == "replace-one" else bound


def moment_sensitivity(bound: float, relation: Relation = "replace-one") -> float:
    """Δ of Σ x² (feature by feature) and of Σ x xᵀ (Frobenius norm) for rows of norm at most
    ``bound``. Two such squares or matrices have a non-negative inner product, so they are √2·B²
    apart and not 2B².

    >>> moment_sensitivity(1.0) == math.sqrt(2), moment_sensitivity(3.0, "add-remove")
    (True, 9.0)
    """
    return math.sqrt(2) * bound**2 if relation == "replace-one" else bound**2


def gram_scale(relation: Relation = "replace-one") -> float:
    """The factor with which a record of norm at most 1 moves Σ x xᵀ by at most 2 (replace-one) or 1
    (zero-out, add-remove).

    >>> round(gram_scale() ** 2, 9), gram_scale("zero-out")
    (2.0, 1.0)
    """
    return sum_sensitivity(1.0, relation) / moment_sensitivity(1.0, relation)


@dataclass(frozen=True)
class MomentScales:
    """√a and √b: what a row and its squares are multiplied by before they get the same noise."""

    mean: float
    squares: float


def moment_scales(relation: Relation = "replace-one") -> MomentScales:
    """The scales with which a record of norm at most 1 moves Σ x and Σ x² together by at most 2
    (replace-one) or 1 (zero-out, add-remove); each by itself has half of μ².

    >>> scales = moment_scales()
    >>> round(4 * scales.mean**2 + 2 * scales.squares**2, 9)
    4.0
    """
    half = math.sqrt(0.5)
    return MomentScales(half, half * gram_scale(relation))


def joint(gram: float, products: float, relation: Relation = "replace-one") -> float:
    """Δ of (√a·Σ x xᵀ, √b·Σ x yᵀ) together, a = ``gram`` and b = ``products``, for ‖x‖ ≤ 1 and
    ‖y‖ ≤ 1.

    Replacing (x, y) moves it by at most the maximum of a(2 − 2u²) + b(2 + 2u) over u = |x·x′| from
    0 to 1: the two parts are never both at their worst, so this is less than their sum.

    >>> round(joint(0.15, 0.175) ** 2, 3)  # apart: 2·0.15 + 4·0.175 = 1
    0.752
    """
    if relation != "replace-one":
        return math.sqrt(gram + products)
    u = min(1.0, products / (2 * gram)) if gram > 0 else 1.0
    return math.sqrt(gram * (2 - 2 * u * u) + products * (2 + 2 * u))


@dataclass(frozen=True)
class JointScales:
    """√a and √b: what the Gram matrix and the products x yᵀ are multiplied by before they get the
    same noise."""

    gram: float
    products: float


def joint_scales(share: float, relation: Relation = "replace-one") -> JointScales:
    """The scales with which a record moves both sums together by at most 2 (replace-one) or 1
    (zero-out, add-remove), where the Gram matrix by itself would have ``share`` of μ².

    >>> scales = joint_scales(0.3)
    >>> round(joint(scales.gram**2, scales.products**2), 9)
    2.0
    >>> round(joint_scales(0.3, "zero-out").gram ** 2, 9)
    0.3
    """
    if not 0 < share < 1:
        raise BadInput(
            "out-of-range",
            f"share={share} is not a share of the budget; give a number in (0, 1)",
        )
    if relation != "replace-one":
        return JointScales(math.sqrt(share), math.sqrt(1 - share))
    a, b = share / 2, (1 - share) / 4  # μ² is 2a for the Gram matrix and 4b for the products
    factor = 2 / joint(a, b)
    return JointScales(factor * math.sqrt(a), factor * math.sqrt(b))
