"""What a row looks like, from the raw columns to the features that a model sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np

from dpscaffold.errors import BadInput

if TYPE_CHECKING:  # the accountant takes long to import, and data are made without it
    from torch import Tensor

    from dpscaffold.privacy import Cost, Protection

Numbers = TypeVar("Numbers", np.ndarray, "Tensor")


Kind = Literal["class", "number", "labels"]

#: The most labels of one target: the bits of an int64 without its sign.
MOST_LABELS = 63


#: More labels than this are taken for a mistake: a measurement or an identifier is not a class.
MOST_CLASSES = 10_000


@dataclass(frozen=True)
class Target:
    """What is predicted: a class, a number, or several labels that each hold or do not.

    Args:
        kind: ``"class"``, ``"number"`` or ``"labels"``.
        classes: The names of the classes in order, or of the labels.
        low: The smallest value of a number, known without looking at the records.
        high: The largest value of a number.

    Labels are class numbers from 0, int64; numbers, float32; or sets of labels, int64, whose bit j
    says whether label j holds (:mod:`~dpscaffold.federation.labels`).

    A number has a public range from ``low`` to ``high``. Training maps it to [−1, 1], because
    clipping cuts the gradients of larger numbers, and predictions are mapped back. Without a range
    the numbers are used as they are.

    >>> str(Target("labels", ("fever", "cough", "rash")))
    '3 labels'
    >>> score = Target("number", low=0, high=60)
    >>> score.scaled(np.array([0.0, 45.0, 99.0])).tolist()
    [-1.0, 0.5, 1.0]
    >>> score.answers(np.array([0.5, -7.0])).tolist()
    [45.0, 0.0]
    """

    kind: Kind = "class"
    classes: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        self._check_range()
        if self.kind not in ("class", "number", "labels"):
            raise BadInput(
                "unknown-choice",
                f"target is {self.kind!r}; it must be 'class', 'number' or 'labels'",
            )
        if self.kind == "number" and self.classes:
            raise BadInput(
                "conflicting-arguments",
                f"classes are given ({', '.join(self.classes[:5])}), and the target is a number; "
                f"leave them out",
            )
        if self.kind == "class" and len(self.classes) < 2:
            raise BadInput(
                "too-few-classes", f"classes is {len(self.classes)}; a classifier needs at least 2"
            )
        if self.kind == "labels" and not 1 <= len(self.classes) <= MOST_LABELS:
            raise BadInput(
                "out-of-range",
                f"the target has {len(self.classes)} labels; give 1 to {MOST_LABELS} of them",
            )
        self._check_names()

    def _check_names(self) -> None:
        twice = next((name for name, count in Counter(self.classes).items() if count > 1), None)
        if twice is not None:
            what = "labels" if self.kind == "labels" else "classes"
            raise BadInput(
                "name-used-twice", f"two {what} are called '{twice}'; give each its own name"
            )

    def _check_range(self) -> None:
        """Refuse a range that is not one, or that no number needs."""
        if self.low is None and self.high is None:
            return
        if self.kind != "number":
            raise BadInput(
                "not-applicable",
                f"target has low or high, and its kind is '{self.kind}'; a range belongs to a "
                f"number: set kind = 'number', or leave low and high out",
            )
        if self.low is None or self.high is None:
            lacking = "low" if self.low is None else "high"
            raise BadInput("no-target-range", f"target has no {lacking}; give both low and high")
        if not (np.isfinite([self.low, self.high]).all() and self.low < self.high):
            raise BadInput(
                "bad-range",
                f"target has low = {self.low:g} and high = {self.high:g}; low must be below high",
            )

    @classmethod
    def numbered(cls, classes: int) -> Target:
        """This many classes, called by their numbers.

        >>> Target.numbered(3).classes
        ('0', '1', '2')
        """
        if classes > MOST_CLASSES:
            raise BadInput(
                "too-many-classes",
                f"labels count up to {classes - 1}, which makes {classes} classes of them; is it "
                f"the label? (to predict numbers, set target = 'number')",
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
        """A multi-label target, from label names or a count (then named "0", "1", …).

        >>> Target.labelled(2).classes
        ('0', '1')
        """
        names = map(str, range(given)) if isinstance(given, int) else given
        return cls("labels", tuple(names))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its labels."""
        return np.dtype(np.float32 if self.kind == "number" else np.int64)

    @property
    def _middle(self) -> tuple[float, float]:
        """The middle of the range and half its width; (0, 1) without a range."""
        if self.low is None or self.high is None:
            return 0.0, 1.0
        return self.low + (self.high - self.low) / 2, (self.high - self.low) / 2

    def scaled(self, numbers: Numbers, clip: bool = True) -> Numbers:
        """Numbers in their own units as training uses them: [low, high] becomes [−1, 1]. With
        ``clip`` a number outside of the range counts as the nearer end."""
        if self.low is None:
            return numbers
        middle, half = self._middle
        moved: Numbers = (numbers - middle) / half
        return moved.clip(-1.0, 1.0) if clip else moved

    def restored(self, labels: Numbers) -> Numbers:
        """Labels of a federation in their own units."""
        if self.low is None:
            return labels
        middle, half = self._middle
        return labels * half + middle

    def answers(self, scores: Numbers) -> Numbers:
        """The scores of a model as it gives them out: of a number with a range, in its own units
        and within the range; others as they are."""
        return scores if self.low is None else self.restored(scores.clip(-1.0, 1.0))

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        said: dict[str, Any] = {"kind": self.kind, "classes": list(self.classes)}
        return said if self.low is None else {**said, "low": self.low, "high": self.high}

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> Target:
        """The target of :meth:`to_dict`."""
        return cls(said["kind"], tuple(said["classes"]), said.get("low"), said.get("high"))

    def complaint(self, labels: np.ndarray) -> str:
        """What is wrong with labels (N,), or the empty string."""
        if not len(labels):
            return ""
        low, high = labels.min(), labels.max()
        if self.kind == "number":
            fine = bool(np.isfinite([low, high]).all())
            return "" if fine else "contain NaN or infinity; leave such records out"
        most = len(self.classes) - 1 if self.kind == "class" else (1 << len(self.classes)) - 1
        if low >= 0 and high <= most:
            return ""
        if self.kind == "labels":
            return f"hold more than the {len(self.classes)} labels of the target"
        worst = high if high > most else low
        return f"contain {worst}; labels must lie in 0 to {len(self.classes) - 1}"

    def __str__(self) -> str:
        if self.kind == "number":
            return "a number" + ("" if self.low is None else f" from {self.low:g} to {self.high:g}")
        return f"{len(self.classes)} {'labels' if self.kind == 'labels' else 'classes'}"


