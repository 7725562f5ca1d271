"""Three losses for which the published bound is too small, each with its exact ε in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
from privacy.explicit_pairs import gaussian_epsilon, rare_gaussian_epsilon
from world import epsilon, published_epsilon

FULL = {"users": 100, "size": 1000, "batch": 1000, "delta": 1e-5, "memory": False}


@pytest.mark.parametrize(
    ("noise", "rounds", "printed", "true"),
    [(1, 1, 1.347, 3.139), (1, 100, 1.896, 8.615), (2, 1000, 1.800, 9.176)],
)
def test_sampling_users_does_not_amplify_a_records_epsilon(noise, rounds, printed, true):
    """f = −d·x; user 1 holds d = +1 throughout, or one −1; the 99 others hold −1.

    One user is drawn a round. User 1's upload lies 2C/b away from its neighbour's and 1000 such
    units away from everyone else's, so the third party can tell when user 1 was drawn, and then
    sees a plain Gaussian.
    """
    run = {**FULL, "rounds": rounds, "local_steps": 1, "cohort": 1, "noise": noise}
    exact = rare_gaussian_epsilon(1e-5, noise, 0.01, rounds)
    assert exact == pytest.approx(true, abs=0.001)
    assert published_epsilon(**run) == pytest.approx(printed, abs=0.001)
    assert published_epsilon(**run) < exact <= epsilon("third_party", **run)
    assert exact <= epsilon("server", **run) <= 1.003 * exact


def test_noise_does_not_average_out_over_adaptive_steps():
    """K = 2, l = 1, 20 users, f = −25y² for 999 records of user 1 and ±y for the last; η = C = 1.

    In units of 2C/b: H₁ = ±½ + z₁, y₁ = −H₁, H₂ = 0.999·50·H₁ ± ½ + z₂, and the sum of all moves is
    −(H₁ + H₂) plus 2·19 noises of the others. User 1's first noise is multiplied along with its
    signal.
    """
    gain = 1 + 0.999 * 50
    shift, deviation = gain + 1, math.sqrt(gain**2 + 1 + 2 * 19)
    exact = gaussian_epsilon(1e-5, shift / deviation)
    run = {**FULL, "rounds": 1, "local_steps": 2, "users": 20, "cohort": 20, "noise": 1.0}
    assert exact == pytest.approx(4.44, abs=0.005)
    assert published_epsilon(**run) == pytest.approx(1.567, abs=0.001)
    assert published_epsilon(**run) < exact <= epsilon("third_party", **run)
    assert exact <= epsilon("server", **run)


def test_memory_carries_noise_from_round_to_round():
    """SCAFFOLD, K = 1, user i in two rounds with disjoint companions, m = 20, its gradient changing
    sign.

    Round 1 shows S₁ = H¹ + 19 noises; then c_i = H¹, and round 2 shows S₂ = H² − H¹ + 19 noises.
    With H¹ moved by 1 and H² by −1 the shift is (1, −2), against the covariance ((20, −1), (−1,
    21)).
    """
    covariance, shift = np.array([[20.0, -1.0], [-1.0, 21.0]]), np.array([1.0, -2.0])
    exact = gaussian_epsilon(1e-5, math.sqrt(shift @ np.linalg.solve(covariance, shift)))
    run = {
        **FULL,
        "memory": True,
        "rounds": 2,
        "local_steps": 1,
        "users": 20,
        "cohort": 20,
        "noise": 1.0,
    }
    assert exact == pytest.approx(1.909, abs=0.001)
    assert published_epsilon(**run) == pytest.approx(1.567, abs=0.001)
    assert published_epsilon(**run) < exact <= epsilon("third_party", **run)
    assert exact <= epsilon("server", **run)
