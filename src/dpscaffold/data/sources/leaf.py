"""LEAF-style JSON: ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y":
[...]}}}``.

Reference: Caldas et al., "LEAF: a benchmark for federated settings", 2018.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dpscaffold.data.pool import Pool
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Target

Users = dict[str, tuple[np.ndarray, np.ndarray]]


def read_leaf(path: str | Path) -> Pool | Federation:
    """A JSON file or a folder of them as a pool with natural users.

    A folder with ``train`` and ``test`` subfolders has its split already and comes back as a
    federation, of the users that are in both. A user may be spread over several files of a folder.
    """
    path = Path(path)
    if (path / "train").is_dir() and (path / "test").is_dir():
        return _read_split(path)
    users = _read_folder(path) if path.is_dir() else _read_file(path)
    if not users:
        raise BadInput("no-users", f"{path} has no users")
    labels = np.concatenate([y for _, y in users.values()])
    numbers = np.repeat(np.arange(len(users)), [len(y) for _, y in users.values()])
    features = _stacked(path, users)
    return Pool(
        features,
        labels,
        Target.numbered(max(2, int(labels.max()) + 1)),
        f"LEAF {path.stem}",
        users=numbers,
        names=tuple(users),
    )


def _stacked(path: Path, users: Users) -> np.ndarray:
    widths = {x.shape[1] for x, _ in users.values()}
    if len(widths) > 1:
        raise BadInput(
            "users-differ",
            f"{path}: users have {min(widths)} to {max(widths)} features; all must have the same "
            f"number",
        )
    return np.concatenate([x for x, _ in users.values()])


def _read_folder(folder: Path) -> Users:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise BadInput("no-files", f"{folder} holds no .json file")
    users: Users = {}
    for file in files:
        for name, (x, y) in _read_file(file).items():
            if name in users and users[name][0].shape[1] == x.shape[1]:
                x, y = np.concatenate([users[name][0], x]), np.concatenate([users[name][1], y])
            users[name] = (x, y)
    return users


def _read_file(path: Path) -> Users:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise BadInput("file-unreadable", f"{path} cannot be read: {problem.strerror}") from None
    except ValueError as problem:
        raise BadInput("not-json", f"{path} is not valid JSON ({problem})") from None
    data = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise BadInput(
            "not-leaf",
            f"{path} has no 'user_data' table; expected LEAF's users, num_samples and user_data",
        )
    return {str(name): _arrays(path, str(name), entry) for name, entry in data.items()}


def _read_split(path: Path) -> Federation:
    """The federation of a folder with train and test, of the users that are in both."""
    train, test = _read_folder(path / "train"), _read_folder(path / "test")
    both = [user for user in train if user in test]
    if not both:
        raise BadInput(
            "not-leaf", f"{path}: no user of train/ is in test/; expected the same users in both"
        )
    first, second = ([table[user] for user in both] for table in (train, test))
    return Federation.from_arrays(first, second, names=both, title=f"LEAF {path.name}")


def _arrays(path: Path, name: str, entry: Any) -> tuple[np.ndarray, np.ndarray]:
    if not isinstance(entry, dict) or "x" not in entry or "y" not in entry:
        raise BadInput("not-leaf", f"{path}: user {name} has no 'x' and 'y'")
    try:
        x = np.array(entry["x"], dtype=np.float32)
        y = np.array(entry["y"], dtype=np.float64)
    except (ValueError, TypeError):
        raise BadInput(
            "not-numbers",
            f"{path}: user {name} holds text or rows of unequal length where numbers are expected",
        ) from None
    x = x.reshape(len(x), -1) if x.ndim > 1 else x
    if (x.ndim, y.shape) != (2, x.shape[:1]) or not len(y):
        raise BadInput(
            "wrong-shape",
            f"{path}: user {name} has x of shape {x.shape} and y of shape {y.shape}; expected (n, "
            f"d) and (n,), n at least 1",
        )
    if not (np.isfinite(y) & (y >= 0) & (y == np.floor(y))).all():
        raise BadInput(
            "bad-labels", f"{path}: user {name} has labels that are not whole numbers from 0 up"
        )
    return x, y.astype(np.int64)
