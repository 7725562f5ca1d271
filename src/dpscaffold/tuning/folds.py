"""Folds within each user's training records: the split of a cross-validation that keeps users as
they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dpscaffold.checks import whole
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, Records


def fold_federation(federation: Federation, fold: int, folds: int = 5) -> Federation:
    """The training records alone, every user's ``fold``-th part held out as its test records.

    Each user's records are shuffled once, always alike, and cut into ``folds`` parts of nearly
    equal size; the folds of different ``fold`` are disjoint and cover all records. The federation's
    own test records play no part.

    >>> from dpscaffold import synthetic
    >>> data = synthetic(users=3, records=50)
    >>> part = fold_federation(data, 0)
    >>> part.train.sizes.tolist(), part.test.sizes.tolist()
    ([32, 32, 32], [8, 8, 8])
    """
    whole("folds", folds, 2)
    smallest = int(federation.train.sizes.min())
    if smallest < folds:
        user = int(federation.train.sizes.argmin())
        raise BadInput(
            "too-few-records",
            f"folds is {folds}, and user {user} has {smallest} training records; use at most "
            f"{smallest} folds or leave that user out",
        )
    if not 0 <= fold < folds:
        raise BadInput("out-of-range", f"fold is {fold}; there are the folds 0 to {folds - 1}")
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for user in range(federation.users):
        features, labels = federation.train.of(user)
        stream = np.random.default_rng(np.random.SeedSequence(0, spawn_key=(user,)))
        parts = np.array_split(stream.permutation(len(labels)), folds)
        out = torch.from_numpy(np.sort(parts[fold]))
        rest = torch.from_numpy(
            np.sort(np.concatenate([p for k, p in enumerate(parts) if k != fold]))
        )
        held.append((features[out], labels[out]))
        kept.append((features[rest], labels[rest]))
    return replace(
        federation,
        train=Records.from_users([x for x, _ in kept], [y for _, y in kept], federation.train.kind),
        test=Records.from_users([x for x, _ in held], [y for _, y in held], federation.train.kind),
        title=f"{federation.title}, fold {fold + 1} of {folds}",
        mapped=False,
    )
