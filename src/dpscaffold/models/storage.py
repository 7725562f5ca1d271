"""Write a model to a folder: safetensors, JSON and the privacy statement, and no code.

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from dpscaffold.atomic import draft_of, put_in_place
from dpscaffold.data.stored import entries
from dpscaffold.errors import BadInput
from dpscaffold.models.trained import TrainedParameters
from dpscaffold.privacy import page
from dpscaffold.privacy.preparation import unnamed
from dpscaffold.runs.written import plain, versions
from dpscaffold.tasks.stored import constants_of, task_entry

#: The layout of model.json; raise it when an older version could misread what is written. A model
#: of a number with a range has the second one: without the range its scores have another scale.
FORMAT, RANGED = 1, 2
INDEX, WEIGHTS, PRIVACY, PAGE = "model.json", "model.safetensors", "privacy.json", "privacy.md"


def save_model(model: TrainedParameters, folder: Path) -> Path:
    """Write a model to a folder, which appears whole or not at all; one that holds a model is
    replaced, any other must be empty."""
    if folder.exists() and not folder.is_dir():
        raise BadInput("not-a-folder", f"{folder} is a file; name a folder for the model")
    if folder.exists() and any(folder.iterdir()) and not (folder / INDEX).exists():
        raise BadInput(
            "folder-not-empty",
            f"{folder} is not empty and holds no model; name a new or an empty folder",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(folder)
    try:
        for name, content in _files(model).items():
            with (draft / name).open("wb") as stream:
                stream.write(content)
                os.fsync(stream.fileno())
        put_in_place(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _files(model: TrainedParameters) -> dict[str, bytes]:
    """The contents of a model's folder, by name; model.json, which has the digests, last."""
    unit = model.privacy.unit if model.privacy else "record"
    listed, arrays = entries(unnamed(model.preparation, unit))
    tensors: dict[str, Tensor] = {"params": model.params.detach().cpu().contiguous()}
    for name, array in arrays.items():
        tensors[f"preparation.{name}"] = torch.from_numpy(np.array(array, copy=True))
    for name, value in constants_of(model.task).items():
        tensors[f"constant.{name}"] = value.detach().cpu().clone().contiguous()
    contents = {
        WEIGHTS: save_tensors(tensors),
        PRIVACY: as_json(plain(model.privacy.to_json() if model.privacy else {})),
    }
    if model.privacy:
        contents[PAGE] = page(model.privacy).encode()
    index = {
        "format": FORMAT if model.target.low is None else RANGED,
        "task": task_entry(model.task),
        "target": model.target.to_dict(),
        "columns": list(model.columns),
        "dimension": model.schema.dimension,
        "preparation": listed,
        "leaves_unprotected": list(model.unprotected),
        "origin": _origin(model),
        "versions": versions(),
        "files": {name: digest_of(content) for name, content in contents.items()},
    }
    return {**contents, INDEX: as_json({**index, "digest": digest_of(as_json(plain(index)))})}


def _origin(model: TrainedParameters) -> dict[str, Any]:
    """Where the model comes from; only a personal one names its site, so that earlier versions read
    all others."""
    said = asdict(model.origin)
    return {key: value for key, value in said.items() if key != "personal" or value is not None}


def as_json(value: Any) -> bytes:
    """Indented JSON, as the files hold it."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def digest_of(content: bytes) -> str:
    """What the index says of a file's contents: 128 bits of BLAKE2b, in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()
