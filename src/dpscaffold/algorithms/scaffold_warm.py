"""SCAFFOLD with a warm start; with noise it is the paper's DP-SCAFFOLD-warm."""

from dpscaffold.algorithms.base import (
    Affine,
    AffineDirection,
    Algorithm,
    Local,
    Participant,
    Slots,
    Upload,
)
from dpscaffold.algorithms.scaffold import scaffold


def still(at: Participant) -> Affine:
    """A warm-start step measures a gradient at x⁰ and moves nowhere."""
    return Affine(moves=False)


stay = AffineDirection(still)


def send_measured_control(local: Local, at: Participant) -> tuple[Upload, Slots]:
    """c_i ← (1/K)Σ H̃_i^k(x⁰): the model does not move, the control becomes the measured mean."""
    nowhere, control = local.params.new_zeros(local.params.shape), local.mean_gradient
    return Upload(nowhere, {"control": control - at.memory["control"]}), {"control": control}


def scaffold_warm() -> Algorithm:
    """SCAFFOLD whose first round(4/l) rounds only measure control variates (the paper's
    DP-SCAFFOLD-warm)."""
    warm_up = scaffold().replace(name="warm-up", direction=stay, finish=send_measured_control)
    return scaffold().replace(name="scaffold-warm", title="SCAFFOLD-warm", warm_up=warm_up)
