"""Privacy losses on a grid: of one step, of one participation, mixed, composed, and ε read off
them; never optimistically.

For two output laws P and Q the privacy loss is log(P/Q) under P. Its law fixes every
δ(ε) = E[(1 − e^{ε−L})₊], the hockey-stick divergence of order e^ε, and the losses of adaptively
composed mechanisms add (Sommer, Meiser, Mohammadi 2019; Koskela, Jälkö, Honkela 2020). Here the law
lives on the grid {h·i}, with the mass that was cut off at +∞, where it counts fully towards δ.

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

The library dp_accounting composes such laws too; the tests compare with it. It is not used here
because one ε takes about four times as long with it, and because the rounding of its transforms
is not bounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from dpscaffold.errors import BadInput
from dpscaffold.privacy.mechanism import LEAST_STATED

Array = NDArray[np.float64]

#: Mass that one composition may cut off at each end. The upper part is moved to +∞, the lower part
#: upwards.
TAIL = 1e-18
#: Longest transform; beyond it the grid is made coarser, upwards.
LONGEST = 1 << 22
#: The grid is this fraction of the standard deviation of one step's loss: the variance that the
#: grid adds is then below a thousandth of the step's, whatever the noise and however many steps are
#: composed.
RESOLUTION = 0.05
#: Gaussian tails are cut here, at a mass of 1e-23.
REACH = 10.0
#: Stands for a mass of 0 in a logarithm.
LEAST = 1e-300
#: The distance from 1 to the next double.
EPS = float(np.finfo(float).eps)
#: Most grid points of one step's law.
MOST_POINTS = 1 << 19


def decayed_sums(probs: NDArray[np.float64], interval: float) -> NDArray[np.float64]:
    """V_j = p_j + e^{−h}·V_{j−1}, in blocks over which e^{hj} cannot overflow; all terms are
    positive.

    >>> decayed_sums(np.array([1.0, 0.0, 1.0]), math.log(2.0)).tolist()
    [1.0, 0.5, 1.25]
    """
    sums = np.empty_like(probs)
    width = max(1, int(30 / interval))
    growth = np.exp(interval * np.arange(min(width, len(probs))))
    last = 0.0
    for start in range(0, len(probs), width):
        block = probs[start : start + width]
        scale = growth[: len(block)]
        sums[start : start + width] = (
            np.cumsum(block * scale) + last * math.exp(-interval)
        ) / scale
        last = float(sums[start + len(block) - 1])
    return sums


@dataclass(frozen=True)
class Loss:
    """The law of a privacy loss: mass ``probs[j]`` at h·(lowest + j), and ``infinite`` at +∞.

    ``probs`` is (n,), ``interval`` is h. Every operation returns a law that dominates the exact
    one: its δ(ε) is never smaller, up to the rounding that :meth:`power` bounds and adds to
    ``infinite``.

    >>> coin = Loss(1.0, -1, np.array([0.25, 0.0, 0.75]), 0.0)
    >>> round(coin.delta(0.0), 4), round(coin.power(2).delta(0.5), 4)
    (0.4741, 0.437)
    """

    interval: float
    lowest: int
    probs: Array
    infinite: float

    @property
    def losses(self) -> Array:
        """The grid points, (n,)."""
        return self.interval * (self.lowest + np.arange(len(self.probs), dtype=np.float64))

    def delta(self, epsilon: float) -> float:
        """δ(ε) = P[L = ∞] + E[(1 − e^{ε−L})₊; L < ∞]."""
        above = self.losses > epsilon
        return float(
            self.infinite - np.dot(np.expm1(epsilon - self.losses[above]), self.probs[above])
        )

    def deltas(self, epsilons: Array) -> Array:
        """δ(ε) at many ε ≥ 0, (k,), in one pass and rounded up.

        With U_k and V_k as in :meth:`epsilon`, δ(ε) = U_k − e^{ε−L_k}·V_k for the first grid point
        L_k above ε. The sums' rounding, at most n units in the last place of U_k each, is added.

        >>> coin = Loss(1.0, -1, np.array([0.25, 0.0, 0.75]), 0.0)
        >>> coin.deltas(np.array([0.0, 0.5, 1.0])).round(4).tolist()
        [0.4741, 0.2951, 0.0]
        """
        upper = np.append(np.cumsum(self.probs[::-1])[::-1], 0.0)
        lower = np.append(decayed_sums(self.probs[::-1], self.interval)[::-1], 0.0)
        losses = np.append(self.losses, math.inf)
        place = np.searchsorted(self.losses, epsilons, side="right")
        slack = 1 + 4 * len(self.probs) * EPS
        deltas: Array = self.infinite + np.maximum(
            0.0, upper[place] * slack - np.exp(epsilons - losses[place]) * lower[place]
        )
        return deltas

    def epsilon(self, delta: float) -> float:
        """The smallest ε ≥ 0 with δ(ε) ≤ ``delta``; infinite if the mass at +∞ alone exceeds it.

        With U_k the mass at or above the grid point L_k and V_k = Σ_{i≥k} p_i·e^{L_k−L_i}, between
        two grid points δ(ε) = U_k − e^{ε−L_k}·V_k for the upper one, L_k. V obeys V_k = p_k +
        e^{−h}·V_{k+1}, which never overflows. The interval is found on the grid and the equation
        solved exactly inside it.
        """
        if self.infinite > delta:
            return math.inf
        first = max(0, 1 - self.lowest)  # losses ≤ 0 add nothing to δ(ε) for ε ≥ 0
        losses, probs = self.losses[first:][::-1], self.probs[first:][::-1]
        if not len(losses):
            return 0.0
        upper = self.infinite + np.cumsum(probs)
        lower = decayed_sums(probs, self.interval)
        exceeds = np.flatnonzero(upper - lower > delta)
        # At the largest loss itself δ is the mass at infinity, and exceeds by rounding alone.
        k = max(0, int(exceeds[0]) - 1) if len(exceeds) else len(losses) - 1
        excess = float(upper[k]) - delta
        if excess <= 0:
            return 0.0
        value = float(losses[k]) + math.log(excess / float(lower[k]))
        floor = float(losses[k + 1]) if k + 1 < len(losses) else 0.0
        return max(floor, min(value, float(losses[k])))

    def mixed(self, weight: float) -> Loss:
        """This law with probability ``weight``, else a loss of exactly 0 (nothing was released).

        Sound when the coin is data-independent and may be revealed: the two cases then have
        disjoint supports, and δ is the average of the two δ.
        """
        low, end = min(self.lowest, 0), self.lowest + len(self.probs)
        probs = np.zeros(max(end, 1) - low)
        probs[self.lowest - low : end - low] = weight * self.probs
        probs[-low] += 1.0 - weight
        return Loss(self.interval, low, probs, weight * self.infinite)

    def power(self, times: int) -> Loss:
        """The loss of ``times`` adaptive compositions: the n-fold convolution, by one transform.

        The window holds all but :data:`TAIL` of the mass on either side (Chernoff). What wraps
        round from below lands higher than it was; what wraps round from above is counted at +∞ as
        well. The rounding of the transforms, bounded in the ℓ1 norm from their own spectrum, is
        added at +∞ too.
        """
        if times == 1:
            return self
        if times == 0:
            return Loss(self.interval, 0, np.ones(1), 0.0)
        low, high = _window(self.probs, times)
        length = high - low + 1
        if length > LONGEST:
            return self.on_grid(self.interval * math.ceil(length / LONGEST)).power(times)
        size = scipy.fft.next_fast_len(max(length, len(self.probs)), real=True)
        spectrum = scipy.fft.rfft(self.probs, size)
        probs = np.roll(scipy.fft.irfft(spectrum**times, size), -low)[:length]
        rounding = _rounding(spectrum, self.probs, times, size)
        infinite = -math.expm1(times * math.log1p(-self.infinite)) if self.infinite < 1 else 1.0
        return Loss(
            self.interval,
            self.lowest * times + low,
            np.maximum(probs, 0.0),
            min(1.0, infinite + TAIL + rounding),
        )

    def compose(self, other: Loss) -> Loss:
        """The loss of both mechanisms, the second chosen after seeing the first, on the coarser of
        their grids."""
        interval = max(self.interval, other.interval)
        one = self if self.interval == interval else self.on_grid(interval)
        two = other if other.interval == interval else other.on_grid(interval)
        length = len(one.probs) + len(two.probs) - 1
        size = scipy.fft.next_fast_len(length, real=True)
        spectrum = scipy.fft.rfft(one.probs, size) * scipy.fft.rfft(two.probs, size)
        probs = scipy.fft.irfft(spectrum, size)[:length]
        norms = float(np.linalg.norm(one.probs) * np.linalg.norm(two.probs))
        rounding = 2 * EPS * math.log2(size) * math.sqrt(size) * norms
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        return Loss(
            interval,
            one.lowest + two.lowest,
            np.maximum(probs, 0.0),
            min(1.0, infinite + rounding),
        )

    def on_grid(self, interval: float) -> Loss:
        """The same law on any other grid, every loss rounded up.

        >>> coin = Loss(1.0, -1, np.array([0.25, 0.0, 0.75]), 0.0)
        >>> moved = coin.on_grid(0.7)
        >>> moved.lowest, moved.probs.tolist()  # −1 → −0.7 and 1 → 1.4
        (-1, [0.25, 0.0, 0.0, 0.75])
        """
        places = np.ceil(self.losses / interval).astype(np.int64)
        probs: Array = np.bincount(places - places[0], weights=self.probs).astype(np.float64)
        return Loss(interval, int(places[0]), probs, self.infinite)


def privacy_parameters(epsilon: float, delta: float, interval: float) -> Loss:
    """The dominating pair of any (ε, δ)-DP mechanism, ε rounded up to the grid (Kairouz, Oh,
    Viswanath 2015).

    Loss +ε with probability (1−δ)·e^ε/(1+e^ε), −ε with (1−δ)/(1+e^ε), and +∞ with δ.

    >>> round(privacy_parameters(1.0, 1e-6, 0.25).epsilon(2e-6), 3)
    1.0
    """
    index = math.ceil(epsilon / interval)
    probs = np.zeros(2 * index + 1)
    likely = 1.0 / (1.0 + math.exp(-index * interval))
    probs[-1] += (1.0 - delta) * likely
    probs[0] += (1.0 - delta) * (1.0 - likely)
    return Loss(interval, -index, probs, delta)


def _window(probs: Array, times: int) -> tuple[int, int]:
    """Indices that hold all but TAIL of the n-fold convolution's mass on each side, by Chernoff's
    inequality.

    P[S ≥ a] ≤ e^{−ta}·E[e^{tS}] for every t > 0: take the smallest a over a range of t around the
    best one for a Gaussian of the same variance, from far below to far above it.
    """
    index = np.flatnonzero(probs > 0)
    mass = probs[index]
    mean = float(np.dot(index, mass)) / max(float(mass.sum()), LEAST)
    variance = times * float(np.dot((index - mean) ** 2, mass))
    low, high = 0, (len(probs) - 1) * times

    need, logs = -math.log(TAIL), np.log(mass)
    best = math.sqrt(2 * need / max(variance, 1e-12))
    for t in best * np.geomspace(1e-3, 2.0, 28):
        up = need + times * _log_sum(logs + t * index)
        down = need + times * _log_sum(logs - t * index)
        high = min(high, math.ceil(up / t))
        low = max(low, math.floor(-down / t))
    return min(low, high), high


def _log_sum(values: Array) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))


def _rounding(spectrum: NDArray[np.complex128], probs: Array, times: int, size: int) -> float:
    """An ℓ1 bound on what double precision does to n-fold convolution by transform.

    Each spectral value carries an error e ≲ u·log₂(N)·‖p‖₂; its n-th power one of n·|X|^{n−1}·e;
    back in the time domain ‖error‖₁ ≤ √N·‖error‖₂ = (Σ over the N frequencies of
    (n·|X|^{n−1}·e)²)^{1/2}.
    """
    error = EPS * math.log2(max(size, 2)) * float(np.linalg.norm(probs))
    growth = np.minimum(np.abs(spectrum), 1.0) ** (times - 1)
    return times * error * math.sqrt(2 * float(np.dot(growth, growth)))


def step_losses(
    rate: float, noise: float, sampling: str, interval: float | None = None
) -> tuple[Loss, ...]:
    """The loss laws of one step, one per direction (a single one where the pair is symmetric).

    ``sampling`` is ``"fixed"`` (replace-one, multiplier ``noise``) or ``"poisson"`` (zero-out,
    multiplier 2·``noise``); rate 1 with ``"fixed"`` is the plain Gaussian mechanism.

    >>> gaussian, = step_losses(1.0, 1.0, "fixed")
    >>> round(gaussian.epsilon(1e-5), 2)
    4.38
    """
    if noise < LEAST_STATED:
        raise BadInput(
            "noise-out-of-range",
            f"the noise of a step is {noise:.3g} times what one record can change, too little to "
            f"hide anything; give noise for at least {LEAST_STATED:g}",
        )
    sigma = noise if sampling == "fixed" else 2.0 * noise
    h = interval if interval is not None else grid_interval(rate, sigma, sampling)
    if sampling == "fixed":
        return (_fixed(rate, sigma, h),)
    return _poisson(rate, sigma, h)


def grid_interval(rate: float, sigma: float, sampling: str) -> float:
    """h: a fixed fraction of the loss's standard deviation, more only if the grid would not fit."""
    x = np.linspace(-REACH * sigma, 1 + REACH * sigma, 4001)
    loss = _loss(x, rate, sigma)
    null = np.exp(-0.5 * (x / sigma) ** 2)
    mixed = np.exp(np.clip(loss, None, 700.0)) * null
    if sampling == "fixed":  # positive losses under P and, mirrored, under Q
        second = np.sum(np.maximum(loss, 0.0) ** 2 * (mixed + null)) / np.sum(null)
    else:
        second = np.sum(loss**2 * np.minimum(mixed, null)) / np.sum(null)
    deviation = min(math.sqrt(float(second)), 1 / sigma)
    return max(RESOLUTION * deviation, float(loss[-1]) / MOST_POINTS)


