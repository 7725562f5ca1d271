"""FedAvg, and FedSGD, which is FedAvg with K·s = 1 (Algorithm 2 of the paper without its noise)."""

from dataclasses import replace

from dpscaffold.algorithms.base import (
    Affine,
    AffineDirection,
    Algorithm,
    Local,
    Participant,
    Server,
    Slots,
    Upload,
    proved_linear,
)


@proved_linear
def unchanged(at: Participant) -> Affine:
    """y_i^k ← y_i^{k−1} − η_l·H̃_i^k."""
    return Affine()


along_gradient = AffineDirection(unchanged)


@proved_linear
def send_move(local: Local, at: Participant) -> tuple[Upload, Slots]:
    """Δy_i ← y_i^K − x^{t−1}, in the precision of x; nothing is kept."""
    x = at.broadcast.params
    return Upload((local.params - x).to(x.dtype)), {}


def add_mean_move(server: Server, mean: Upload, rate: float) -> Server:
    """x^t ← x^{t−1} + η_g·Δx^t."""
    return replace(server, params=server.params + rate * mean.params)


def fedavg() -> Algorithm:
    """Federated averaging (McMahan et al. 2017); with :class:`~dpscaffold.Gaussian` it is
    DP-FedAvg."""
    return Algorithm("fedavg", along_gradient, send_move, add_mean_move, title="FedAvg")


def fedsgd() -> Algorithm:
    """FedAvg whose K batches together are one pass over the user's data: K = round(1/s), else an
    error."""
    return fedavg().replace(name="fedsgd", title="FedSGD")
