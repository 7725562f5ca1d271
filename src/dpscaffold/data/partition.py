"""Who gets which rows of a pooled dataset.

Every function takes the (N,) labels, the users' ``sizes`` and a seed, and returns one array of row
numbers per user: no row goes to two users, user i gets exactly ``sizes[i]`` rows, and the same seed
gives the same rows. :func:`equal_sizes` and :func:`uneven_sizes` make the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpscaffold.data.streams import stream
from dpscaffold.errors import BadInput

Parts = list[np.ndarray]


def equal_sizes(available: int, users: int, records: int | None = None) -> np.ndarray:
    """R records for each of M users, or ⌊N/M⌋ when ``records`` is not given.

    >>> equal_sizes(100, 3).tolist()
    [33, 33, 33]
    """
    _require_users(users)
    each = available // users if records is None else records
    if each < 1:
        raise BadInput(
            "too-few-records",
            f"{users} users cannot each have a record: there are {available} records",
        )
    if users * each > available:
        raise BadInput(
            "too-few-records",
            f"{users} users × {each} records are {users * each} records, and there are "
            f"{available}; ask for at most {available // each} users or {available // users} "
            f"records each",
        )
    return np.full(users, each, dtype=np.int64)


def uneven_sizes(total: int, users: int, weights: np.ndarray, minimum: int = 2) -> np.ndarray:
    """Sizes in proportion to weights, which add up to ``total``.

    Args:
        total: The number of records.
        users: The number of users.
        weights: A positive weight for each user.
        minimum: The smallest size. What is left after it is shared by largest remainders.

    >>> uneven_sizes(10, 3, np.array([1.0, 1.0, 2.0])).tolist()
    [3, 3, 4]
    """
    _require_users(users)
    spare = total - minimum * users
    if spare < 0:
        raise BadInput(
            "too-few-records",
            f"{users} users with at least {minimum} records each need {minimum * users} records, "
            f"and there are {total}",
        )
    exact = spare * (weights / weights.sum())
    sizes = np.floor(exact).astype(np.int64)
    late = np.argsort(-(exact - sizes), kind="stable")[: spare - int(sizes.sum())]
    sizes[late] += 1
    total_sizes: np.ndarray = sizes + minimum
    return total_sizes


def lognormal_sizes(
    total: int, users: int, spread: float, seed: int = 0, minimum: int = 2
) -> np.ndarray:
    """Log-normal sizes, in proportion to exp(spread · N(0, 1)).

    Args:
        total: The number of records.
        users: The number of users.
        spread: The standard deviation of the logarithm; 0 is as equal as integers allow.
        seed: The seed of the draw.
        minimum: The smallest size.
    """
    if not (np.isfinite(spread) and spread >= 0):
        raise BadInput(
            "out-of-range", f"size_spread is {spread}; it must be a finite number, at least 0"
        )
    weights = np.exp(spread * stream(seed, "sizes").standard_normal(users))
    return uneven_sizes(total, users, weights, minimum)


def iid(labels: np.ndarray, sizes: Sequence[int] | np.ndarray, seed: int = 0) -> Parts:
    """Rows partitioned at random, whatever their label."""
    return similarity(labels, sizes, 100.0, seed)


def similarity(
    labels: np.ndarray, sizes: Sequence[int] | np.ndarray, percent: float, seed: int = 0
) -> Parts:
    """γ-similar data, as in the paper: γ % of a user's rows i.i.d., the rest sorted by label.

    ΣR_i rows are drawn from the pool. User i first takes round(γR_i/100) of them at random; what
    remains is sorted by label (rows of one label in random order) and cut into consecutive runs,
    one per user. With γ = 0 a user therefore sees the fewest labels possible, and with γ = 100 an
    i.i.d. sample.

    >>> labels = np.repeat([0, 1, 2, 3], 25)
    >>> [sorted(set(labels[rows].tolist())) for rows in similarity(labels, [25] * 4, 0)]
    [[0], [1], [2], [3]]
    >>> len(set(np.concatenate(similarity(labels, [20, 30], 50)).tolist()))
    50

    Args:
        labels: The label of each row, (N,).
        sizes: The number of rows of each user.
        percent: γ, from 0 (sorted by label) to 100 (i.i.d.).
        seed: The seed of the partition.

    Reference: Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution", 2019;
    the allocation is that of the DP-SCAFFOLD paper, section Experiments.
    """
    if not 0 <= percent <= 100:
        raise BadInput(
            "out-of-range",
            f"similarity is {percent}; it is a percentage, 0 (sorted by label) to 100 (i.i.d.)",
        )
    if percent < 100:
        _require_classes(labels, f"similarity = {percent:g} sorts records")
    sizes = _checked(labels, sizes)
    rows = stream(seed, "partition").permutation(len(labels))[: sizes.sum()]
    mixed = np.rint(percent * sizes / 100).astype(np.int64)
    shared, rest = rows[: mixed.sum()], rows[mixed.sum() :]
    rest = rest[np.argsort(labels[rest], kind="stable")]
    return [
        np.concatenate(pair)
        for pair in zip(_cut(shared, mixed), _cut(rest, sizes - mixed), strict=True)
    ]


def dirichlet(
    labels: np.ndarray, sizes: Sequence[int] | np.ndarray, alpha: float, seed: int = 0
) -> Parts:
    """Label skew: user i draws q_i ~ Dirichlet(α·C·p), then its rows; p are the C labels' pooled
    frequencies.

    For balanced labels that is Dirichlet(α, …, α). Labels are drawn from q_i and rows of that label
    without replacement; a label whose rows have run out leaves q_i, which is renormalised over
    those that remain. Users draw in random order, so that running out is nobody's in particular. α
    → ∞ is i.i.d., α → 0 one label per user.

    >>> labels = np.repeat(np.arange(5), 40)
    >>> [len(rows) for rows in dirichlet(labels, [40] * 5, alpha=0.1)]
    [40, 40, 40, 40, 40]

    Args:
        labels: The label of each row, (N,).
        sizes: The number of rows of each user.
        alpha: α; the smaller, the fewer labels per user.
        seed: The seed of the partition.

    Reference: Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution", 2019.
    """
    _require_positive("alpha", alpha)
    _require_classes(labels, "partition = 'dirichlet' draws records")
    sizes = _checked(labels, sizes)
    rng = stream(seed, "partition")
    kinds, codes = np.unique(labels, return_inverse=True)
    supply = np.bincount(codes, minlength=len(kinds))
    shuffled = rng.permutation(len(labels))
    piles = _cut(shuffled[np.argsort(codes[shuffled], kind="stable")], supply)
    used = np.zeros(len(kinds), dtype=np.int64)
    parts: Parts = [np.empty(0, dtype=np.int64)] * len(sizes)
    for user in rng.permutation(len(sizes)):
        wish = rng.gamma(alpha * len(kinds) * supply / len(labels))
        counts = _draw_counts(rng, wish, supply - used, int(sizes[user]))
        parts[user] = np.concatenate(
            [pile[u : u + n] for pile, u, n in zip(piles, used, counts, strict=True)]
        )
        used += counts
    return parts


def _draw_counts(
    rng: np.random.Generator, wish: np.ndarray, left: np.ndarray, size: int
) -> np.ndarray:
    """How many rows of each label a user takes: multinomial(size, wish), capped by what is left."""
    counts = np.zeros_like(left)
    while (missing := size - int(counts.sum())) > 0:
        open_labels = counts < left
        # Tiny α may give a draw that is zero wherever rows remain: then any remaining row will do.
        weights = np.where(open_labels, wish, 0.0)
        if weights.sum() <= 0 or not np.isfinite(weights.sum()):
            weights = np.where(open_labels, (left - counts).astype(float), 0.0)
        counts = np.minimum(counts + rng.multinomial(missing, weights / weights.sum()), left)
    return counts


def natural(
    users: np.ndarray,
    count: int,
    keep: int | None = None,
    minimum: int = 2,
    most: int | None = None,
    seed: int = 0,
) -> tuple[Parts, np.ndarray]:
    """Rows by the user they came with: the parts, and the numbers of the users that were kept.

    Args:
        users: The number of each record's user, (N,).
        count: The number of users.
        keep: How many users are drawn; None keeps all.
        minimum: Users with fewer records are left out.
        most: The largest number of records of a user, drawn at random; None keeps all.
        seed: The seed of the draws.

    >>> natural(np.array([0, 1, 0, 2, 1, 0]), 3, keep=None, minimum=2, most=2)[1].tolist()
    [0, 1]
    """
    sizes = np.bincount(users, minlength=count)
    able = np.flatnonzero(sizes >= max(minimum, 1))
    if not len(able):
        raise BadInput(
            "too-few-records",
            f"no user has {minimum} records or more; the largest has {sizes.max(initial=0)}",
        )
    if keep is not None and keep > len(able):
        raise BadInput(
            "too-few-users",
            f"{keep} users were asked for, and {len(able)} of {count} have {minimum} records or "
            f"more; ask for at most {len(able)}",
        )
    rng = stream(seed, "partition")
    kept = able if keep is None else np.sort(rng.choice(able, keep, replace=False))
    piles = _cut(np.argsort(users, kind="stable"), sizes)
    if most is None:
        return [piles[i] for i in kept], kept
    return [np.sort(rng.permutation(piles[i])[:most]) for i in kept], kept


def _cut(rows: np.ndarray, sizes: np.ndarray) -> Parts:
    """Consecutive pieces of the given sizes."""
    return np.split(rows, np.cumsum(sizes)[:-1])


def _checked(labels: np.ndarray, sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    sizes = np.asarray(sizes, dtype=np.int64)
    _require_users(len(sizes))
    if sizes.min() < 1:
        raise BadInput(
            "user-without-records",
            f"user {int(sizes.argmin())} is to have {sizes.min()} records; every user needs at "
            f"least one",
        )
    if sizes.sum() > len(labels):
        raise BadInput(
            "too-few-records",
            f"{len(sizes)} users are to have {sizes.sum()} records, and there are {len(labels)}; "
            f"ask for fewer",
        )
    return sizes


def _require_classes(labels: np.ndarray, what: str) -> None:
    if labels.dtype.kind == "f":
        raise BadInput(
            "wrong-target",
            f"{what} by class, and the target is a number; name a user column, or use "
            f"similarity = 100 (i.i.d.)",
        )


def _require_users(users: int) -> None:
    if users < 1:
        raise BadInput("out-of-range", f"users is {users}; a federation needs at least 1")


def _require_positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise BadInput("out-of-range", f"{name} is {value}; it must be a positive finite number")
