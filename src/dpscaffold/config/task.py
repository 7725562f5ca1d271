"""``[task]``: what is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import Field, model_validator

from dpscaffold.algorithms.naming import made_by, own_function
from dpscaffold.config.table import OwnFileTable
from dpscaffold.data.meanings import Shaped
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation.schema import Target

if TYPE_CHECKING:
    from torch import nn

    from dpscaffold.tasks import Loss, Task


class RowShape(Protocol):
    """What a task must fit: a federation, or the public facts of one."""

    @property
    def dimension(self) -> int:
        """d."""

    @property
    def target(self) -> Target:
        """What is predicted."""


class TaskSettings(Shaped, OwnFileTable):
    """``[task]``: what is learnt, and what is measured.

    ``loss`` is a name of :func:`~dpscaffold.tasks.losses.loss_named`. ``kind = "logistic"`` is the
    linear model under softmax, or under one logistic loss a label.
    """

    kind: Literal["logistic", "linear", "mlp", "module"] = "logistic"
    """The model: linear with softmax, linear with any loss, one hidden layer, or your own
    nn.Module. Example: ``"mlp"``"""
    loss: str | None = None
    """The loss to minimise; by default softmax for classes, squared for numbers, and labels (one
    logistic loss each) for several labels. 'huber:0.5' changes from quadratic to linear at 0.5,
    'huber' at 1. Example: ``"softmax"``"""
    hidden: int = Field(default=200, ge=1)
    """The width of the hidden layer (kind 'mlp'). Example: ``64``"""
    module: str | None = None
    """The function that makes your own module, as 'my_file:factory'. The file is searched next to
    the configuration. Example: ``"my_net:make"``"""
    shape: tuple[int, ...] | None = None
    """The shape of a record that the module expects, if it is not a flat row. Example: ``[1, 28,
    28]``"""
    class_weights: tuple[float, ...] | dict[str, float] | None = None
    """The weight of each class in the loss, in the order of the classes or by name: constants
    chosen without looking at the data. Example: ``[1.0, 3.0]``"""
    metrics: tuple[str, ...] | None = None
    """The metrics of every evaluation; by default the usual ones of the target. 'optimum' adds the
    distance to the central optimum, which is solved for first (convex tasks), and 'dissimilarity'
    how far apart the users' gradients are, as convex tasks always say. Example:
    ``["balanced_accuracy"]``"""

    @model_validator(mode="after")
    def _consistent(self) -> TaskSettings:
        if (self.kind == "module") != (self.module is not None):
            raise BadInput(
                "conflicting-arguments",
                f"task.module is {self.module!r} with task.kind {self.kind!r}; "
                "a module task needs module = 'package.file:factory'",
            )
        if self.loss is not None:
            from dpscaffold.tasks.losses import loss_named

            loss_named(self.loss)
        if self.kind == "logistic" and self.loss not in (None, "softmax"):
            raise BadInput(
                "wrong-loss",
                f"task.loss is {self.loss!r} with task.kind 'logistic', which is the linear model "
                f"under softmax; use task.kind = 'linear'",
            )
        return self

    def build_loss(self, target: Target) -> Loss:
        """The loss, which must fit the target."""
        from dpscaffold.tasks.losses import loss_named, weighted

        if self.kind == "logistic" and target.kind == "number":
            raise BadInput(
                "wrong-target",
                "task.kind is 'logistic', which tells classes apart, and the target is a number; "
                "use task.kind = 'linear' (loss 'squared' or 'huber')",
            )
        usual = {"class": "softmax", "number": "squared", "labels": "labels"}
        if self.kind == "logistic" and target.kind == "labels" and self.loss is not None:
            raise BadInput(
                "wrong-loss",
                f"task.loss is {self.loss!r}, and the target is several labels; leave it out",
            )
        loss = loss_named(self.loss or usual[target.kind])
        if self.class_weights is not None:
            loss = weighted(loss, self._weights(target))
        loss.fits(target.kind, len(target.classes))
        return loss

    def _weights(self, target: Target) -> tuple[float, ...]:
        """One weight a class, in the order of the classes."""
        given = self.class_weights
        if not isinstance(given, dict):
            return given or ()
        stray = [name for name in given if name not in target.classes]
        if stray:
            raise BadInput(
                "unknown-class",
                f"task.class_weights names '{stray[0]}'{nearest(stray[0], target.classes)}; the "
                f"classes are {', '.join(target.classes[:10])}",
            )
        return tuple(given.get(name, 1.0) for name in target.classes)

    def build(self, federation: RowShape) -> Task:
        """The task, in the federation's shape."""
        from dpscaffold.tasks import SOFTMAX, Linear, Logistic, Mlp, ModuleTask

        loss = self.build_loss(federation.target)
        outputs = loss.outputs(len(federation.target.classes))
        if self.kind == "logistic" and loss == SOFTMAX:
            return Logistic(federation.dimension, outputs)
        if self.kind in ("logistic", "linear"):
            return Linear(federation.dimension, outputs, loss)
        if self.kind == "mlp":
            return Mlp(federation.dimension, outputs, self.hidden, loss)
        assert self.module is not None
        made = own_module(self.module, self._folder)
        return ModuleTask(made, self.shape, self.module, loss)


def own_module(name: str, folder: Path | None, argument: str = "task.module") -> nn.Module:
    """What a user's own function makes, which must be a module ready to be trained."""
    from torch import nn
    from torch.nn.parameter import UninitializedParameter

    made = made_by(own_function(name, folder, argument), name, argument, nn.Module, {})
    if any(isinstance(value, UninitializedParameter) for value in made.parameters()):
        raise BadInput(
            "lazy-module",
            f"{argument} is {name!r}, whose layers have no sizes yet (lazy modules); give them "
            f"their numbers of features",
        )
    return made
