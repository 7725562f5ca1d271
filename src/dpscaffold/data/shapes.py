"""How many features and classes data will have, as far as their settings tell without the files."""

from __future__ import annotations

from pydantic import BaseModel

from dpscaffold.data.config import Emnist, Pooled, Synthetic
from dpscaffold.data.preprocessing import Pca

#: (features, classes).
Shape = tuple[int, int]

#: Of the records of a source as they are read.
READ: dict[str, Shape] = {
    "mnist": (28 * 28, 10),
    "fashion-mnist": (28 * 28, 10),
    "emnist47": (28 * 28, 47),
    "cifar10": (32 * 32 * 3, 10),
    "digits": (8 * 8, 10),
}


def shape_of(data: BaseModel) -> Shape | None:
    """(features, classes) of a ``[data]`` table's records as they are trained on, or None where
    only the files tell.

    >>> from dpscaffold.data.config import parse_data
    >>> shape_of(parse_data({"source": "mnist", "preprocess": ["centre", "pca:60", "unit-norm"]}))
    (60, 10)
    """
    if isinstance(data, Synthetic):
        return data.dimension, data.classes
    if not isinstance(data, Pooled):
        return None
    found = _emnist(data) if isinstance(data, Emnist) else READ.get(getattr(data, "source", ""))
    kept = [step.components for step in data.preprocess if isinstance(step, Pca)]
    return (kept[-1], found[1]) if found and kept else found


def _emnist(data: Emnist) -> Shape:
    from dpscaffold.data.sources.images import EMNIST_SPLITS

    return 28 * 28, len(EMNIST_SPLITS[data.split][0])
