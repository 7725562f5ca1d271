"""The privacy loss of one local step and of one participation (K steps).

A step adds (2C/b)·N(0, σ_g²) to the mean of b clipped gradients. Written on the line that joins the
two neighbouring outputs, in units of their distance, the worst pair is built from N(0, σ²) and N(1,
σ²):

* fixed-size batches, replace-one: the tight profile δ(ε) = q·δ_G(log(1 + (e^ε − 1)/q)) for ε ≥ 0
  and its mirror image for ε < 0, q = b/R, σ = σ_g (Balle, Barthe, Gaboardi 2018, Theorem 11; a
  profile is a dominating pair by Zhu, Dong, Wang 2022, so it composes adaptively);
* Poisson batches, zero-out or add-remove: (1−q)·N(0) + q·N(1) against N(0), and the reverse, with
  σ = 2σ_g;
* a user's whole dataset: N(0) against N(1), no sampling, σ = σ_g.

For ε ≥ 0 the fixed-size profile *is* that of (1−q)N(0) + qN(1) against N(0), since
E[((1−q)Q + qP − e^ε·Q)₊] = q·E[(P − (1 + (e^ε−1)/q)·Q)₊]. So all three come from one table of
Gaussian masses between the losses of a grid, and "connect the dots" (Doroshenko et al. 2022) places
each interval's mass on its two ends such that its P-mass and Q-mass are both kept.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import scipy

from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.loss import Array, LossDistribution

#: The grid is this fraction of the standard deviation of one step's loss: the variance that the
#: grid adds is then below a thousandth of the step's, whatever the noise and however many steps are
#: composed.
RESOLUTION = 0.05
#: Gaussian tails are cut here, at a mass of 1e-23.
REACH = 10.0
#: Masses below this have lost digits to underflow.
LEAST = 1e-300
#: Most grid points of one step's law.
MOST_POINTS = 1 << 19
#: Below this σ the two outputs of a step hardly overlap, and the loss is 0 or about 1/2σ².
APART = 0.2
#: Grid points up to the largest loss of such a step.
POINTS_APART = 1 << 12


def ndtr(x: Array | float) -> Array:
    """Φ, the standard normal distribution function; scipy.special is loaded when first asked."""
    values: Array = scipy.special.ndtr(x)
    return values


def step_losses(
    rate: float, noise: float, sampling: str, interval: float | None = None
) -> tuple[LossDistribution, ...]:
    """The loss laws of one step, one per direction (a single one where the pair is symmetric).

    ``sampling`` is ``"fixed"`` (replace-one, multiplier ``noise``) or ``"poisson"`` (zero-out,
    multiplier 2·``noise``); rate 1 with ``"fixed"`` is the plain Gaussian mechanism.

    >>> gaussian, = step_losses(1.0, 1.0, "fixed")
    >>> round(gaussian.epsilon(1e-5), 2)
    4.38
    """
    if sampling not in ("fixed", "poisson"):
        raise PrivacyError(
            "no-loss-distribution",
            f"sampling={sampling!r} has no loss distribution; give fixed or poisson",
        )
    sigma = noise if sampling == "fixed" else 2.0 * noise
    h = interval if interval is not None else grid_interval(rate, sigma, sampling)
    if sampling == "fixed":
        return (_symmetric(rate, sigma, h),)
    return _remove(rate, sigma, h), _add(rate, sigma, h)


def grid_interval(rate: float, sigma: float, sampling: str) -> float:
    """h: a fixed fraction of the loss's standard deviation, more only if the grid would not fit."""
    if sigma < APART:
        return _interval_apart(rate, sigma)
    x = np.linspace(-REACH * sigma, 1 + REACH * sigma, 4001)
    loss = _loss(x, rate, sigma)
    null = np.exp(-0.5 * (x / sigma) ** 2)
    mixed = np.exp(np.clip(loss, None, 700.0)) * null
    if sampling == "fixed":  # positive losses under P and, mirrored, under Q
        second = np.sum(np.maximum(loss, 0.0) ** 2 * (mixed + null)) / np.sum(null)
    else:
        second = np.sum(loss**2 * np.minimum(mixed, null)) / np.sum(null)
    widest = float(_loss(np.array([1 + REACH * sigma]), rate, sigma)[0])
    deviation = min(math.sqrt(float(second)), 1 / sigma)
    return max(RESOLUTION * deviation, widest / MOST_POINTS)


def _interval_apart(rate: float, sigma: float) -> float:
    """h where the loss is 0 with probability 1 − q, else about N(log q + 1/2σ², 1/σ²).

    The grid is a fraction of the deviation of this mixture and of its normal part, whichever is
    smaller. e^{−loss} underflows for the largest of these losses, and :func:`_connect` then rounds
    them up.
    """
    mean = max(0.0, math.log(rate) + 1 / (2 * sigma**2))
    deviation = math.sqrt(rate) * math.hypot(mean, 1 / sigma)
    widest = float(_loss(np.array([1 + REACH * sigma]), rate, sigma)[0])
    return max(RESOLUTION * min(deviation, 1 / sigma), widest / POINTS_APART)


def _loss(x: Array, rate: float, sigma: float) -> Array:
    """log((1−q) + q·e^{(2x−1)/2σ²}), increasing in x."""
    exponent = (2 * x - 1) / (2 * sigma**2)
    if rate >= 1.0:
        return exponent
    return np.logaddexp(math.log1p(-rate), math.log(rate) + exponent)


