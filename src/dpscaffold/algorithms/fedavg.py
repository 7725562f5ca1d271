"""FedAvg, and FedSGD, which is FedAvg with K·s = 1 (Algorithm 2 of the paper without its noise)."""

from __future__ import annotations

from torch import Tensor

from dpscaffold.algorithms.base import Algorithm, Broadcast, Local, Memory, Server, Upload


def along_gradient(gradient: Tensor, y: Tensor, broadcast: Broadcast, memory: Memory) -> Tensor:
    """y_i^k ← y_i^{k−1} − η_l·H̃_i^k."""
    return gradient


def send_move(local: Local, broadcast: Broadcast, memory: Memory) -> tuple[Upload, Memory]:
    """Δy_i ← y_i^K − x^{t−1}; nothing is kept."""
    return Upload(local.params - broadcast.params), memory


def add_mean_move(server: Server, mean: Upload, rate: float) -> Server:
    """x^t ← x^{t−1} + η_g·Δx^t."""
    return Server(server.params + rate * mean.params, server.control)


def fedavg() -> Algorithm:
    """Federated averaging (McMahan et al. 2017); with :class:`~dpscaffold.Gaussian` it is
    DP-FedAvg."""
    return Algorithm("fedavg", along_gradient, send_move, add_mean_move)


def fedsgd() -> Algorithm:
    """FedAvg whose K batches together are one pass over the user's data: K = round(1/s), else an
    error."""
    return fedavg().replace(name="fedsgd", full_pass=True)
