"""A model on disk: safetensors, JSON and the privacy statement. Nothing in it is executed.

===================  ==========================================================================
file                 holds
===================  ==========================================================================
model.json           task, columns, classes, preparation, versions, format number, digests
model.safetensors    the parameters, the arrays of the preparation, constants of a module
privacy.json / .md   what is promised about the records that it was trained on
===================  ==========================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from dpscaffold.data.stored import entries, steps
from dpscaffold.errors import BadInput
from dpscaffold.journal import sync_folder
from dpscaffold.model import Model, Origin
from dpscaffold.runfolder import plain, versions
from dpscaffold.schema import Target, schema_of
from dpscaffold.tasks import Task
from dpscaffold.tasks.stored import constants_of, task_entry, task_of

#: The layout of model.json; raise it when an older version could misread what is written.
FORMAT = 1
INDEX, WEIGHTS, PRIVACY, PAGE = "model.json", "model.safetensors", "privacy.json", "privacy.md"
#: Where a run folder keeps its model.
WITHIN = "model"


def save_model(model: Model, folder: Path) -> Path:
    """Write a model to a folder, which appears whole or not at all; one that holds a model is
    replaced, any other must be empty."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{folder} is a file; name a folder for the model")
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).exists():
        raise BadInput(f"{folder} is not empty and holds no model; name a new or an empty folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, content in _files(model).items():
            with (draft / name).open("wb") as stream:
                stream.write(content)
                os.fsync(stream.fileno())
        os.chmod(draft, 0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(draft, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _files(model: Model) -> dict[str, bytes]:
    """The contents of a model's folder, by name; model.json, which has the digests, last."""
    from dpscaffold.report.statement import render

    listed, arrays = entries(model.preparation)
    tensors: dict[str, Tensor] = {"params": model.params.detach().cpu().contiguous()}
    for name, array in arrays.items():
        tensors[f"preparation.{name}"] = torch.from_numpy(np.array(array, copy=True))
    for name, value in constants_of(model.task).items():
        tensors[f"constant.{name}"] = value.detach().cpu().clone().contiguous()
    statement = plain(dict(model.privacy))
    contents = {
        WEIGHTS: save_tensors(tensors),
        PRIVACY: _json(statement),
    }
    if statement:
        contents[PAGE] = render(statement).encode()
    index = {
        "format": FORMAT,
        "task": task_entry(model.task),
        "target": {"kind": model.target.kind, "classes": list(model.target.classes)},
        "columns": list(model.columns),
        "dimension": model.schema.dimension,
        "preparation": listed,
        "leaves_unprotected": list(model.unprotected),
        "origin": asdict(model.origin),
        "versions": versions(),
        "files": {name: _digest(content) for name, content in contents.items()},
    }
    return {**contents, INDEX: _json({**index, "digest": _digest(_json(plain(index)))})}


def load_model(folder: Path | str, module: nn.Module | Task | None = None) -> Model:
    """The model of a folder, or of a run folder; executes no code and reads no private record.

    ``module`` is the user's own module or task, where the model is of one: its code is not stored.

    >>> import tempfile
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
    privacy = json.loads(_checked(folder, PRIVACY, index))
    try:
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
        target = Target(index["target"]["kind"], tuple(index["target"]["classes"]))
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
            f"{folder} holds {tuple(params.shape)} parameters, and its task {task.name!r} has "
            f"{task.parameters}; give the module that was trained"
        )
    return Model(task, params, preparation, target, schema, privacy, origin)


def find_model(folder: Path) -> Path:
    """The folder that holds the model: the one named, or the one inside a run folder."""
    for place in (folder, folder / WITHIN):
        if (place / INDEX).is_file():
            return place
    if (folder / "config.toml").exists():
        raise BadInput(
            f"the run in {folder} has no model yet: it was interrupted or is still going; finish "
            f"it with 'dpscaffold train … --out {folder} --resume'"
        )
    what = "holds no model (model.json is missing)" if folder.is_dir() else "is no folder"
    raise BadInput(
        f"{folder} {what}; name a run folder of 'dpscaffold train' or a folder that a model was "
        f"saved to"
    )


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = dict(json.loads(path.read_text(encoding="utf-8")))
        found, digest = index["format"], index.pop("digest")
    except (ValueError, KeyError, TypeError) as problem:
        raise _damaged(path, str(problem)) from None
    if found != FORMAT:
        raise BadInput(
            f"{path} has format {found}, and this version reads format {FORMAT}; use the version "
            f"that wrote it, or a newer one"
        )
    if digest != _digest(_json(index)):
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
    if _digest(content) != index["files"].get(name):
        raise _damaged(path, "its digest differs from its contents")
    return content


def _damaged(path: Path, what: str) -> BadInput:
    return BadInput(
        f"{path} is damaged or was changed ({what}); copy the folder again from where it came from"
    )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
