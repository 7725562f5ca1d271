"""One Gaussian release, exactly: δ by ε, and the noise that an (ε, δ) needs."""

from __future__ import annotations

import numpy as np

from dpscaffold.privacy.errors import PrivacyError


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
        raise PrivacyError(
            "out-of-range",
            f"epsilon is {epsilon} and delta {delta}; epsilon must be positive and delta lie "
            f"between 0 and 1",
        )
    from scipy.optimize import brentq

    low, high = 1e-3, 1.0
    while gaussian_delta(epsilon, high) > delta:
        low, high = high, 2 * high
    while gaussian_delta(epsilon, low) < delta:
        low /= 2
    z = brentq(lambda x: gaussian_delta(epsilon, x) - delta, low, high, xtol=1e-12)
    return float(z) * (1 + 1e-9)


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The smallest ε with which one Gaussian release is (ε, δ)-differentially private.

    >>> round(gaussian_epsilon(3.731, 1e-5), 3), gaussian_epsilon(1e6, 1e-5)
    (1.0, 0.0)
    """
    from scipy.optimize import brentq

    if gaussian_delta(0.0, multiplier) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(high, multiplier) > delta:
        high *= 2
    found = brentq(lambda x: gaussian_delta(x, multiplier) - delta, 0.0, high, xtol=1e-12)
    return float(found) * (1 + 1e-9)
