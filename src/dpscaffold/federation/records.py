"""A flat table of records with offsets, so that users may hold any number of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Kind, Target

#: How many values are looked at together when a table is checked or hashed; bounds the memory of a
#: mapped one.
BLOCK = 1 << 22


@dataclass(frozen=True)
class Records:
    """The records of all users, one after the other.

    ``features`` is (N, d) float32, ``labels`` (N,) int64 for classes and for sets of labels
    (:mod:`~dpscaffold.federation.labels`) and float32 for numbers, and ``offsets`` (M+1,) int64:
    user ``i`` holds the rows ``offsets[i]`` to ``offsets[i+1]``.

    >>> labels = [torch.tensor([0, 1, 0]), torch.tensor([1])]
    >>> records = Records.from_users([torch.zeros(3, 2), torch.ones(1, 2)], labels)
    >>> records.sizes.tolist(), records.of(1)[0].tolist()
    ([3, 1], [[1.0, 1.0]])
    """

    features: Tensor
    labels: Tensor
    offsets: Tensor

    @classmethod
    def from_users(
        cls, features: Sequence[Tensor], labels: Sequence[Tensor], kind: Kind = "class"
    ) -> Records:
        """Concatenate one table per user; ``kind`` says whether labels are class numbers or
        numbers."""
        if len(features) != len(labels):
            raise BadInput(
                "count-differs",
                f"features are given for {len(features)} users and labels for {len(labels)}; give "
                f"one of each per user",
            )
        if not features:
            raise BadInput("no-users", "a federation needs at least one user, and none was given")
        for i, (x, y) in enumerate(zip(features, labels, strict=True)):
            _check_user(i, x, y, features[0].shape, kind)
        sizes = torch.tensor([len(x) for x in features])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return cls(
            torch.cat(list(features)).to(torch.float32),
            torch.cat(list(labels)).to(torch.float32 if kind == "number" else torch.int64),
            offsets,
        )

    @property
    def kind(self) -> Kind:
        """Whether the labels are numbers, or class numbers (and sets of labels, stored alike)."""
        return "number" if self.labels.is_floating_point() else "class"

    @property
    def users(self) -> int:
        """M, the number of users."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> Tensor:
        """R_i, the number of records of each user, (M,)."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def dimension(self) -> int:
        """d, the number of features."""
        return int(self.features.shape[1])

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def of(self, user: int) -> tuple[Tensor, Tensor]:
        """The (features, labels) of one user, as views."""
        rows = slice(int(self.offsets[user]), int(self.offsets[user + 1]))
        return self.features[rows], self.labels[rows]

    def scaled(self, target: Target, clip: bool) -> Records:
        """The same records with labels on the scale of the target's range; ``clip`` is for training
        records."""
        complaint = target.complaint(self.labels.numpy())  # an infinite one would become an end
        if complaint:
            raise BadInput("bad-labels", f"labels {complaint}")
        return replace(self, labels=target.scaled(self.labels, clip))

    def select(self, users: Sequence[int]) -> Records:
        """The records of some users, in the given order, copied."""
        parts = [self.of(i) for i in users]
        return Records.from_users([x for x, _ in parts], [y for _, y in parts], self.kind)

    def validate(self, target: Target, what: str) -> None:
        """Refuse tables that no algorithm could use; ``what`` names the table in the message."""
        if self.features.ndim != 2:
            raise BadInput(
                "wrong-shape",
                f"{what} features have shape {tuple(self.features.shape)}; expected (records, "
                f"features)",
            )
        if len(self.features) != len(self.labels) or int(self.offsets[-1]) != len(self.labels):
            raise BadInput(
                "count-differs",
                f"{what} data have {len(self.features)} rows, {len(self.labels)} labels and "
                f"offsets up to {int(self.offsets[-1])}; the three must agree",
            )
        empty = (self.sizes <= 0).nonzero().flatten()
        if len(empty):
            raise BadInput(
                "user-without-records",
                f"user {int(empty[0])} has no {what} records; every user needs at least one",
            )
        if self.kind != ("number" if target.kind == "number" else "class"):
            raise BadInput(
                "bad-labels",
                f"{what} labels are of type {self.labels.dtype}, and the target is {target}; "
                f"give {target.dtype}",
            )
        complaint = target.complaint(self.labels.numpy())
        if complaint:
            raise BadInput("bad-labels", f"{what} labels {complaint}")
        self._check_finite(what)

    def _check_finite(self, what: str) -> None:
        step = max(1, BLOCK // max(1, self.dimension))
        for start in range(0, len(self.features), step):
            block = self.features[start : start + step]
            if bool(torch.isfinite(block.sum())):
                continue  # an overflowing sum of finite values is looked at below
            finite = torch.isfinite(block).all(dim=1)
            if not bool(finite.all()):
                row = start + int((~finite).nonzero()[0])
                user = int(torch.searchsorted(self.offsets, row, right=True)) - 1
                raise BadInput(
                    "not-finite",
                    f"{what} features of user {user} contain NaN or infinity (row {row}); clean "
                    f"or impute them first",
                )

    def sampled(self, rows: int) -> Records:
        """At most this many evenly spaced rows, copied, as one user's."""
        kept = torch.linspace(0, len(self) - 1, min(rows, len(self)), dtype=torch.float64).long()
        return Records(self.features[kept], self.labels[kept], torch.tensor([0, len(kept)]))

    def digest(self) -> str:
        """A short hash of the contents, which is never written as it is: see
        :func:`~dpscaffold.runs.data_key.identity`."""
        state = hashlib.blake2b(digest_size=16)
        state.update(np.ascontiguousarray(self.offsets.numpy()).tobytes())
        step = max(1, BLOCK // max(1, self.dimension))
        for start in range(0, len(self.labels), step):
            rows = slice(start, start + step)
            state.update(np.ascontiguousarray(self.features[rows].numpy()).data)
            state.update(np.ascontiguousarray(self.labels[rows].numpy()).data)
        return state.hexdigest()


def _check_user(user: int, x: Tensor, y: Tensor, first: torch.Size, kind: Kind) -> None:
    """Refuse one user's features ``x`` and labels ``y``; ``first`` is the shape of user 0."""
    if len(x) != len(y):
        raise BadInput(
            "count-differs",
            f"user {user} has {len(x)} rows of features and {len(y)} labels; the counts must agree",
        )
    if x.ndim != 2 or x.shape[1] != first[1]:
        raise BadInput(
            "wrong-shape",
            f"user {user} has features of shape {tuple(x.shape)}; "
            f"expected (records, {first[-1]}) as for user 0",
        )
    if y.ndim != 1:
        raise BadInput(
            "wrong-shape",
            f"user {user} has labels of shape {tuple(y.shape)}; give one number per record",
        )
    fractions = y.is_floating_point() and not bool((y == y.round()).all())
    if kind != "number" and fractions:
        raise BadInput(
            "bad-labels",
            f"user {user} has labels that are not whole numbers; give class numbers from 0, "
            f"or say that the target is a number",
        )
