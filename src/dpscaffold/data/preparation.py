"""Fit preprocessing steps and apply them, block by block, in memory or from file to file.

A step is fitted on the *training* records of all users, pooled, after the steps before it; it is
then applied to train and test alike. Nothing is ever fitted per user. What is fitted is a value
(:mod:`dpscaffold.data.prepared`) that stays with the federation: it says how it treats private
records and, where it was private, what it cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpscaffold.data import prepared
from dpscaffold.data.features import Hog, RandomFeatures
from dpscaffold.data.prepared import Project, Shift, applied, transformed
from dpscaffold.data.preprocessing import (
    Centre,
    ClipNormSettings,
    FittedStep,
    HogSettings,
    NoisedStep,
    Pca,
    RandomFeaturesSettings,
    Standardise,
    StepSettings,
    UnitNormSettings,
    parse_steps,
)
from dpscaffold.data.private import (
    clip_rows,
    finite_rows,
    noised_moments,
    noised_squares,
    noised_sum,
)
from dpscaffold.data.streams import stream
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Prepared
from dpscaffold.privacy import Cost
from dpscaffold.privacy.preparation import together
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.randomness.streams import Stream

_TRUST = "the party that prepared the data saw the sums without noise and is trusted with them"
_OUTSIDE = "computed from all users' training records without protection"


def preprocess(
    federation: Federation,
    steps: Iterable[str | dict[str, Any] | StepSettings],
    seed: int = 0,
    release: bool = False,
) -> Federation:
    """The federation after preprocessing steps, in memory.

    Args:
        federation: The federation.
        steps: The steps in order, such as ``["standardise", "unit-norm"]``.
        seed: The seed of the noise of private steps.
        release: Draw the noise from the operating system, where nobody can draw it again. The
            result must then be stored and used from there on: each new draw is a further release
            of the same records.

    >>> x, y = torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([0, 1])
    >>> small = preprocess(Federation.from_arrays([(x, y)], [(x, y)]), ["unit-norm"])
    >>> small.test.features.norm(dim=1).tolist(), small.preprocessing
    ([1.0, 1.0], ('Rows were scaled to unit norm, record by record (no fit).',))
    """
    return applied(federation, fit(federation.train.features, steps, seed, release))


def fit(
    features: torch.Tensor,
    steps: Iterable[str | dict[str, Any] | StepSettings],
    seed: int = 0,
    release: bool = False,
) -> tuple[Prepared, ...]:
    """Fit the steps one after the other on the pooled training records (N, d); reads them in
    blocks.

    Noise of private steps comes from ``seed``, so that a load repeats what another one gave: were
    it drawn anew, each load would spend again, and the average of many would have no noise. With
    ``release`` it comes from the operating system, and the caller stores what is fitted.
    """
    fitted: tuple[Prepared, ...] = ()
    for number, step in enumerate(parse_steps(steps)):
        rng: Stream = CipherStream() if release else stream(seed, f"noise {number}")
        fitted += (_fit(step, features, fitted, rng),)
    return fitted


def _fit(
    step: StepSettings, features: torch.Tensor, before: tuple[Prepared, ...], rng: Stream
) -> Prepared:
    if isinstance(step, UnitNormSettings):
        return prepared.UnitNorm()
    if isinstance(step, ClipNormSettings):
        return prepared.ClipNorm(step.norm)
    if isinstance(step, HogSettings):
        return Hog(step.shape)
    if isinstance(step, RandomFeaturesSettings):
        columns = len(next(transformed(features[:1], before))[0])
        return RandomFeatures.drawn(columns, step.features)
    assert isinstance(step, NoisedStep)
    source = _Source(step, features, before, rng)
    if isinstance(step, Centre):
        mean = source.mean().astype(np.float32)
        what = "Features were centred with the pooled mean"
        return Shift(mean, None, step.protection, source.sentence(what), source.cost("mean"))
    if isinstance(step, Standardise):
        mean, deviation = source.mean_and_deviation(step)
        what = "Features were standardised with the pooled mean and deviation"
        return Shift(
            mean.astype(np.float32),
            (1 / deviation).astype(np.float32),
            step.protection,
            source.sentence(what),
            source.cost("mean and deviation"),
        )
    assert isinstance(step, Pca)
    basis = source.components(step.components)
    what = f"Features were projected on the {step.components} leading principal components"
    cost = source.cost("principal components")
    return Project(basis, step.protection, source.sentence(what), cost)


class _Source:
    """Where a fitted step's statistics come from: public values, noised sums, or bare ones."""

    def __init__(
        self,
        step: NoisedStep,
        features: torch.Tensor,
        before: tuple[Prepared, ...],
        rng: Stream,
    ):
        self.step, self.features, self.before = step, features, before
        self.count = len(features)
        self.dimension = len(next(transformed(features[:1], before))[0])
        self.private = step.fit == "private"
        self.given = _given(step) if isinstance(step, FittedStep) else {}
        self.released: list[Cost] = []
        self.rng = rng
        #: Whether somebody who knows the data's seed can draw the noise again.
        self.seeded = not isinstance(rng, CipherStream)

    def rows(self) -> Iterator[np.ndarray]:
        for rows in transformed(self.features, self.before):
            yield clip_rows(finite_rows(rows), self._bound()) if self.private else rows

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
            return self._public("mean", (self.dimension,)), _without_zeros(deviation)
        mean = self.mean()
        if not self.private:
            centre = mean.astype(np.float32)
            total = sum((_squares(rows - centre) for rows in self.rows()), np.zeros(self.dimension))
            return mean, _without_zeros(np.sqrt(total / self.count))
        multiplier = self._spend("deviation", 2**0.5)
        squares = sum((_squares(rows) for rows in self.rows()), np.zeros(self.dimension))
        squares = noised_squares(squares, self._bound(), multiplier, self.rng) / self.count
        # A variance that the noise drowns is worth its noise level, which is public.
        drowned = 2**0.5 * self._bound() ** 2 * multiplier / self.count
        return mean, np.sqrt(np.maximum(squares - mean**2, drowned))

    def components(self, count: int) -> np.ndarray:
        """(d, k) float32, orthonormal, by falling eigenvalue; the largest entry of each is
        positive."""
        if self.step.fit == "public":
            return np.ascontiguousarray(
                self._public("components", (count, self.dimension)).T.astype(np.float32)
            )
        if count > self.dimension:
            raise BadInput(
                "too-many-components",
                f"preprocess: pca asks for {count} components, and there are {self.dimension} "
                f"features",
            )
        total = np.zeros((self.dimension, self.dimension))
        for rows in self.rows():
            total += rows.T @ rows
        if self.private:
            total = noised_moments(
                total, self._bound(), self._spend("principal components", 2**0.5), self.rng
            )
        return leading_components(total / self.count, count)

    def cost(self, name: str) -> Cost | None:
        """What all releases of the step spent together."""
        return together(name, self.released) if self.released else None

    def sentence(self, what: str) -> str:
        if self.step.fit == "public":
            return f"{what}, taken from public statistics (no private record was read for them)."
        if not self.private:
            return f"{what}, {_OUTSIDE}."
        noise = (
            "drawn from the data's seed, which makes this a simulation of the mechanism"
            if self.seeded
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
        self.released.append(Cost(name, noise=z, add_remove=ratio * z, seeded=self.seeded))
        return z

    def _public(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.given:
            file = getattr(self.step, "statistics", None)
            where = f"'{file}'" if file else "the step"
            raise BadInput(
                "missing-statistic",
                f"preprocess: fit = 'public' needs {name}, and {where} gives "
                f"{', '.join(self.given) or 'none'}{nearest(name, self.given)}",
            )
        value = np.asarray(self.given[name], dtype=np.float64)
        if value.ndim == 0:
            value = np.full(shape, value)
        if value.shape != shape or not np.isfinite(value).all():
            raise BadInput(
                "wrong-shape",
                f"preprocess: public {name} has shape {value.shape} or holds NaN; expected "
                f"{shape} finite numbers",
            )
        return value


def leading_components(moments: np.ndarray, count: int) -> np.ndarray:
    """The leading eigenvectors of a matrix (d, d), (d, k) float32, by falling eigenvalue; the
    largest entry of each is positive."""
    _, vectors = np.linalg.eigh(moments)
    basis = vectors[:, ::-1][:, :count]
    signs = np.sign(basis[np.abs(basis).argmax(axis=0), np.arange(basis.shape[1])])
    return np.ascontiguousarray((basis * signs).astype(np.float32))


def _given(step: FittedStep) -> dict[str, Any]:
    """The public statistics: those in the step, or the components of its ``.npz`` file."""
    if not isinstance(step, Pca):
        given = {name: getattr(step, name) for name in step.public}
        return {name: value for name, value in given.items() if value is not None}
    if not step.statistics:
        return {}
    try:
        with np.load(Path(step.statistics).expanduser(), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, EOFError) as problem:
        raise BadInput(
            "file-unreadable",
            f"preprocess: statistics file {step.statistics} cannot be read ({problem}); "
            f"expected a NumPy .npz file",
        ) from None


def _squares(rows: np.ndarray) -> np.ndarray:
    sums: np.ndarray = np.einsum("nd,nd->d", rows, rows)
    return sums.astype(np.float64)


def _without_zeros(deviation: np.ndarray) -> np.ndarray:
    """A constant feature is divided by one."""
    return np.where(deviation > 0, deviation, 1.0)
