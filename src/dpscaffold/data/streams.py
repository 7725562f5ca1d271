"""The random streams of what is done to data, keyed by ``data.seed``.

They are apart from a run's own (:mod:`~dpscaffold.randomness.streams`): ``data.seed`` makes the
data, ``plan.seed`` the run. Which numbers a seed gives is part of its meaning: never change a key.
"""

from __future__ import annotations

import numpy as np

#: What a synthetic user's stream is for: the law that its records follow, and the records.
LAW, DRAWS = 0, 1


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The generator of one purpose, so that, say, another test ratio does not move records between
    users.

    >>> a, b = stream(0, "partition"), stream(0, "split")
    >>> bool(a.integers(1 << 60) == b.integers(1 << 60))
    False
    """
    return np.random.default_rng([seed, *purpose.encode()])


def user_stream(seed: int, purpose: int, user: int) -> np.random.Generator:
    """The generator of one synthetic user, so that more users do not change those there are.

    >>> law, draws = user_stream(0, LAW, 3), user_stream(0, DRAWS, 3)
    >>> bool(law.integers(1 << 60) == draws.integers(1 << 60))
    False
    """
    sequence = np.random.SeedSequence(seed, spawn_key=(purpose, user))
    return np.random.Generator(np.random.PCG64(sequence))
