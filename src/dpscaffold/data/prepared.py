"""The steps that make features, as values: frozen, with their arrays, ready to be applied and
stored.

Each maps rows to rows, every row by itself, and says how it treats private records
(:mod:`dpscaffold.privacy.preparation`). :mod:`dpscaffold.data.preparation` fits them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpscaffold.data.blocks import blocks
from dpscaffold.data.private import clip_rows
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared

if TYPE_CHECKING:
    from torch import Tensor

    from dpscaffold.federation import Federation, Records
    from dpscaffold.privacy import Cost, Protection


def same_fields(self: Any, other: Any) -> bool:
    """Equality of two values with arrays: same type, and all fields equal."""
    if type(self) is not type(other):
        return False
    return all(
        _same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _by_mean(step: Shift | Standardised) -> int:
    """d, the number of features that it takes."""
    return len(step.mean)


def _note_division(step: Shift | Standardised) -> None:
    """``divided`` says whether a private sum was divided by how many records there are."""
    object.__setattr__(step, "divided", step.cost is not None)


@dataclass(frozen=True, eq=False)
class Shift:
    """x ↦ (x − mean)·factor, feature by feature, in single precision.

    ``mean`` is (d,) float32 and ``factor`` (d,) float32, or None where nothing is scaled.

    >>> step = Shift(np.float32([1, 2]), np.float32([2, 2]), "public", "Shifted by given numbers.")
    >>> step(np.float32([[1, 3]])).tolist()
    [[0.0, 2.0]]
    """

    mean: np.ndarray
    factor: np.ndarray | None
    protection: Protection
    sentence: str
    cost: Cost | None = None
    width = property(_by_mean)
    __eq__ = same_fields
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _note_division(self)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        out: np.ndarray = rows - self.mean
        if self.factor is not None:
            out *= self.factor
        return out


@dataclass(frozen=True, eq=False)
class Standardised:
    """x ↦ (x − mean)/deviation, feature by feature, in double precision.

    The result stays double for the step that follows: the synthetic data are rounded once, at the
    end. ``mean`` and ``deviation`` are (d,) float64.
    """

    mean: np.ndarray
    deviation: np.ndarray
    protection: Protection
    sentence: str
    cost: Cost | None = None
    width = property(_by_mean)
    __eq__ = same_fields
    __hash__ = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        _note_division(self)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        out: np.ndarray = (rows - self.mean) / self.deviation
        return out


@dataclass(frozen=True, eq=False)
class Project:
    """x ↦ xB for a ``basis`` B, (d, k) float32."""

    basis: np.ndarray
    protection: Protection
    sentence: str
    cost: Cost | None = None
    __eq__ = same_fields
    __hash__ = None  # type: ignore[assignment]

    @property
    def width(self) -> int:
        """d, the number of features that it takes."""
        return len(self.basis)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rows @ self.basis)


@dataclass(frozen=True, eq=False)
class Ranges:
    """x ↦ x with the public range of a feature, ``low`` to ``high``, mapped to −1 to 1; what lies
    outside counts as the nearer end. Features without a range (−∞ to ∞) stay as they are.

    >>> step = Ranges(np.array([0, -np.inf]), np.array([100, np.inf]), ("age",))
    >>> step(np.float32([[75, 7], [200, 7]])).tolist()
    [[0.5, 7.0], [1.0, 7.0]]
    """

    low: np.ndarray
    high: np.ndarray
    names: tuple[str, ...]
    protection: ClassVar[Protection] = "public"
    cost: ClassVar[Cost | None] = None
    __eq__ = same_fields
    __hash__ = None  # type: ignore[assignment]

    @property
    def sentence(self) -> str:
        """What was done, for people."""
        named = ", ".join(f"'{name}'" for name in self.names)
        return (
            f"The given ranges of {named} were mapped to -1 to 1, and values cut to them, record "
            f"by record (no private record was read)."
        )

    @property
    def scale(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is subtracted, what is divided by and what the result is cut at, (d,) each."""
        known = np.isfinite(self.low)
        low, high = np.where(known, self.low, -1.0), np.where(known, self.high, 1.0)
        middle, half = (low + high) / 2, (high - low) / 2
        bound = np.where(known, 1.0, np.inf)
        return middle.astype(np.float32), half.astype(np.float32), bound.astype(np.float32)

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        middle, half, bound = self.scale
        return np.asarray(np.clip((rows - middle) / half, -bound, bound), dtype=np.float32)


