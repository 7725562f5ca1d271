"""What is learnt: logistic regression, a one-hidden-layer network, or any module."""

from dpscaffold.tasks.base import Batch, Clip, ClippedSum, Task
from dpscaffold.tasks.logistic import Logistic
from dpscaffold.tasks.mlp import Mlp
from dpscaffold.tasks.module import ModuleTask

__all__ = ["Batch", "Clip", "ClippedSum", "Logistic", "Mlp", "ModuleTask", "Task"]
