"""Sets of labels as integers, so that a record of many labels is stored as any other.

Where a target is several labels, each of which holds or does not, a record's label is the set of
those that hold, packed into the bits of one int64: bit j is label j. Tables, engines, batches and
files carry it as they carry a class number; only the loss and the metrics look inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import MOST_LABELS

if TYPE_CHECKING:
    from torch import Tensor


def pack(table: Any, what: str = "labels") -> np.ndarray:
    """(N, L) of 0 and 1 (or booleans) ↦ sets of labels (N,) int64; ``what`` names them if wrong.

    >>> pack([[1, 0, 1], [0, 0, 0]]).tolist()
    [5, 0]
    """
    given = np.asarray(table)
    if given.ndim != 2 or not 1 <= given.shape[1] <= MOST_LABELS:
        raise BadInput(
            "wrong-shape",
            f"{what} have shape {given.shape}; where target = 'labels', give (records, labels), "
            f"1 to {MOST_LABELS} labels",
        )
    held = given == 1
    strange = np.argwhere(~(held | (given == 0)))
    if len(strange):
        row, column = strange[0]
        raise BadInput(
            "bad-labels",
            f"{what} hold {given[row, column]} (record {row}, label {column}); a label that holds "
            f"is 1 and one that does not is 0",
        )
    places = np.left_shift(np.int64(1), np.arange(given.shape[1], dtype=np.int64))
    return np.asarray(np.where(held, places, np.int64(0)).sum(axis=1, dtype=np.int64))


def unpack(labels: Tensor, count: int, axis: int = -1) -> Tensor:
    """Sets of labels (…) ↦ whether each of ``count`` labels holds, int64 0 or 1, the labels along
    a new ``axis``.

    >>> import torch
    >>> unpack(torch.tensor([5, 0]), 3).tolist()
    [[1, 0, 1], [0, 0, 0]]
    """
    import torch  # only here: the keys of a configuration are explained without it

    bits = torch.arange(count, device=labels.device)
    spread = labels.unsqueeze(axis)
    shape = [1] * spread.ndim
    shape[axis] = count
    return (spread >> bits.view(shape)) & 1
