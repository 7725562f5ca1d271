"""The ε that the paper prints, for comparison only.

Its proof takes for granted that sampling users amplifies a record's ε and that noise averages out
over adaptive local steps. Both fail for some losses (docs/published-bound.md shows three), so this
number is no guarantee, and nothing is planned or stated by it but the paper's own tables.

>>> from dpscaffold.privacy import SERVER, describe, epsilon
>>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
...                records=4000, batch_sizes=800, noise=60, delta=2.5e-6)
>>> round(published(run), 1), round(epsilon(run, SERVER), 2)
(12.9, 0.86)
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import scipy

from dpscaffold.privacy import Mechanism, no_guarantee
from dpscaffold.privacy.loss import Array
from dpscaffold.privacy.numbers import largest_count

#: How many orders are computed at a time.
BLOCK = 128


def most_rounds(run: Mechanism, target: float, at_most: int = 1_000_000) -> int:
    """The largest T whose published ε is at most ``target``.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=1, local_steps=5, users=100, cohort_size=5,
    ...                records=4000, batch_sizes=800, noise=10, delta=2.5e-6)
    >>> most_rounds(run, 3.0)
    488
    """
    return largest_count(lambda rounds: published(run, rounds) <= target, at_most)


def published(run: Mechanism, rounds: int | None = None) -> float:
    """ε as in the "Implementation" paragraph of the paper's appendix, with σ_g·√(lM) for noise.

    The per-step curve at rate s, K times; the generic amplification at rate l; T times; and
    ε = min over λ of (log(1/δ) + K_M(λ))/λ, with K_M linear between integers. On each linear piece
    (a + bλ)/λ is monotone, so the minimum is taken at an integer and no grid is needed.
    """
    if no_guarantee(run) or run.unit != "record" or run.sampling != "fixed":
        return math.inf
    rounds = run.rounds if rounds is None else rounds
    rate = max(group.rate for group in run.groups)
    noise = run.noise * math.sqrt(run.cohort_size)
    most = 64
    while True:
        orders, curve = _published_round(rate, noise, run.local_steps, run.user_ratio, most)
        values = rounds * curve - math.log(run.delta) / (orders - 1)
        best = int(np.argmin(values))
        if best < most // 2 or most >= 1024:
            return float(values[best])
        most *= 4


@lru_cache(maxsize=256)
def _published_round(
    rate: float, noise: float, local_steps: int, user_ratio: float, most: int
) -> tuple[Array, Array]:
    """Orders 2 … ``most`` and the published curve of one round."""
    orders = np.arange(2, most + 1, dtype=float)
    if rate >= 1.0:
        step = orders / (2 * noise**2)
    else:
        log_terms = orders * (orders - 1) / (2 * noise**2) + math.log(2)  # e^{j(j−1)/2σ²}, times 2
        pair = 1 / noise**2
        log_terms[0] = math.log(2) + min(_log_of_gain(2, pair), pair)
        step = _amplified(log_terms, rate, orders)
    participation = local_steps * step
    if user_ratio >= 1.0:
        return orders, participation
    log_terms = (orders - 1) * participation + math.log(2)
    at_two = participation[0]
    log_terms[0] = min(_log_of_gain(4, at_two), at_two + math.log(2))
    return orders, _amplified(log_terms, user_ratio, orders)


def _log_of_gain(factor: float, exponent: float) -> float:
    """log(factor·(e^exponent − 1)), −∞ at 0 and +∞ where it overflows."""
    if exponent > 700:
        return math.inf
    return math.log(factor * math.expm1(exponent)) if exponent > 0 else -math.inf


def _amplified(log_terms: Array, rate: float, orders: Array) -> Array:
    """1/(α−1) · log(1 + Σ_{j=2}^α q^j·C(α, j)·e^{log_terms[j]}) (Wang, Balle, Kasiviswanathan,
    Theorem 9)."""
    values = np.empty(len(orders))
    weighted = log_terms + orders * math.log(rate) - scipy.special.gammaln(orders + 1)
    for start in range(0, len(orders), BLOCK):  # α down the rows, j along the columns, j ≤ α
        alpha = orders[start : start + BLOCK, None]
        j = orders[None, : start + len(alpha)]
        chosen = scipy.special.gammaln(np.maximum(alpha - j, 0) + 1)
        terms = np.where(
            j <= alpha, weighted[: j.shape[1]] + scipy.special.gammaln(alpha + 1) - chosen, -np.inf
        )
        top = np.maximum(terms.max(axis=1), 0.0)
        total = np.expm1(-top) + np.exp(terms - top[:, None]).sum(axis=1)
        values[start : start + BLOCK] = (top + np.log1p(total)) / (alpha[:, 0] - 1)
    return values
