"""Statistics of two uploads: is the noise of one found again in the other?

Noise that repeats, in another round or at another user, cancels in a difference; noise of opposite
sign cancels in a sum. What is left is then the data. Independent noise shows nothing here.

Uploads are (T, n): what is left in T participations of n users when the known records are taken
off, NaN where a user did not take part. Every statistic is a distance, at least 0; a user without a
pair gets 0.
"""

from __future__ import annotations

import numpy as np

from dpscaffold.privacy.loss import Array

#: What :func:`between_rounds` returns, by place.
BETWEEN_ROUNDS = (
    "largest difference of two rounds",
    "smallest difference of two rounds",
    "largest sum of two rounds",
    "smallest sum of two rounds",
)
#: What :func:`between_users` returns, by place.
BETWEEN_USERS = (
    "difference from the nearest of other users, largest of all rounds",
    "difference from the nearest of other users, smallest of all rounds",
    "sum with the nearest of other users, largest of all rounds",
    "sum with the nearest of other users, smallest of all rounds",
)


def between_rounds(uploads: Array) -> Array:
    """Over all pairs of a user's rounds, (4, n).

    >>> noise = np.array([[1.0, 0.5], [1.0, -0.5], [3.0, np.nan]])
    >>> between_rounds(noise).tolist()
    [[2.0, 1.0], [0.0, 1.0], [4.0, 0.0], [2.0, 0.0]]
    """
    if len(uploads) < 2:
        return np.zeros((4, uploads.shape[1]))
    first, second = np.triu_indices(len(uploads), 1)
    differences = np.abs(uploads[first] - uploads[second])
    sums = np.abs(uploads[first] + uploads[second])
    return np.concatenate([_extremes(differences), _extremes(sums)])


def between_users(uploads: Array, others: Array) -> Array:
    """Every upload next to the nearest of those of other users in any round, (4, n).

    >>> between_users(np.array([[1.0, 0.5], [2.0, np.nan]]), np.array([[2.0], [-0.5]])).tolist()
    [[1.0, 1.0], [0.0, 1.0], [1.5, 0.0], [0.5, 0.0]]
    """
    pool = np.sort(others[np.isfinite(others)])
    if not len(pool):
        return np.zeros((4, uploads.shape[1]))
    differences = _to_nearest(uploads, pool)
    sums = _to_nearest(-uploads, pool)
    return np.concatenate([_extremes(differences), _extremes(sums)])


def _to_nearest(values: Array, pool: Array) -> Array:
    """The distance of every value to the nearest of a sorted pool; NaN stays NaN."""
    after = np.searchsorted(pool, values).clip(1, max(1, len(pool) - 1))
    near = np.stack([pool[after - 1], pool[np.minimum(after, len(pool) - 1)]])
    return np.asarray(np.abs(values - near).min(0))


def _extremes(distances: Array) -> Array:
    """The largest and the smallest of each column, (2, n); 0 where all are NaN."""
    absent = np.isnan(distances)
    largest = np.where(absent, 0.0, distances).max(0)
    smallest = np.where(absent, np.inf, distances).min(0)
    return np.stack([largest, np.where(np.isinf(smallest), 0.0, smallest)])