def _loss(x: Any, rate: float, sigma: float) -> Any:
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
    below, above = scipy.special.ndtr(edges), scipy.special.ndtr(-edges)
    masses: Array = np.where(edges[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return masses


def _interval_masses(index: Array, rate: float, sigma: float, h: float) -> tuple[Array, Array]:
    """P- and Q-mass of x between the losses h·index, what lies below the first and above the last
    included: the first and the last entry of each."""
    x = np.concatenate([[-np.inf], _point(h * index, rate, sigma), [np.inf]])
    null, moved = _masses(x / sigma), _masses((x - 1) / sigma)
    return (1 - rate) * null + rate * moved, null


def _connect(p: Array, q: Array, index: Array, h: float) -> Array:
    """Mass on the n+1 grid points from P- and Q-mass of the n intervals between them.

    In (L, L+h) the mass u at the upper end and p − u at the lower end keep Σ e^{−loss}·mass = q, so
    u = (p − e^L·q)/(1 − e^{−h}). The result dominates the interval's law (Doroshenko et al.,
    Theorem 3.1).
    """
    scaled = np.exp(h * index[:-1] + np.log(np.maximum(q, LEAST)))
    upper = np.clip((p - scaled) / -math.expm1(-h), 0.0, p)
    probs = np.zeros(len(p) + 1)
    probs[1:] += upper
    probs[:-1] += p - upper
    return probs


def _fixed(rate: float, sigma: float, h: float) -> Loss:
    """Fixed-size batches: positive losses of (1−q)N(0)+qN(1) against N(0), their mirror, the rest
    at 0."""
    top = max(1, math.ceil(_loss(1 + REACH * sigma, rate, sigma) / h))
    index = np.arange(top + 1, dtype=float)
    p, q = _interval_masses(index, rate, sigma, h)
    positive = _connect(p[1:-1], q[1:-1], index, h)

    probs = np.zeros(2 * top + 1)
    probs[top:] += positive
    probs[top::-1] += positive * np.exp(-h * index)
    probs[top] += (1 - rate) * float(1 - 2 * scipy.special.ndtr(-0.5 / sigma))
    probs[0] += q[-1]  # losses below the grid, moved up to its end
    return Loss(h, -top, probs, float(p[-1]))


def _poisson(rate: float, sigma: float, h: float) -> tuple[Loss, Loss]:
    """Poisson batches: the record in P, (1−q)N(0)+qN(1) against N(0), and the record in Q, where
    the loss changes its sign."""
    lowest = math.floor(_loss(-REACH * sigma, rate, sigma) / h)
    top = math.ceil(_loss(1 + REACH * sigma, rate, sigma) / h)
    index = np.arange(lowest, top + 1, dtype=float)
    p, q = _interval_masses(index, rate, sigma, h)

    removed = _connect(p[1:-1], q[1:-1], index, h)
    removed[0] += p[0]
    added = _connect(q[-2:0:-1], p[-2:0:-1], -index[::-1], h)
    added[0] += q[-1]
    return (
        Loss(h, lowest, removed, float(p[-1])),
        Loss(h, -top, added, float(q[0])),
    )


@lru_cache(maxsize=64)
def participation_losses(
    rate: float, noise: float, sampling: str, unit: str, steps: int
) -> tuple[Loss, ...]:
    """The loss of one participation: K adaptive steps.

    For ``unit="user"`` the K steps are Gaussian mechanisms of multiplier σ_g on the same dataset,
    which together are exactly one of multiplier σ_g/√K.
    """
    if unit == "user":
        return step_losses(1.0, noise / math.sqrt(steps), "fixed")
    return tuple(law.power(steps) for law in step_losses(rate, noise, sampling))
