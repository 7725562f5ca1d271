"""Your own arrays: one pair per user, one pooled table, a ``.npz`` file, or a Hugging Face
dataset."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from dpscaffold.data.pool import Pool, assemble
from dpscaffold.data.preparation import preprocess as _preprocess
from dpscaffold.data.prepared import Scale
from dpscaffold.data.steps import _Step
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation

Array = torch.Tensor | np.ndarray


def from_users(
    users: Mapping[str, tuple[Array, Array]] | Sequence[tuple[Array, Array]],
    test_ratio: float = 0.2,
    seed: int = 0,
    classes: int | None = None,
    preprocess: Iterable[str | dict[str, Any] | _Step] = (),
    title: str = "your arrays",
) -> Federation:
    """A federation from one (features, labels) pair per user.

    Each user's records are split into train and test. Features of any shape (n, …) are flattened to
    (n, d). Arrays are NumPy or torch.

    >>> rng = np.random.default_rng(0)
    >>> sites = ("north", "south")
    >>> hospitals = {site: (rng.normal(size=(10, 3)), np.arange(10) % 2) for site in sites}
    >>> from_users(hospitals, preprocess=["standardise", "unit-norm"])
    Federation(your arrays: 2 users, 8 train records each, 3 features, 2 classes)
    """
    named = (
        dict(users)
        if isinstance(users, Mapping)
        else {str(i): pair for i, pair in enumerate(users)}
    )
    if not named:
        raise BadInput("a federation needs at least one user, and none was given")
    pairs = {name: _pair(name, x, y) for name, (x, y) in named.items()}
    widths = {x.shape[1] for x, _ in pairs.values()}
    if len(widths) > 1:
        raise BadInput(
            f"users have {min(widths)} to {max(widths)} features; all must have the same number"
        )
    sizes = [len(y) for _, y in pairs.values()]
    pool = from_pooled(
        np.concatenate([x for x, _ in pairs.values()]),
        np.concatenate([y for _, y in pairs.values()]),
        np.repeat(np.arange(len(pairs)), sizes),
        classes,
        title,
    )
    parts = np.split(np.arange(len(pool)), np.cumsum(sizes)[:-1])
    return _preprocess(assemble(pool, parts, test_ratio, seed, tuple(pairs)), preprocess, seed)


def from_pooled(
    features: Array,
    labels: Array,
    users: Array | None = None,
    classes: int | None = None,
    title: str = "your arrays",
) -> Pool:
    """A pool from one table, to be dealt out by a partition or by its ``users`` (one name a
    record)."""
    x, y = _pair("pool", features, labels)
    classes = max(2, int(y.max(initial=0)) + 1) if classes is None else classes
    if users is None:
        return Pool(x, y, classes, title)
    names, codes = np.unique(np.asarray(users), return_inverse=True)
    if len(codes) != len(y):
        raise BadInput(
            f"users are given for {len(codes)} records, and there are {len(y)}; give one each"
        )
    return Pool(
        x, y, classes, title, users=codes.astype(np.int64), names=tuple(str(name) for name in names)
    )


def read_npz(path: str | Path) -> Pool:
    """A pool from a ``.npz`` file with ``features``, ``labels`` and, where there is one,
    ``users``."""
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, BadZipFile) as problem:
        raise BadInput(f"{path} cannot be read as a NumPy .npz file ({problem})") from None
    for name in ("features", "labels"):
        if name not in arrays:
            raise BadInput(
                f"{path} has no array '{name}'{nearest(name, arrays)}; it has "
                f"{', '.join(arrays) or 'none'}"
            )
    return from_pooled(arrays["features"], arrays["labels"], arrays.get("users"), title=path.stem)


def from_huggingface(
    dataset: Any,
    label: str,
    features: Sequence[str] = (),
    user: str | None = None,
    title: str | None = None,
) -> Pool:
    """A pool from a ``datasets.Dataset``: number, vector or image columns side by side, flattened.

    Images come as bytes and are brought to [0, 1]; other columns stay as they are. The library
    itself is not imported: whatever has ``column_names`` and gives columns by name will do.
    """
    names = list(getattr(dataset, "column_names", None) or [])
    if not names or isinstance(dataset, Mapping):
        raise BadInput(
            "a Hugging Face dataset with columns is expected; choose one split, such as "
            "dataset['train']"
        )
    for wanted in (label, *features, *([user] if user else [])):
        if wanted not in names:
            raise BadInput(
                f"the dataset has no column '{wanted}'{nearest(wanted, names)}; it has "
                f"{', '.join(names)}"
            )
    chosen = tuple(features) or tuple(name for name in names if name not in (label, user))
    columns = [_flat_column(dataset, name) for name in chosen]
    scale = np.concatenate([np.full(x.shape[1], factor, np.float32) for x, factor in columns])
    users = np.asarray(dataset[user]) if user else None
    pool = from_pooled(
        np.concatenate([x for x, _ in columns], axis=1) * scale,
        np.asarray(dataset[label]),
        users,
        title=title or "Hugging Face dataset",
    )
    return replace(pool, preparation=(Scale(scale),)) if (scale != 1).any() else pool


def _flat_column(dataset: Any, name: str) -> tuple[np.ndarray, float]:
    """One column as (n, d) float32, and the factor that brings bytes to [0, 1]."""
    try:
        rows = [np.asarray(value) for value in dataset[name]]
        column = np.stack(rows).reshape(len(rows), -1)
        return column.astype(np.float32), 1 / 255 if column.dtype == np.uint8 else 1.0
    except (ValueError, TypeError):
        raise BadInput(
            f"column '{name}' cannot be made numbers of one shape; choose other features"
        ) from None


def _pair(name: str, features: Array, labels: Array) -> tuple[np.ndarray, np.ndarray]:
    """(n, d) float32 and (n,) int64, checked."""
    try:
        x = np.asarray(features, dtype=np.float32)
        y = np.asarray(labels, dtype=np.float64)
    except (ValueError, TypeError):
        raise BadInput(f"{name}: features and labels must be numbers") from None
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
        raise BadInput(
            f"{name}: features of shape {x.shape} and labels of shape {y.shape}; expected (n, d) "
            f"and (n,), n at least 1"
        )
    if not (np.isfinite(y).all() and (y == np.floor(y)).all() and (y >= 0).all()):
        raise BadInput(f"{name}: labels must be whole numbers from 0 up")
    return x.reshape(len(x), -1), y.astype(np.int64)
