"""Federations: who holds which data.

A :class:`Federation` is a train and a test table of :class:`Records` over the same users. Both are
read-only by convention: nothing in the package writes into them, so they may live in memory-mapped
files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dpscaffold.errors import BadInput
from dpscaffold.federation.labels import pack
from dpscaffold.federation.records import Records
from dpscaffold.federation.roster import NumberedNames, Roster
from dpscaffold.federation.schema import Kind, Prepared, Schema, Target, kind_of, schema_of
from dpscaffold.report.notebook import html_table

#: The most bytes of a mapped federation that are read to tell whether it is the same; of a larger
#: one, this many rows.
WHOLE, SAMPLED_ROWS = 1 << 32, 1 << 14


@dataclass(frozen=True)
class Digest:
    """A hash by which a federation is known again, and a sentence on what it covers. The hash is
    never written as it is: see :func:`~dpscaffold.runs.data_key.identity`."""

    value: str
    covers: str


@dataclass(frozen=True)
class Federation:
    """Training and test records of the same M users.

    Args:
        train: The training records.
        test: The test records.
        target: What is predicted; a number of classes is enough. Numbers with a range are held as
            :meth:`Target.scaled` maps them.
        names: The users' names.
        title: One line for tables and figures.
        preparation: The steps that made the features of raw rows, in order. Each can be applied to
            other raw rows, and says how it treats private records.
        mapped: Whether the tables are in files and may exceed memory; engines then load only a
            round's users.
        checksum: The checksum of the stored files as they were written.
        declared_sizes: R_i as the users declared them without looking at their data
            (:meth:`declaring`).

    >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    >>> Federation.from_arrays([(x, y), (x, y)], test=[(x, y), (x, y)]).users
    2
    """

    train: Records
    test: Records
    target: Target
    names: Sequence[str] = ()
    title: str = "federation"
    preparation: tuple[Prepared, ...] = ()
    mapped: bool = False
    checksum: str = ""
    declared_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", Target.of(self.target))
        if self.train.users != self.test.users:
            raise BadInput(
                "count-differs",
                f"train data have {self.train.users} users and test data {self.test.users}; they "
                f"must be the same users",
            )
        if self.train.dimension != self.test.dimension:
            raise BadInput(
                "count-differs",
                f"train data have {self.train.dimension} features and test data "
                f"{self.test.dimension}; they must agree",
            )
        if not self.names:
            object.__setattr__(self, "names", NumberedNames(range(self.train.users)))
        if len(self.names) != self.train.users:
            raise BadInput(
                "count-differs",
                f"{len(self.names)} names were given for {self.train.users} users; give one each",
            )

    @classmethod
    def from_arrays(
        cls,
        train: Sequence[tuple[Tensor | np.ndarray, Tensor | np.ndarray]],
        test: Sequence[tuple[Tensor | np.ndarray, Tensor | np.ndarray]],
        classes: int | Sequence[str] | None = None,
        names: Sequence[str] = (),
        title: str = "your arrays",
        target: Kind | Target = "class",
    ) -> Federation:
        """Build and validate a federation from one (features, labels) pair per user.

        Args:
            train: The training records of each user: features (n, d) and labels (n,), or (n, L) of
                0 and 1 for several labels.
            test: The test records, likewise.
            classes: The number of classes, or their names; of several labels, their names.
            names: The users' names.
            title: One line for tables and figures.
            target: ``"class"``, ``"number"`` or ``"labels"``. ``Target("number", low=0, high=60)``
                predicts a number in a public range. ``"number"`` uses numbers as they are: they
                should be near 1, because clipping cuts the gradients of larger ones.
        """
        kind = kind_of(target)
        classes = (target.classes or classes) if isinstance(target, Target) else classes
        if kind == "labels":
            return cls._of_labels(train, test, classes, names, title)
        tables = [_records(part, kind) for part in (train, test)]
        if isinstance(target, Target) and kind == "number":
            predicted = target
        else:
            predicted = _target_of(kind, classes, tables)
        if predicted.low is not None:
            tables = [table.scaled(predicted, k == 0) for k, table in enumerate(tables)]
        return cls(tables[0], tables[1], predicted, tuple(names), title).validated()

    @classmethod
    def _of_labels(
        cls,
        train: Sequence[tuple[Tensor | np.ndarray, Tensor | np.ndarray]],
        test: Sequence[tuple[Tensor | np.ndarray, Tensor | np.ndarray]],
        labels: int | Sequence[str] | None,
        names: Sequence[str],
        title: str,
    ) -> Federation:
        """A federation from one (features, (n, L) of 0 and 1) pair per user."""
        widths = _label_widths([y for part in (train, test) for _, y in part])
        target = Target.labelled(max(widths) if labels is None else labels)
        if widths != {len(target.classes)}:
            raise BadInput(
                "count-differs",
                f"users have {min(widths)} to {max(widths)} columns of labels, and the target has "
                f"{len(target.classes)} labels; give one column for each",
            )
        tables = [
            Records.from_users(
                [torch.as_tensor(x) for x, _ in part],
                [torch.from_numpy(pack(y, f"labels of user {i}")) for i, (_, y) in enumerate(part)],
            )
            for part in (train, test)
        ]
        return cls(tables[0], tables[1], target, tuple(names), title).validated()

    def validated(self) -> Federation:
        """This federation, after every check a training run relies on."""
        self.train.validate(self.target, "train")
        self.test.validate(self.target, "test")
        return self

    @property
    def users(self) -> int:
        """M, the number of users."""
        return self.train.users

    @property
    def dimension(self) -> int:
        """d, the number of features."""
        return self.train.dimension

    @property
    def preprocessing(self) -> tuple[str, ...]:
        """What was done to the features, in sentences."""
        return tuple(step.sentence for step in self.preparation)

    def digest(self) -> Digest:
        """Tells this federation from any other, down to a single record.

        A mapped one beyond 4 GiB is not read whole: its hash then covers the checksums of its
        files as they were written, every label and every size, and evenly spaced rows.
        """
        state = hashlib.blake2b(digest_size=16)
        state.update(repr((self.classes, self.dimension)).encode())
        if self.target.low is not None:
            state.update(repr((self.target.low, self.target.high)).encode())
        tables = (self.train, self.test)
        size = sum(table.features.numel() * table.features.element_size() for table in tables)
        if not self.mapped or size <= WHOLE:
            for table in tables:
                state.update(table.digest().encode())
            return Digest(state.hexdigest(), "every record, train and test")
        state.update(self.checksum.encode())
        for table in tables:
            state.update(table.sampled(SAMPLED_ROWS).digest().encode())
            state.update(np.ascontiguousarray(table.offsets.numpy()).data)
            state.update(np.ascontiguousarray(table.labels.numpy()).data)
        return Digest(
            state.hexdigest(),
            f"the checksums of the files as they were written, every label and size, and "
            f"{SAMPLED_ROWS} rows of train and of test",
        )

    @property
    def classes(self) -> int:
        """C, the number of classes, or of labels; 0 where the target is a number."""
        return len(self.target.classes)

    @cached_property
    def schema(self) -> Schema:
        """What a row looks like, and nothing of any record."""
        return schema_of(self.preparation, self.target, self.dimension)

    @cached_property
    def roster(self) -> Roster:
        """What a server may know of this federation; of sizes, those that were declared."""
        sizes = self.declared_sizes or tuple(self.train.sizes.tolist())
        return Roster(sizes, self.names, self.schema, self.title, bool(self.declared_sizes))

    def declaring(self, sizes: int | Sequence[int]) -> Federation:
        """The same data with sizes that are constants: one for all users, or one each.

        Rates, divisors and weights are then made of these, so that Poisson batches hide whether a
        record is there at all (add/remove neighbours). Users may hold more or fewer records.

        >>> x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
        >>> small = Federation.from_arrays([(x, y), (x, y)], test=[(x, y), (x, y)])
        >>> small.declaring(5).declared_sizes
        (5, 5)
        """
        listed = (sizes,) * self.users if isinstance(sizes, int) else tuple(sizes)
        if len(listed) != self.users or any(type(size) is not int or size < 1 for size in listed):
            raise BadInput(
                "count-differs",
                f"data.declared_sizes is {sizes!r} for {self.users} users; give one whole number "
                f"above 0, or one each",
            )
        return replace(self, declared_sizes=listed)

    def titled(self, title: str) -> Federation:
        """The same data under another title."""
        return replace(self, title=title)

    def _repr_html_(self) -> str:
        sizes = self.train.sizes
        rows = [
            ("users", self.users),
            ("train records of a user", f"{int(sizes.min())} to {int(sizes.max())}"),
            ("features", self.dimension),
            ("target", f"{self.target} {', '.join(self.target.classes[:8])}"),
            ("preparation", " ".join(self.preprocessing) or None),
        ]
        return html_table(self.title, rows)

    def __repr__(self) -> str:
        low, high = int(self.train.sizes.min()), int(self.train.sizes.max())
        sizes = f"{low}" if low == high else f"{low} to {high}"
        return (
            f"Federation({self.title}: {self.users} users, {sizes} train records each, "
            f"{self.dimension} features, {self.target})"
        )


def _records(
    users: Sequence[tuple[Tensor | np.ndarray, Tensor | np.ndarray]], kind: Kind
) -> Records:
    features, labels = ([torch.as_tensor(pair[k]) for pair in users] for k in (0, 1))
    return Records.from_users(features, labels, kind)


def _target_of(
    kind: Kind, classes: int | Sequence[str] | None, tables: Sequence[Records]
) -> Target:
    """The target that a kind and classes describe; by default the largest label counts classes."""
    if kind == "number":
        return Target("number", tuple(classes) if isinstance(classes, Sequence) else ())
    if classes is not None:
        return Target.of(classes)
    return Target.of(max(2, 1 + max(int(table.labels.max()) for table in tables if len(table))))


def _label_widths(labels: Sequence[Tensor | np.ndarray]) -> set[int]:
    """The numbers of label columns that users have; other shapes are refused."""
    shapes = [tuple(np.shape(y)) for y in labels]
    flat = next((shape for shape in shapes if len(shape) != 2), None)
    if flat is not None or not shapes:
        raise BadInput(
            "wrong-shape",
            f"labels have shape {flat}; where target = 'labels', give (records, labels) of 0 and 1 "
            f"for every user",
        )
    return {shape[1] for shape in shapes}
