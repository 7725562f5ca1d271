"""ε of explicit pairs of datasets, computed by a route of its own: characteristic functions.

Nothing here touches the package. The loss of one step of a concrete pair of output laws on the line
is integrated into E[e^{itL}], raised to the powers that the run prescribes, and inverted by one
transform; or, where the pair is Gaussian, a closed form is used.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, norm


def gaussian_delta(epsilon: float, mu: float) -> float:
    """δ(ε) between N(0, 1) and N(μ, 1)."""
    return float(
        norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon + norm.logcdf(-mu / 2 - epsilon / mu))
    )


def gaussian_epsilon(delta: float, mu: float) -> float:
    """The ε at which that δ is reached."""
    return float(
        brentq(lambda e: gaussian_delta(e, mu) - delta, 0, mu * mu / 2 + 10 * mu, xtol=1e-10)
    )


def rare_gaussian_epsilon(delta: float, sigma: float, chance: float, rounds: int) -> float:
    """ε where each round shows N(0, σ²) or N(1, σ²) with this chance, else nothing: a binomial
    sum."""
    counts = np.arange(1, rounds + 1)
    weights = binom.pmf(counts, rounds, chance)
    kept = weights > 1e-18

    def total(epsilon: float) -> float:
        return sum(
            w * gaussian_delta(epsilon, np.sqrt(n) / sigma)
            for n, w in zip(counts[kept], weights[kept], strict=True)
        )

    return float(brentq(lambda e: total(e) - delta, 1e-6, 1000, xtol=1e-9))


def step_pair(rate: float, sigma: float, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Losses and P-probabilities of one step, on a fine grid of outputs in units of the sensitivity
    2C/b.

    ``"opposite"``: all other gradients are 0 and the record's is +C or −C, so a step shows
    (1−q)N(0) + qN(±½). ``"aligned"``: all other gradients are +C and the record's is −C or +C, so a
    step shows (1−q)N(0) + qN(1) or N(0) (replace-one), or with half the distance the same for
    add/remove.
    """
    x = np.linspace(-9 * sigma - 1, 9 * sigma + 1, 6001)
    centre = norm.pdf(x, 0, sigma)
    if kind == "opposite":
        p = (1 - rate) * centre + rate * norm.pdf(x, 0.5, sigma)
        q = (1 - rate) * centre + rate * norm.pdf(x, -0.5, sigma)
    elif kind == "aligned":
        p, q = (1 - rate) * centre + rate * norm.pdf(x, 1, sigma), centre
    else:
        p, q = centre, (1 - rate) * centre + rate * norm.pdf(x, 1, sigma)
    return np.log(p) - np.log(q), p * (x[1] - x[0])


def composed_epsilon(
    delta: float,
    losses: np.ndarray,
    probs: np.ndarray,
    steps: int,
    chance: float,
    rounds: int,
    points: int = 4096,
) -> float:
    """ε of ``rounds`` rounds, each of ``steps`` steps with this chance and of nothing otherwise.

    Needs a total loss without atoms, that is many rounds or chance 1.
    """
    mean = rounds * chance * steps * np.dot(probs, losses)
    second = np.dot(probs, losses**2)
    variance = (
        rounds * chance * steps * second + rounds * chance * (steps * np.dot(probs, losses)) ** 2
    )
    width = 24 * np.sqrt(variance)
    start = mean - width / 2
    frequencies = 2 * np.pi / width * np.arange(points // 2 + 1)
    step = np.array([np.dot(probs, np.exp(1j * t * losses)) for t in frequencies])
    round_ = (1 - chance) + chance * step**steps
    spectrum = round_**rounds * np.exp(-1j * frequencies * start)
    density = np.fft.irfft(np.conj(spectrum), points) * points / width
    grid = start + width / points * np.arange(points)

    def total(epsilon: float) -> float:
        return float(
            np.sum(np.maximum(0.0, -np.expm1(np.minimum(epsilon - grid, 0.0))) * density)
            * width
            / points
        )

    return float(brentq(lambda e: total(e) - delta, 0.0, grid[-1], xtol=1e-8))
