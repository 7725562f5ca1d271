"""An offer: all that the parties of a deployed run agree on, and nothing of anybody's records.

It is the public part of a configuration (schema, task, algorithm, plan, mechanism), every key
spelled out. Its digest is the plan's identity: at the sites, in the run folder, and on resume.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    model_validator,
)

from dpscaffold.algorithms import Algorithm
from dpscaffold.algorithms.sums import moments
from dpscaffold.config import AlgorithmSettings, ConfigTable, TaskSettings
from dpscaffold.config.gaussian import Gaussian, NoisedStep
from dpscaffold.config.personal import PersonalSettings, trained_by
from dpscaffold.config.plan import Plan
from dpscaffold.config.secure import Secure
from dpscaffold.data.meanings import Ends, Meanings
from dpscaffold.data.preprocessing import STEPS, Centre, FittedStep, Pca, Standardise
from dpscaffold.data.tables.cells import Spellings
from dpscaffold.data.tables.codec import Coding
from dpscaffold.data.tables.missing import OTHERS, NaStrings, refuse_declared
from dpscaffold.deployment.protocol.messages import Json, Refused, canonical
from dpscaffold.deployment.protocol.steps import (
    Fitted,
    FittedCost,
    SchemaStep,
    blank,
    build,
    check_step,
    fitted_sentence,
    kind_of,
    width_after,
)
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared, Target
from dpscaffold.privacy import Cost
from dpscaffold.privacy.preparation import Remark

if TYPE_CHECKING:
    from dpscaffold.tasks import Task


#: How often a site may be asked for one sum of a secure preparation: once, and once more if the
#: first attempt had no result.
SECURE_ATTEMPTS = 2


class SchemaSettings(Meanings, Ends, ConfigTable):
    """``[schema]``: what a row looks like, for parties who cannot look at one another's.

    A record that cannot be read (a label of no class, a text in place of a number) is counted and
    contributes nothing: what a record contains never decides whether the table is accepted.
    """

    features: Annotated[int, Field(ge=1)] | Annotated[tuple[str, ...], Field(min_length=1)]
    """The columns to learn from, in order; for .npz files, which contain the features, their
    number. Value: a list of strings, or an integer, 1 or more. Example:
    ``["age", "pressure", "sex"]``"""
    classes: Annotated[int, Field(ge=0)] | Annotated[tuple[str, ...], Field(min_length=2)]
    """The class labels in order; for .npz files their number, and 0 if the label is a number. A
    record with another label, or none, is counted but contributes nothing. Value: a list of
    strings, or an integer, 2 or more, or 0. Example: ``["no", "yes"]``"""
    categories: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """The values of each categorical column, known beforehand. A value that is not listed is
    encoded as zeros. Value: a table of lists of strings. Example: ``{ sex = ["f", "m"] }``"""
    label: str = "label"
    missing: float = Field(default=0.0, allow_inf_nan=False)
    """The value that replaces a missing number. A record with a value that is not a number is
    counted but contributes nothing. Value: a finite number. Example: ``-1.0``"""
    prepare: tuple[SchemaStep, ...] = ()
    """Preprocessing steps with public statistics or private fits, in order; the noise of a private
    step is that of each site's sum. Value: names or tables of steps, as in data.preprocess.
    Example: ``["hog:28x28", { step = "clip-norm", norm = 3.0 }]``"""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns; none where the records are arrays."""
        return self.features if isinstance(self.features, tuple) else ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """The labels of the classes; none where they are numbered, or the label is a number."""
        return self.classes if isinstance(self.classes, tuple) else ()

    @property
    def class_count(self) -> int:
        """How many classes there are; 0 where the label is a number."""
        return self.classes if isinstance(self.classes, int) else len(self.classes)

    @property
    def dimension(self) -> int:
        """d, the number of features after preparation, by the name that a task asks for."""
        return self.widths[-1]

    @property
    def unfitted(self) -> int | None:
        """The place of the first step that is still to be fitted."""
        return next((k for k, step in enumerate(self.prepare) if kind_of(step)), None)

    def before(self, place: int | None) -> SchemaSettings:
        """The schema with the steps before this place; None leaves them as they are."""
        return self if place is None else self.changed(prepare=self.prepare[:place])

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of features before the first step and after each."""
        widths = [self.width]
        for step in self.prepare:
            widths.append(width_after(step, widths[-1]))
        return tuple(widths)

    @property
    def steps(self) -> tuple[Prepared, ...]:
        """The preparation as values that map rows to rows."""
        return tuple(
            build(step, width) for step, width in zip(self.prepare, self.widths, strict=False)
        )

    @property
    def target(self) -> Target:
        """What is predicted."""
        if self.classes == 0:
            return Target("number", (), self.low, self.high)
        return Target("class", self.class_names or Target.numbered(self.class_count).classes)

    @property
    def na_strings(self) -> NaStrings:
        """The texts that mean a missing value, by column."""
        return NaStrings.given(self.na_values)

    @property
    def coding(self) -> Coding:
        """How columns become features, at the sites and in the model of the run."""
        columns = self.columns or tuple(map(str, range(self.width)))
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
        """The number of features before preparation: one for each column, and one for each value
        of a categorical column."""
        if isinstance(self.features, int):
            return self.features
        coded = sum(len(values) for values in self.categories.values())
        return len(self.features) - len(self.categories) + coded

    @model_validator(mode="after")
    def _consistent(self) -> SchemaSettings:
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
                "schema.features names a column twice, or the label among the features",
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
        centred = False
        for place, step in enumerate(self.prepare):
            check_step(step)
            centred = centred or isinstance(step, Centre | Standardise | Fitted)
            if not isinstance(step, Pca):
                continue
            if step.components > self.widths[place]:
                raise BadInput(
                    "too-many-components",
                    f"schema.prepare: pca asks for {step.components} components, and there are "
                    f"{self.widths[place]} features",
                )
            if not centred:
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
        if len(set(self.class_names)) < len(self.class_names):
            raise BadInput(
                "count-differs",
                f"schema.classes is {list(self.class_names)}; name every class once",
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
    fit: Annotated[Centre | Standardise | Pca, Field(discriminator="step")] | None = None
    #: Models of the sites' own that are trained during the run.
    personal: PersonalSettings | None = None

    @model_validator(mode="after")
    def _trained_together(self) -> Offer:
        refuse_fine_tuning(self.personal)
        return self

    @model_validator(mode="after")
    def _in_full(self) -> Offer:
        if self.plan.learning_rate is None:
            raise BadInput("learning-rate-without-sizes", "an offer gives plan.learning_rate")
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
        kind = kind_of(self.fit)
        if kind is None or self.fit.norm_bound is None:
            raise BadInput("not-applicable", f"the step {self.fit.step!r} is not fitted on records")
        return moments(kind, self.fit.norm_bound)

    @property
    def parts(self) -> tuple[Offer, ...]:
        """The offers of a whole run: one for each step to be fitted, then that of the training, in
        which zeros stand for what is not fitted yet."""
        offer, found = self, []
        while (place := offer.rows.unfitted) is not None:
            found.append(offer.fitting(place))
            step: Any = offer.rows.prepare[place]
            offer = offer.fitted(place, blank(step, offer.rows.widths[place]))
        return (*found, offer)

    def fitting(self, place: int) -> Offer:
        """The offer of the run that fits the step at this place: one round over all records."""
        step: Any = self.rows.prepare[place]
        privacy = self.privacy
        if privacy is None or privacy.unit == "user":
            raise BadInput(
                "not-applicable",
                f"schema.prepare: {step.step} is fitted by noised sums, which hide single records; "
                f"give [privacy] with unit = 'record', or a step with public constants",
            )
        sums = None if self.secure is None else self.secure.changed(voids=SECURE_ATTEMPTS - 1)
        before = self.rows.before(place)
        once = Plan.one_round(self.plan.public_seed)
        query = privacy.changed(clip=1.0, noise=step.noise)
        offer = offer_of(before, self.task, self.algorithm, once, query, sums)
        return offer.model_copy(update={"fit": step})

    def fitted(self, place: int, step: Fitted) -> Offer:
        """This offer with a fitted step in its place."""
        prepare = (*self.rows.prepare[:place], step, *self.rows.prepare[place + 1 :])
        return self.model_copy(update={"rows": self.rows.changed(prepare=prepare)})

    def steps(self, users: int) -> tuple[Prepared, ...]:
        """The preparation; of steps that are still to be fitted by ``users`` sites, what it
        costs."""
        rows, built = self.rows, []
        for step, width in zip(rows.prepare, rows.widths, strict=False):
            planned = isinstance(step, FittedStep) and kind_of(step)
            built.append(self._planned(step, users) if planned else build(step, width))
        return tuple(built)

    def _planned(self, step: Any, users: int) -> Remark:
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
        tables["rows"]["prepare"] = [_given(step) for step in tables["rows"]["prepare"]]
        if self.fit is None:
            del tables["fit"]
        else:
            tables["fit"] = _given(tables["fit"])
        for key in ("secure", "noises", "personal"):
            if tables[key] is None:
                del tables[key]
        tables["algorithm"] = {k: v for k, v in tables["algorithm"].items() if v is not None}
        return dict(json.loads(canonical(tables)))


def _given(step: dict[str, Any]) -> dict[str, Any]:
    """The keys that a step uses."""
    return {key: value for key, value in step.items() if value is not None}


def fitting_cost(
    secure: Secure | None, privacy: NoisedStep | None, step: FittedStep, users: int, count: int = 1
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
        name=names[kind_of(step) or "mean"],
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
        if isinstance(step, dict) and step.get("step") not in (*STEPS, "fitted"):
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
    if plan.learning_rate is None:
        raise BadInput(
            "learning-rate-without-sizes",
            "plan.learning_rate is left out, and sites are offered a number; give it, or "
            "deploy.records (every site's public size), for which the server chooses one",
        )
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
            f"privacy.noise has {len(noises)} numbers, and deploy.records names "
            f"{len(sites)} sites; give one number for each, in their order",
        )
    return dict(zip(sites, noises, strict=True))
