"""Steps of ``schema.prepare``: those of ``data.preprocess``, for parties who see no records.

A step needs no fit, has public statistics, or is fitted by noised sums before the training. Then
:class:`Fitted` takes its place in the offer, with its statistics and what they cost.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Discriminator, Field
from pydantic.json_schema import SkipJsonSchema

from dpscaffold.algorithms.base import MomentKind
from dpscaffold.config import ConfigTable
from dpscaffold.data.features import Hog, RandomFeatures
from dpscaffold.data.prepared import ClipNorm, Project, Shift, UnitNorm
from dpscaffold.data.preprocessing import (
    Centre,
    ClipNormSettings,
    HogSettings,
    NoisedStep,
    Pca,
    RandomFeaturesSettings,
    Standardise,
    StepSettings,
    UnitNormSettings,
    expanded,
    hog_width,
)
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared
from dpscaffold.privacy import Cost
from dpscaffold.privacy.preparation import Protection

#: The steps that are fitted on the sites' records by noised sums, with the sums that each needs.
_SUMS: dict[str, MomentKind] = {"centre": "mean", "standardise": "moments", "pca": "gram"}
#: The largest number of random numbers that a step may draw.
_MOST_DRAWN = 100_000_000
PUBLIC = "Rows were prepared by public constants of the plan."


class FittedCost(ConfigTable):
    """What a fitted step spent, as in :class:`~dpscaffold.privacy.Cost`."""

    name: str
    noise: float = Field(gt=0)
    add_remove: float = Field(gt=0)
    seeded: bool
    alone: float = Field(gt=0, le=1)


class Fitted(ConfigTable):
    """A fitted step in the offer of a training: state of a run, which no plan names. Without a cost
    it holds the place of a step that is still to be fitted."""

    step: Literal["fitted"]
    #: The mean and what is multiplied after its subtraction, one number per feature.
    mean: tuple[float, ...] | None = None
    factor: tuple[float, ...] | None = None
    #: The columns of the components one after the other, float32, in base64.
    basis: str | None = None
    components: int = 0
    spent: FittedCost | None = None

    def build(self, width: int) -> Prepared:
        """The step as a value that maps rows of ``width`` numbers to rows."""
        protection: Protection = "public" if self.spent is None else "private"
        sentence = PUBLIC if self.spent is None else fitted_sentence(self.spent.name)
        cost = None if self.spent is None else Cost(**self.spent.model_dump())
        if self.mean is None:
            return Project(self._columns(width), protection, sentence, cost)
        mean, factor = _numbers(self.mean, width), None
        if self.factor is not None:
            factor = _numbers(self.factor, width)
        made = Shift(mean, factor, protection, sentence, cost)
        object.__setattr__(made, "divided", False)  # the divisor is a number that sites declared
        return made

    def _columns(self, width: int) -> np.ndarray:
        """B (d, k) float32."""
        try:
            flat = np.frombuffer(base64.b64decode(self.basis or "", validate=True), "<f4")
        except ValueError as error:
            raise BadInput("wrong-shape", f"schema.prepare: basis is no base64 ({error})") from None
        if len(flat) != width * self.components or not np.isfinite(flat).all():
            raise BadInput(
                "wrong-shape",
                f"schema.prepare: basis has {len(flat)} numbers, not {width} for each component",
            )
        return np.ascontiguousarray(flat.reshape(-1, width).T, np.float32)


def _step(value: Any) -> Any:
    """``"hog:28x28"`` as a table; tables pass through."""
    state = isinstance(value, dict) and value.get("step") == "fitted"
    return value if state else expanded(value)


Step = (
    Standardise
    | Centre
    | UnitNormSettings
    | ClipNormSettings
    | Pca
    | HogSettings
    | RandomFeaturesSettings
)
SchemaStep = Annotated[Step | SkipJsonSchema[Fitted], Discriminator("step"), BeforeValidator(_step)]


def check_step(step: Step | Fitted) -> None:
    """Refuse a step that would be fitted where no server reaches."""
    if not isinstance(step, NoisedStep) or kind_of(step) is not None:
        return
    name = getattr(step, "step", "")
    if step.fit == "private":
        raise BadInput(
            "missing-key",
            f"schema.prepare: the step {name!r} has no noise, the σ of each site's sum in units of "
            f"what one record can change; give noise in place of epsilon",
        )
    needed = ("mean",) if isinstance(step, Centre) else ("mean", "deviation")
    lacking = [key for key in needed if getattr(step, key, None) is None]
    if step.fit == "unprotected" or lacking:
        given = "" if isinstance(step, Pca) else f", or fit = 'public' with {' and '.join(needed)}"
        raise BadInput(
            "not-applicable",
            f"schema.prepare: the step {name!r} has fit = '{step.fit}', and a server has no "
            f"records to fit it on; give fit = 'private' with norm_bound and noise{given}",
        )


def refuse_state(steps: Sequence[Step | Fitted]) -> None:
    """Refuse a fitted step in a plan: it would say by itself what it cost."""
    if any(isinstance(step, Fitted) for step in steps):
        raise BadInput(
            "not-applicable",
            "schema.prepare has the step 'fitted', which a run writes into its own offers; name "
            "the step to be fitted, such as 'centre' with fit = 'private'",
        )


def kind_of(step: StepSettings | Fitted) -> MomentKind | None:
    """The sums that a step is to be fitted on; None where it needs none, or is fitted."""
    if not isinstance(step, Centre | Standardise | Pca) or step.fit != "private":
        return None
    return None if step.noise is None else _SUMS[step.step]


def width_after(step: Step | Fitted, width: int) -> int:
    """The number of features after a step that gets ``width`` of them."""
    if isinstance(step, HogSettings):
        return hog_width(step.shape)
    if isinstance(step, RandomFeaturesSettings):
        return step.features
    return getattr(step, "components", 0) or width


def build(step: Step | Fitted, width: int) -> Prepared:
    """The step as a value that maps rows of ``width`` numbers to rows.

    >>> build(Standardise(fit="public", mean=1.0, deviation=[0.5, 2.0]), 2)(np.ones((1, 2)))
    array([[0., 0.]])
    """
    if isinstance(step, Fitted):
        return step.build(width)
    if isinstance(step, UnitNormSettings):
        return UnitNorm()
    if isinstance(step, ClipNormSettings):
        return ClipNorm(step.norm)
    if isinstance(step, HogSettings):
        return _hog(step, width)
    if isinstance(step, RandomFeaturesSettings):
        return _random_features(step, width)
    if isinstance(step, Pca) or step.fit != "public":
        raise BadInput(
            "not-applicable", f"schema.prepare: the step {step.step!r} is not fitted yet"
        )
    factor = None
    if isinstance(step, Standardise):
        deviation = _numbers(step.deviation, width).astype(np.float64)
        factor = (1 / np.where(deviation > 0, deviation, 1)).astype(np.float32)
    return Shift(_numbers(step.mean, width), factor, "public", PUBLIC)


def _numbers(given: float | tuple[float, ...] | None, width: int) -> np.ndarray:
    """One number per feature, (d,) float32; one number alone is that of all."""
    found = np.asarray(given, np.float32)
    return np.full(width, found) if found.ndim == 0 else found


def blank(step: Step, width: int) -> Fitted:
    """What holds the place of a step that is still to be fitted: zeros."""
    if not isinstance(step, Pca):
        return Fitted(step="fitted", mean=(0.0,) * width)
    zeros = base64.b64encode(bytes(4 * width * step.components)).decode()
    return Fitted(step="fitted", basis=zeros, components=step.components)


def _hog(step: HogSettings, width: int) -> Hog:
    made = Hog(step.shape)
    if made.width != width:
        raise BadInput(
            "wrong-shape",
            f"schema.prepare: hog has the shape {list(made.shape)}, which is {made.width} pixels, "
            f"and the rows have {width} columns; set shape to the size of the images",
        )
    return made


def _random_features(step: RandomFeaturesSettings, width: int) -> RandomFeatures:
    if step.features * width > _MOST_DRAWN:
        raise BadInput(
            "out-of-range",
            f"schema.prepare: {step.features} random features of {width} columns are more than "
            f"{_MOST_DRAWN:,} random numbers; ask for fewer",
        )
    return RandomFeatures.drawn(width, step.features)


def fitted_sentence(name: str) -> str:
    """What is said of a fitted step."""
    return (
        f"The {name} of all sites' rows was fitted by noised sums, to which each site added its "
        f"own noise before they left it."
    )
