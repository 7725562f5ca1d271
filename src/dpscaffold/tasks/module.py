"""Any ``torch.nn.Module``."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpscaffold.errors import BadInput
from dpscaffold.tasks.base import Batch, Clip, ClippedSum, stacked_scores
from dpscaffold.tasks.ghost import Ghost, RecordStack
from dpscaffold.tasks.losses import SOFTMAX, Loss
from dpscaffold.tasks.wiring import Parameters

#: Layers without a gradient of each record: why, and what takes their place.
_UNFIT: dict[Any, tuple[str, str]] = {
    nn.modules.batchnorm._BatchNorm: (
        "which mixes the examples of a batch",
        "GroupNorm or LayerNorm",
    ),
    (nn.RNNBase, nn.LSTMCell): (
        "of which PyTorch has no gradient for each record",
        "GRUCell or RNNCell in a loop over the steps",
    ),
}


class ModuleTask:
    """A model given as a module that maps (N, *shape) to scores (N, outputs).

    The flat vector has the module's parameters in their own order, without those that require no
    gradient; x⁰ is their current value. The module itself is copied, never changed. Per-example
    gradients are formed only where the layers need it, for a part of the records at a time. Buffers
    and frozen parameters are constants, and the module is used in evaluation mode (dropout is off).
    Layers that mix examples, such as batch normalisation, are refused: an example then has no
    gradient to clip.

    Args:
        module: The module. It gives one score per class for the softmax loss, one for the others.
        shape: The shape of a row for the module, such as ``(1, 28, 28)`` for a convolution.
        name: The name that is stored with a model.
        loss: The loss, such as ``LOSSES["softmax"]``.

    >>> task = ModuleTask(nn.Linear(4, 3))
    >>> task.parameters
    15
    """

    convex = False

    def __init__(
        self,
        module: nn.Module,
        shape: tuple[int, ...] | None = None,
        name: str = "module",
        loss: Loss = SOFTMAX,
    ) -> None:
        _refuse_unfit(module)
        self.name = name if loss == SOFTMAX else f"{name}-{loss.name}"
        self.module = copy.deepcopy(module).eval()
        self.shape = shape
        self.loss = loss
        self.outputs = loss.scores or _scores_of_last_layer(self.module)
        everything = dict(self.module.named_parameters())
        learnt = {key: value for key, value in everything.items() if value.requires_grad}
        if not learnt:
            raise BadInput(
                "no-parameters",
                "the module has no parameters that require a gradient; there is nothing to learn",
            )
        self.shapes = {key: value.shape for key, value in learnt.items()}
        self._initial = torch.cat([value.detach().flatten().float() for value in learnt.values()])
        self.parameters = len(self._initial)
        self.width = 0  # gradients are held in chunks of their own
        constants = dict(self.module.named_buffers()) | everything
        self.constants = {
            key: value.detach().clone() for key, value in constants.items() if key not in learnt
        }
        self.module.requires_grad_(False)
        self._ghost = Ghost(self.module, self.shapes, self._score, loss.values)

    @property
    def slower(self) -> str:
        """Which parameters take the slower path, in a sentence for a run's log; "" where none."""
        return self._ghost.said

    def prepare(self, features: Tensor) -> Tensor:
        """Features as they are; they are reshaped on use."""
        return features

    def initial(self, seed: int) -> Tensor:
        """The module's weights when the task was made; the seed plays no part."""
        return self._initial.clone()

    def _unflatten(self, params: Tensor) -> dict[str, Tensor]:
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = params.split(sizes)
        return {
            key: part.view(shape)
            for (key, shape), part in zip(self.shapes.items(), parts, strict=True)
        }

    def filled(self, params: Tensor) -> nn.Module:
        """A copy of the module with these parameters (P,) in it."""
        module = copy.deepcopy(self.module)
        own = dict(module.named_parameters())
        with torch.no_grad():
            for key, value in self._unflatten(params).items():
                own[key].copy_(value)
        return module

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """The module's output, (N, outputs)."""
        if self.shape is not None:
            features = features.reshape(-1, *self.shape)
        constants = {key: value.to(params.device) for key, value in self.constants.items()}
        named = (self._unflatten(params), constants)
        scores: Tensor = functional_call(self.module, named, (features,))
        return scores

    def scores_of(self, models: Tensor, features: Tensor) -> Tensor:
        """Scores (S, N, outputs), one model after the other."""
        return stacked_scores(self, models, features)

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row, (N,)."""
        return self.loss.values(self.scores(params, features), labels)

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """From the inputs and errors of each layer; see :mod:`~dpscaffold.tasks.ghost`."""
        if clip is None:
            return ClippedSum(self._plain_sum(params, batch), None)
        rows = RecordStack(batch.features, batch.labels, batch.weight)
        return ClippedSum(*self._ghost.clipped_sum(params, rows, clip))

    def _score(self, params: Parameters, row: Tensor) -> Tensor:
        """The scores (classes,) of one record (D,), with parameters by name."""
        rows = row[None] if self.shape is None else row.reshape(1, *self.shape)
        constants = {key: _alike(value, row) for key, value in self.constants.items()}
        scores: Tensor = functional_call(self.module, (dict(params), constants), (rows,))[0]
        return scores

    def _plain_sum(self, params: Tensor, batch: Batch) -> Tensor:
        """Σ_j w_j·∇f_j without per-example gradients."""
        weight, features = batch.weight, batch.features
        if weight is None:
            weight = torch.ones_like(features[..., 0])
        else:  # padding has a finite loss, whatever it holds: 0·NaN would poison the sum
            features = features.masked_fill((weight == 0)[:, :, None], 0.0)

        def loss(flat: Tensor, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
            return (self.losses(flat, x, y) * w).sum()

        gradients: Tensor = vmap(grad(loss))(params, features, batch.labels, weight)
        return gradients


def _alike(constant: Tensor, row: Tensor) -> Tensor:
    """A constant on a record's device and, unless it is an integer, in its precision."""
    return constant.to(row) if constant.is_floating_point() else constant.to(row.device)


def _scores_of_last_layer(module: nn.Module) -> int:
    """How many scores a module gives, by its last linear layer; 0 where it has none."""
    linear = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return linear[-1].out_features if linear else 0


def _refuse_unfit(module: nn.Module) -> None:
    for layer in module.modules():
        for kind, (why, instead) in _UNFIT.items():
            if isinstance(layer, kind):
                raise BadInput(
                    "not-per-record",
                    f"the module contains {type(layer).__name__}, {why}, so a single example's "
                    f"gradient cannot be clipped; use {instead} instead",
                )
