"""An offer: all that the parties of a deployed run agree on, and nothing of anybody's records.

It is the public part of a configuration (schema, task, algorithm, plan, mechanism), every key
spelled out. Its digest is the plan's identity: at the sites, in the run folder, and on resume.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from dpscaffold.config import AlgorithmSettings, ConfigTable, PlanSettings, TaskSettings
from dpscaffold.config.privacy import SecureSettings
from dpscaffold.data.prepared import ClipNorm, Scale, Shift, UnitNorm
from dpscaffold.data.tables.cells import Forms, refuse_two_readings
from dpscaffold.data.tables.codec import Coding
from dpscaffold.data.tables.missing import OTHERS, NaStrings, checked_na_strings, refuse_declared
from dpscaffold.data.tables.spellings import Spellings, checked_spellings
from dpscaffold.deployment.protocol.messages import Json, Refused, canonical
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared, Target
from dpscaffold.privacy.mechanism import Clip, Relation, Sampling, Unit
from dpscaffold.setting.gaussian import Gaussian
from dpscaffold.setting.plan import Plan
from dpscaffold.setting.secure import Secure

if TYPE_CHECKING:
    from dpscaffold.tasks import Task


class PublicStep(ConfigTable):
    """One step of a preparation that needs no fit, or carries public constants."""

    step: Literal["unit-norm", "clip-norm", "scale", "shift"]
    """Subtract a mean (shift), multiply by factors (scale), scale long rows down (clip-norm), or
    scale all rows to norm 1 (unit-norm). Example: ``"shift"``"""
    norm: float | None = Field(default=None, gt=0)
    """Longer rows are scaled down to this norm (needed by clip-norm). Example: ``3.0``"""
    mean: tuple[float, ...] | None = None
    """The values to subtract, one per feature (needed by shift). Example: ``[50.0, 130.0]``"""
    factor: tuple[float, ...] | None = None
    """The factors of the features, one per feature (needed by scale; shift applies them after the
    subtraction). Example: ``[0.1, 0.1]``"""

    @model_validator(mode="after")
    def _complete(self) -> PublicStep:
        wanted = {"unit-norm": (), "clip-norm": ("norm",), "scale": ("factor",), "shift": ("mean",)}
        for name in wanted[self.step]:
            if getattr(self, name) is None:
                raise BadInput(
                    "missing-key", f"schema.prepare: the step {self.step!r} needs {name}"
                )
        return self

    def build(self) -> Prepared:
        """The step as a value that maps rows to rows."""
        said = "Rows were prepared by public constants of the plan."
        factor = None if self.factor is None else np.asarray(self.factor, np.float32)
        if self.step == "unit-norm":
            return UnitNorm()
        if self.step == "clip-norm":
            return ClipNorm(float(self.norm or 1.0))
        if self.step == "scale":
            return Scale(np.asarray(self.factor, np.float32), said)
        return Shift(np.asarray(self.mean, np.float32), factor, "public", said)


class SchemaSettings(ConfigTable):
    """``[schema]``: what a row looks like, for parties who cannot look at one another's.

    A record that cannot be read (a label of no class, a text in place of a number) is counted and
    contributes nothing: what a record contains never decides whether the table is accepted.
    """

    features: int = Field(ge=1)
    """d, the number of features of a row: one per column, and one per value of a categorical
    column. Example: ``4``"""
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
    """The column to predict. Example: ``"ill"``"""
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
    na_values: Annotated[
        tuple[str, ...] | dict[str, tuple[str, ...]] | None,
        BeforeValidator(partial(checked_na_strings, key="schema.na_values")),
    ] = None
    """NA strings: texts that mean a missing value, as a list for every column or a table of lists
    by column ('*' for all others). The default NA strings (NA, NaN, an empty cell) need not be
    listed. The model keeps the list for new rows. Value: a list of strings, or a table by column of
    such lists. Example: ``{ pressure = ["-9", "?"] }``"""
    values: Annotated[
        dict[str, dict[str, tuple[str, ...]]] | None,
        BeforeValidator(partial(checked_spellings, key="schema.values")),
    ] = None
    """Other spellings of labels and categories, for every site and for new rows: a table by column
    that gives each value its other spellings. Value: a table by column of tables of lists of
    strings. Example: ``{ ill = { yes = ["Yes", "ja"] } }``"""
    dates: dict[str, Forms] = Field(default_factory=dict)
    """Columns of dates with their form (strptime's codes) or a list of forms. They become days
    since 1970. Value: a table of forms by column. Example: ``{ age = "%d.%m.%Y" }``"""
    absent: tuple[str, ...] = ()
    """Columns that a site may lack. Their values are missing there. Example: ``["pressure"]``"""
    prepare: tuple[PublicStep, ...] = ()
    """Preprocessing steps with public constants, in order. Value: a list of tables, see the steps
    below. Example: ``[{ step = "clip-norm", norm = 3.0 }]``"""

    @property
    def dimension(self) -> int:
        """d, by the name that a task asks for."""
        return self.features

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
        """The number of features before the preparation (which keeps it)."""
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

    def _check_dates(self) -> None:
        stray = sorted({*self.dates} - ({*self.columns} - {*self.categories}))
        if stray:
            raise BadInput(
                "wrong-column-kind",
                f"schema.dates names {stray[0]!r}, which is not a column of numbers",
            )
        for name, forms in self.dates.items():
            refuse_two_readings(name, forms)

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


class MechanismSettings(ConfigTable):
    """A :class:`~dpscaffold.Gaussian` in an offer; ``secret`` is false in a rehearsal alone."""

    clip: Clip
    noise: float
    sampling: Sampling
    unit: Unit
    secret: bool
    neighbours: Relation | None = None

    @classmethod
    def of(cls, mechanism: Gaussian) -> MechanismSettings:
        """What sites learn about a mechanism, whose noise must be known."""
        if mechanism.epsilon is not None:
            raise BadInput(
                "epsilon-without-sizes",
                "an offer names the noise; epsilon is solved for sizes, so give noise",
            )
        return cls(**{name: getattr(mechanism, name) for name in cls.model_fields})

    def build(self) -> Gaussian:
        """The mechanism."""
        return Gaussian(**self.model_dump())


class Offer(ConfigTable):
    """What is offered. ``format`` is of this very table."""

    format: Literal[1] = 1
    rows: SchemaSettings
    task: TaskSettings
    algorithm: AlgorithmSettings
    plan: PlanSettings
    privacy: MechanismSettings | None = None
    secure: SecureSettings | None = None

    def build_task(self) -> Task:
        """The task, in the schema's shape."""
        return self.task.build(self.rows)

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
        if self.secure is None:
            del tables["secure"]
        tables["algorithm"] = {k: v for k, v in tables["algorithm"].items() if v is not None}
        return dict(json.loads(canonical(tables)))


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
    known = {"unit-norm", "clip-norm", "scale", "shift"}
    for step in steps if isinstance(steps, list) else ():
        if isinstance(step, dict) and step.get("step") not in known:
            raise Refused("preparation", f"{step.get('step')!r:.80} is not known here")
    try:
        offer = Offer.model_validate_json(canonical(dict(raw)), strict=True)
        if offer.privacy is not None:
            offer.privacy.build()
        return offer
    except (ValidationError, BadInput, ValueError, TypeError) as error:
        raise Refused("bad-offer", f"{error!s:.300}") from error


def offer_of(
    rows: SchemaSettings,
    task: TaskSettings,
    algorithm: AlgorithmSettings,
    plan: Plan,
    privacy: Gaussian | None,
    secure: Secure | None = None,
) -> Offer:
    """The offer of a run, with the plan's warm rounds resolved."""
    warm = 0
    if algorithm.build().warm_up is not None:
        warm = round(4 / plan.user_ratio) if plan.warm_rounds is None else plan.warm_rounds
    mechanism = MechanismSettings.of(privacy) if privacy is not None else None
    settled = PlanSettings(**plan.to_dict() | {"warm_rounds": warm, "seed": plan.public_seed})
    sums = None if secure is None else SecureSettings(**vars(secure))
    return Offer(
        rows=rows, task=task, algorithm=algorithm, plan=settled, privacy=mechanism, secure=sums
    )