@dataclass(frozen=True)
class UnitNorm:
    """x ↦ x/‖x‖, the norm taken in the precision of the rows; a row of zeros stays.

    >>> UnitNorm()(np.float32([[3, 4], [0, 0]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0]]
    """

    norm: ClassVar[float] = 1.0
    protection: ClassVar[Protection] = "none needed"
    cost: ClassVar[Cost | None] = None
    sentence: ClassVar[str] = "Rows were scaled to unit norm, record by record (no fit)."

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        if rows.dtype == np.float64:
            lengths = np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
            unit: np.ndarray = rows / lengths
            return unit
        norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float32))
        return np.asarray(rows / np.where(norms > 0, norms, np.float32(1))[:, None])


@dataclass(frozen=True)
class ClipNorm:
    """x ↦ x·min(1, norm/‖x‖)."""

    norm: float
    protection: ClassVar[Protection] = "none needed"
    cost: ClassVar[Cost | None] = None

    @property
    def sentence(self) -> str:
        """What was done, for people."""
        return f"Rows longer than {self.norm:g} were scaled down to it, record by record (no fit)."

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return clip_rows(rows, self.norm).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Scale:
    """x ↦ x·factor, a constant that was known beforehand, such as 1/255 for the bytes of an image.

    ``factor`` is one float32 or one for each feature, () or (d,).
    """

    factor: np.ndarray
    sentence: str = "Pixels were brought to [0, 1] by a constant factor (no fit)."
    protection: ClassVar[Protection] = "none needed"
    cost: ClassVar[Cost | None] = None
    __eq__ = same_fields
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        out: np.ndarray = np.multiply(rows, self.factor, dtype=np.float32, casting="unsafe")
        return out


def in_blocks(rows: np.ndarray, steps: Iterable[Prepared]) -> Iterator[np.ndarray]:
    """The rows of a table after the steps, in blocks of float32; a mapped table is not loaded."""
    steps = tuple(steps)
    for block in blocks(*rows.shape):
        part = rows[block]
        for step in steps:
            with np.errstate(over="ignore", invalid="ignore"):  # a warning would tell of records
                part = step(part)
        yield part.astype(np.float32, copy=False)


def prepare(rows: np.ndarray, steps: Iterable[Prepared]) -> np.ndarray:
    """Raw rows (N, …) as features (N, d) float32: the steps one after the other.

    >>> prepare(np.array([[0, 510]]), [Scale(np.float32(1 / 255)), UnitNorm()]).tolist()
    [[0.0, 1.0]]
    """
    if rows.ndim != 2:
        raise BadInput("wrong-shape", f"rows have shape {rows.shape}; expected (records, columns)")
    parts = list(in_blocks(rows, steps))
    if not parts:
        raise BadInput("no-rows", "no row was given; give at least one")
    return np.concatenate(parts)


def applied(federation: Federation, steps: Iterable[Prepared]) -> Federation:
    """The federation after steps that are fitted already; it keeps them."""
    steps = tuple(steps)
    if not steps:
        return federation
    train, test = (after(table, steps) for table in (federation.train, federation.test))
    return replace(
        federation,
        train=train,
        test=test,
        mapped=False,
        preparation=federation.preparation + steps,
    ).validated()


def transformed(features: Tensor, steps: Iterable[Prepared]) -> Iterator[np.ndarray]:
    """The rows of a table after the steps, in blocks of float32."""
    return in_blocks(features.numpy(), steps)


def after(table: Records, steps: tuple[Prepared, ...]) -> Records:
    """A table after steps that are fitted already."""
    if not steps:
        return table
    out: np.ndarray | None = None
    start = 0
    for rows in transformed(table.features, steps):
        if out is None:
            out = np.empty((len(table.labels), rows.shape[1]), dtype=np.float32)
        out[start : start + len(rows)] = rows
        start += len(rows)
    assert out is not None  # a validated table has rows
    import torch

    from dpscaffold.federation import Records

    return Records(torch.from_numpy(out), table.labels, table.offsets)