class HasKind(Protocol):
    """A target, or the settings of one."""

    @property
    def kind(self) -> Kind:
        """What its labels are."""
        ...


def kind_of(target: Kind | HasKind) -> Kind:
    """The kind of a target that is given by its kind alone or with more.

    >>> kind_of("class"), kind_of(Target("number", low=0, high=60))
    ('class', 'number')
    """
    return target if isinstance(target, str) else target.kind


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
    """What a row looks like: all that a party may know of the data next to their sizes.

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


def _declared_categories(preparation: Sequence[Prepared]) -> tuple[tuple[str, Any], ...]:
    """The categories of each column, but for those that were read from the records."""
    found = next((step.categories for step in preparation if hasattr(step, "categories")), ())
    unknown = {name for step in preparation for name in getattr(step, "read_off", ())}
    return tuple([(name, values) for name, values in found if name not in unknown])


def schema_of(preparation: Sequence[Prepared], target: Target, dimension: int) -> Schema:
    """The schema of rows that these steps turn into ``dimension`` features."""
    from dpscaffold.privacy.preparation import remarks  # the accountant takes long to import

    public = ("none needed", "public")
    steps = list(preparation)
    columns = raw_columns(preparation, dimension)
    known = _declared_categories(preparation)
    private = [k for k, step in enumerate(steps) if step.protection not in public]
    for k, said in zip(private, remarks([steps[k] for k in private]), strict=True):
        steps[k] = said
    return Schema(columns, known, target, tuple(steps), dimension)
