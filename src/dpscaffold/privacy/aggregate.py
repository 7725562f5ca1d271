"""How much noise the sum of the uploads holds, relative to what one record can move it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dpscaffold.privacy.mechanism import Mechanism

#: At most this many (rate, noise) pairs are evaluated; beyond, neighbours are merged, to the worse
#: of both.
MOST_PAIRS = 16
#: Gradients are clipped to this much of C before they enter a secure sum, so that computed sums of
#: neighbours are no further apart than exact sums of gradients of norm C, for up to
#: :data:`MOST_SUMMED` records at a site (docs/privacy-proofs.md, How sums are rounded).
CLIPPED_SHARE = 1 - 2.0**-10
MOST_SUMMED = 1 << 20


def worst_steps(run: Mechanism, colluders: int = 0) -> list[tuple[float, float]]:
    """(rate, multiplier) pairs, one of which is the worst user's, for one step seen through the
    sum.

    A user's upload enters with weight w_j and carries noise of deviation 2C·σ_j·w_j/b_j, and one
    record of user i moves the sum by at most 2C·w_i/b_i. The multiplier is therefore
    √(Σ_{j∈C}(σ_j·w_j/b_j)²)/(w_i/b_i), smallest when i's m − 1 companions are those with the least
    noise. The weights' common denominator cancels. For equal users it is σ_g·√m.

    ``colluders`` of the companions know their own noise and subtract it. Whoever they are, at least
    m − 1 − k companions are left, and these have the least noise when they are the quietest of all:
    the sum over the quietest set loses its k largest terms other than i's.

    ε rises with the rate and falls with the multiplier, so only users that no other one beats in
    both matter; where these are many, neighbours are merged into (larger rate, smaller multiplier).
    """
    hiding = max(1, run.cohort_size - colluders)
    return _asked(run, run.noise * _relative(run, hiding))


def own_steps(run: Mechanism) -> list[tuple[float, float]]:
    """The same for one step that is hidden by nothing but its user's own noise, σ_i."""
    return _asked(run, own_multipliers(run))


def secure_steps(run: Mechanism) -> list[tuple[float, float]]:
    """The same for one step that is seen through a secure sum."""
    return _asked(run, run.noise * secure_factors(run))


def own_multipliers(run: Mechanism) -> NDArray[np.float64]:
    """σ_i of each group's users."""
    return run.noise * np.array([group.louder for group in run.groups])


def secure_factors(run: Mechanism) -> NDArray[np.float64]:
    """What σ_g is to be multiplied by for each group of users, if the server sees only sums.

    In a list A, at least |A| − k members are honest, user i among them. Each adds noise of
    multiplier σ_j·√((m − k)/(|A| − k)), and the sum of the honest noises is least if the others are
    the quietest of all. The factor is the smallest over all allowed lengths of A; for equal users
    it is √(m − k). The rounding of computed sums is within C, since gradients are clipped to
    a little less (:data:`CLIPPED_SHARE`).
    """
    assert run.secure is not None
    k, m = run.secure.colluders, run.cohort_size
    lists = [
        math.sqrt((m - k) / (members - k)) * _relative(run, members - k)
        for members in range(run.secure.least, m + 1)
    ]
    factors: NDArray[np.float64] = np.min(lists, axis=0)
    return factors


def _ratios(run: Mechanism) -> NDArray[np.float64]:
    """w_j/b_j of each group's users; with a user as unit nothing is divided by b_j."""
    by_records = run.weighting == "records" and run.unit == "record"
    weights = np.array([float(g.records) if by_records else g.weight for g in run.groups])
    return weights if run.unit == "user" else weights / np.array([g.batch for g in run.groups])


def group_rates(run: Mechanism) -> NDArray[np.float64]:
    """b_j/R_j of each group's users; with a user as unit nothing is sampled."""
    return np.array([1.0 if run.unit == "user" else g.rate for g in run.groups])


def _asked(run: Mechanism, noise: NDArray[np.float64]) -> list[tuple[float, float]]:
    """The front of the groups whose records are asked about, from the noise of every group."""
    asked = list(run.protects or range(len(run.groups)))
    return _front(group_rates(run)[asked], noise[asked])


def _front(rates: NDArray[np.float64], noise: NDArray[np.float64]) -> list[tuple[float, float]]:
    """The (rate, multiplier) pairs that no other pair exceeds in both, at most a few."""
    front: list[tuple[float, float]] = []
    for i in np.lexsort((noise, -rates)):  # rates downwards; only a new low of noise is kept
        if not front or noise[i] < front[-1][1]:
            front.append((float(rates[i]), float(noise[i])))
    size = math.ceil(len(front) / MOST_PAIRS)
    merged = [front[k : k + size] for k in range(0, len(front), size)]
    return [(max(r for r, _ in part), min(s for _, s in part)) for part in merged]


def _relative(run: Mechanism, participants: int) -> NDArray[np.float64]:
    """√(Σ_{j∈C} a_j²)/ratio_i for each group's i, where a_j = louder_j·ratio_j is the noise of user
    j in the sum, and C the quietest set of m users that contains i."""
    ratio = _ratios(run)
    loud = ratio * np.array([group.louder for group in run.groups])
    ascending = np.sort(np.repeat(loud, [group.users for group in run.groups]))
    quietest = np.concatenate([[0.0], np.cumsum(ascending**2)])
    below = np.searchsorted(ascending, loud, side="left")
    # A user among the m quietest has the other m − 1 of them as companions, any other the m − 1
    # quietest.
    others = np.where(
        below < participants, quietest[participants] - loud**2, quietest[participants - 1]
    )
    multipliers: NDArray[np.float64] = np.sqrt(loud**2 + np.maximum(others, 0.0)) / ratio
    return multipliers
