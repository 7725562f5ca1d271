"""The law of the discrete Laplace noise, and where its randomness comes from."""

from __future__ import annotations

import math
import random
import secrets
from collections import Counter

import pytest
from scipy.stats import chi2

from dpscaffold.randomness.laplace import discrete_laplace


def probability(z, scale):
    """Of the integer z under discrete Laplace noise, in closed form."""
    decay = math.exp(-1 / scale)
    return (1 - decay) / (1 + decay) * decay ** abs(z)


@pytest.mark.parametrize("scale", [1, 3])
def test_the_noise_has_its_law_and_no_other(scale):
    """A chi-square test at 10⁻⁶; noise of another scale fails it."""
    below = random.Random(scale).randrange
    count, most = 20_000, 4 * scale
    drawn = Counter(max(-most, min(most, discrete_laplace(scale, below))) for _ in range(count))

    def statistic(of):
        inner = {z: count * probability(z, of) for z in range(-most + 1, most)}
        tail = (count - sum(inner.values())) / 2
        wanted = inner | {-most: tail, most: tail}
        return sum((drawn[z] - w) ** 2 / w for z, w in wanted.items())

    worst = chi2.ppf(1 - 1e-6, 2 * most)
    assert statistic(scale) < worst
    assert statistic(scale + 1) > worst


def test_the_noise_comes_from_the_operating_system():
    assert discrete_laplace.__defaults__ == (secrets.randbelow,)
    assert len({discrete_laplace(10**9) for _ in range(20)}) == 20
