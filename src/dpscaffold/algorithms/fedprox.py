"""FedProx: FedAvg with a pull back towards the broadcast model (Li et al. 2020)."""

from dataclasses import dataclass

from dpscaffold.algorithms.base import (
    Affine,
    AffineDirection,
    Algorithm,
    Participant,
    proved_linear,
)
from dpscaffold.algorithms.fedavg import fedavg
from dpscaffold.checks import at_least


@proved_linear
@dataclass(frozen=True)
class Proximal:
    """y_i^k ← y_i^{k−1} − η_l(H̃_i^k + μ(y_i^{k−1} − x^{t−1})), as a value: two runs can be seen to
    share μ."""

    mu: float

    def __call__(self, at: Participant) -> Affine:
        """The same pull in every participation."""
        return Affine(pull=float(self.mu))


def fedprox(mu: float = 0.1) -> Algorithm:
    """FedAvg whose steps go along H + λy + μ(y − x); the proximal term stands outside clipping and
    noise.

    Args:
        mu: μ, the strength of the pull towards the broadcast model. Value: a number, 0 or more.
            Example: ``0.5``

    >>> fedprox(mu=0.0).name
    'fedprox'
    """
    at_least("algorithm.mu", mu, 0)
    return fedavg().replace(
        name="fedprox",
        title="FedProx",
        direction=AffineDirection(Proximal(mu)),
        numbers={"mu": mu},
    )
