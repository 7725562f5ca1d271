"""SCAFFOLD (Karimireddy et al. 2020); with noise it is DP-SCAFFOLD.

Algorithm 1 of the paper, line by line: the drift correction c − c_i joins the step *after* the
noise, so everything that leaves a user is a function of noised gradients and of what the server
sent.
"""

from dpscaffold.algorithms.base import (
    Affine,
    AffineDirection,
    Algorithm,
    Cohort,
    Local,
    Participant,
    Server,
    Slots,
    Upload,
)


def tell_control(server: Server, cohort: Cohort) -> Slots:
    """Participants are sent c^{t−1} next to x^{t−1}."""
    return {"control": server.slots["control"]}


def corrected(at: Participant) -> Affine:
    """y_i^k ← y_i^{k−1} − η_l(H̃_i^k − c_i^{t−1} + c^{t−1})."""
    return Affine(at.broadcast.shared["control"] - at.memory["control"])


along_corrected = AffineDirection(corrected)


def send_move_and_control(local: Local, at: Participant) -> tuple[Upload, Slots]:
    """c̃_i ← c_i − c + (x − y_i^K)/(Kη_l), the mean of the K noised gradients; upload Δy_i, Δc_i."""
    own, x = at.memory["control"], at.broadcast.params
    travelled = at.known.steps * at.known.step_size
    control = own - at.broadcast.shared["control"] + (x - local.params) / travelled
    return Upload(local.params - x, {"control": control - own}), {"control": control}


def add_both(server: Server, mean: Upload, rate: float) -> Server:
    """x^t ← x^{t−1} + η_g·Δx^t and c^t ← c^{t−1} + (1/M)ΣΔc_i^t."""
    control = server.slots["control"] + mean.totals["control"]
    return Server(server.params + rate * mean.params, {**server.slots, "control": control})


def scaffold() -> Algorithm:
    """SCAFFOLD with all control variates zero at the start."""
    return Algorithm(
        "scaffold", along_corrected, send_move_and_control, add_both, tell_control,
        remembers={"control": "vector"}, keeps={"control": "vector"}, title="SCAFFOLD",
    )  # fmt: skip
