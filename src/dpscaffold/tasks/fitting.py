"""Whether a task fits the rows of a federation: tried with empty records, before anything runs."""

from __future__ import annotations

import torch
from torch import Tensor

from dpscaffold.checks import instance
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Schema
from dpscaffold.tasks.base import Batch, Task
from dpscaffold.tasks.module import ModuleTask


def check_task(task: Task, schema: Schema, seed: int) -> None:
    """An empty record through the task: its input and output must fit the schema."""
    classes = len(schema.target.classes)
    loss = getattr(task, "loss", None)  # your own task may have none to ask
    if loss is not None:
        loss.fits(schema.target.kind, classes)
    scores = _scores_of_zeros(task, schema.dimension, seed)
    needed = loss.outputs(classes) if loss is not None else max(1, classes)
    single = loss is None and scores.shape[-1] == 1 and classes == 2  # it tells two apart
    if scores.ndim != 2 or (scores.shape[1] != needed and not single):
        raise BadInput(
            "wrong-scores",
            f"the task {task.name!r} gives scores of shape {tuple(scores.shape)} for one "
            f"record; the federation's target is {schema.target}, so (1, {needed}) is needed",
        )
    if isinstance(task, ModuleTask):
        _check_module(task, schema, seed)


def _scores_of_zeros(task: Task, dimension: int, seed: int) -> Tensor:
    try:
        with torch.no_grad():
            scores = task.scores(task.initial(seed), task.prepare(torch.zeros(1, dimension)))
    except Exception as error:  # a module of a user's own may raise anything
        what = f"the task {task.name!r} does not accept records of {dimension} features"
        raise BadInput("task-failed", f"{what} ({type(error).__name__}: {error})") from error
    if not isinstance(scores, Tensor) or not scores.is_floating_point():
        raise BadInput(
            "wrong-scores",
            f"the task {task.name!r} gives {type(scores).__name__} instead of scores; its "
            f"module must return one tensor of floats",
        )
    return scores


def require_task(task: object) -> None:
    """Refuse what is no task at all: a class, a name, a module that is not wrapped."""
    made = all(hasattr(task, name) for name in ("name", "initial", "scores", "clipped_sum"))
    if not made or isinstance(task, type):
        give = "a task, such as Logistic(features, classes)"
        if isinstance(task, torch.nn.Module):
            give = "ModuleTask(module), which makes a task of it"
        instance("task", task, (), give)


def _check_module(task: ModuleTask, schema: Schema, seed: int) -> None:
    """A module must be trainable record by record, whatever a record holds."""
    rows = torch.zeros(1, 2, schema.dimension)
    labels = torch.zeros(1, 2, dtype=torch.long if schema.target.classes else torch.float32)
    try:
        batch = Batch(task.prepare(rows), labels)
        task.clipped_sum(task.initial(seed)[None], batch, torch.ones(1))
    except Exception as error:
        raise BadInput(
            "not-per-record",
            f"the module {task.name!r} cannot be trained record by record ({_why(error)}",
        ) from error


def _why(error: Exception) -> str:
    """Why a module failed, and what helps; PyTorch's own words are about its inside."""
    said = (str(error).strip().splitlines() or ["no message"])[0]
    if "vmap:" in said:
        return (
            "its path depends on a value); what it does must not depend on the values of a "
            "record: use torch.where instead of if, item(), nonzero() and boolean masks"
        )
    return f"{type(error).__name__}: {said}); each row must be computed by itself"
