"""Momentum at the server: any algorithm, moved along a running sum of its mean uploads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dpscaffold.algorithms.base import Algorithm, Server, Update, Upload
from dpscaffold.checks import fraction


@dataclass(frozen=True)
class Momentum:
    """v ← βv + Δx, and the base moves along v (Hsu et al. 2019)."""

    base: Update
    beta: float

    def __call__(self, server: Server, mean: Upload, rate: float) -> Server:
        """The base's move along the velocity."""
        velocity = self.beta * server.slots["velocity"] + mean.params
        moved = self.base(server, replace(mean, params=velocity), rate)
        return replace(moved, slots={**moved.slots, "velocity": velocity})


def with_momentum(base: Algorithm, beta: float = 0.9) -> Algorithm:
    """The algorithm with momentum at the server (FedAvgM where the base is FedAvg).

    Args:
        base: The algorithm.
        beta: β, the decay of the momentum or of the first moment. Value: a number from 0 up to 1.
            Example: ``0.9``

    >>> from dpscaffold import fedavg
    >>> with_momentum(fedavg()).keeps, with_momentum(fedavg()).memory
    ({'velocity': 'vector'}, False)
    """
    fraction("algorithm.beta", beta)
    return base.replace(
        title=f"{base.shown} with momentum",
        update=Momentum(base.update, beta),
        keeps={**base.keeps, "velocity": "vector"},
        numbers={**base.numbers, "server": "momentum", "beta": beta},
    )
