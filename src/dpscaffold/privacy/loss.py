"""Privacy loss distributions on a grid: mix them, compose them, read ε off them, never
optimistically.

For two output laws P and Q the privacy loss is log(P/Q) under P. Its law fixes every
δ(ε) = E[(1 − e^{ε−L})₊], the hockey-stick divergence of order e^ε, and the losses of adaptively
composed mechanisms add (Sommer, Meiser, Mohammadi 2019; Koskela, Jälkö, Honkela 2020). Here the law
lives on the grid {h·i}, with the mass that was cut off at +∞, where it counts fully towards δ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray

Array = NDArray[np.float64]

#: Mass that one composition may cut off at each end. The upper part is moved to +∞, the lower part
#: upwards.
TAIL = 1e-18
#: Longest transform; beyond it the grid is made coarser, upwards.
LONGEST = 1 << 22


def decayed_sums(probs: NDArray[np.float64], interval: float) -> NDArray[np.float64]:
    """V_j = p_j + e^{−h}·V_{j−1}, in blocks over which e^{hj} cannot overflow; all terms are
    positive.

    >>> decayed_sums(np.array([1.0, 0.0, 1.0]), math.log(2.0)).tolist()
    [1.0, 0.5, 1.25]
    """
    if interval > 1:  # terms below e^{−40} are lost in rounding; without them δ(ε) is larger
        sums = probs.copy()
        for k in range(1, min(int(40 / interval) + 1, len(probs))):
            sums[k:] += math.exp(-k * interval) * probs[:-k]
        return sums
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
class LossDistribution:
    """The law of a privacy loss: mass ``probs[j]`` at h·(lowest + j), and ``infinite`` at +∞.

    ``probs`` is (n,), ``interval`` is h. Every operation returns a law that dominates the exact
    one: its δ(ε) is never smaller, up to the rounding that :meth:`power` bounds and adds to
    ``infinite``.

    >>> coin = LossDistribution(1.0, -1, np.array([0.25, 0.0, 0.75]), 0.0)
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

        >>> coin = LossDistribution(1.0, -1, np.array([0.25, 0.0, 0.75]), 0.0)
        >>> coin.deltas(np.array([0.0, 0.5, 1.0])).round(4).tolist()
        [0.4741, 0.2951, 0.0]
        """
        upper = np.append(np.cumsum(self.probs[::-1])[::-1], 0.0)
        lower = np.append(decayed_sums(self.probs[::-1], self.interval)[::-1], 0.0)
        losses = np.append(self.losses, math.inf)
        place = np.searchsorted(self.losses, epsilons, side="right")
        slack = 1 + 4 * len(self.probs) * float(np.finfo(float).eps)
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
        k = int(exceeds[0]) - 1 if len(exceeds) else len(losses) - 1
        if k < 0:  # the largest loss itself: its δ is the mass at infinity, up to rounding
            return float(losses[0])
        excess = float(upper[k]) - delta
        if excess <= 0:
            return 0.0
        value = float(losses[k]) + math.log(excess / float(lower[k]))
        floor = float(losses[k + 1]) if k + 1 < len(losses) else 0.0
        return max(floor, min(value, float(losses[k])))

    def mixed(self, weight: float) -> LossDistribution:
        """This law with probability ``weight``, else a loss of exactly 0 (nothing was released).

        Sound when the coin is data-independent and may be revealed: the two cases then have
        disjoint supports, and δ is the average of the two δ.
        """
        if weight >= 1.0:
            return self
        low, high = min(self.lowest, 0), max(self.lowest + len(self.probs) - 1, 0)
        probs = np.zeros(high - low + 1)
        probs[self.lowest - low : self.lowest - low + len(self.probs)] = weight * self.probs
        probs[-low] += 1.0 - weight
        return LossDistribution(self.interval, low, probs, weight * self.infinite)

    def power(self, times: int) -> LossDistribution:
        """The loss of ``times`` adaptive compositions: the n-fold convolution, by one transform.

        The window holds all but :data:`TAIL` of the mass on either side (Chernoff). What wraps
        round from below lands higher than it was; what wraps round from above is counted at +∞ as
        well. The rounding of the transforms, bounded in the ℓ1 norm from their own spectrum, is
        added at +∞ too.
        """
        if times == 1:
            return self
        if times == 0:
            return LossDistribution(self.interval, 0, np.ones(1), 0.0)
        low, high = _window([self.probs], [times])
        length = high - low + 1
        if length > LONGEST:
            return self.coarser(math.ceil(length / LONGEST)).power(times)
        size = scipy.fft.next_fast_len(max(length, len(self.probs)), real=True)
        spectrum = scipy.fft.rfft(self.probs, size)
        probs = np.roll(scipy.fft.irfft(spectrum**times, size), -low)[:length]
        rounding = _rounding(spectrum, self.probs, times, size)
        infinite = -math.expm1(times * math.log1p(-self.infinite)) if self.infinite < 1 else 1.0
        return LossDistribution(
            self.interval,
            self.lowest * times + low,
            np.maximum(probs, 0.0),
            min(1.0, infinite + TAIL + rounding),
        )

    def compose(self, other: LossDistribution) -> LossDistribution:
        """The loss of both mechanisms, the second chosen after seeing the first; same interval."""
        if not math.isclose(self.interval, other.interval, rel_tol=1e-12):
            raise ValueError(
                f"intervals {self.interval} and {other.interval} differ; build both on one grid"
            )
        size = scipy.fft.next_fast_len(len(self.probs) + len(other.probs) - 1, real=True)
        probs = scipy.fft.irfft(
            scipy.fft.rfft(self.probs, size) * scipy.fft.rfft(other.probs, size), size
        )
        probs = probs[: len(self.probs) + len(other.probs) - 1]
        norms = float(np.linalg.norm(self.probs) * np.linalg.norm(other.probs))
        rounding = 2 * np.finfo(float).eps * math.log2(size) * math.sqrt(size) * norms
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        return LossDistribution(
            self.interval,
            self.lowest + other.lowest,
            np.maximum(probs, 0.0),
            min(1.0, infinite + rounding),
        )

    def coarser(self, factor: int) -> LossDistribution:
        """The same law on a grid ``factor`` times coarser, every loss rounded up."""
        if factor <= 1:
            return self
        indices = -((-(self.lowest + np.arange(len(self.probs)))) // factor)
        probs: Array = np.bincount(indices - indices[0], weights=self.probs).astype(np.float64)
        return LossDistribution(self.interval * factor, int(indices[0]), probs, self.infinite)

    def on_grid(self, interval: float) -> LossDistribution:
        """The same law on any other grid, every loss rounded up.

        >>> coin = LossDistribution(1.0, -1, np.array([0.25, 0.0, 0.75]), 0.0)
        >>> moved = coin.on_grid(0.7)
        >>> moved.lowest, moved.probs.tolist()  # −1 → −0.7 and 1 → 1.4
        (-1, [0.25, 0.0, 0.0, 0.75])
        """
        indices = np.ceil(self.losses / interval).astype(np.int64)
        probs: Array = np.bincount(indices - indices[0], weights=self.probs).astype(np.float64)
        return LossDistribution(interval, int(indices[0]), probs, self.infinite)


def privacy_parameters(epsilon: float, delta: float, interval: float) -> LossDistribution:
    """The dominating pair of any (ε, δ)-DP mechanism, ε rounded up to the grid (Kairouz, Oh,
    Viswanath 2015).

    Loss +ε with probability (1−δ)·e^ε/(1+e^ε), −ε with (1−δ)/(1+e^ε), and +∞ with δ.

    >>> round(privacy_parameters(1.0, 1e-6, 0.25).epsilon(2e-6), 3)
    1.0
    """
    index = math.ceil(epsilon / interval - 1e-9)
    probs = np.zeros(2 * index + 1)
    likely = 1.0 / (1.0 + math.exp(-index * interval))
    probs[-1] += (1.0 - delta) * likely
    probs[0] += (1.0 - delta) * (1.0 - likely)
    return LossDistribution(interval, -index, probs, delta)


def _window(parts: Sequence[Array], times: Sequence[int]) -> tuple[int, int]:
    """Indices that hold all but TAIL of the convolution's mass on each side, by Chernoff's
    inequality.

    P[S ≥ a] ≤ e^{−ta}·E[e^{tS}] for every t > 0: take the smallest a over a range of t around the
    best one for a Gaussian of the same variance, from far below to far above it.
    """
    low = 0
    high = sum((len(p) - 1) * n for p, n in zip(parts, times, strict=True))
    variance = 0.0
    for p, n in zip(parts, times, strict=True):
        index = np.arange(len(p))
        mean = float(np.dot(index, p)) / max(float(p.sum()), 1e-300)
        variance += n * float(np.dot((index - mean) ** 2, p))
    need = -math.log(TAIL)
    best = math.sqrt(2 * need / max(variance, 1e-12))
    for t in best * np.geomspace(1e-3, 2.0, 28):
        up = down = need
        for p, n in zip(parts, times, strict=True):
            positive = p > 0
            index, logs = np.arange(len(p))[positive], np.log(p[positive])
            up += n * _log_sum(logs + t * index)
            down += n * _log_sum(logs - t * index)
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
    error = np.finfo(float).eps * math.log2(max(size, 2)) * float(np.linalg.norm(probs))
    growth = np.minimum(np.abs(spectrum), 1.0) ** (times - 1)
    return times * error * math.sqrt(2 * float(np.dot(growth, growth)))
