"""What is learnt: linear models, a one-hidden-layer network, or any module, under any loss."""

from dpscaffold.tasks.base import Batch, Clip, ClippedSum, Task, stacked_scores
from dpscaffold.tasks.linear import Linear
from dpscaffold.tasks.logistic import Logistic
from dpscaffold.tasks.losses import LOSSES, SOFTMAX, Loss, huber, loss_named, weighted
from dpscaffold.tasks.mlp import Mlp
from dpscaffold.tasks.module import ModuleTask

__all__ = [
    "LOSSES",
    "SOFTMAX",
    "Batch",
    "Clip",
    "ClippedSum",
    "Linear",
    "Logistic",
    "Loss",
    "Mlp",
    "ModuleTask",
    "Task",
    "huber",
    "loss_named",
    "stacked_scores",
    "weighted",
]
