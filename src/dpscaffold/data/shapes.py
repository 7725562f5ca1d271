"""How many features and classes data will have, as far as their settings tell without the files."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel

from dpscaffold.data.config import Emnist, Pooled, Synthetic
from dpscaffold.data.preprocessing import (
    HogSettings,
    Pca,
    RandomFeaturesSettings,
    StepSettings,
    hog_width,
)

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
    return (_width(found[0], data.preprocess), found[1]) if found else None


def _width(features: int, steps: Iterable[StepSettings]) -> int:
    """The number of features after the steps."""
    for step in steps:
        if isinstance(step, Pca):
            features = step.components
        elif isinstance(step, RandomFeaturesSettings):
            features = step.features
        elif isinstance(step, HogSettings):
            features = hog_width(step.shape, step.cell, step.orientations)
    return features


def _emnist(data: Emnist) -> Shape:
    from dpscaffold.data.sources.images import EMNIST_SPLITS

    return 28 * 28, len(EMNIST_SPLITS[data.split][0])
