"""FedDyn (Acar et al. 2021), as your own algorithm: ``algorithm.name = "feddyn:feddyn"``.

Every user keeps g_i, the server their mean h. A step follows H̃ − g_i + α(y − x), so that at a fixed
point the users' gradients cancel; g_i is built from noised gradients alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dpscaffold.algorithms import Algorithm, Local, Participant, Server, Slots, Upload


@dataclass(frozen=True)
class WithAlpha:
    """Functions that share α, as values: equal ones compare equal."""

    alpha: float


class TowardsServer(WithAlpha):
    """y ← y − η_l(H̃ − g_i + α(y − x))."""

    def __call__(self, gradient: Tensor, y: Tensor, at: Participant) -> Tensor:
        return gradient - at.memory["dual"] + self.alpha * (y - at.broadcast.params)


class SendMove(WithAlpha):
    """g_i ← g_i − α(y_i − x); Δy_i and Δg_i are sent."""

    def __call__(self, local: Local, at: Participant) -> tuple[Upload, Slots]:
        move = local.params - at.broadcast.params
        dual = at.memory["dual"] - self.alpha * move
        return Upload(move, {"dual": dual - at.memory["dual"]}), {"dual": dual}


class AddMove(WithAlpha):
    """h ← h + (1/M)ΣΔg_i; x ← x + η_g·Δx − h/α."""

    def __call__(self, server: Server, mean: Upload, rate: float) -> Server:
        dual = server.slots["dual"] + mean.totals["dual"]
        params = server.params + rate * mean.params - dual / self.alpha
        return Server(params, {**server.slots, "dual": dual})


def feddyn(alpha: float = 0.5) -> Algorithm:
    """FedDyn with its penalty α."""
    return Algorithm(
        "feddyn", TowardsServer(alpha), SendMove(alpha), AddMove(alpha), title="FedDyn",
        numbers={"alpha": alpha}, remembers={"dual": "vector"}, keeps={"dual": "vector"},
    )  # fmt: skip
