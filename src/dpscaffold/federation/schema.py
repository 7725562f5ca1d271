"""What a row looks like, from the raw columns to the features that a model sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from dpscaffold.errors import BadInput

if TYPE_CHECKING:  # the accountant takes long to import, and data are made without it
    from dpscaffold.privacy import Cost, Protection


Kind = Literal["class", "number", "labels"]

#: The most labels of one target: the bits of an int64 without its sign.
MOST_LABELS = 63


#: More labels than this are taken for a mistake: a measurement or an identifier is not a class.
MOST_CLASSES = 10_000


@dataclass(frozen=True)
class Target:
    """What is predicted: one of some ``classes``, by name and in order, a number, or several
    ``labels`` (then ``classes`` are their names), each of which holds or does not.

    Labels are class numbers from 0, int64; numbers, float32; or sets of labels, int64, whose bit j
    says whether label j holds (:mod:`~dpscaffold.federation.labels`).

    >>> Target("class", ("ill", "well")).outputs, Target("number").outputs
    (2, 1)
    >>> str(Target("labels", ("fever", "cough", "rash")))
    '3 labels'
    """

    kind: Kind = "class"
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("class", "number", "labels"):
            raise BadInput(f"target is {self.kind!r}; it must be 'class', 'number' or 'labels'")
        if self.kind == "number" and self.classes:
            raise BadInput(
                f"classes are given ({', '.join(self.classes[:5])}), and the target is a number; "
                f"leave them out"
            )
        if self.kind == "class" and len(self.classes) < 2:
            raise BadInput(f"classes is {len(self.classes)}; a classifier needs at least 2")
        if self.kind == "labels" and not 1 <= len(self.classes) <= MOST_LABELS:
            raise BadInput(
                f"the target has {len(self.classes)} labels; give 1 to {MOST_LABELS} of them"
            )
        if len(set(self.classes)) < len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            what = "labels" if self.kind == "labels" else "classes"
            raise BadInput(f"two {what} are called '{twice}'; give each its own name")

    @classmethod
    def numbered(cls, classes: int) -> Target:
        """So many classes, called by their numbers.

        >>> Target.numbered(3).classes
        ('0', '1', '2')
        """
        if classes > MOST_CLASSES:
            raise BadInput(
                f"labels count up to {classes - 1}, which makes {classes} classes of them; is it "
                f"the label? (to predict numbers, set target = 'number')"
            )
        return cls("class", tuple(str(i) for i in range(classes)))

    @classmethod
    def of(cls, given: Target | int | Sequence[str]) -> Target:
        """A target from itself, a number of classes, or their names."""
        if isinstance(given, Target):
            return given
        return cls.numbered(given) if isinstance(given, int) else cls("class", tuple(given))

    @classmethod
    def labelled(cls, given: int | Sequence[str]) -> Target:
        """Several labels, by their names or so many, called by their numbers.

        >>> Target.labelled(2).classes
        ('0', '1')
        """
        names = map(str, range(given)) if isinstance(given, int) else given
        return cls("labels", tuple(names))

    @property
    def outputs(self) -> int:
        """How many scores a model has for it: one a class or label, or one."""
        return len(self.classes) or 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its labels."""
        return np.dtype(np.float32 if self.kind == "number" else np.int64)

    def complaint(self, labels: np.ndarray) -> str:
        """What is wrong with labels (N,), or the empty string."""
        if not len(labels):
            return ""
        low, high = labels.min(), labels.max()
        if self.kind == "number":
            fine = bool(np.isfinite(low) and np.isfinite(high))
            return "" if fine else "contain NaN or infinity; leave such records out"
        if self.kind == "labels":
            fine = low >= 0 and int(high) >> len(self.classes) == 0
            return "" if fine else f"hold more than the {len(self.classes)} labels of the target"
        if low >= 0 and high < len(self.classes):
            return ""
        worst = high if high >= len(self.classes) else low
        return f"contain {worst}; labels must lie in 0 to {len(self.classes) - 1}"

    def __str__(self) -> str:
        if self.kind == "number":
            return "a number"
        return f"{len(self.classes)} {'labels' if self.kind == 'labels' else 'classes'}"


class Prepared(Protocol):
    """A step that made the features, as a value: rows (N, d) → rows (N, d′), each by itself.

    A federation keeps its steps and stores them, so that a model can be given raw rows, and so
    that a privately fitted step is released once. The steps that come with the package are in
    :mod:`dpscaffold.data.prepared`.
    """

    @property
    def protection(self) -> Protection:
        """How the records that it was fitted on are protected."""
        ...

    @property
    def cost(self) -> Cost | None:
        """What a private step spent."""
        ...

    @property
    def sentence(self) -> str:
        """What was done, for people; nobody decides anything from its words."""
        ...

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """The rows after the step."""
        ...


@dataclass(frozen=True)
class Schema:
    """What a row looks like: all that a party may know of the data beside their sizes.

    ``columns`` are the raw columns in order (numbers, as text, where they have no names) and
    ``categories`` (name, values) those that are one-hot and were known beforehand; ``dimension`` is
    d, the features after preparation. ``preparation`` holds the steps that need no protection or
    were public as they are; of those fitted on private records, only what is said of them (their
    sentence, protection and cost), never their arrays.
    """

    columns: tuple[str, ...]
    categories: tuple[tuple[str, tuple[str, ...]], ...]
    target: Target
    preparation: tuple[Prepared, ...]
    dimension: int

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON and for comparing two runs."""
        return {
            "columns": list(self.columns),
            "categories": {name: list(values) for name, values in self.categories},
            "target": {"kind": self.target.kind, "classes": list(self.target.classes)},
            "preparation": [
                {"sentence": step.sentence, "protection": step.protection}
                for step in self.preparation
            ],
            "dimension": self.dimension,
        }


def raw_columns(preparation: Sequence[Prepared], dimension: int) -> tuple[str, ...]:
    """The columns of the raw rows that these steps turn into ``dimension`` features."""
    for step in preparation:
        named = getattr(step, "columns", None)
        if named is not None:
            return tuple(named)
        width = getattr(step, "width", None)
        if width is not None:
            return tuple(str(j) for j in range(width))
    return tuple(str(j) for j in range(dimension))


def schema_of(preparation: Sequence[Prepared], target: Target, dimension: int) -> Schema:
    """The schema of rows that these steps turn into ``dimension`` features."""
    from dpscaffold.privacy.preparation import remarks  # the accountant takes long to import

    public = ("none needed", "public")
    steps = list(preparation)
    categories = next(
        (step.categories for step in preparation if hasattr(step, "categories")),
        (),
    )
    unknown = {name for step in preparation for name in getattr(step, "read_off", ())}
    known = tuple([(name, values) for name, values in categories if name not in unknown])
    columns = raw_columns(preparation, dimension)
    private = [k for k, step in enumerate(steps) if step.protection not in public]
    for k, said in zip(private, remarks([steps[k] for k in private]), strict=True):
        steps[k] = said
    return Schema(columns, known, target, tuple(steps), dimension)
