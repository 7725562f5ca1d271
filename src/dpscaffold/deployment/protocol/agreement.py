"""An offer: all that the parties of a deployed run agree on, and nothing of anybody's records.

It is the public part of a configuration (schema, task, algorithm, plan, mechanism), every key
spelled out. Its digest is the plan's identity: at the sites, in the run folder, and on resume.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from dpscaffold.algorithms import Algorithm
from dpscaffold.algorithms.base import MomentKind
from dpscaffold.algorithms.moments import moments
from dpscaffold.config import AlgorithmSettings, ConfigTable, TaskSettings
from dpscaffold.config.gaussian import Gaussian, NoisedStep
from dpscaffold.config.personal import PersonalSettings, trained_by
from dpscaffold.config.plan import Plan
from dpscaffold.config.secure import Secure
from dpscaffold.data.features import Hog, RandomFeatures
from dpscaffold.data.meanings import Meanings
from dpscaffold.data.prepared import ClipNorm, Project, Scale, Shift, UnitNorm
from dpscaffold.data.preprocessing import HogSettings, as_shape, expanded, hog_width
from dpscaffold.data.tables.cells import Spellings
from dpscaffold.data.tables.codec import Coding
from dpscaffold.data.tables.missing import OTHERS, NaStrings, refuse_declared
from dpscaffold.deployment.protocol.messages import Json, Refused, canonical
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared, Target
from dpscaffold.privacy import Cost
from dpscaffold.privacy.preparation import Protection, Remark

if TYPE_CHECKING:
    from dpscaffold.tasks import Task


#: What each step of a preparation needs.
_NEEDED: dict[str, tuple[str, ...]] = {
    "unit-norm": (),
    "clip-norm": ("norm",),
    "scale": ("factor",),
    "shift": ("mean",),
    "hog": ("shape",),
    "random-features": ("features",),
    "project": ("basis",),
    "centre": ("fit", "norm_bound", "noise"),
    "standardise": ("fit", "norm_bound", "noise"),
    "pca": ("fit", "norm_bound", "noise", "components"),
}
#: The steps that are fitted on the sites' records by noised sums, with the sums that each needs.
_FITTED: dict[str, MomentKind] = {"centre": "mean", "standardise": "moments", "pca": "gram"}
#: How often a site may be asked for one sum of a secure preparation: once, and once more if the
#: first attempt had no result.
SECURE_ATTEMPTS = 2
#: The largest number of random numbers that a step may draw.
_MOST_DRAWN = 100_000_000


class FittedCost(ConfigTable):
    """What a fitted step spent, as in :class:`~dpscaffold.privacy.Cost`."""

    name: str
    noise: float = Field(gt=0, allow_inf_nan=False)
    add_remove: float = Field(gt=0, allow_inf_nan=False)
    seeded: bool
    alone: float = Field(gt=0, le=1)


class SchemaStep(ConfigTable):
    """One step of a preparation: it needs no fit, carries public constants, or is fitted by noised
    sums before the training."""

    step: Literal[
        "unit-norm",
        "clip-norm",
        "scale",
        "shift",
        "project",
        "hog",
        "random-features",
        "centre",
        "standardise",
        "pca",
    ]
    """Subtract a mean (shift), multiply by factors (scale), scale long rows down (clip-norm), scale
    all rows to norm 1 (unit-norm), make features of images (hog) or of tables (random-features), or
    fit by noised sums at the sites: subtract the mean (centre), divide by the deviation too
    (standardise), project on principal components (pca). Example: ``"shift"``"""
    norm: float | None = Field(default=None, gt=0)
    """Longer rows are scaled down to this norm (needed by clip-norm). Example: ``3.0``"""
    mean: tuple[float, ...] | None = None
    """The values to subtract, one per feature (needed by shift). Example: ``[50.0, 130.0]``"""
    factor: tuple[float, ...] | None = None
    """The factors of the features, one per feature (needed by scale; shift applies them after the
    subtraction). Example: ``[0.1, 0.1]``"""
    shape: Annotated[tuple[int, ...] | None, BeforeValidator(as_shape)] = None
    """The size of an image: height and width, or channels, height and width (needed by hog).
    Example: ``[28, 28]``"""
    features: int | None = Field(default=None, gt=0)
    """The number of random features (needed by random-features). Example: ``300``"""
    fit: Literal["private"] | None = None
    """That the step is fitted by noised sums over the sites' records (needed by centre,
    standardise and pca). Example: ``"private"``"""
    norm_bound: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The bound on the norm of a row, chosen without looking at the data; longer rows are scaled
    down to it for the sums (fit 'private'). Example: ``10.0``"""
    noise: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """σ of each site's sum in units of its sensitivity, as privacy.noise (fit 'private'). Example:
    ``20.0``"""
    components: int | None = Field(default=None, gt=0)
    """The number of principal components that are kept (needed by pca). Example: ``20``"""
    basis: str | None = None
    """The components in base64, as the server writes them once they are fitted (project). Example:
    ``"AACAPw=="``"""
    spent: FittedCost | None = None
    """What fitting the step spent, as the server writes it. Value: a table. Example: ``{ name =
    "mean", noise = 20.0, add_remove = 40.0, seeded = false, alone = 1.0 }``"""

    @model_validator(mode="after")
    def _complete(self) -> SchemaStep:
        for name in _NEEDED[self.step]:
            if getattr(self, name) is None:
                raise BadInput(
                    "missing-key", f"schema.prepare: the step {self.step!r} needs {name}"
                )
        if self.shape is not None:
            HogSettings(shape=self.shape)  # refuses images that are too small
        return self

    def build(self, width: int) -> Prepared:
        """The step as a value that maps rows of ``width`` numbers to rows."""
        if self.step == "hog":
            return self._hog(width)
        if self.step == "random-features":
            return self._random_features(width)
        if self.kind is not None:
            raise BadInput(
                "not-applicable", f"schema.prepare: the step {self.step!r} is not fitted yet"
            )
        if self.step == "project":
            return Project(self._basis(width), self._protection, self._sentence, self._cost)
        said = "Rows were prepared by public constants of the plan."
        factor = None if self.factor is None else np.asarray(self.factor, np.float32)
        if self.step == "unit-norm":
            return UnitNorm()
        if self.step == "clip-norm":
            return ClipNorm(float(self.norm or 1.0))
        if self.step == "scale":
            return Scale(np.asarray(self.factor, np.float32), said)
        mean = np.asarray(self.mean, np.float32)
        made = Shift(mean, factor, self._protection, self._sentence, self._cost)
        object.__setattr__(made, "divided", False)  # the divisor is a number that sites declared
        return made

    @property
    def kind(self) -> MomentKind | None:
        """The sums that the step is fitted on; None where it needs no fit, or is fitted."""
        return _FITTED.get(self.step)

    def blank(self, width: int) -> SchemaStep:
        """This step with zeros for what is still to be fitted."""
        if self.step != "pca":
            return SchemaStep(step="shift", mean=(0.0,) * width)
        zeros = base64.b64encode(bytes(4 * width * (self.components or 1))).decode()
        return SchemaStep(step="project", basis=zeros, components=self.components)

    @property
    def _protection(self) -> Protection:
        return "public" if self.spent is None else "private"

    @property
    def _cost(self) -> Cost | None:
        return None if self.spent is None else Cost(**self.spent.model_dump())

    @property
    def _sentence(self) -> str:
        if self.spent is None:
            return "Rows were prepared by public constants of the plan."
        return fitted_sentence(self.spent.name)

    def _basis(self, width: int) -> np.ndarray:
        """B (d, k) float32, from the bytes of its columns one after the other."""
        try:
            flat = np.frombuffer(base64.b64decode(self.basis or "", validate=True), "<f4")
        except ValueError as error:
            raise BadInput("wrong-shape", f"schema.prepare: basis is no base64 ({error})") from None
        if len(flat) != width * (self.gives or 0) or not np.isfinite(flat).all():
            raise BadInput(
                "wrong-shape",
                f"schema.prepare: basis has {len(flat)} numbers, not {width} for each component",
            )
        return np.ascontiguousarray(flat.reshape(-1, width).T, np.float32)

    def _hog(self, width: int) -> Hog:
        made = Hog(self.shape or ())
        if made.width != width:
            raise BadInput(
                "wrong-shape",
                f"schema.prepare: hog has the shape {list(made.shape)}, which is {made.width} "
                f"pixels, and the rows have {width} columns; set shape to the size of the images",
            )
        return made

    def _random_features(self, width: int) -> RandomFeatures:
        count = self.features or 1
        if count * width > _MOST_DRAWN:
            raise BadInput(
                "out-of-range",
                f"schema.prepare: {count} random features of {width} columns are more than "
                f"{_MOST_DRAWN:,} random numbers; ask for fewer",
            )
        return RandomFeatures.drawn(width, count)

    @property
    def gives(self) -> int | None:
        """The number of features after the step; None where it keeps it."""
        if self.step == "hog" and self.shape is not None:
            return hog_width(self.shape)
        if self.step in ("pca", "project"):
            return self.components
        return self.features if self.step == "random-features" else None


