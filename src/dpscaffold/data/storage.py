"""Prepared federations on disk: save them to a folder, and map them from there.

Mapped, the tables stay in their files and are paged in as they are read, so a federation may exceed
memory; :class:`~dpscaffold.data.writer.FederationWriter` builds such a one user by user. A folder
appears under its name only when it is whole.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import warnings
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from dpscaffold.data.blocks import blocks
from dpscaffold.data.stored import ARRAYS, steps
from dpscaffold.data.writer import FORMAT, INDEX, RANGED, FederationWriter, column_types
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, Records
from dpscaffold.federation.schema import Prepared, Target


def save(federation: Federation, folder: str | Path, overwrite: bool = False) -> Path:
    """Write a federation to a folder, in blocks: a mapped one is copied without being loaded."""
    writer = FederationWriter(
        folder,
        federation.target,
        federation.title,
        federation.preparation,
        overwrite,
    )
    with writer:
        writer.names = list(federation.names)
        for part, table in (("train", federation.train), ("test", federation.test)):
            rows = (table.features[block].numpy() for block in blocks(*table.features.shape))
            writer.append_table(part, rows, table.labels, table.sizes)
    return Path(folder)


def load(folder: str | Path) -> Federation:
    """Read a stored federation.

    The tables stay in their files (read-only; writing into them is an error the operating system
    punishes). Everything is read once to compare checksums: a record that was changed after the
    preparation would otherwise be trained on, and no statement would say so.
    """
    folder = Path(folder)
    index = _read_index(folder)
    target = _target(folder, index)
    tables = []
    for part in ("train", "test"):
        columns = {
            name: _read_column(folder, f"{part}-{name}.npy", kind, index)
            for name, kind in column_types(target).items()
        }
        tables.append(Records(**columns))
    try:
        names = tuple(index["names"] or ())
        federation = Federation(
            tables[0],
            tables[1],
            target,
            names,
            index["title"],
            _read_preparation(folder, index),
            True,
            hashlib.blake2b(repr(sorted(index["files"].items())).encode()).hexdigest(),
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise BadInput(
            "data-damaged", f"{folder / INDEX} is damaged ({problem}); prepare the federation again"
        ) from None
    for table in tables:
        if (
            len(table.features) != len(table.labels)
            or int(table.offsets[-1]) != len(table.labels)
            or bool((table.sizes < 1).any())
        ):
            raise BadInput(
                "data-damaged",
                f"{folder} is damaged: its features, labels and offsets do not fit together; "
                f"prepare it again",
            )
    return federation


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise BadInput(
            "not-prepared-data",
            f"{folder} holds no prepared federation ({INDEX} is missing); make one with "
            f"'dpscaffold data prepare'",
        )
    try:
        index: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = index["format"]
        index["files"].keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput("data-damaged", f"{path} is damaged; prepare the federation again") from None
    if found not in (FORMAT, RANGED):
        raise BadInput(
            "wrong-version",
            f"{path} has format {found}, and this version reads {FORMAT} and {RANGED}; "
            f"prepare the federation again",
        )
    return index


def _target(folder: Path, index: dict[str, Any]) -> Target:
    """What is predicted."""
    try:
        return Target.from_dict(index["target"])
    except (KeyError, TypeError, ValueError) as problem:
        raise BadInput(
            "data-damaged", f"{folder / INDEX} is damaged ({problem}); prepare the federation again"
        ) from None


def _read_preparation(folder: Path, index: dict[str, Any]) -> tuple[Prepared, ...]:
    """The steps that made the features; nothing is fitted here, as a private step is released
    once."""
    arrays: dict[str, np.ndarray] = {}
    if ARRAYS in index["files"]:
        path = folder / ARRAYS
        try:
            content = path.read_bytes()
            digest = hashlib.blake2b(content, digest_size=16).hexdigest()
            if digest != index["files"][ARRAYS]["blake2b"]:
                raise ValueError("its checksum differs")
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        except (OSError, ValueError, EOFError, BadZipFile) as problem:
            raise BadInput(
                "data-damaged",
                f"{path} cannot be read ({problem}); the folder is damaged, prepare the "
                f"federation again",
            ) from None
    return steps(index["preparation"], arrays, folder / INDEX)


def _check_size(path: Path, expected: int | None) -> None:
    if not path.is_file():
        raise BadInput(
            "data-damaged",
            f"{path} is missing; the folder is damaged, prepare the federation again",
        )
    size = path.stat().st_size
    if size != expected:
        raise BadInput(
            "data-damaged",
            f"{path} has {size} bytes and should have {expected}; the folder is damaged, prepare "
            f"the federation again",
        )


def _checksum(array: np.ndarray) -> str:
    state = hashlib.blake2b(digest_size=16)
    for block in blocks(len(array), math.prod(array.shape[1:])):
        state.update(np.ascontiguousarray(array[block]).data)
    return state.hexdigest()


def _read_column(
    folder: Path, name: str, kind: np.dtype[Any], index: dict[str, Any]
) -> torch.Tensor:
    path, entry = folder / name, index["files"].get(name, {})
    _check_size(path, entry.get("bytes"))
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as problem:
        raise BadInput(
            "data-damaged",
            f"{path} is not a readable .npy file ({problem}); prepare the federation again",
        ) from None
    if array.dtype != kind or array.ndim != (2 if name.endswith("features.npy") else 1):
        raise BadInput(
            "data-damaged",
            f"{path} holds {array.dtype} of rank {array.ndim}; expected {kind}; prepare the "
            f"federation again",
        )
    if _checksum(array) != entry.get("blake2b"):
        raise BadInput(
            "data-damaged",
            f"{path} has changed since it was written (its checksum differs); prepare the "
            f"federation again",
        )
    with warnings.catch_warnings():
        # Torch warns that the mapping is read-only; that is what it is for.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(np.asarray(array))
