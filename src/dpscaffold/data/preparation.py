"""Fit preprocessing steps and apply them, block by block, in memory or from file to file.

A step is fitted on the *training* records of all users, pooled, after the steps before it; it is
then applied to train and test alike. Nothing is ever fitted per user. Every step leaves a sentence
for the privacy statement, and a private one leaves its cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpscaffold.data.pool import blocks, stream
from dpscaffold.data.private import clip_rows, noised_moments, noised_squares, noised_sum
from dpscaffold.data.steps import (
    Centre,
    ClipNorm,
    Pca,
    Standardise,
    UnitNorm,
    _Fitted,
    _Step,
    parse_steps,
)
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation, PreprocessingCost, Records

#: float32 rows in, float32 rows out, each row by itself.
Map = Callable[[np.ndarray], np.ndarray]
_TRUST = "the party that prepared the data saw the sums without noise and is trusted with them"
_OUTSIDE = "computed from all users' training records without protection: outside the guarantee"


@dataclass(frozen=True)
class Fitted:
    """A step ready to be applied: the map, its sentence, and its cost where it was private."""

    apply: Map
    sentence: str
    costs: tuple[PreprocessingCost, ...] = ()


def preprocess(
    federation: Federation, steps: Iterable[str | dict[str, Any] | _Step], seed: int = 0
) -> Federation:
    """The federation after the steps, in memory.

    >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([0, 1])
    >>> small = preprocess(Federation.from_arrays([(x, y)], [(x, y)]), ["unit-norm"])
    >>> small.test.features.norm(dim=1).tolist(), small.preprocessing
    ([1.0, 1.0], ('Rows were scaled to unit norm, record by record (no fit).',))
    """
    fitted = fit(federation, steps, seed)
    if not fitted:
        return federation
    train, test = (_applied(table, fitted) for table in (federation.train, federation.test))
    return described(federation, fitted, train, test)


def described(
    federation: Federation, fitted: list[Fitted], train: Records, test: Records
) -> Federation:
    """The federation with new tables and what the steps have to say."""
    return replace(
        federation,
        train=train,
        test=test,
        mapped=False,
        preprocessing=federation.preprocessing + tuple(step.sentence for step in fitted),
        preprocessing_costs=federation.preprocessing_costs
        + tuple(cost for step in fitted for cost in step.costs),
    ).validated()


def fit(
    federation: Federation, steps: Iterable[str | dict[str, Any] | _Step], seed: int = 0
) -> list[Fitted]:
    """Fit the steps one after the other on the pooled training records; reads them in blocks."""
    fitted: list[Fitted] = []
    for number, step in enumerate(parse_steps(steps)):
        fitted.append(_fit(step, federation.train.features, tuple(fitted), seed, number))
    return fitted


def transformed(features: torch.Tensor, fitted: Iterable[Fitted]) -> Iterator[np.ndarray]:
    """The rows of a table after the steps, in blocks of float32."""
    table = features.numpy()
    for block in blocks(*table.shape):
        rows = table[block]
        for step in fitted:
            rows = step.apply(rows)
        yield rows


def _applied(table: Records, fitted: list[Fitted]) -> Records:
    out: np.ndarray | None = None
    start = 0
    for rows in transformed(table.features, fitted):
        if out is None:
            out = np.empty((len(table), rows.shape[1]), dtype=np.float32)
        out[start : start + len(rows)] = rows
        start += len(rows)
    assert out is not None  # a validated table has rows
    return Records(torch.from_numpy(out), table.labels, table.offsets)


def _fit(
    step: _Step, features: torch.Tensor, before: tuple[Fitted, ...], seed: int, number: int
) -> Fitted:
    if isinstance(step, UnitNorm):
        return Fitted(_unit_norm, "Rows were scaled to unit norm, record by record (no fit).")
    if isinstance(step, ClipNorm):
        norm = step.norm
        return Fitted(
            lambda rows: clip_rows(rows, norm).astype(np.float32),
            f"Rows longer than {norm:g} were scaled down to it, record by record (no fit).",
        )
    assert isinstance(step, _Fitted)
    source = _Source(step, features, before, seed, number)
    if isinstance(step, Centre):
        return Fitted(
            _shift(source.mean()),
            source.sentence("Features were centred with the pooled mean"),
            source.costs(),
        )
    if isinstance(step, Standardise):
        mean, deviation = source.mean_and_deviation(step)
        what = "Features were standardised with the pooled mean and deviation"
        return Fitted(_shift(mean, deviation), source.sentence(what), source.costs())
    assert isinstance(step, Pca)
    basis = source.components(step.components)
    what = f"Features were projected on the {step.components} leading principal components"
    return Fitted(lambda rows: rows @ basis, source.sentence(what), source.costs())


class _Source:
    """Where a fitted step's statistics come from: public values, noised sums, or bare ones."""

    def __init__(
        self,
        step: _Fitted,
        features: torch.Tensor,
        before: tuple[Fitted, ...],
        seed: int,
        number: int,
    ):
        self.step, self.features, self.before = step, features, before
        self.count = len(features)
        self.dimension = len(next(transformed(features[:1], before))[0])
        self.private = step.fit == "private"
        self.given = _given(step)
        self.released: list[PreprocessingCost] = []
        system = self.private and step.entropy == "system"
        self.rng = np.random.default_rng() if system else stream(seed, f"noise {number}")

    def rows(self) -> Iterator[np.ndarray]:
        for rows in transformed(self.features, self.before):
            yield clip_rows(rows, self._bound()) if self.private else rows

    def mean(self) -> np.ndarray:
        if self.step.fit == "public":
            return self._public("mean", (self.dimension,))
        total = sum(
            (rows.sum(axis=0, dtype=np.float64) for rows in self.rows()), np.zeros(self.dimension)
        )
        if self.private:
            total = noised_sum(total, self._bound(), self._spend("mean", 2.0), self.rng)
        return total / self.count

    def mean_and_deviation(self, step: Standardise) -> tuple[np.ndarray, np.ndarray]:
        if step.fit == "public":
            deviation = self._public("deviation", (self.dimension,))
            return self._public("mean", (self.dimension,)), _floored(deviation, step.floor)
        mean = self.mean()
        floor = step.floor
        if not self.private:
            centre = mean.astype(np.float32)
            total = sum((_squares(rows - centre) for rows in self.rows()), np.zeros(self.dimension))
            return mean, _floored(np.sqrt(total / self.count), floor)
        multiplier = self._spend("deviation", 2**0.5)
        squares = sum((_squares(rows) for rows in self.rows()), np.zeros(self.dimension))
        squares = noised_squares(squares, self._bound(), multiplier, self.rng) / self.count
        # A variance that the noise drowns is worth its noise level, which is public.
        drowned = 2**0.5 * self._bound() ** 2 * multiplier / self.count
        return mean, np.sqrt(np.maximum(squares - mean**2, max(floor**2, drowned)))

    def components(self, count: int) -> np.ndarray:
        """(d, k) float32, orthonormal, by falling eigenvalue; the largest entry of each is
        positive."""
        if self.step.fit == "public":
            return np.ascontiguousarray(
                self._public("components", (count, self.dimension)).T.astype(np.float32)
            )
        if count > self.dimension:
            raise BadInput(
                f"preprocess: pca asks for {count} components, and there are {self.dimension} "
                f"features"
            )
        total = np.zeros((self.dimension, self.dimension))
        for rows in self.rows():
            total += rows.T @ rows
        if self.private:
            total = noised_moments(
                total, self._bound(), self._spend("principal components", 2**0.5), self.rng
            )
        _, vectors = np.linalg.eigh(total / self.count)
        basis = vectors[:, ::-1][:, :count]
        signs = np.sign(basis[np.abs(basis).argmax(axis=0), np.arange(count)])
        return np.ascontiguousarray((basis * signs).astype(np.float32))

    def costs(self) -> tuple[PreprocessingCost, ...]:
        return tuple(self.released)

    def sentence(self, what: str) -> str:
        if self.step.fit == "public":
            return f"{what}, taken from public statistics (no private record was read for them)."
        if not self.private:
            return f"{what}, {_OUTSIDE}."
        noise = (
            "drawn from the data's seed, which makes this a simulation of the mechanism"
            if self.step.entropy == "seed"
            else "drawn from the operating system"
        )
        return (
            f"{what}, differentially private for replace-one neighbours (rows clipped to norm "
            f"{self._bound():g}, "
            f"Gaussian noise of multiplier {self.step.multiplier():.4g} on {len(self.released)} "
            f"pooled sum{'s' if len(self.released) > 1 else ''}, {noise}); {_TRUST}."
        )

    def _bound(self) -> float:
        assert self.step.norm_bound is not None  # validated with the step
        return self.step.norm_bound

    def _spend(self, name: str, ratio: float) -> float:
        """The multiplier of a release, noted as spent; ``ratio`` is Δ(replace-one) over
        Δ(add/remove)."""
        z = self.step.multiplier()
        cost = PreprocessingCost(name, noise_multiplier=z, add_remove_multiplier=ratio * z)
        self.released.append(cost)
        return z

    def _public(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.given:
            where = f"'{self.step.statistics}'" if self.step.statistics else "the step"
            raise BadInput(
                f"preprocess: fit = 'public' needs {name}, and {where} gives "
                f"{', '.join(self.given) or 'none'}{nearest(name, self.given)}"
            )
        value = np.asarray(self.given[name], dtype=np.float64)
        if value.ndim == 0:
            value = np.full(shape, value)
        if value.shape != shape or not np.isfinite(value).all():
            raise BadInput(
                f"preprocess: public {name} has shape {value.shape} or holds NaN; expected "
                f"{shape} finite numbers"
            )
        return value


def _given(step: _Fitted) -> dict[str, Any]:
    """The public statistics: those in the step, and those of its ``.npz`` file."""
    given: dict[str, Any] = {}
    if step.statistics:
        try:
            with np.load(Path(step.statistics).expanduser(), allow_pickle=False) as file:
                given = {name: file[name] for name in file.files}
        except (OSError, ValueError, AttributeError, EOFError) as problem:
            raise BadInput(
                f"preprocess: statistics file {step.statistics} cannot be read ({problem}); "
                f"expected a NumPy .npz file"
            ) from None
    inline = {name: getattr(step, name, None) for name in ("mean", "deviation")}
    return given | {name: value for name, value in inline.items() if value is not None}


def _squares(rows: np.ndarray) -> np.ndarray:
    return np.einsum("nd,nd->d", rows, rows).astype(np.float64)


def _floored(deviation: np.ndarray, floor: float) -> np.ndarray:
    deviation = np.maximum(deviation, floor)
    return np.where(deviation > 0, deviation, 1.0)


def _shift(mean: np.ndarray, deviation: np.ndarray | None = None) -> Map:
    centre = mean.astype(np.float32)
    if deviation is None:
        return lambda rows: rows - centre
    factor = (1 / deviation).astype(np.float32)

    def standardise(rows: np.ndarray) -> np.ndarray:
        out = rows - centre
        out *= factor
        return out

    return standardise


def _unit_norm(rows: np.ndarray) -> np.ndarray:
    norms = np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float32))
    return (rows / np.where(norms > 0, norms, np.float32(1))[:, None]).astype(
        np.float32, copy=False
    )
