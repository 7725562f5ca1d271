"""Your own arrays: one pair per user, one pooled table, or a ``.npz`` file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpscaffold.data.pool import Pool, assemble
from dpscaffold.data.preparation import preprocess as _preprocess
from dpscaffold.data.preprocessing import StepSettings
from dpscaffold.data.tables.codec import LABELS_READ, by_value
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation
from dpscaffold.federation.labels import pack
from dpscaffold.federation.schema import Kind, Target, kind_of
from dpscaffold.privacy.preparation import Remark

Array = torch.Tensor | np.ndarray


def from_users(
    users: Mapping[str, tuple[Array, Array]] | Sequence[tuple[Array, Array]],
    test_ratio: float = 0.2,
    seed: int = 0,
    classes: int | Sequence[str] | None = None,
    preprocess: Iterable[str | dict[str, Any] | StepSettings] = (),
    title: str = "your arrays",
    target: Kind | Target = "class",
) -> Federation:
    """A federation from one (features, labels) pair per user.

    Each user's records are split into train and test.

    Args:
        users: NumPy or torch arrays of each user, by name or as a list. Features of any shape
            (n, …) are flattened to (n, d). Labels (n,) are class numbers, class names or numbers;
            or (n, L) of 0 and 1 for several labels.
        test_ratio: The share of each user's records that is kept for testing.
        seed: The seed of the split.
        classes: The number of classes, or their names; of several labels, their names.
        preprocess: Preprocessing steps, such as ``["standardise", "unit-norm"]``.
        title: One line for tables and figures.
        target: ``"class"``, ``"number"`` or ``"labels"``. ``Target("number", low=0, high=60)``
            predicts a number in a public range. ``"number"`` uses numbers as they are: they
            should be near 1, because clipping cuts the gradients of larger ones.

    >>> rng = np.random.default_rng(0)
    >>> sites = ("north", "south")
    >>> hospitals = {site: (rng.normal(size=(10, 3)), np.arange(10) % 2) for site in sites}
    >>> from_users(hospitals, preprocess=["standardise", "unit-norm"])
    Federation(your arrays: 2 users, 8 train records each, 3 features, 2 classes)
    """
    named = users if isinstance(users, Mapping) else {str(i): p for i, p in enumerate(users)}
    _check_pairs(named)
    pairs = {name: _pair(name, x, y, kind_of(target)) for name, (x, y) in named.items()}
    features, labels = zip(*pairs.values(), strict=True)
    counts = sorted({y.shape[1:] for y in labels})
    if len(counts) > 1:
        raise BadInput(
            "users-differ",
            f"users have {counts[0][0]} to {counts[-1][0]} labels; all must have the same ones",
        )
    _check_widths(features)
    sizes = [len(y) for y in labels]
    pool = from_pooled(
        np.concatenate(features),
        np.concatenate(labels),
        np.repeat(np.arange(len(pairs)), sizes),
        classes,
        title,
        target,
    )
    parts = np.split(np.arange(len(pool)), np.cumsum(sizes)[:-1])
    return _preprocess(assemble(pool, parts, test_ratio, seed, tuple(pairs)), preprocess, seed)


def _check_pairs(named: Mapping[str, Any]) -> None:
    if not named:
        raise BadInput("no-users", "a federation needs at least one user, and none was given")
    for name, pair in named.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadInput(
                "wrong-type", f"user {name} is no pair; give (features, labels) for each user"
            )


def _check_widths(features: Iterable[np.ndarray]) -> None:
    """Refuse users with different numbers of features."""
    widths = {x.shape[1] for x in features}
    if len(widths) > 1:
        raise BadInput(
            "users-differ",
            f"users have {min(widths)} to {max(widths)} features; all must have the same number",
        )


def from_pooled(
    features: Array,
    labels: Array,
    users: Array | None = None,
    classes: int | Sequence[str] | None = None,
    title: str = "your arrays",
    target: Kind | Target = "class",
) -> Pool:
    """A pool of records from one table, to be partitioned among users.

    Args:
        features: NumPy or torch array (n, …), flattened to (n, d).
        labels: Class numbers, class names or numbers (n,); or (n, L) of 0 and 1.
        users: The user of each record, if it is known.
        classes: The number of classes, or their names in order.
        title: One line for tables and figures.
        target: ``"class"``, ``"number"``, ``"labels"`` or a ``Target``, as for
            :func:`from_users`.

    >>> from_pooled(np.eye(2), np.array(["well", "ill"])).target.classes
    ('ill', 'well')
    """
    x, y = _pair("pool", features, labels, kind_of(target))
    y, predicted, remarks = _target(y, classes, target)
    if users is None:
        return Pool(x, y, predicted, title, preparation=remarks)
    names, codes = np.unique(np.asarray(users).ravel(), return_inverse=True)
    if len(codes) != len(y):
        raise BadInput(
            "count-differs",
            f"users are given for {len(codes)} records, and there are {len(y)}; give one each",
        )
    return Pool(
        x,
        y,
        predicted,
        title,
        users=codes.astype(np.int64),
        names=tuple(str(name) for name in names),
        preparation=remarks,
    )


def _labels_target(width: int, names: int | Sequence[str] | None) -> Target:
    """The target of ``width`` columns of labels, which must be as many as the names."""
    named = Target.labelled(width if names is None else names)
    if len(named.classes) != width:
        raise BadInput(
            "count-differs",
            f"{len(named.classes)} names of labels are given, and there are {width} columns of "
            f"them; give one each",
        )
    return named


def class_numbers(labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The class number of every label, by its name."""
    index = {name: i for i, name in enumerate(names)}
    strange = next((str(label) for label in labels if label not in index), None)
    if strange is not None:
        raise BadInput(
            "unknown-class",
            f"label '{strange}' is not among classes{nearest(strange, names)}; they are "
            f"{', '.join(names[:10])}",
        )
    return np.array([index[label] for label in labels], dtype=np.int64)


