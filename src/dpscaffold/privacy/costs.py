"""Other private mechanisms on the same records: a private mean, a private PCA, a private vote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpscaffold.errors import BadInput
from dpscaffold.privacy.adversary import ALONE, Adversary
from dpscaffold.privacy.loss import REACH, Loss, privacy_parameters, step_losses
from dpscaffold.privacy.mechanism import Sampling

#: Finest grid, in points, on which a further mechanism is composed.
POINTS = 1 << 20


@dataclass(frozen=True)
class Cost:
    """A mechanism that was run next to the training, on the same records and for the same
    neighbours.

    Give either ``noise``, a Gaussian's standard deviation over its ℓ2-sensitivity, or ``epsilon``
    and ``delta``. It is composed with the training's loss distribution: exactly for a Gaussian,
    through the dominating pair of (ε, δ)-DP otherwise, which is never worse than adding the ε and
    the δ.

    A mechanism that may stand next to runs of either kind gives ``noise`` for replace-one
    neighbours (one record of one user replaced) and ``add_remove`` for add/remove ones, the
    divisors being public constants; :meth:`under` chooses. ``seeded`` says that the noise was drawn
    from a stored seed, as in a simulation, and can be drawn again by whoever knows it. In a secure
    sum the noise of other sites counts; ``alone`` is the share of it that is left if all of them
    collude with the server.

    >>> Cost("private mean", noise=4.0).noise
    4.0
    """

    name: str
    noise: float | None = None
    epsilon: float | None = None
    delta: float = 0.0
    add_remove: float | None = None
    seeded: bool = False
    alone: float = 1.0

    def __post_init__(self) -> None:
        if (self.noise is None) == (self.epsilon is None):
            raise BadInput(
                "noise-or-epsilon",
                f"the cost {self.name!r} needs either noise or epsilon, and not both",
            )
        if self.noise is not None and not (math.isfinite(self.noise) and self.noise > 0):
            raise BadInput(
                "out-of-range",
                f"noise={self.noise} of the cost {self.name!r} must be a finite number above 0",
            )
        if self.epsilon is not None and not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise BadInput(
                "out-of-range",
                f"epsilon={self.epsilon} of the cost {self.name!r} must be a number from 0 up",
            )
        if not 0.0 <= self.delta < 1.0:
            raise BadInput(
                "out-of-range", f"delta={self.delta} of the cost {self.name!r} must lie in [0, 1)"
            )

    def under(self, sampling: Sampling) -> Cost | None:
        """This cost for the neighbours of a run that samples so; None where it is not known.

        >>> Cost("mean", noise=3.0, add_remove=6.0).under("poisson").noise
        6.0
        """
        if self.epsilon is not None or sampling == "fixed":
            return replace(self, add_remove=None)
        if self.add_remove is None:
            return None
        return replace(self, noise=self.add_remove, add_remove=None)

    @property
    def if_others_collude(self) -> Cost:
        """This cost towards a server with which all other sites collude."""
        if self.noise is None or self.alone == 1.0:
            return self
        both = (self.noise, self.add_remove)
        less = [None if noise is None else noise * self.alone for noise in both]
        return replace(self, noise=less[0], add_remove=less[1], alone=1.0)

    def reach(self) -> float:
        """The largest finite loss."""
        if self.epsilon is not None:
            return self.epsilon
        assert self.noise is not None
        return (1 + 2 * REACH * self.noise) / (2 * self.noise**2)

    def losses(self, interval: float) -> Loss:
        """Its loss distribution on a grid."""
        if self.epsilon is not None:
            return privacy_parameters(self.epsilon, self.delta, interval)
        assert self.noise is not None
        return step_losses(1.0, self.noise, "fixed", interval)[0]


def together(name: str, costs: Sequence[Cost]) -> Cost:
    """Several Gaussians on the same records as the one that they are: 1/z² = Σ 1/z_i².

    Exact, for adaptive releases too (Dong, Roth and Su, "Gaussian differential privacy", 2022).

    >>> together("both", [Cost("a", noise=3.0), Cost("b", noise=4.0)]).noise
    2.4
    """

    def one(multipliers: list[float | None]) -> float | None:
        known = [z for z in multipliers if z is not None]
        if len(known) < len(multipliers):
            return None
        return 1 / math.sqrt(sum(1 / z**2 for z in known))

    noise = one([cost.noise for cost in costs])
    if noise is None:
        raise BadInput(
            "not-gaussian", f"the costs of {name!r} are not all Gaussian; compose them with a run"
        )
    return Cost(
        name,
        noise=noise,
        add_remove=one([cost.add_remove for cost in costs]),
        seeded=any(cost.seeded for cost in costs),
    )


def costs_towards(costs: tuple[Cost, ...], who: Adversary | None) -> tuple[Cost, ...]:
    """The costs as an adversary sees them: other sites hide them too, unless all of them collude
    with the server."""
    return tuple(cost.if_others_collude for cost in costs) if who == ALONE else costs


def with_costs(law: Loss, costs: tuple[Cost, ...]) -> Loss:
    """The loss of the training and of every further mechanism together."""
    for cost in costs:
        law = law.coarser(math.ceil(cost.reach() / (law.interval * POINTS)))
        law = law.compose(cost.losses(law.interval))
    return law
