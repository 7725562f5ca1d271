"""Rényi accounting: of a step, of a round with random participation, and as the paper computes it.

All three work on one curve ε(α), the Rényi divergence of order α, composed by addition. They are
looser than the loss distributions of :mod:`dpscaffold.privacy.queries` and serve as cross-check and
comparison.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import scipy

from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.loss import Array
from dpscaffold.privacy.mechanism import Group, Mechanism

WHOLE_ORDERS = [*range(2, 65), 96, 128, 256, 512, 1024]

#: Beyond this many groups with unequal noise, one curve holds for all of them.
MOST_GROUPS = 16
#: How many orders are summed at a time.
BLOCK = 128


def participation_curve(run: Mechanism, group: Group | None = None) -> tuple[Array, Array]:
    """Orders α and K·ε_s(α): one participation of a user of a group; by default of one that is
    hidden no better than any, with the largest rate and the least noise.

    Fixed-size batches: Wang, Balle, Kasiviswanathan 2019, in the form strengthened for the
    Gaussian, for replace-one neighbours. Poisson batches: Mironov, Talwar, Zhang 2019, for
    add/remove neighbours and multiplier 2σ_g. A user as unit: the Gaussian mechanism, α/2σ_g².
    """
    noise = run.least_noise if group is None else run.noise * group.louder
    numbers = (run.sampling, run.unit, run.local_steps)
    return _curve(group or run.worst, noise, *numbers)


@lru_cache(maxsize=1024)
def _curve(group: Group, noise: float, sampling: str, unit: str, steps: int) -> tuple[Array, Array]:
    """The same from the numbers that it depends on."""
    # Imported here because it takes longer than everything else that a statement needs.
    from dp_accounting import NeighboringRelation, dp_event
    from dp_accounting.rdp import RdpAccountant

    if unit == "user":
        orders = RdpAccountant().orders
        return orders, steps * orders / (2 * noise**2)
    if sampling == "fixed":
        relation = NeighboringRelation.REPLACE_ONE
        gaussian = dp_event.GaussianDpEvent(noise)
        event = dp_event.SampledWithoutReplacementDpEvent(group.records, group.batch, gaussian)
        accountant = RdpAccountant(neighboring_relation=relation)
    elif sampling != "poisson":
        raise PrivacyError(
            "no-renyi-curve",
            f"sampling={sampling!r} has no Rényi curve; give fixed or poisson",
        )
    else:
        relation = NeighboringRelation.ADD_OR_REMOVE_ONE
        # Whole orders only: the series for fractional ones need not converge when the noise is
        # small.
        accountant = RdpAccountant(WHOLE_ORDERS, relation)
        event = dp_event.PoissonSampledDpEvent(group.rate, dp_event.GaussianDpEvent(2 * noise))
    accountant.compose(event)
    return accountant.orders, steps * accountant.rdp


def random_participation(run: Mechanism, rounds: int, gaussians: tuple[float, ...] = ()) -> float:
    """ε of T rounds when the user is drawn with probability l and its participations may be
    revealed.

    Per round: ε(α) = 1/(α−1) · log(1 − l + l·e^{(α−1)·K·ε_s(α)}), since the two cases have disjoint
    supports. Further Gaussian mechanisms of multipliers z (``gaussians``) add α/2z² each.
    """
    from dp_accounting.rdp import compute_epsilon

    # Where the noise differs, each user has a curve of its own.
    several = run.unequal and len(run.protected_groups) <= MOST_GROUPS
    users: tuple[Group | None, ...] = run.protected_groups if several else (None,)
    curves = [round_curve(run, rounds, gaussians, group) for group in users]
    return max(float(compute_epsilon(*curve, run.delta)[0]) for curve in curves)


def round_curve(
    run: Mechanism, rounds: int, gaussians: tuple[float, ...] = (), group: Group | None = None
) -> tuple[Array, Array]:
    """Orders α and the whole curve of :func:`random_participation`; a void attempt counts as a
    participation."""
    orders, once = participation_curve(run, group)
    curve, ratio = once, run.user_ratio
    if ratio < 1.0:
        exponent = (orders - 1) * curve
        curve = np.logaddexp(math.log1p(-ratio), math.log(ratio) + exponent) / (orders - 1)
    total = rounds * curve + run.voids * once
    return orders, total + sum(orders / (2 * z**2) for z in gaussians)


def published(
    rate: float,
    noise: float,
    local_steps: int,
    user_ratio: float,
    rounds: int,
    delta: float,
    gaussians: tuple[float, ...] = (),
) -> float:
    """ε as in the "Implementation" paragraph of the paper's appendix; ``noise`` is σ_g·√(lM).

    The per-step curve at rate s, K times; the generic amplification at rate l; T times; and
    ε = min over λ of (log(1/δ) + K_M(λ))/λ, with K_M linear between integers. On each linear piece
    (a + bλ)/λ is monotone, so the minimum is taken at an integer and no grid is needed.
    """
    most = 64
    while True:
        orders, curve = _published_round(rate, noise, local_steps, user_ratio, most)
        values = rounds * curve - math.log(delta) / (orders - 1)
        values = values + sum(orders / (2 * z**2) for z in gaussians)
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