def _named_target(
    labels: np.ndarray, classes: int | Sequence[str] | None
) -> tuple[np.ndarray, Target, tuple[Remark, ...]]:
    """Class numbers of labels that are names; by default the classes are those that occur."""
    if classes and not isinstance(classes, int):
        given = tuple(classes)
        return class_numbers(labels, given), Target("class", given), ()
    names = tuple(sorted({str(label) for label in labels}, key=by_value))
    said = Remark(LABELS_READ, "unprotected", remedy="classes=(…), their names in order")
    return class_numbers(labels, names), Target("class", names), (said,)


def _target(
    labels: np.ndarray, classes: int | Sequence[str] | None, target: Kind | Target
) -> tuple[np.ndarray, Target, tuple[Remark, ...]]:
    """Labels as numbers, what they represent, and what was read from them."""
    if isinstance(target, Target) and target.classes:
        classes, target = target.classes, target.kind
    if target == "labels":
        return pack(labels), _labels_target(labels.shape[1], classes), ()
    if kind_of(target) == "number":
        if classes is not None:
            raise BadInput(
                "conflicting-arguments",
                "classes are given, and the target is a number; leave one of them out",
            )
        return labels, target if isinstance(target, Target) else Target("number"), ()
    if labels.dtype.kind == "U":
        return _named_target(labels, classes)
    count = max(2, int(labels.max(initial=0)) + 1)
    return labels, Target.of(count if classes is None else classes), ()


