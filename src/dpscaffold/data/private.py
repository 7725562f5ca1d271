"""Differentially private sums for preprocessing: a mean, second moments, a second-moment matrix.

The setting is central: one party (the one that prepares the data) sees the pooled sum, adds
Gaussian noise and releases the result. Rows are clipped to a public norm bound B before they are
summed, so that replacing one record of one user moves the released sum by at most its sensitivity
Δ:

=========================  =====  ==========================================================
released                   Δ      why
=========================  =====  ==========================================================
Σ x                        2B     two vectors of norm at most B
Σ x² (feature by feature)  √2·B²  two non-negative vectors of norm at most B²
Σ x xᵀ                     √2·B²  ‖xxᵀ − yyᵀ‖² = ‖x‖⁴ + ‖y‖⁴ − 2⟨x, y⟩², Frobenius norm
=========================  =====  ==========================================================

The noise has standard deviation z·Δ, z the noise multiplier, in every direction of an orthonormal
basis. From the operating system (:class:`~dpscaffold.randomness.csprng.CipherStream`) it comes
under a key of its own for every statistic, and the noised sum is rounded to the public grid of
uploads (:func:`~dpscaffold.randomness.csprng.on_grid`), so that its last bits tell nothing; from a
seed it stays as it was drawn. A row that is not finite adds nothing. The number of records is
public under replace-one neighbours. For zero-out neighbours the sensitivities are B, B² and B², so
the multipliers are 2z, √2·z and √2·z, the divisor being taken as a public constant.

References: Dwork, Talwar, Thakurta and Zhang, "Analyze Gauss", 2014 (the matrix); Balle and Wang,
"Improving the Gaussian mechanism", 2018 (the multiplier for a given ε and δ).
"""

from __future__ import annotations

import math

import numpy as np

from dpscaffold.privacy.sums import moment_sensitivity, sum_sensitivity
from dpscaffold.randomness.csprng import on_grid
from dpscaffold.randomness.streams import Stream


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


def finite_rows(rows: np.ndarray) -> np.ndarray:
    """Rows with zeros for each that is not finite: it adds nothing, and spoils no sum of others.

    >>> finite_rows(np.array([[3.0, 4.0], [np.inf, 1.0], [0.0, np.nan]])).tolist()
    [[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]
    """
    return np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0)


def released(total: np.ndarray, spread: float, normals: np.ndarray, stream: Stream) -> np.ndarray:
    """total + spread·normals, float64: as it is from a seed; secret noise is rounded to the public
    grid, whose step is a power of two at most 2⁻²⁰ of ``spread``.

    >>> from dpscaffold.randomness.csprng import CipherStream
    >>> secret = released(np.array([0.3]), 2.0**19, np.array([1e-7]), CipherStream(bytes(32)))
    >>> secret.tolist(), released(np.array([0.3]), 1.0, np.array([2.0]), np.random.default_rng())
    ([0.5], array([2.3]))
    """
    noised = total + spread * normals
    if isinstance(stream, np.random.Generator):
        return noised
    import torch

    scale = torch.tensor(spread, dtype=torch.float64)
    return on_grid(torch.from_numpy(np.atleast_1d(noised)), scale).numpy()


def noised_sum(total: np.ndarray, bound: float, multiplier: float, rng: Stream) -> np.ndarray:
    """A sum (d,) of rows clipped to ``bound``, with noise of standard deviation 2B·z per
    coordinate."""
    spread = multiplier * sum_sensitivity(bound)
    return released(total, spread, rng.standard_normal(total.shape), rng)


def noised_squares(total: np.ndarray, bound: float, multiplier: float, rng: Stream) -> np.ndarray:
    """A sum (d,) of squares of clipped rows, with noise of standard deviation √2·B²·z per
    coordinate."""
    spread = multiplier * moment_sensitivity(bound)
    return released(total, spread, rng.standard_normal(total.shape), rng)


def noised_moments(total: np.ndarray, bound: float, multiplier: float, rng: Stream) -> np.ndarray:
    """A sum (d, d) of outer products of clipped rows, with symmetric noise.

    An orthonormal basis of the symmetric matrices has (e_i e_jᵀ + e_j e_iᵀ)/√2 off the diagonal, so
    with Δ = √2·B² the noise has standard deviation z·Δ on the diagonal and z·Δ/√2 off it. The
    sum's lower triangle represents both: the other could differ in its last bits, under the same
    noise.
    """
    square = rng.standard_normal(total.shape)
    symmetric = (square + square.T) / 2  # variance 1 on the diagonal, 1/2 off it
    spread = multiplier * moment_sensitivity(bound)
    if isinstance(rng, np.random.Generator):
        return released(total, spread, symmetric, rng)
    lower = np.tril(total)
    mirrored = lower + np.tril(total, -1).T
    # One grid for all entries, that of the smaller deviation.
    return released(mirrored, spread / math.sqrt(2), symmetric * math.sqrt(2), rng)
