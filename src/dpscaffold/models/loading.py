"""Read a model from its folder, as :mod:`dpscaffold.models.storage` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from dpscaffold.data.stored import steps
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Target, schema_of
from dpscaffold.models.model import Model
from dpscaffold.models.storage import (
    FORMAT,
    INDEX,
    PRIVACY,
    RANGED,
    WEIGHTS,
    as_json,
    digest_of,
)
from dpscaffold.models.trained import Origin
from dpscaffold.privacy.page import Statement
from dpscaffold.runs.earlier import refuse_old
from dpscaffold.runs.ledger import WITHIN
from dpscaffold.tasks import Task
from dpscaffold.tasks.stored import task_of


def load_model(folder: Path | str, module: nn.Module | Task | None = None) -> Model:
    """The model of a folder, or of a run folder; executes no code and reads no private record.

    ``module`` is the user's own module or task, where the model is of one: its code is not stored.

    >>> import tempfile
    >>> import torch
    >>> from dpscaffold import Logistic, synthetic
    >>> federation = synthetic(users=3, records=20, dimension=4, classes=3)
    >>> model = Model.of(federation, Logistic(4, 3), torch.zeros(15))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     load_model(model.save(f"{place}/model")).columns
    ('0', '1', '2', '3')
    """
    folder = find_model(Path(folder))
    index = _read_index(folder)
    tensors = _read_weights(folder, index)
    stated = json.loads(_checked(folder, PRIVACY, index))
    try:
        privacy = Statement.from_json(stated, "the model's privacy.json") if stated else None
        arrays = {
            name.removeprefix("preparation."): value.numpy()
            for name, value in tensors.items()
            if name.startswith("preparation.")
        }
        constants = {
            name.removeprefix("constant."): value
            for name, value in tensors.items()
            if name.startswith("constant.")
        }
        preparation = steps(index["preparation"], arrays, folder / INDEX)
        target = Target.from_dict(index["target"])
        schema = schema_of(preparation, target, int(index["dimension"]))
        task = task_of(index["task"], constants, module)
        params = tensors["params"]
        origin = Origin(**index["origin"])
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise _damaged(folder / INDEX, f"{type(problem).__name__}: {problem}") from None
    if params.shape != (task.parameters,):
        raise BadInput(
            "module-mismatch",
            f"{folder} holds {tuple(params.shape)} parameters, and its task {task.name!r} has "
            f"{task.parameters}; give the module that was trained",
        )
    return Model(task, params, preparation, target, schema, privacy, origin)


def find_model(folder: Path) -> Path:
    """The folder that holds the model: the one named, or the one inside a run folder."""
    for place in (folder, folder / WITHIN):
        if (place / INDEX).is_file():
            refuse_old(place)
            if place.name == WITHIN:
                refuse_old(place.parent)
            return place
    if (folder / "config.toml").exists():
        raise BadInput(
            "run-unfinished",
            f"the run in {folder} has no model yet: it was interrupted or is still going; finish "
            f"it with 'dpscaffold train … --out {folder} --resume'",
        )
    what = "holds no model (model.json is missing)" if folder.is_dir() else "is no folder"
    raise BadInput(
        "not-a-model",
        f"{folder} {what}; name a run folder of 'dpscaffold train' or a folder that a model was "
        f"saved to",
    )


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = dict(json.loads(path.read_text(encoding="utf-8")))
        found, digest = index["format"], index.pop("digest")
    except (ValueError, KeyError, TypeError) as problem:
        raise _damaged(path, str(problem)) from None
    if found not in (FORMAT, RANGED):
        raise BadInput(
            "wrong-version",
            f"{path} has format {found}, and this version reads formats up to {RANGED}; use the "
            f"version that wrote it, or a newer one",
        )
    if digest != digest_of(as_json(index)):
        raise _damaged(path, "its digest differs from its contents")
    return index


def _read_weights(folder: Path, index: Mapping[str, Any]) -> dict[str, Tensor]:
    content = _checked(folder, WEIGHTS, index)
    try:
        return dict(load_tensors(content))
    except (SafetensorError, ValueError) as problem:
        raise _damaged(folder / WEIGHTS, str(problem)) from None


def _checked(folder: Path, name: str, index: Mapping[str, Any]) -> bytes:
    """The contents of a file, which must be those that were written."""
    path = folder / name
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise _damaged(path, problem.strerror or "it cannot be read") from None
    if digest_of(content) != index["files"].get(name):
        raise _damaged(path, "its digest differs from its contents")
    return content


def _damaged(path: Path, what: str) -> BadInput:
    return BadInput(
        "model-damaged",
        f"{path} is damaged or was changed ({what}); copy the folder again from where it came from",
    )
