"""Preprocessing steps as data: what is done to the features and what each step is fitted on.

A pipeline is a list whose items are names (``"standardise"``, ``"unit-norm"``, ``"pca:60"``) or
tables with the details (``{step = "pca", components = 60, fit = "private", norm_bound = 1.0, noise
= 20.0}``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from dpscaffold.data.meanings import Shaped
from dpscaffold.data.sentences import mistake_of
from dpscaffold.errors import BadInput, BadValue, nearest
from dpscaffold.privacy.preparation import Protection


def _as_text(path: Any) -> Any:
    """A path is kept as text."""
    return str(path) if isinstance(path, Path) else path


def as_shape(shape: Any) -> Any:
    """``"28x28"`` as a shape; lists pass through."""
    if not isinstance(shape, str):
        return shape
    sides = shape.split("x")
    if not all(side.isascii() and side.isdigit() for side in sides):
        raise BadValue(
            "wrong-shape", f"hog: shape is {shape!r}; give the size of the images as '28x28'"
        )
    return tuple(int(side) for side in sides)


class StepSettings(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class UnitNormSettings(StepSettings):
    """Every row scaled to norm 1; a row of zeros stays. Needs no fit."""

    step: Literal["unit-norm"] = "unit-norm"
    """The name of the step. The name alone, such as "unit-norm" or "pca:60", is a step with its
    defaults. Example: ``"pca"``"""


class ClipNormSettings(StepSettings):
    """Every row longer than ``norm`` scaled down to it. Needs no fit."""

    step: Literal["clip-norm"] = "clip-norm"
    norm: float = Field(gt=0)
    """Longer rows are scaled down to this norm. Example: ``1.0``"""


class HogSettings(StepSettings, Shaped):
    """Images as histograms of oriented gradients, for rows of pixels. Needs no fit."""

    step: Literal["hog"] = "hog"
    shape: Annotated[tuple[int, ...], BeforeValidator(as_shape), Field(min_length=2, max_length=3)]
    """The size of an image: height and width, or channels, height and width. Example:
    ``[28, 28]``"""

    @model_validator(mode="after")
    def _large_enough(self) -> HogSettings:
        if min(self.shape) < 1 or min(self.shape[-2:]) < 2:
            raise BadValue(
                "wrong-shape",
                f"hog: shape is {list(self.shape)}; an image has at least 2 × 2 pixels",
            )
        return self


#: The side of a cell of ``hog`` in pixels, and the bins of its histogram: strokes of digits and
#: edges of clothes are about this wide, and every published result used these two.
CELL, ORIENTATIONS = 4, 8


def hog_width(shape: tuple[int, ...]) -> int:
    """The number of features that ``hog`` gives.

    >>> hog_width((28, 28))
    392
    """
    height, width = shape[-2:]
    return -(-height // CELL) * -(-width // CELL) * ORIENTATIONS


class RandomFeaturesSettings(StepSettings):
    """Random Fourier features of a Gaussian kernel of width 1, for tables whose classes no line
    separates. Needs no fit."""

    step: Literal["random-features"] = "random-features"
    features: int = Field(gt=0)
    """The number of features. Example: ``300``"""


#: The δ at which a step's ``epsilon`` is turned into a noise multiplier. The multiplier is what is
#: accounted, at the δ of the run, so this number only says how much noise an ε asks for.
STEP_DELTA = 1e-6


class NoisedStep(StepSettings):
    """What a step is fitted on.

    ``unprotected``: the pooled training records of all users, as in the paper, outside the
    guarantee.
    ``public``: statistics given by the user: a mean and a deviation in the step, and components in
    the ``.npz`` file ``statistics``.
    ``private``: the same pooled sums with rows clipped to the public ``norm_bound`` and Gaussian
    noise of multiplier ``noise`` (or of the multiplier that gives the whole step ``epsilon``). Its
    noise is drawn from the data's seed where data are loaded, so that a simulation repeats, and
    from the operating system where they are prepared once to be used.
    """

    #: How many noised sums the private fit releases.
    releases: ClassVar[int] = 1
    fit: Literal["unprotected", "public", "private"] = "unprotected"
    """What the step is fitted on: the private records (outside ε), given statistics, or noised sums
    (inside ε). Example: ``"public"``"""
    norm_bound: float | None = Field(default=None, gt=0)
    """The bound on the norm of a row, chosen without looking at the data (fit 'private'). Example:
    ``1.0``"""
    noise: float | None = Field(default=None, gt=0)
    """The noise multiplier of each release (fit 'private'). Example: ``20.0``"""
    epsilon: float | None = Field(default=None, gt=0)
    """The ε of the step at δ = 1e-6, instead of noise (fit 'private'). Example: ``0.1``"""

    @model_validator(mode="after")
    def _consistent(self) -> NoisedStep:
        private = ("norm_bound", "noise", "epsilon")
        given = [name for name in private if getattr(self, name) is not None]
        step = getattr(self, "step", "step")
        if self.fit != "private":
            if given:
                raise BadValue(
                    "not-applicable",
                    f"{step}: {given[0]} belongs to fit = 'private', and fit is '{self.fit}'",
                )
            return self
        if self.norm_bound is None:
            raise BadValue(
                "missing-key",
                f"{step}: fit = 'private' needs norm_bound, a bound on the norm of a row chosen "
                f"without looking at the data",
            )
        if (self.noise is None) == (self.epsilon is None):
            raise BadValue(
                "noise-or-epsilon",
                f"{step}: fit = 'private' needs either noise (a multiplier) or epsilon",
            )
        return self

    @property
    def protection(self) -> Protection:
        """How the records are treated that the step is fitted on."""
        return self.fit

    def multiplier(self) -> float:
        """The noise multiplier of each release."""
        if self.noise is not None:
            return self.noise
        from dpscaffold.privacy.solve import gaussian_multiplier

        assert self.epsilon is not None  # the validator saw to it
        # R Gaussian releases of multiplier z are one of multiplier z/√R, so that (ε, δ) is the
        # whole step's.
        return gaussian_multiplier(self.epsilon, STEP_DELTA) * math.sqrt(self.releases)


class FittedStep(NoisedStep):
    """A step whose statistics may be public."""

    #: The keys of its public statistics.
    public: ClassVar[tuple[str, ...]]

    @model_validator(mode="after")
    def _public(self) -> FittedStep:
        given = [name for name in self.public if getattr(self, name) is not None]
        if self.fit != "public" and given:
            raise BadValue(
                "not-applicable",
                f"{getattr(self, 'step', 'step')}: {given[0]} belongs to fit = 'public', and fit "
                f"is '{self.fit}'",
            )
        return self


class Centre(FittedStep):
    """The mean subtracted."""

    public: ClassVar[tuple[str, ...]] = ("mean",)
    step: Literal["centre"] = "centre"
    mean: float | tuple[float, ...] | None = None
    """The mean to subtract: one number, or one per feature (fit 'public'). Example: ``0.5``"""


class Standardise(FittedStep):
    """The mean subtracted and the result divided by the deviation, feature by feature.

    A deviation of zero (a constant feature) counts as one.
    """

    releases: ClassVar[int] = 2
    public: ClassVar[tuple[str, ...]] = ("mean", "deviation")
    step: Literal["standardise"] = "standardise"
    mean: float | tuple[float, ...] | None = None
    """The mean to subtract: one number, or one per feature (fit 'public'). Example: ``0.5``"""
    deviation: float | tuple[float, ...] | None = None
    """The standard deviation to divide by: one number, or one per feature (fit 'public'). Example:
    ``0.25``"""


class Pca(FittedStep):
    """Rows projected on the ``components`` leading eigenvectors of their second-moment matrix.

    It shifts nothing, so a centring step comes before it.
    """

    public: ClassVar[tuple[str, ...]] = ("statistics",)
    step: Literal["pca"] = "pca"
    components: int = Field(gt=0)
    """The number of principal components that are kept. Example: ``60``"""
    statistics: Annotated[str, BeforeValidator(_as_text)] | None = None
    """An .npz file with the array 'components' (fit 'public'). Example: ``"public.npz"``"""


STEPS: dict[str, type[StepSettings]] = {
    "standardise": Standardise,
    "centre": Centre,
    "unit-norm": UnitNormSettings,
    "clip-norm": ClipNormSettings,
    "pca": Pca,
    "hog": HogSettings,
    "random-features": RandomFeaturesSettings,
}
#: The key that may follow a step's name, after a colon, its type and an example.
_ARGUMENT: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "pca": ("components", int, "60"),
    "clip-norm": ("norm", float, "1.0"),
    "hog": ("shape", str, "28x28"),
    "random-features": ("features", int, "500"),
}


def expanded(value: Any) -> Any:
    """``"pca:60"`` as ``{"step": "pca", "components": 60}``; tables and steps pass through."""
    if isinstance(value, str):
        return _from_text(value)
    if isinstance(value, dict):
        if "step" not in value:
            raise BadValue(
                "missing-key",
                f"a preprocessing step is {value!r:.80} and has no name; give it as step, as in "
                f'{{ step = "pca", components = 60 }}',
            )
        _check_step(str(value["step"]))
    return value


def _check_step(name: str) -> None:
    if name not in STEPS:
        raise BadValue(
            "unknown-step",
            f"no preprocessing step is called '{name}'{nearest(name, STEPS)}; there are "
            f"{', '.join(STEPS)}",
        )


def _from_text(text: str) -> dict[str, Any]:
    name, _, argument = text.partition(":")
    _check_step(name)
    if name not in _ARGUMENT:
        if argument:
            raise BadValue(
                "not-applicable",
                f"step '{name}' takes nothing after a colon, and '{argument}' was given",
            )
        return {"step": name}
    field, kind, example = _ARGUMENT[name]
    if not argument:
        raise BadValue(
            "missing-key",
            f"step '{name}' needs its {field} after a colon, as in '{name}:{example}'",
        )
    try:
        return {"step": name, field: kind(argument)}
    except ValueError:
        raise BadValue(
            "not-a-number", f"step '{name}:{argument}' needs a number after the colon"
        ) from None


PreprocessingStep = Annotated[
    Standardise
    | Centre
    | UnitNormSettings
    | ClipNormSettings
    | Pca
    | HogSettings
    | RandomFeaturesSettings,
    Field(discriminator="step"),
    BeforeValidator(expanded),
]


def check_order(steps: tuple[StepSettings, ...]) -> tuple[StepSettings, ...]:
    """Refuse a PCA that no centring precedes."""
    centred = False
    for step in steps:
        centred = centred or isinstance(step, Centre | Standardise)
        if isinstance(step, Pca) and not centred:
            raise BadValue(
                "pca-not-centred",
                "'pca' comes before any 'centre' or 'standardise'; put one before it (for rows "
                "that are centred already { step = 'centre', fit = 'public', mean = 0.0 })",
            )
    return steps


_ADAPTER: TypeAdapter[tuple[Any, ...]] = TypeAdapter(tuple[PreprocessingStep, ...])


def parse_steps(items: Iterable[str | dict[str, Any] | StepSettings]) -> tuple[StepSettings, ...]:
    """A pipeline from names, tables and steps.

    >>> [step.step for step in parse_steps(["centre", "pca:60", "unit-norm"])]
    ['centre', 'pca', 'unit-norm']
    """
    try:
        return check_order(_ADAPTER.validate_python(tuple(items)))
    except ValidationError as problem:
        raise BadInput(*mistake_of(problem, PreprocessingStep, "preprocess")) from None
    except BadValue as problem:
        raise BadInput(problem.code, f"preprocess: {problem}") from None