def _point(loss: Array, rate: float, sigma: float) -> Array:
    """The x at which the loss is reached: ½ + σ²·log(1 + (e^L − 1)/q), −∞ below the smallest
    loss."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        small = np.log1p(np.expm1(np.minimum(loss, 30.0)) / rate)
        large = loss - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-loss))
        value = np.where(loss > 30.0, large, small)
    floor = math.log1p(-rate) if rate < 1 else -math.inf
    return np.where(
        loss <= floor, -np.inf, 0.5 + sigma**2 * np.nan_to_num(value, nan=-np.inf, neginf=-np.inf)
    )


def _masses(edges: Array) -> Array:
    """N(0, 1) mass between consecutive edges, from the nearer tail so that small ones stay
    exact."""
    low, high = edges[:-1], edges[1:]
    return np.where(low > 0, ndtr(-low) - ndtr(-high), ndtr(high) - ndtr(low))


def _interval_masses(index: Array, rate: float, sigma: float, h: float) -> tuple[Array, Array]:
    """P- and Q-mass of x between the losses h·index, with the ends ±∞ left to the caller."""
    x = _point(h * index, rate, sigma)
    null, moved = _masses(x / sigma), _masses((x - 1) / sigma)
    return (1 - rate) * null + rate * moved, null


def _connect(p: Array, q: Array, index: Array, h: float) -> Array:
    """Mass on the n+1 grid points from P- and Q-mass of the n intervals between them.

    In (L, L+h) the mass u at the upper end and p − u at the lower end keep Σ e^{−loss}·mass = q, so
    u = (p − e^L·q)/(1 − e^{−h}). The result dominates the interval's law (Doroshenko et al.,
    Theorem 3.1). A q that has lost digits to underflow counts as 0: all mass then goes up.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.where(
            q > LEAST, np.exp(np.minimum(h * index[:-1] + np.log(np.maximum(q, LEAST)), 700.0)), 0.0
        )
    upper = np.clip((p - scaled) / -math.expm1(-h), 0.0, p)
    probs = np.zeros(len(p) + 1)
    probs[1:] += upper
    probs[:-1] += p - upper
    return probs


def _symmetric(rate: float, sigma: float, h: float) -> LossDistribution:
    """Fixed-size batches: positive losses of (1−q)N(0)+qN(1) against N(0), their mirror, the rest
    at 0."""
    top = max(1, math.ceil(float(_loss(np.array([1 + REACH * sigma]), rate, sigma)[0]) / h))
    index = np.arange(top + 1, dtype=float)
    p, q = _interval_masses(index, rate, sigma, h)
    positive = _connect(p, q, index, h)
    x_top = float(_point(np.array([h * top]), rate, sigma)[0])
    beyond = (1 - rate) * float(ndtr(-x_top / sigma)) + rate * float(ndtr(-(x_top - 1) / sigma))
    probs = np.zeros(2 * top + 1)
    probs[top:] += positive
    probs[top::-1] += positive * np.exp(-h * index)
    probs[top] += (1 - rate) * float(1 - 2 * ndtr(-0.5 / sigma))
    probs[0] += float(ndtr(-x_top / sigma))  # losses below the grid, moved up to its end
    return LossDistribution(h, -top, probs, beyond)


def _remove(rate: float, sigma: float, h: float) -> LossDistribution:
    """Poisson, the record present in P: (1−q)N(0)+qN(1) against N(0)."""
    index, p, q, outside = _table(rate, sigma, h)
    probs = _connect(p, q, index, h)
    probs[0] += outside["below_p"]
    return LossDistribution(h, int(index[0]), probs, outside["above_p"])


def _add(rate: float, sigma: float, h: float) -> LossDistribution:
    """Poisson, the record absent from P: N(0) against (1−q)N(0)+qN(1); the loss changes sign."""
    index, p, q, outside = _table(rate, sigma, h)
    probs = _connect(q[::-1], p[::-1], -index[::-1], h)
    probs[0] += outside["above_q"]
    return LossDistribution(h, -int(index[-1]), probs, outside["below_q"])


def _table(rate: float, sigma: float, h: float) -> tuple[Array, Array, Array, dict[str, float]]:
    """Interval masses over all losses from the smallest that matters to the largest, and the
    rest."""
    ends = _loss(np.array([-REACH * sigma, 1 + REACH * sigma]), rate, sigma)
    index = np.arange(math.floor(ends[0] / h), math.ceil(ends[1] / h) + 1, dtype=float)
    p, q = _interval_masses(index, rate, sigma, h)
    low, high = _point(h * index[[0, -1]], rate, sigma)
    outside = {
        "below_p": (1 - rate) * float(ndtr(low / sigma)) + rate * float(ndtr((low - 1) / sigma)),
        "below_q": float(ndtr(low / sigma)),
        "above_p": (1 - rate) * float(ndtr(-high / sigma))
        + rate * float(ndtr(-(high - 1) / sigma)),
        "above_q": float(ndtr(-high / sigma)),
    }
    return index, p, q, outside


@lru_cache(maxsize=64)
def participation_losses(
    rate: float, noise: float, sampling: str, unit: str, steps: int
) -> tuple[LossDistribution, ...]:
    """The loss of one participation: K adaptive steps.

    For ``unit="user"`` the K steps are Gaussian mechanisms of multiplier σ_g on the same dataset,
    which together are exactly one of multiplier σ_g/√K.
    """
    if unit == "user":
        return step_losses(1.0, noise / math.sqrt(steps), "fixed")
    if unit != "record":
        raise PrivacyError(
            "no-loss-distribution", f"unit={unit!r} has no loss distribution; give record or user"
        )
    return tuple(law.power(steps) for law in step_losses(rate, noise, sampling))
