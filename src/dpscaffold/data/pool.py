"""A pooled dataset that no user holds yet, and how it is partitioned.

Readers (images, tables, arrays) produce a :class:`Pool`; partitions say which rows go to which
user; and :func:`assemble` splits every user's rows into train and test and builds the federation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dpscaffold.data.blocks import blocks
from dpscaffold.data.prepared import Scale
from dpscaffold.data.streams import stream
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, Records
from dpscaffold.federation.schema import Prepared, Target


@dataclass(frozen=True)
class Pool:
    """Records before they belong to users.

    ``features`` is (N, d), either float32 or, for images, uint8 that ``scale`` brings to [0, 1]
    when the rows are partitioned (so that a pool of images costs a quarter of the memory).
    ``labels`` is (N,), what ``target`` says (a number of classes will do for it): class numbers in
    int64, or numbers in float32, in their own units. ``users`` holds, where the data have a natural
    user, its number per record, and ``names`` the names of these users. ``notes`` say what a reader
    had to decide (categories, missing values); ``preparation`` are the steps that made these
    features of raw rows. ``coded`` says that the reader numbered the labels itself, so that they
    need not be looked through here.
    """

    features: np.ndarray
    labels: np.ndarray
    target: Target
    title: str
    scale: float = 1.0
    users: np.ndarray | None = None
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    preparation: tuple[Prepared, ...] = ()
    coded: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.target, Target):
            object.__setattr__(self, "target", Target.of(self.target))
        if self.features.ndim != 2 or len(self.features) != len(self.labels):
            raise BadInput(
                "wrong-shape",
                f"{self.title}: features of shape {self.features.shape} and {len(self.labels)} "
                f"labels do not fit; expected (records, features) and one label per record",
            )
        complaint = "" if self.coded else self.target.complaint(self.labels)
        if complaint:
            raise BadInput("bad-labels", f"{self.title}: labels {complaint}")

    @property
    def classes(self) -> int:
        """C, the number of classes; 0 where the target is a number."""
        return len(self.target.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: np.ndarray) -> torch.Tensor:
        """Some rows as float32 features, scaled, (len(rows), d)."""
        out = np.empty((len(rows), self.features.shape[1]), dtype=np.float32)
        for block in blocks(len(rows), self.features.shape[1]):
            np.multiply(
                self.features[rows[block]], np.float32(self.scale), out=out[block], casting="unsafe"
            )
        return torch.from_numpy(out)


def held_out_size(records: int, test_ratio: float) -> int:
    """How many of a user's records are for testing: the nearest integer, at least one on
    either side.

    >>> held_out_size(2500, 0.2), held_out_size(3, 0.2)
    (500, 1)
    """
    return min(max(1, round(test_ratio * records)), records - 1)


def split_rows(
    parts: Sequence[np.ndarray], names: Sequence[str], test_ratio: float, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Each user's rows shuffled and cut into (train, test), a fraction ``test_ratio`` of them for
    testing.

    >>> train, test = split_rows([np.arange(5), np.arange(5, 15)], ["a", "b"], 0.2, seed=0)
    >>> [len(rows) for rows in train], [len(rows) for rows in test]
    ([4, 8], [1, 2])
    """
    if not 0 < test_ratio < 1:
        raise BadInput(
            "out-of-range", f"test_ratio is {test_ratio}; it must lie strictly between 0 and 1"
        )
    rng = stream(seed, "split")
    train, test = [], []
    for name, rows in zip(names, parts, strict=True):
        if len(rows) < 2:
            raise BadInput(
                "too-few-records",
                f"user {name} has {len(rows)} record{'' if len(rows) == 1 else 's'}; a train/test "
                f"split needs at least 2 (give it more, or leave it out with minimum_records)",
            )
        shuffled = rng.permutation(rows)
        held_out = held_out_size(len(rows), test_ratio)
        test.append(shuffled[:held_out])
        train.append(shuffled[held_out:])
    return train, test


def assemble(
    pool: Pool,
    parts: Sequence[np.ndarray],
    test_ratio: float = 0.2,
    seed: int = 0,
    names: Sequence[str] = (),
) -> Federation:
    """The federation in which user i holds the rows ``parts[i]`` of the pool, split into training
    and test records.

    Args:
        pool: All records.
        parts: The row numbers of each user.
        test_ratio: The share of each user's records that is kept for testing.
        seed: The seed of the split.
        names: The users' names.

    >>> pool = Pool(np.eye(6, dtype=np.float32), np.array([0, 1, 0, 1, 0, 1]), 2, "six records")
    >>> assemble(pool, [np.arange(4), np.arange(4, 6)]).train.sizes.tolist()
    [3, 1]
    """
    names = tuple(names) or numbered(parts)
    train, test = partitioned(pool, parts, test_ratio, seed, names)
    federation = Federation(train, test, pool.target, names, pool.title, steps_of(pool))
    return federation.validated()


def numbered(parts: Sequence[np.ndarray]) -> tuple[str, ...]:
    """Names for users who have none."""
    return tuple(str(i) for i in range(len(parts)))


def partitioned(
    pool: Pool, parts: Sequence[np.ndarray], test_ratio: float, seed: int, names: Sequence[str]
) -> tuple[Records, Records]:
    """The train and the test table of these parts, which nobody has looked through yet."""
    train, test = split_rows(parts, names, test_ratio, seed)
    return _table(pool, train, clip=True), _table(pool, test, clip=False)


def steps_of(pool: Pool) -> tuple[Prepared, ...]:
    """How the features of a pool's tables were made of raw rows."""
    scaled: tuple[Prepared, ...] = ()
    if pool.scale != 1:
        scaled = (Scale(np.asarray(pool.scale, dtype=np.float32)),)
    return scaled + pool.preparation


def _table(pool: Pool, parts: Sequence[np.ndarray], clip: bool) -> Records:
    if not parts:
        raise BadInput(
            "no-users",
            f"{pool.title}: no user is left; lower minimum_records or ask for other users",
        )
    rows = np.concatenate(parts)
    kind = np.float32 if pool.target.kind == "number" else np.int64
    labels = torch.from_numpy(pool.labels[rows].astype(kind, copy=False))
    table = Records(pool.take(rows), labels, offsets([len(part) for part in parts]))
    return table if pool.target.low is None else table.scaled(pool.target, clip)


def offsets(sizes: Sequence[int]) -> torch.Tensor:
    """Where each user's rows begin, (M+1,) int64.

    >>> offsets([3, 1]).tolist()
    [0, 3, 4]
    """
    return torch.from_numpy(np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]))