def npz_arrays(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of a ``.npz`` file by name."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: _array_in(file, name, path) for name in file.files}
    except BadInput:
        raise
    except Exception as problem:  # zipfile, zlib and NumPy's header each raise kinds of their own
        what = str(problem).strip().splitlines() or [type(problem).__name__]
        raise BadInput(
            "file-unreadable", f"{path} cannot be read as a NumPy .npz file ({what[0]})"
        ) from None


def _array_in(file: Any, name: str, path: str | Path) -> np.ndarray:
    """One array of the file; Python's objects are not unpacked: that runs their code."""
    try:
        found: np.ndarray = file[name]
    except ValueError as problem:
        if "allow_pickle" not in str(problem):
            raise
        raise BadInput(
            "not-numbers",
            f"{path}: the array '{name}' holds Python's objects; save it as numbers or texts, "
            f"with {name}.astype(float) or {name}.astype(str)",
        ) from None
    return found


def read_npz(path: str | Path, target: Kind | Target = "class") -> Pool:
    """A pool from a ``.npz`` file with ``features``, ``labels`` ((n, L) of 0 and 1 where the target
    is labels) and, where there are any, ``users`` and the names of the ``classes`` in order."""
    path, arrays = Path(path), npz_arrays(path)
    for name in ("features", "labels"):
        if name not in arrays:
            raise BadInput(
                "unknown-array",
                f"{path} has no array '{name}'{nearest(name, arrays)}; it has "
                f"{', '.join(arrays) or 'none'}",
            )
    names = arrays.get("classes")
    classes = None if names is None else tuple(str(name) for name in names.ravel())
    users = arrays.get("users")
    try:
        return from_pooled(arrays["features"], arrays["labels"], users, classes, path.stem, target)
    except BadInput as problem:
        raise BadInput(problem.code, f"{path}: {str(problem).removeprefix('pool: ')}") from None


def _labelled(name: str, features: Array, labels: Array) -> tuple[np.ndarray, np.ndarray]:
    """(n, d) float32 and (n, L) of 0 and 1, checked."""
    try:
        x, y = np.asarray(features, dtype=np.float32), np.asarray(labels)
    except (ValueError, TypeError):
        raise BadInput("not-numbers", f"{name}: features and labels must be numbers") from None
    if x.ndim < 2 or y.ndim != 2 or len(x) != len(y) or not len(y):
        raise BadInput(
            "wrong-shape",
            f"{name}: features of shape {x.shape} and labels of shape {y.shape}; where target = "
            f"'labels', (n, d) and (n, L) are expected, n at least 1",
        )
    pack(y, f"{name}: labels")  # says what is wrong with them
    return x.reshape(len(x), -1), y.astype(np.int64)


def _pair(
    name: str, features: Array, labels: Array, target: Kind = "class"
) -> tuple[np.ndarray, np.ndarray]:
    """(n, d) float32 and (n,) int64, float32 for numbers or texts for names of classes, checked;
    of several labels (n, L) of 0 and 1."""
    if target == "labels":
        return _labelled(name, features, labels)
    try:
        x, y = _as_arrays(features, labels, target)
    except (ValueError, TypeError):
        raise BadInput("not-numbers", f"{name}: features and labels must be numbers") from None
    if x.ndim < 2 or y.ndim != 1 or len(x) != len(y) or not len(y):
        several = "; for (n, L) of 0 and 1 set target = 'labels'" if y.ndim == 2 else ""
        raise BadInput(
            "wrong-shape",
            f"{name}: features of shape {x.shape} and labels of shape {y.shape}; expected (n, d) "
            f"and (n,), n at least 1{several}",
        )
    named = y.dtype.kind == "U"
    return x.reshape(len(x), -1), y if named else _numeric_labels(name, y, target)


def _as_arrays(features: Array, labels: Array, target: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Features as float32, and labels as numbers, or as texts where they are names of classes."""
    x, y = np.asarray(features), np.asarray(labels)
    if {x.dtype.kind, y.dtype.kind} & {"c", "M"}:
        raise TypeError("neither complex numbers nor dates")
    y = np.char.decode(y, "utf-8") if y.dtype.kind == "S" else y
    named = target == "class" and _are_texts(y)
    return x.astype(np.float32), y.astype(str) if named else y.astype(np.float64)


def _are_texts(values: np.ndarray) -> bool:
    texts = values.dtype.kind in "OU" and values.ndim == 1
    return texts and all(isinstance(value, str) for value in values)


def _numeric_labels(name: str, labels: np.ndarray, target: Kind) -> np.ndarray:
    """Labels as float32 numbers or int64 class numbers, checked."""
    if not np.isfinite(labels).all():
        raise BadInput(
            "bad-labels", f"{name}: labels contain NaN or infinity; leave such records out"
        )
    if target == "number":
        return labels.astype(np.float32)
    if not ((labels == np.floor(labels)) & (labels >= 0)).all():
        raise BadInput(
            "bad-labels",
            f"{name}: labels must be whole numbers from 0 up, or names (to predict numbers, set "
            f"target = 'number')",
        )
    return labels.astype(np.int64)
