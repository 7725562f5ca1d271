"""Tasks as plain values, so that a stored model says what its numbers mean without any code."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpscaffold.errors import BadInput
from dpscaffold.tasks.base import Task
from dpscaffold.tasks.linear import Linear
from dpscaffold.tasks.logistic import Logistic
from dpscaffold.tasks.losses import loss_named
from dpscaffold.tasks.mlp import Mlp
from dpscaffold.tasks.module import ModuleTask


def task_entry(task: Task) -> dict[str, Any]:
    """A task as JSON: its kind and the numbers that make it.

    >>> task_entry(Mlp(60, 10))
    {'kind': 'mlp', 'features': 60, 'outputs': 10, 'hidden': 200, 'loss': 'softmax'}
    """
    match task:
        case Logistic():
            return {"kind": "logistic", "features": task.features, "outputs": task.outputs}
        case Linear():
            numbers = {"features": task.features, "outputs": task.outputs}
            return {"kind": "linear", **numbers, "loss": task.loss.name}
        case Mlp():
            numbers = {"features": task.features, "outputs": task.classes, "hidden": task.hidden}
            return {"kind": "mlp", **numbers, "loss": task.loss.name}
        case ModuleTask():
            return {
                "kind": "module",
                "name": task.name,
                "shape": None if task.shape is None else list(task.shape),
                "tensors": {key: list(shape) for key, shape in task.shapes.items()},
                "loss": task.loss.name,
            }
    return {"kind": "own", "name": task.name, "parameters": task.parameters}


def constants_of(task: Task) -> dict[str, Tensor]:
    """The buffers and frozen parameters of a module task, which are no part of its vector."""
    return dict(task.constants) if isinstance(task, ModuleTask) else {}


def task_of(
    entry: Mapping[str, Any], constants: Mapping[str, Tensor], module: nn.Module | Task | None
) -> Task:
    """The task of an entry. ``module`` is the user's own module (or task), where it is one.

    >>> task_of({"kind": "logistic", "features": 2, "outputs": 3}, {}, None)
    Logistic(features=2, classes=3)
    """
    kind = entry["kind"]
    if kind not in ("module", "own"):
        if module is not None:
            raise BadInput(
                "not-applicable",
                f"module is given, but the model is of the kind {kind!r}; leave it out",
            )
        if kind == "logistic":
            return Logistic(int(entry["features"]), int(entry["outputs"]))
        loss = loss_named(entry["loss"])
        if kind == "linear":
            return Linear(int(entry["features"]), int(entry["outputs"]), loss)
        if kind == "mlp":
            outputs, hidden = int(entry["outputs"]), int(entry["hidden"])
            return Mlp(int(entry["features"]), outputs, hidden, loss)
        raise BadInput(
            "wrong-version", f"the model is of the kind {kind!r}, which this version does not know"
        )
    if module is None:
        raise BadInput(
            "module-needed",
            f"the model is of a {'module' if kind == 'module' else 'task'} of one's own "
            f"({entry['name']!r}), whose code is not stored; give it: "
            f"{'--module my_file:factory or ' * (kind == 'module')}load_model(folder, module=…)",
        )
    if not isinstance(module, nn.Module):
        return module
    if kind == "own":
        raise BadInput(
            "module-mismatch",
            f"the model is of the task {entry['name']!r}, not of a bare module; give the task",
        )
    return _module_task(entry, constants, module)


def _module_task(
    entry: Mapping[str, Any], constants: Mapping[str, Tensor], module: nn.Module
) -> ModuleTask:
    """The user's module with the constants that the model was trained with."""
    module = copy.deepcopy(module)
    own = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    for key, value in constants.items():
        if key not in own or own[key].shape != value.shape:
            raise BadInput(
                "module-mismatch",
                f"module does not fit the stored model: it has no constant '{key}' of shape "
                f"{tuple(value.shape)}; give the module that was trained",
            )
        with torch.no_grad():
            own[key].copy_(value)
        own[key].requires_grad_(False)
    shape = None if entry["shape"] is None else tuple(entry["shape"])
    loss = loss_named(entry["loss"])
    name = str(entry["name"]).removesuffix(f"-{loss.name}")
    task = ModuleTask(module, shape, name, loss)
    found = {key: list(value) for key, value in task.shapes.items()}
    if found != entry["tensors"]:
        raise BadInput(
            "module-mismatch",
            f"module does not fit the stored model: its parameters are {_listed(found)}, and the "
            f"stored ones {_listed(entry['tensors'])}; give the module that was trained",
        )
    return task


def _listed(shapes: Mapping[str, Any]) -> str:
    shown = [f"{key} {tuple(shape)}" for key, shape in list(shapes.items())[:4]]
    return ", ".join(shown) + (", …" if len(shapes) > 4 else "")
