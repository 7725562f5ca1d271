"""How much users differ: what ``dpscaffold data describe`` says about a federation.

*Label heterogeneity*, in [0, 1], is the mean over users of the total-variation distance between the
user's label frequencies and the pooled ones, ½ Σ_c |p_i(c) − p̄(c)|: the share of its records that a
user would have to swap to look like the whole. Small samples differ even when nothing else does, so
what i.i.d. users of the same sizes would score is shown too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpscaffold.data.blocks import blocks
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Kind

#: Sets of labels that are counted apart, the last for all others together.
MOST_SETS = 32


@dataclass(frozen=True)
class Description:
    """A federation in numbers; ``counts`` is (M, C), the training records of each user by label."""

    title: str
    users: int
    train_records: int
    test_records: int
    dimension: int
    classes: int
    sizes: dict[str, float]
    single_class_users: int
    classes_per_user: float
    label_heterogeneity: float
    label_heterogeneity_iid: float
    preprocessing: tuple[str, ...]
    names: Sequence[str]
    counts: np.ndarray
    target: Kind = "class"

    def as_json(self) -> dict[str, Any]:
        """Everything but the table of counts by user, which for many users is long."""
        content = asdict(self)
        content.pop("names")
        counts = content.pop("counts")
        content["labels"] = counts.sum(axis=0).tolist()
        return content


def describe(federation: Federation) -> Description:
    """Look through a federation once, block by block: a mapped one is not loaded.

    >>> import torch
    >>> x, y = torch.eye(4), torch.tensor([0, 0, 1, 1])
    >>> halves = [(x[:2], y[:2]), (x[2:], y[2:])]
    >>> apart = Federation.from_arrays(halves, halves)
    >>> describe(apart).label_heterogeneity
    0.5
    """
    counts = label_counts(federation)
    sizes = federation.train.sizes.numpy()
    quantiles = np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1])
    present = (counts > 0).sum(axis=1)
    score, iid = label_heterogeneity(counts)
    return Description(
        title=federation.title,
        users=federation.users,
        train_records=len(federation.train),
        test_records=len(federation.test),
        dimension=federation.dimension,
        classes=counts.shape[1],
        target=federation.target.kind,
        sizes=dict(zip(("min", "q25", "median", "q75", "max"), quantiles.tolist(), strict=True)),
        single_class_users=int((present == 1).sum()),
        classes_per_user=float(present.mean()),
        label_heterogeneity=score,
        label_heterogeneity_iid=iid,
        preprocessing=federation.preprocessing,
        names=federation.names,
        counts=counts,
    )


def label_counts(federation: Federation) -> np.ndarray:
    """(M, C): how many training records of each label each user has.

    A number is counted by tenths: of all training records, each part holds as many. Of several
    labels the sets of them are counted, the most frequent apart and the others together.
    """
    table, classes, edges = federation.train, federation.classes, np.empty(0)
    if federation.target.kind == "number":
        edges = np.quantile(table.labels.numpy(), np.linspace(0.1, 0.9, 9))
        classes = 10
    common = np.empty(0, dtype=np.int64)
    if federation.target.kind == "labels":
        sets, often = np.unique(table.labels.numpy(), return_counts=True)
        common = np.sort(sets[np.argsort(-often, kind="stable")[: MOST_SETS - 1]])
        classes = len(common) + (len(sets) > len(common))
    counts = np.zeros(federation.users * classes, dtype=np.int64)
    bounds = table.offsets.numpy()
    for block in blocks(len(table), 4):
        labels = table.labels[block].numpy()
        if len(edges):
            labels = np.searchsorted(edges, labels, side="right")
        if len(common):
            place = np.searchsorted(common, labels).clip(max=len(common) - 1)
            labels = np.where(common[place] == labels, place, len(common))
        user = np.searchsorted(bounds, np.arange(block.start, block.stop), side="right") - 1
        counts += np.bincount(user * classes + labels, minlength=len(counts))
    return counts.reshape(federation.users, classes)


def label_heterogeneity(counts: np.ndarray) -> tuple[float, float]:
    """The score of an (M, C) table of counts, and about what i.i.d. users of the same sizes would
    score.

    A frequency estimated from n records of a label with pooled share p is off by √(2p(1−p)/(πn)) on
    average (normal approximation).

    >>> tuple(round(value, 3) for value in label_heterogeneity(np.array([[50, 50], [50, 50]])))
    (0.0, 0.028)
    """
    sizes = counts.sum(axis=1, keepdims=True)
    pooled = counts.sum(axis=0) / counts.sum()
    distances = 0.5 * np.abs(counts / sizes - pooled).sum(axis=1)
    # The pooled frequencies contain the user's own records, which makes the gap smaller by 1 − n/N.
    spread = np.sqrt(2 * pooled * (1 - pooled) / np.pi * (1 / sizes) * (1 - sizes / counts.sum()))
    return float(distances.mean()), float(min(1.0, 0.5 * spread.sum(axis=1).mean()))
