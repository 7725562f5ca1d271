"""SCAFFOLD (Karimireddy et al. 2020) and its warm start; with noise they are DP-SCAFFOLD(-warm).

Algorithm 1 of the paper, line by line: the drift correction c − c_i joins the step *after* the
noise, so everything that leaves a user is a function of noised gradients and of what the server
sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpscaffold.algorithms.base import Algorithm, Broadcast, Local, Memory, Server, Upload


def along_corrected(gradient: Tensor, y: Tensor, broadcast: Broadcast, memory: Memory) -> Tensor:
    """y_i^k ← y_i^{k−1} − η_l(H̃_i^k − c_i^{t−1} + c^{t−1})."""
    own, common = _controls(memory, broadcast)
    return gradient - own + common


def send_move_and_control(
    local: Local, broadcast: Broadcast, memory: Memory
) -> tuple[Upload, Memory]:
    """c̃_i ← c_i − c + (x − y_i^K)/(Kη_l), which is the mean of the K noised gradients; upload both
    differences."""
    own, common = _controls(memory, broadcast)
    control = own - common + (broadcast.params - local.params) / local.travelled
    return Upload(local.params - broadcast.params, control - own), Memory(control)


def add_both(server: Server, mean: Upload, rate: float) -> Server:
    """x^t ← x^{t−1} + η_g·Δx^t and c^t ← c^{t−1} + (1/M)ΣΔc_i^t."""
    assert server.control is not None and mean.control is not None
    return Server(server.params + rate * mean.params, server.control + mean.control)


def stay(gradient: Tensor, y: Tensor, broadcast: Broadcast, memory: Memory) -> Tensor:
    """A warm-start step measures a gradient at x⁰ and moves nowhere."""
    return torch.zeros_like(y)


def send_measured_control(
    local: Local, broadcast: Broadcast, memory: Memory
) -> tuple[Upload, Memory]:
    """c_i ← (1/K)Σ H̃_i^k(x⁰): the model does not move, the control becomes the measured mean."""
    own, _ = _controls(memory, broadcast)
    return Upload(torch.zeros_like(local.params), local.mean_gradient - own), Memory(
        local.mean_gradient
    )


def _controls(memory: Memory, broadcast: Broadcast) -> tuple[Tensor, Tensor]:
    """(c_i, c)."""
    assert memory.control is not None and broadcast.control is not None
    return memory.control, broadcast.control


def scaffold() -> Algorithm:
    """SCAFFOLD with all control variates zero at the start."""
    return Algorithm("scaffold", along_corrected, send_move_and_control, add_both, memory=True)


def scaffold_warm() -> Algorithm:
    """SCAFFOLD whose first round(4/l) rounds only measure control variates (the paper's
    DP-SCAFFOLD-warm)."""
    warm_up = scaffold().replace(name="warm-up", direction=stay, finish=send_measured_control)
    return scaffold().replace(name="scaffold-warm", warm_up=warm_up)
