"""Server optimisers: they wrap the ``update`` of any algorithm and add slots at the server.

They see the mean upload alone, so they are post-processing: every privacy bound stands. Warm-start
rounds, in which x stays, are left as they are.
"""

from collections.abc import Callable
from dataclasses import replace

from dpscaffold.algorithms.base import Algorithm, Partial, Server, Update, Upload
from dpscaffold.checks import above, fraction


def momentum(base: Update, beta: float, server: Server, mean: Upload, rate: float) -> Server:
    """v ← βv + Δx, and the base moves along v (Hsu et al. 2019)."""
    velocity = beta * server.slots["velocity"] + mean.params
    moved = base(server, replace(mean, params=velocity), rate)
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
        update=Partial(momentum, (base.update, beta)),
        keeps={**base.keeps, "velocity": "vector"},
        numbers={**base.numbers, "server": "momentum", "beta": beta},
    )


def adam(
    base: Update,
    beta: float,
    beta2: float,
    tau: float,
    server: Server,
    mean: Upload,
    rate: float,
) -> Server:
    """u ← β₁u + (1 − β₁)Δx, v ← β₂v + (1 − β₂)Δx², and the base moves along û/(√v̂ + τ), where
    û = u/(1 − β₁ⁿ) and v̂ = v/(1 − β₂ⁿ) after n rounds (Kingma and Ba 2015, Reddi et al. 2021)."""
    slots, move = server.slots, mean.params
    taken = slots["adam_rounds"] + 1
    first = beta * slots["adam_mean"] + (1 - beta) * move
    second = beta2 * slots["adam_square"] + (1 - beta2) * move.square()
    unbiased = first / (1 - beta**taken)
    step = unbiased / ((second / (1 - beta2**taken)).sqrt() + tau)
    moved = base(server, replace(mean, params=step), rate)
    kept = {"adam_mean": first, "adam_square": second, "adam_rounds": taken}
    return replace(moved, slots={**moved.slots, **kept})


def with_adam(
    base: Algorithm, beta: float = 0.9, beta2: float = 0.99, tau: float = 1e-3
) -> Algorithm:
    """The algorithm with Adam at the server (FedAdam where the base is FedAvg). Every coordinate
    moves by up to η_g a round, so ``plan.server_rate`` should be small, for example 0.01.

    Args:
        base: The algorithm.
        beta: β, the decay of the momentum or of the first moment. Value: a number from 0 up to 1.
            Example: ``0.9``
        beta2: β₂, the decay of the second moment. Value: a number from 0 up to 1. Example: ``0.99``
        tau: τ, which is added to the root of the second moment. Value: a number above 0. Example:
            ``0.001``
    """
    fraction("algorithm.beta", beta)
    fraction("algorithm.beta2", beta2)
    above("algorithm.tau", tau, 0)
    kept = {"adam_mean": "vector", "adam_square": "vector", "adam_rounds": "number"}
    return base.replace(
        title=f"{base.shown} with Adam",
        update=Partial(adam, (base.update, beta, beta2, tau)),
        keeps={**base.keeps, **kept},
        numbers={**base.numbers, "server": "adam", "beta": beta, "beta2": beta2, "tau": tau},
    )


#: By the name of ``algorithm.server``; their further arguments are keys of ``[algorithm]``.
SERVERS: dict[str, Callable[..., Algorithm]] = {"momentum": with_momentum, "adam": with_adam}
