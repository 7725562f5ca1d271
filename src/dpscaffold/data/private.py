"""Differentially private sums for preprocessing: a mean, second moments, a second-moment matrix.

The setting is central: one party (the one that prepares the data) sees the pooled sum, adds
Gaussian noise and releases the result. Rows are clipped to a public norm bound B before they are
summed, so that replacing one record of one user moves the released sum by at most its sensitivity
Δ:

========================  ===========  =======================================================
released                  Δ            why
========================  ===========  =======================================================
Σ x                       2B           two vectors of norm at most B
Σ x² (feature by feature)  √2·B²        two non-negative vectors of norm at most B²
Σ x xᵀ                    √2·B²        ‖xxᵀ − yyᵀ‖² = ‖x‖⁴ + ‖y‖⁴ − 2⟨x, y⟩², Frobenius norm
========================  ===========  =======================================================

The noise has standard deviation z·Δ, z the noise multiplier, in every direction of an orthonormal
basis. The number of records is public under replace-one neighbours. For zero-out neighbours the
sensitivities are B, B² and B², so the multipliers are 2z, √2·z and √2·z, the divisor being taken as
a public constant.

References: Dwork, Talwar, Thakurta and Zhang, "Analyze Gauss", 2014 (the matrix); Balle and Wang,
"Improving the Gaussian mechanism", 2018 (the multiplier for a given ε and δ).
"""

from __future__ import annotations

import math

import numpy as np

from dpscaffold.errors import BadInput


def clip_rows(rows: np.ndarray, bound: float) -> np.ndarray:
    """Rows longer than ``bound`` scaled down to it, float64.

    >>> clip_rows(np.array([[3.0, 4.0], [0.3, 0.4]]), 1.0).round(6).tolist()
    [[0.6, 0.8], [0.3, 0.4]]
    """
    rows = rows.astype(np.float64)
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows))
    # Rounded up by a few units in the last place, so that no clipped row is longer than the bound.
    clipped: np.ndarray = rows * (bound / np.maximum(norms * (1 + 4e-16), bound))[:, None]
    return clipped


def sum_sensitivity(bound: float) -> float:
    """Δ of Σ x under replace-one: 2B."""
    return 2 * bound


def moment_sensitivity(bound: float) -> float:
    """Δ of Σ x² and of Σ x xᵀ under replace-one: √2·B²."""
    return math.sqrt(2) * bound**2


def noised_sum(
    total: np.ndarray, bound: float, multiplier: float, rng: np.random.Generator
) -> np.ndarray:
    """A sum (d,) of rows clipped to ``bound``, with noise of standard deviation 2B·z per
    coordinate."""
    return total + multiplier * sum_sensitivity(bound) * rng.standard_normal(total.shape)


def noised_squares(
    total: np.ndarray, bound: float, multiplier: float, rng: np.random.Generator
) -> np.ndarray:
    """A sum (d,) of squares of clipped rows, with noise of standard deviation √2·B²·z per
    coordinate."""
    return total + multiplier * moment_sensitivity(bound) * rng.standard_normal(total.shape)


def noised_moments(
    total: np.ndarray, bound: float, multiplier: float, rng: np.random.Generator
) -> np.ndarray:
    """A sum (d, d) of outer products of clipped rows, with symmetric noise.

    An orthonormal basis of the symmetric matrices has (e_i e_jᵀ + e_j e_iᵀ)/√2 off the diagonal, so
    with Δ = √2·B² the noise has standard deviation z·Δ on the diagonal and z·Δ/√2 off it.
    """
    square = rng.standard_normal(total.shape)
    symmetric = (square + square.T) / 2  # variance 1 on the diagonal, 1/2 off it
    return total + multiplier * moment_sensitivity(bound) * symmetric


def gaussian_delta(epsilon: float, multiplier: float) -> float:
    """δ(ε) of a Gaussian mechanism: Φ(1/(2z) − εz) − e^ε Φ(−1/(2z) − εz).

    >>> round(gaussian_delta(1.0, 1.0), 6)
    0.126937
    """
    from scipy.special import log_ndtr

    a, b = 1 / (2 * multiplier) - epsilon * multiplier, -1 / (2 * multiplier) - epsilon * multiplier
    return float(np.exp(log_ndtr(a)) - np.exp(epsilon + log_ndtr(b)))


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The smallest noise multiplier with which one Gaussian release is (ε, δ)-differentially
    private.

    >>> z = gaussian_multiplier(1.0, 1e-5)
    >>> round(z, 3), gaussian_delta(1.0, z) <= 1e-5
    (3.731, True)
    """
    if not epsilon > 0 or not 0 < delta < 1:
        raise BadInput(
            f"epsilon is {epsilon} and delta {delta}; epsilon must be positive and delta lie "
            f"between 0 and 1"
        )
    from scipy.optimize import brentq

    low, high = 1e-3, 1.0
    while gaussian_delta(epsilon, high) > delta:
        low, high = high, 2 * high
    while gaussian_delta(epsilon, low) < delta:
        low /= 2
    z = brentq(lambda x: gaussian_delta(epsilon, x) - delta, low, high, xtol=1e-12)
    return float(z) * (1 + 1e-9)
