"""How layers make per-example gradients from what went in and the errors that came back.

A rule takes a layer, its inputs (U, N, …) and the gradients of the loss with respect to its
outputs, the *errors* (U, N, …), for U users and N records, and gives the contribution of each of
its parameters by name. What stands behind the first two dimensions is what the layer saw of one
record; further leading dimensions (time steps, patches, a batch of one) are *places* over which the
gradient of a record is summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpscaffold.tasks.contributions import Contribution, Dense, LookedUpRows, Outer, Outers

Contributions = dict[str, Contribution]
Rule = Callable[[nn.Module, Tensor, Tensor], Contributions]


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of a layer, or None where there is none.

    Only layers that are exactly of a known type and untouched count: a subclass, a hook, a
    reparametrised weight or a forward method of its own may compute something else.
    """
    rule = _RULES.get(type(layer))
    touched = (
        "forward" in layer.__dict__
        or layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or not set(layer._parameters) <= {"weight", "bias"}
        or layer._parameters.get("weight") is None
    )
    if rule is None or touched or not _plain(layer):
        return None
    return rule


def _plain(layer: nn.Module) -> bool:
    """Whether the layer's options are those that its rule knows."""
    if isinstance(layer, nn.Embedding):
        return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    if isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return not layer.track_running_stats
    return True


def _linear(layer: nn.Module, inputs: Tensor, errors: Tensor) -> Contributions:
    """y_t = W·a_t + w₀: ∂W = Σ_t δ_t·a_tᵀ and ∂w₀ = Σ_t δ_t."""
    lead = inputs.shape[:2]
    inputs = inputs.reshape(*lead, -1, inputs.shape[-1])
    errors = errors.reshape(*lead, -1, errors.shape[-1])
    weight: Contribution
    if inputs.shape[2] == 1:
        weight = Outer(errors[:, :, 0], inputs[:, :, 0])
    else:
        weight = Outers(errors.transpose(2, 3), inputs.transpose(2, 3))
    return {"weight": weight, "bias": Dense(errors.sum(2))}


def _convolution(layer: nn.Module, inputs: Tensor, errors: Tensor) -> Contributions:
    """A convolution is a linear map of the patches it looks at, one place each."""
    assert isinstance(layer, nn.modules.conv._ConvNd)
    axes, groups = len(layer.kernel_size), layer.groups
    users, records = inputs.shape[:2]
    extra = inputs.shape[2] if inputs.dim() == axes + 4 else 1  # a batch of its own, mostly of one
    images = inputs.reshape(-1, *inputs.shape[-1 - axes :])
    patches = _patches(layer, images)  # (V, channels·kernel, places)
    errors = errors.reshape(len(patches), layer.out_channels, -1)
    bias = Dense(errors.sum(2).view(users, records, extra, -1).sum(2))
    if groups > 1:
        left, right = errors.unflatten(1, (groups, -1)), patches.unflatten(1, (groups, -1))
        found = (left @ right.transpose(2, 3)).view(users, records, extra, -1).sum(2)
        return {"weight": Dense(found), "bias": bias}

    def apart(values: Tensor) -> Tensor:
        values = values.view(users, records, extra, *values.shape[1:])
        return values[:, :, 0] if extra == 1 else values.transpose(2, 3).flatten(3)

    return {"weight": Outers(apart(errors), apart(patches)), "bias": bias}


def _patches(layer: nn.modules.conv._ConvNd, images: Tensor) -> Tensor:
    """What each place of the output looks at, (V, channels, …) → (V, channels·kernel, places)."""
    pads = _padding(layer)
    if any(pads):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        images = F.pad(images, pads, mode=mode)
    axes = len(layer.kernel_size)
    for axis in range(axes):
        dilation = layer.dilation[axis]
        reach = dilation * (layer.kernel_size[axis] - 1) + 1
        images = images.unfold(2 + axis, reach, layer.stride[axis])[..., ::dilation]
    order = (0, 1, *range(2 + axes, 2 + 2 * axes), *range(2, 2 + axes))
    kernel = layer.in_channels * math.prod(layer.kernel_size)
    return images.permute(order).reshape(len(images), kernel, -1)


def _padding(layer: nn.modules.conv._ConvNd) -> list[int]:
    """The padding as ``F.pad`` wants it: (before, after) of the last axis first."""
    pads: list[int] = []
    for axis in reversed(range(len(layer.kernel_size))):
        if layer.padding == "same":
            both = layer.dilation[axis] * (layer.kernel_size[axis] - 1)
            pads += [both // 2, both - both // 2]
        elif layer.padding == "valid":
            pads += [0, 0]
        else:
            pads += [int(layer.padding[axis])] * 2
    return pads


def _embedding(layer: nn.Module, inputs: Tensor, errors: Tensor) -> Contributions:
    """Each place adds its error to the row that it looked up; padding adds nothing."""
    assert isinstance(layer, nn.Embedding)
    index = inputs.reshape(*inputs.shape[:2], -1)
    values = errors.reshape(*index.shape, layer.embedding_dim)
    if layer.padding_idx is not None:
        values = torch.where((index == layer.padding_idx)[..., None], 0.0, values)
    return {"weight": LookedUpRows(index, values, layer.num_embeddings)}


def _last_axes_norm(layer: nn.Module, inputs: Tensor, errors: Tensor) -> Contributions:
    """LayerNorm and RMSNorm: y = w·x̂ + w₀, elementwise over the last axes."""
    assert isinstance(layer, nn.LayerNorm | nn.RMSNorm)
    shape = list(layer.normalized_shape)
    if isinstance(layer, nn.LayerNorm):
        normal = F.layer_norm(inputs, shape, eps=layer.eps)
    else:
        normal = F.rms_norm(inputs, shape, eps=layer.eps)

    def places_summed(values: Tensor) -> Tensor:
        return values.reshape(*values.shape[:2], -1, math.prod(shape)).sum(2)

    return {"weight": Dense(places_summed(errors * normal)), "bias": Dense(places_summed(errors))}


def _channel_norm(layer: nn.Module, inputs: Tensor, errors: Tensor) -> Contributions:
    """GroupNorm and InstanceNorm: y = w·x̂ + w₀, one weight a channel."""
    users, records = inputs.shape[:2]
    if isinstance(layer, nn.GroupNorm):
        channels, axis = layer.num_channels, 3
        images = inputs.flatten(0, 2)
        normal = F.group_norm(images, layer.num_groups, eps=layer.eps)
    else:
        assert isinstance(layer, nn.modules.instancenorm._InstanceNorm)
        channels, axis = layer.num_features, inputs.dim() - _AXES[type(layer)] - 1
        images = inputs.flatten(0, axis - 1)
        normal = F.instance_norm(images, eps=layer.eps)

    def summed(values: Tensor) -> Tensor:
        return values.reshape(
            users, records, -1, channels, math.prod(inputs.shape[axis + 1 :])
        ).sum((2, 4))

    product = errors.reshape(images.shape) * normal
    return {"weight": Dense(summed(product)), "bias": Dense(summed(errors))}


_AXES: dict[type[nn.Module], int] = {
    nn.InstanceNorm1d: 1,
    nn.InstanceNorm2d: 2,
    nn.InstanceNorm3d: 3,
}

_RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
    nn.Embedding: _embedding,
    nn.LayerNorm: _last_axes_norm,
    nn.RMSNorm: _last_axes_norm,
    nn.GroupNorm: _channel_norm,
    **dict.fromkeys(_AXES, _channel_norm),
}