def _step(value: Any) -> Any:
    """``"hog:28x28"`` as a table; tables pass through."""
    return expanded(value) if isinstance(value, str) else value


class SchemaSettings(Meanings, ConfigTable):
    """``[schema]``: what a row looks like, for parties who cannot look at one another's.

    A record that cannot be read (a label of no class, a text in place of a number) is counted and
    contributes nothing: what a record contains never decides whether the table is accepted.
    """

    features: int = Field(ge=1)
    """The number of features of a row before preparation: one per column, and one per value of a
    categorical column. Example: ``4``"""
    classes: int = Field(ge=0)
    """The number of classes; 0 if the label is a number. Value: an integer, 2 or more, or 0.
    Example: ``2``"""
    columns: tuple[str, ...] = ()
    """The columns to learn from, in order. Leave it out for .npz files, which contain the features.
    Example: ``["age", "pressure", "sex"]``"""
    categories: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """The values of each categorical column, known beforehand. A value that is not listed is
    encoded as zeros. Value: a table of lists of strings. Example: ``{ sex = ["f", "m"] }``"""
    label: str = "label"
    """The column to predict. Example: ``"readmitted"``"""
    class_names: tuple[str, ...] = ()
    """The class labels in order. A record with another label, or none, is counted but contributes
    nothing. Example: ``["no", "yes"]``"""
    low: float | None = Field(default=None, allow_inf_nan=False)
    """The smallest value that the label can have, if it is a number (classes = 0), known without
    looking at the records. Sites map low to high to -1 to 1 and clip labels outside; the model's
    predictions have the label's own units. Value: a finite number. Example: ``0.0``"""
    high: float | None = Field(default=None, allow_inf_nan=False)
    """The largest value that the label can have, if it is a number. Value: a finite number.
    Example: ``60.0``"""
    missing: float = Field(default=0.0, allow_inf_nan=False)
    """The value that replaces a missing number. A record with a value that is not a number is
    counted but contributes nothing. Value: a finite number. Example: ``-1.0``"""
    prepare: tuple[Annotated[SchemaStep, BeforeValidator(_step)], ...] = ()
    """Preprocessing steps with public constants or private fits, in order. Value: a list of tables
    or names, see the steps below. Example: ``["hog:28x28", { step = "clip-norm", norm = 3.0 }]``"""

    @property
    def dimension(self) -> int:
        """d, the number of features after preparation, by the name that a task asks for."""
        return self.widths[-1]

    @property
    def unfitted(self) -> int | None:
        """The place of the first step that is still to be fitted."""
        return next((k for k, step in enumerate(self.prepare) if step.kind is not None), None)

    def before(self, place: int | None) -> SchemaSettings:
        """The schema with the steps before this place; None leaves them as they are."""
        return self if place is None else self.changed(prepare=self.prepare[:place])

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of features before the first step and after each."""
        widths = [self.features]
        for step in self.prepare:
            widths.append(step.gives or widths[-1])
        return tuple(widths)

    @property
    def steps(self) -> tuple[Prepared, ...]:
        """The preparation as values that map rows to rows."""
        return tuple(
            step.build(width) for step, width in zip(self.prepare, self.widths, strict=False)
        )

    @property
    def target(self) -> Target:
        """What is predicted."""
        if self.classes == 0:
            return Target("number", (), self.low, self.high)
        return Target("class", self.class_names or Target.numbered(self.classes).classes)

    @property
    def na_strings(self) -> NaStrings:
        """The texts that mean a missing value, by column."""
        return NaStrings.given(self.na_values)

    @property
    def coding(self) -> Coding:
        """How columns become features, at the sites and in the model of the run."""
        columns = self.columns or tuple(str(j) for j in range(self.features))
        return Coding(
            columns,
            tuple((n, self.categories[n]) for n in columns if n in self.categories),
            self.missing,
            unseen="zero",
            dates=tuple(self.dates.items()),
            na_values=self.na_strings.among((*columns, self.label)),
            values=self.spellings.columns,
            absent=self.absent,
        )

    @property
    def spellings(self) -> Spellings:
        """The other spellings of labels and categories, by column."""
        return Spellings.given(self.values)

    @property
    def width(self) -> int:
        """The number of features that the columns make."""
        coded = sum(len(values) for values in self.categories.values())
        return len(self.columns) - len(self.categories) + coded

    @model_validator(mode="after")
    def _consistent(self) -> SchemaSettings:
        if self.columns and self.width != self.features:
            raise BadInput(
                "schema-mismatch",
                f"schema.features is {self.features}, and the columns make {self.width}; they must "
                f"agree",
            )
        refuse_declared(self.na_strings, self.categories, {self.label: self.class_names})
        self.spellings.require(
            (*([self.label] if self.classes else ()), *self.categories), "schema.values"
        )
        given = {**self.categories, self.label: self.class_names}
        self.spellings.require_known(given, self.na_strings, "schema.values")
        self._check_named_columns()
        self._check_dates()
        self._check_target()
        self._check_order()
        if len(set(self.columns)) != len(self.columns) or self.label in self.columns:
            raise BadInput(
                "column-named-twice",
                "schema.columns names a column twice, or the label among the features",
            )
        return self

    def _check_named_columns(self) -> None:
        """Every key that names columns names those of the schema."""
        marked = {name for name, _ in self.na_strings.columns} - {self.label, OTHERS}
        named = {
            "na_values": marked,
            "absent": set(self.absent),
            "categories": set(self.categories),
        }
        for key, names in named.items():
            stray = sorted(names - set(self.columns))
            if stray:
                raise BadInput(
                    "unknown-column",
                    f"schema.{key} names {stray[0]!r}, which is not among the columns",
                )

    def _check_order(self) -> None:
        """Principal components are those of centred rows."""
        centring = ("centre", "standardise", "shift")
        for place, step in enumerate(self.prepare):
            if step.step == "pca" and (step.components or 0) > self.widths[place]:
                raise BadInput(
                    "too-many-components",
                    f"schema.prepare: pca asks for {step.components} components, and there are "
                    f"{self.widths[place]} features",
                )
            before = [one.step for one in self.prepare[:place]]
            if step.step == "pca" and not {*before} & {*centring}:
                raise BadInput(
                    "pca-not-centred",
                    "schema.prepare has 'pca' before any 'centre' or 'standardise'; put one before "
                    "it",
                )

    def _check_dates(self) -> None:
        stray = sorted({*self.dates} - ({*self.columns} - {*self.categories}))
        if stray:
            raise BadInput(
                "wrong-column-kind",
                f"schema.dates names {stray[0]!r}, which is not a column of numbers",
            )

    def _check_target(self) -> None:
        if self.classes == 1:
            raise BadInput(
                "too-few-classes",
                "schema.classes is 1; give 2 or more, or 0 where the label is a number",
            )
        ranged = self.low is not None and self.high is not None and self.low < self.high
        if self.classes == 0 and not ranged:
            raise BadInput(
                "no-target-range",
                f"schema.classes is 0, so the label is a number, and its range is low = {self.low} "
                f"to high = {self.high}; give the range that it can have, low below high (-1 and 1 "
                f"for numbers that are scaled already)",
            )
        if self.classes and (self.low, self.high) != (None, None):
            raise BadInput(
                "not-applicable",
                f"schema.low and schema.high are the range of a number, and schema.classes is "
                f"{self.classes}; leave them out, or set classes = 0",
            )
        if self.class_names and len(set(self.class_names)) != self.classes:
            raise BadInput(
                "count-differs",
                f"schema.class_names has {len(set(self.class_names))} different names for "
                f"{self.classes} classes",
            )


def refuse_fine_tuning(personal: PersonalSettings | None) -> None:
    """Refuse personal models that a server asks for and that a site makes by itself."""
    if personal is not None and personal.kind != "mean-regularised":
        raise BadInput(
            "not-applicable",
            f"personal.kind is '{personal.kind}', which a site does by itself after the run "
            f"('dpscaffold personalise'); leave [personal] out at the server, or set kind = "
            f"'mean-regularised'",
        )


class Offer(ConfigTable):
    """What is offered. ``format`` is of this very table."""

    format: Literal[1] = 1
    rows: SchemaSettings
    task: TaskSettings
    algorithm: AlgorithmSettings
    plan: Plan
    privacy: NoisedStep | None = None
    secure: Secure | None = None
    #: σ_i of each site by name, where sites have budgets of their own; ``privacy.noise`` is the
    #: smallest.
    noises: dict[str, float] | None = None
    #: In a run that fits one step of the preparation: that step. The steps of ``rows`` come before.
    fit: SchemaStep | None = None
    #: Models of the sites' own that are trained during the run.
    personal: PersonalSettings | None = None

    @model_validator(mode="after")
    def _trained_together(self) -> Offer:
        refuse_fine_tuning(self.personal)
        return self

    @model_validator(mode="after")
    def _in_full(self) -> Offer:
        if self.plan.learning_rate is None:
            raise BadInput(
                "learning-rate-without-sizes",
                "plan.learning_rate is left out, and sites are offered a number; give it, or "
                "deploy.records (every site's public size), for which the server chooses one",
            )
        return self

    @model_validator(mode="after")
    def _own_noises(self) -> Offer:
        privacy, noises = self.privacy, self.noises
        if noises is not None:
            if privacy is None or not noises:
                raise BadInput("no-noise", "an offer with noises needs a mechanism and sites")
            least = min(noises.values())
            for noise in noises.values():
                privacy.changed(noise=noise)  # refuses bad ones
            if least != privacy.noise:
                raise BadInput(
                    "noise-disagrees",
                    f"noise is {privacy.noise:g}, and the smallest of noises is {least:g}",
                )
        return self

    def mechanism_of(self, site: str) -> NoisedStep | None:
        """The mechanism at one site, with its own noise; refuses a site that has none."""
        if self.noises is None or self.privacy is None:
            return self.privacy
        if site not in self.noises:
            raise BadInput(
                "unknown-site", f"noises has no noise for {site!r}; give one for every site"
            )
        return self.privacy.changed(noise=self.noises[site])

    def privacy_on(self, sites: Sequence[str], limits: Gaussian | None = None) -> Gaussian | None:
        """The privacy of a run of these sites, in their order, within these limits."""
        if self.privacy is None:
            return None
        noises = tuple(one.noise for site in sites if (one := self.mechanism_of(site)))
        several = noises if len(set(noises)) > 1 else None
        step = self.privacy.changed(noise=min(noises))
        return (limits or Gaussian(noise=1.0)).with_step(step, several)

    def build_task(self) -> Task:
        """The task, in the schema's shape."""
        return self.task.build(self.rows)

    def build_algorithm(self) -> Algorithm:
        """The algorithm, or the sums of a run that fits a step."""
        if self.fit is None:
            return trained_by(self.algorithm.build(), self.personal)
        if self.fit.kind is None or self.fit.norm_bound is None:
            raise BadInput("not-applicable", f"the step {self.fit.step!r} is not fitted on records")
        return moments(self.fit.kind, self.fit.norm_bound)

    @property
    def parts(self) -> tuple[Offer, ...]:
        """The offers of a whole run: one for each step to be fitted, then that of the training, in
        which zeros stand for what is not fitted yet."""
        offer, found = self, []
        while (place := offer.rows.unfitted) is not None:
            found.append(offer.fitting(place))
            step = offer.rows.prepare[place].blank(offer.rows.widths[place])
            offer = offer.fitted(place, step)
        return (*found, offer)

    def fitting(self, place: int) -> Offer:
        """The offer of the run that fits the step at this place: one round over all records."""
        step, privacy = self.rows.prepare[place], self.privacy
        if privacy is None or privacy.unit == "user":
            raise BadInput(
                "not-applicable",
                f"schema.prepare: {step.step} is fitted by noised sums, which hide single records; "
                f"give [privacy] with unit = 'record', or a step with public constants",
            )
        assert step.noise is not None
        sums = None if self.secure is None else self.secure.changed(voids=SECURE_ATTEMPTS - 1)
        before = self.rows.before(place)
        once = Plan.one_round(self.plan.public_seed)
        query = privacy.changed(clip=1.0, noise=step.noise)
        offer = offer_of(before, self.task, self.algorithm, once, query, sums)
        return offer.model_copy(update={"fit": step})

    def fitted(self, place: int, step: SchemaStep) -> Offer:
        """This offer with a fitted step in its place."""
        prepare = (*self.rows.prepare[:place], step, *self.rows.prepare[place + 1 :])
        return self.model_copy(update={"rows": self.rows.changed(prepare=prepare)})

    def steps(self, users: int) -> tuple[Prepared, ...]:
        """The preparation; of steps that are still to be fitted by ``users`` sites, what it
        costs."""
        rows, built = self.rows, []
        for step, width in zip(rows.prepare, rows.widths, strict=False):
            built.append(step.build(width) if step.kind is None else self._planned(step, users))
        return tuple(built)

    def _planned(self, step: SchemaStep, users: int) -> Remark:
        cost = fitting_cost(self.secure, self.privacy, step, users)
        return Remark(fitted_sentence(cost.name), "private", Cost(**cost.model_dump()))

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON values, every key spelled out; :func:`read_offer` reads them back."""
        tables = self.model_dump(mode="json")
        for key in ("na_values", "low", "high", "values", "absent", "dates"):
            if tables["rows"][key] in (
                None,
                [],
                {},
            ):  # the digest is as before the key
                del tables["rows"][key]
        for step in tables["rows"]["prepare"]:
            _drop_unset(step)
        if self.fit is None:
            del tables["fit"]
        else:
            _drop_unset(tables["fit"])
        for key in ("secure", "noises", "personal"):
            if tables[key] is None:
                del tables[key]
        tables["algorithm"] = {k: v for k, v in tables["algorithm"].items() if v is not None}
        return dict(json.loads(canonical(tables)))


def _drop_unset(step: dict[str, Any]) -> None:
    """Leave out the keys that a step does not use, but for those that every offer had."""
    for key in [key for key, value in step.items() if value is None]:
        if key not in ("norm", "mean", "factor"):
            del step[key]


def fitted_sentence(name: str) -> str:
    """What is said of a fitted step."""
    return (
        f"The {name} of all sites' rows was fitted by noised sums, to which each site added its "
        f"own noise before they left it."
    )


def fitting_cost(
    secure: Secure | None, privacy: NoisedStep | None, step: SchemaStep, users: int, count: int = 1
) -> FittedCost:
    """What fitting a step spends at a site that answers ``count`` times, or in a secure sum as
    often as it may be asked."""
    names = {"mean": "mean", "moments": "mean and deviation", "gram": "principal components"}
    noise, alone = step.noise or 0.0, 1.0
    if secure is not None:
        honest = math.sqrt(max(1, users - secure.colluders))
        noise, alone, count = noise * honest, 1 / honest, max(count, SECURE_ATTEMPTS)
    noise /= math.sqrt(count)
    return FittedCost(
        name=names[step.kind or "mean"],
        noise=noise,
        add_remove=2 * noise,
        seeded=privacy is None or not privacy.secret,
        alone=alone,
    )


@dataclass(frozen=True)
class Names:
    """The code that an offer would run at a site, by name, before anything of it is imported."""

    algorithm: str
    task: str


def names_in(offer: Mapping[str, Any]) -> Names:
    """Which algorithm and task an offer names; refuses what is not an offer."""
    try:
        task, algorithm = dict(offer["task"]), dict(offer["algorithm"])
        kind = task.get("kind", "logistic")
        named = task.get("module") if kind == "module" else kind
        if not isinstance(named, str) or not isinstance(algorithm["name"], str):
            raise TypeError("names must be texts")
        return Names(algorithm["name"], named)
    except (KeyError, TypeError, ValueError) as error:
        raise Refused("bad-offer", f"it is not a plan: {error!r:.100}") from error


def read_offer(raw: Mapping[str, Any]) -> Offer:
    """An offer from a message, every type as it should be; else a refusal. It imports the named
    algorithm, so ask :func:`names_in` and the policy first."""
    steps = raw.get("rows", {}).get("prepare", ()) if isinstance(raw.get("rows"), dict) else ()
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, dict) and step.get("step") not in _NEEDED:
            raise Refused("preparation", f"{step.get('step')!r:.80} is not known here")
    try:
        return Offer.model_validate_json(canonical(dict(raw)), strict=True)
    except (ValidationError, BadInput, ValueError, TypeError) as error:
        raise Refused("bad-offer", f"{error!s:.300}") from error


def offer_of(
    rows: SchemaSettings,
    task: TaskSettings,
    algorithm: AlgorithmSettings,
    plan: Plan,
    privacy: NoisedStep | None,
    secure: Secure | None = None,
    sites: Sequence[str] = (),
    personal: PersonalSettings | None = None,
) -> Offer:
    """The offer of a run, with the plan's warm rounds resolved. Where sites have noise of their
    own, ``sites`` are their names in the same order."""
    warm = 0
    if algorithm.build().warm_up is not None:
        warm = round(4 / plan.user_ratio) if plan.warm_rounds is None else plan.warm_rounds
    noises = None
    if isinstance(privacy, Gaussian) and privacy.noise_by_user is not None:
        noises = _by_name(sites, privacy.noise_by_user)
    settled = plan.changed(warm_rounds=warm, seed=plan.public_seed)
    return Offer(
        rows=rows,
        task=task,
        algorithm=algorithm,
        plan=settled,
        privacy=None if privacy is None else privacy.step,
        secure=secure,
        noises=noises,
        personal=personal,
    )


def _by_name(sites: Sequence[str], noises: Sequence[float]) -> dict[str, float]:
    """Noise of each site by name."""
    if len(sites) != len(noises):
        raise BadInput(
            "count-differs",
            f"privacy.noise_by_user has {len(noises)} numbers, and deploy.records names "
            f"{len(sites)} sites; give one number for each, in their order",
        )
    return dict(zip(sites, noises, strict=True))
