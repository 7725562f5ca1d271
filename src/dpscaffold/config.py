"""Configuration: a TOML file, overridden key by key, resolved into one frozen value.

The tables are ``[data] [task] [algorithm] [plan] [privacy]``. Unknown keys are refused with the
nearest known one; what was resolved is written beside every result and can be read back.
"""

from __future__ import annotations

import json
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from torch import nn
from torch.nn.parameter import UninitializedParameter

from dpscaffold.algorithms import DEFAULT, Algorithm
from dpscaffold.algorithms.naming import build, numbers_of, own_function
from dpscaffold.budget import Budget
from dpscaffold.checks import choice, shares
from dpscaffold.data.config import DataSettings, PathText, Synthetic
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation
from dpscaffold.federation.roster import Roster
from dpscaffold.federation.schema import Target
from dpscaffold.local import Gaussian
from dpscaffold.plan import Plan
from dpscaffold.privacy import Mechanism, describe
from dpscaffold.setting import Setting
from dpscaffold.tasks import (
    LOSSES,
    SOFTMAX,
    Linear,
    Logistic,
    Loss,
    Mlp,
    ModuleTask,
    Task,
    huber,
    weighted,
)


class ConfigTable(BaseModel):
    """A table of the configuration: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=True)

    def changed(self, **values: Any) -> Self:
        """The table with some keys set, checked again: what was built of it is built anew."""
        return type(self).model_validate({**self.model_dump(exclude_unset=True), **values})


class Rows(Protocol):
    """What a task must fit: a federation, or the public facts of one."""

    @property
    def dimension(self) -> int:
        """d."""
        ...

    @property
    def target(self) -> Target:
        """What is predicted."""
        ...


class TaskSettings(ConfigTable):
    """``[task]``: what is learnt, and whether to solve for the central optimum first.

    ``loss`` is an entry of :data:`~dpscaffold.tasks.losses.LOSSES`, by default softmax for classes,
    squared for numbers and labels (one logistic loss each) for several labels; ``delta`` is where
    the Huber loss turns from a square to a line. ``kind = "logistic"`` is the linear model under
    softmax, or under one logistic loss a label.
    """

    kind: Literal["logistic", "linear", "mlp", "module"] = "logistic"
    loss: str | None = None
    delta: float | None = None
    hidden: int = Field(default=200, ge=1)
    module: str | None = None
    shape: tuple[int, ...] | None = None
    optimum: bool = False
    _folder: Path | None = PrivateAttr(default=None)
    class_weights: tuple[float, ...] | dict[str, float] | None = None
    metrics: tuple[str, ...] | None = None
    dissimilarity: bool = True

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> TaskSettings:
        self._folder = _folder_of(info)
        if (self.kind == "module") != (self.module is not None):
            raise BadInput(
                f"task.module is {self.module!r} with task.kind {self.kind!r}; "
                "a module task needs module = 'package.file:factory'"
            )
        if self.optimum and self.kind not in ("logistic", "linear"):
            raise BadInput(
                f"task.optimum is true with task.kind {self.kind!r}; "
                "only the convex tasks 'logistic' and 'linear' have a central optimum"
            )
        if self.loss is not None:
            choice("task.loss", self.loss, tuple(LOSSES))
        if self.kind == "logistic" and self.loss not in (None, "softmax"):
            raise BadInput(
                f"task.loss is {self.loss!r} with task.kind 'logistic', which is the linear model "
                f"under softmax; use task.kind = 'linear'"
            )
        if self.delta is not None and self.loss != "huber":
            raise BadInput(
                f"task.delta is {self.delta} with task.loss {self.loss!r}; "
                "it belongs to task.loss = 'huber'"
            )
        return self

    def build_loss(self, target: Target) -> Loss:
        """The loss, which must fit the target."""
        if self.kind == "logistic" and target.kind == "number":
            raise BadInput(
                "task.kind is 'logistic', which tells classes apart, and the target is a number; "
                "use task.kind = 'linear' (loss 'squared' or 'huber')"
            )
        usual = {"class": "softmax", "number": "squared", "labels": "labels"}
        if self.kind == "logistic" and target.kind == "labels" and self.loss is not None:
            raise BadInput(
                f"task.loss is {self.loss!r}, and the target is several labels; leave it out"
            )
        name = self.loss or usual[target.kind]
        loss = LOSSES[name] if self.delta is None else huber(self.delta)
        if self.class_weights is not None:
            loss = weighted(loss, self._weights(target))
        loss.fits(target.kind, len(target.classes))
        return loss

    def _weights(self, target: Target) -> tuple[float, ...]:
        """One weight a class, in the order of the classes."""
        given = self.class_weights
        if not isinstance(given, dict):
            return given or ()
        stray = [name for name in given if name not in target.classes]
        if stray:
            raise BadInput(
                f"task.class_weights names '{stray[0]}'{nearest(stray[0], target.classes)}; the "
                f"classes are {', '.join(target.classes[:10])}"
            )
        return tuple(given.get(name, 1.0) for name in target.classes)

    def build(self, federation: Rows) -> Task:
        """The task, in the federation's shape."""
        loss = self.build_loss(federation.target)
        outputs = loss.outputs(len(federation.target.classes))
        if self.kind == "logistic" and loss == SOFTMAX:
            return Logistic(federation.dimension, outputs)
        if self.kind in ("logistic", "linear"):
            return Linear(federation.dimension, outputs, loss)
        if self.kind == "mlp":
            return Mlp(federation.dimension, outputs, self.hidden, loss)
        assert self.module is not None
        made = own_module(self.module, self._folder)
        return ModuleTask(made, self.shape, self.module, loss)


class AlgorithmSettings(ConfigTable):
    """``[algorithm]``: an entry of ``ALGORITHMS`` or ``my_file:factory``, a server optimiser, and
    the numbers of both, which are the arguments of their factories.

    >>> AlgorithmSettings(name="fedprox").model_dump(exclude_none=True)
    {'name': 'fedprox', 'mu': 0.1}
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=True)

    name: str = DEFAULT
    server: str | None = None
    _folder: Path | None = PrivateAttr(default=None)
    _built: Algorithm = PrivateAttr()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any, info: ValidationInfo) -> Any:
        """Spell the numbers out."""
        if not isinstance(given, Mapping):
            return given
        name, server = given.get("name", DEFAULT), given.get("server")
        if not isinstance(name, str) or not isinstance(server, str | None):
            return given
        numbers = {key: value for key, value in given.items() if key not in ("name", "server")}
        return {**given, **numbers_of(name, server, numbers, _folder_of(info))}

    @model_validator(mode="after")
    def _checked(self, info: ValidationInfo) -> AlgorithmSettings:
        self._folder = _folder_of(info)
        self._built = build(self.name, self.server, self.model_extra or {}, self._folder)
        return self

    @property
    def folder(self) -> Path | None:
        """Where a file of the user's own is looked for first."""
        return self._folder

    def build(self) -> Algorithm:
        """The algorithm, which was built when the table was checked."""
        return self._built


def own_module(name: str, folder: Path | None) -> nn.Module:
    """What a user's own function makes, which must be a module ready to be trained."""
    factory = own_function(name, folder, "task.module")
    try:
        made = factory()
    except Exception as error:
        raise BadInput(
            f"task.module is {name!r}, whose factory failed with {type(error).__name__}: {error}; "
            f"mend it"
        ) from error
    if not isinstance(made, nn.Module):
        shown = made.__name__ + ", a class" if isinstance(made, type) else type(made).__name__
        raise BadInput(
            f"task.module is {name!r}, which returned {shown}; the factory must return a "
            f"torch.nn.Module"
        )
    if any(isinstance(value, UninitializedParameter) for value in made.parameters()):
        raise BadInput(
            f"task.module is {name!r}, whose layers have no sizes yet (lazy modules); give them "
            f"their numbers of features"
        )
    return made


def _folder_of(info: ValidationInfo) -> Path | None:
    return (info.context or {}).get("folder")


class PlanSettings(ConfigTable):
    """``[plan]``: the fields of :class:`~dpscaffold.plan.Plan`, which checks them."""

    rounds: int = Plan.rounds
    local_steps: int = Plan.local_steps
    user_ratio: float = Plan.user_ratio
    data_ratio: float = Plan.data_ratio
    learning_rate: float | Literal["plan"] = Plan.learning_rate
    server_rate: float = Plan.server_rate
    regularisation: float = Plan.regularisation
    weighting: Literal["uniform", "records"] = Plan.weighting
    warm_rounds: int | None = None
    averaging: Literal["none", "uniform", "tail"] = Plan.averaging
    tail: float = Plan.tail
    evaluate_every: int = Plan.evaluate_every
    checkpoint_every: int = Plan.checkpoint_every
    seed: int = Plan.seed
    max_rounds: int | None = None
    _built: Plan = PrivateAttr()

    @model_validator(mode="after")
    def _checked(self) -> PlanSettings:
        values = self.model_dump()
        if self.learning_rate == "plan":
            values["learning_rate"] = Plan.learning_rate
        self._built = Plan(**values)
        return self

    @property
    def rate(self) -> float:
        """η₀ where it is a number."""
        return self.build().learning_rate

    def build(self, planned: float | None = None) -> Plan:
        """The plan; ``planned`` is what ``learning_rate = "plan"`` came to, or stands for it."""
        if self.learning_rate != "plan":
            return self._built
        if planned is None:
            raise BadInput(
                "plan.learning_rate is 'plan', which 'train' chooses from the roster; give a "
                "number here, for example the one that 'dpscaffold plan' recommends"
            )
        return replace(self._built, learning_rate=planned)


class FactsSettings(ConfigTable):
    """``[facts]``: what is public about the data, for ``dpscaffold plan`` and
    ``plan.learning_rate = "plan"``.

    ``classes`` is 0 where a number is predicted; ``row_norm`` is what preparation guarantees, or
    ``"none"``. ``planned`` names the keys that were chosen on a public surrogate.
    """

    users: int | None = None
    records: int | tuple[int, ...] | None = None
    features: int | None = None
    classes: int | None = None
    similarity: float | Literal["unknown"] = "unknown"
    row_norm: float | Literal["none"] | None = None
    planned: tuple[str, ...] = ()


class PrivacySettings(ConfigTable):
    """``[privacy]``: the mechanism (:class:`~dpscaffold.Gaussian`) and the limits
    (:class:`~dpscaffold.Budget`).

    Give ``noise``, or ``epsilon`` with the ``view`` it is promised to, from which the noise is
    solved. ``release`` is the recipe for a model that is handed out (:mod:`dpscaffold.release`),
    ``allow`` what it is told to overlook.
    """

    clip: float | Literal["median"] = 1.0
    noise: float | None = None
    epsilon: float | None = None
    view: Literal["server", "third-party", "participant", "paper-third-party"] = "server"
    colluders: int | None = None
    sampling: Literal["fixed", "poisson"] = "fixed"
    unit: Literal["record", "user"] = "record"
    secret: bool = False
    neighbours: Literal["replace-one", "zero-out", "add-remove"] | None = None
    delta: float | Literal["1/records"] | None = None
    max_participations: int | None = None
    user_epsilon: float | None = None
    target_epsilon: float | None = None
    budget_file: PathText | None = None
    release: bool | None = None
    allow: list[Literal["unprotected-preprocessing", "median-clip"]] | None = None
    _gaussian: Gaussian = PrivateAttr()
    _budget: Budget = PrivateAttr()

    @model_validator(mode="after")
    def _consistent(self) -> PrivacySettings:
        if self.allow is not None and not self.release:
            raise BadInput(
                "privacy.allow is given, which overrules what a release refuses, and nothing is "
                "released; add privacy.release = true (--release) or leave it out"
            )
        if (self.noise is None) == (self.epsilon is None):
            given = "both are given" if self.noise is not None else "neither is given"
            raise BadInput(
                f"privacy needs either noise or epsilon, and {given}; set exactly one of "
                f"privacy.noise, privacy.epsilon"
            )
        secret = self.secret or bool(self.release)
        self._gaussian = Gaussian(
            self.clip,
            1.0 if self.noise is None else self.noise,
            self.sampling,
            self.unit,
            secret,
            self.neighbours,
        )
        self._budget = Budget(
            self.delta,
            self.max_participations,
            self.user_epsilon,
            self.target_epsilon,
            self.view,
            self.budget_file,
            1 if self.colluders is None else self.colluders,
        )
        return self

    @property
    def mechanism(self) -> Gaussian:
        """The mechanism; at noise 1 where the noise is to be solved for."""
        return self._gaussian

    @property
    def hidden(self) -> bool:
        """Whether noise and batches are secret; those of a release always are."""
        return self.secret or bool(self.release)

    @property
    def budget(self) -> Budget:
        """The limits."""
        return self._budget


class StoppingSettings(ConfigTable):
    """``[stopping]``: end a run early by public rows (:class:`~dpscaffold.stopping.Stopping`).

    ``path`` is a CSV or Parquet file of raw rows that are public, ``label`` its column of what is
    true, by default that of the data. ε is that of all planned rounds, whenever the run ends.
    """

    path: str
    label: str | None = None
    patience: int = Field(default=5, ge=1)


class Configuration(ConfigTable):
    """A whole configuration.

    >>> settings = load(None, ["plan.rounds=5", "algorithm.name=fedavg"])
    >>> settings.plan.rounds, settings.algorithm.name
    (5, 'fedavg')
    """

    data: DataSettings = Field(default_factory=Synthetic)
    task: TaskSettings = TaskSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    plan: PlanSettings = PlanSettings()
    privacy: PrivacySettings | None = None
    facts: FactsSettings | None = None
    stopping: StoppingSettings | None = None

    def setting(self, data: Federation | Roster, planned: float | None = None) -> Setting:
        """The run this configuration describes on those data, of which the roster is all that
        matters; solves for the noise where ε is given. ``planned`` is η₀ where
        ``learning_rate = "plan"`` (:func:`~dpscaffold.planner.asked.planned_setting`)."""
        roster, given = data if isinstance(data, Roster) else data.roster, self.privacy
        plan, algorithm = self.plan.build(planned), self.algorithm.build()
        if given is None:
            return Setting(roster, self.task.build(roster.schema), algorithm, plan)
        mechanism, budget = given.mechanism, given.budget
        task = self.task.build(roster.schema)
        setting = Setting(roster, task, algorithm, plan, mechanism, budget)
        return setting if given.epsilon is None else setting.calibrated(given.epsilon)

    @property
    def beside(self) -> str | None:
        """The folder of the configuration, where it names a file of a user's own."""
        own = self.task.module is not None or ":" in self.algorithm.name
        folder = self.algorithm.folder
        return str(folder.absolute()) if own and folder is not None else None

    def describe(self, sizes: Sequence[int]) -> Mechanism | None:
        """What the run would do with users of these sizes, for the accountant; None without
        privacy. Noise that is to be solved for counts as 1."""
        given = self.privacy
        if given is None:
            return None
        return describe(
            users=len(sizes),
            records=sizes,
            memory=self.algorithm.build().memory,
            rounds=self.plan.max_rounds or self.plan.rounds,
            local_steps=self.plan.local_steps,
            **shares(sizes, self.plan.user_ratio, self.plan.data_ratio),
            noise=1.0 if given.noise is None else given.noise,
            clip=given.clip,
            sampling=given.sampling,
            unit=given.unit,
            weighting=self.plan.weighting,
            delta=given.delta,
            max_participations=given.max_participations,
            may_decline=given.budget.declines,
            declared_sizes=self.data.declared_sizes is not None and given.neighbours != "zero-out",
        )

    def resolved(self, setting: Setting) -> dict[str, Any]:
        """As written to ``config.toml``: every key spelled out, the noise solved, nothing left to
        defaults."""
        tables = self.model_dump(mode="json", exclude_none=True)
        if self.privacy is not None and setting.privacy is not None:
            tables["privacy"].pop("epsilon", None)
            tables["privacy"]["noise"] = setting.privacy.noise
        tables["plan"]["warm_rounds"] = setting.warm_rounds
        if self.plan.learning_rate == "plan":
            tables["plan"]["learning_rate"] = setting.plan.learning_rate
            facts = tables.setdefault("facts", {})
            facts["planned"] = sorted({*facts.get("planned", ()), "plan.learning_rate"})
        return tables


def checked_facts(table: Mapping[str, Any]) -> FactsSettings:
    """A ``[facts]`` table on its own; what is wrong with it is said in one sentence."""
    return parse({"facts": table}).facts or FactsSettings()


def load(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    unset: Sequence[str] = (),
) -> Configuration:
    """Read a TOML file (or start from ``base``), leave out the keys of ``unset``, apply
    ``key=value`` overrides, and check everything."""
    tables = dict(base or {}) if path is None else read_tables(path)
    for key in unset:
        tables = without(tables, key)
    for item in overrides:
        tables = unplanned(override(tables, item), item.partition("=")[0].strip())
    return parse(tables, beside(Path(path)) if path is not None else None)


def beside(path: Path) -> Path:
    """Where files of a user's own are looked for: beside the configuration, which of a run folder's
    is the one that the run began with."""
    begun = path.parent / "run.json"
    try:
        told = json.loads(begun.read_text(encoding="utf-8")).get("beside")
    except (OSError, ValueError, AttributeError):
        return path.parent
    return Path(told) if isinstance(told, str) else path.parent


#: Keys that say nothing about how well a run learns.
_HARMLESS = ("plan.seed", "plan.evaluate_every", "plan.checkpoint_every")


def unplanned(tables: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The tables after a change of one key by hand: where it was among what was planned on a public
    surrogate, nothing is called planned any more, for who knows what the change was made by.

    >>> unplanned({"facts": {"planned": ["plan"]}}, "plan.learning_rate")
    {'facts': {}}
    >>> unplanned({"facts": {"planned": ["plan"]}}, "data.users")
    {'facts': {'planned': ['plan']}}
    """
    facts = dict(tables.get("facts", {})) if isinstance(tables.get("facts"), Mapping) else {}
    named = facts.get("planned", ())
    touched = any(key == name or key.startswith(f"{name}.") for name in named)
    if not touched or key in _HARMLESS:
        return dict(tables)
    facts.pop("planned")
    return {**tables, "facts": facts}


def read_tables(path: Path | str) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"the configuration {path} cannot be read: {error.strerror}; give the path of a "
            f"TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"the configuration {path} is not valid TOML: {error}") from error


def without(tables: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The tables without one ``table.key``, or without a whole table.

    >>> without({"privacy": {"noise": 2.0, "clip": 1.0}}, "privacy.noise")
    {'privacy': {'clip': 1.0}}
    """
    first, _, rest = key.strip().partition(".")
    if not first:
        raise BadInput(f"--unset is {key!r}; name a table or table.key, e.g. privacy.noise")
    if not rest:
        return {name: table for name, table in tables.items() if name != first}
    inner = tables.get(first)
    if not isinstance(inner, Mapping):
        return dict(tables)
    return {**tables, first: without(inner, rest)}


def override(tables: Mapping[str, Any], item: str) -> dict[str, Any]:
    """The tables with one ``table.key=value`` set; ``table.key=`` leaves a key out and
    ``privacy=false`` a table.

    >>> override({}, "plan.rounds=3")
    {'plan': {'rounds': 3}}
    """
    key, separator, text = item.partition("=")
    parts = key.strip().split(".")
    changed = {
        name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()
    }
    if separator and len(parts) == 1 and text.strip().lower() in ("false", "none"):
        changed.pop(parts[0], None)
        return changed
    if not separator or len(parts) < 2 or not all(parts):
        raise BadInput(f"--set is {item!r}; write table.key=value, e.g. plan.rounds=100")
    if not text.strip():
        return without(changed, key)
    inner = changed
    for part in parts[:-1]:
        inner = inner.setdefault(part, {})
        if not isinstance(inner, dict):
            raise BadInput(f"--set is {item!r}, but {part} is not a table")
    inner[parts[-1]] = _value(text.strip())
    return changed


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse(tables: Mapping[str, Any], folder: Path | None = None) -> Configuration:
    """Check tables; the first thing wrong is said in one sentence. ``folder`` is where a user's own
    algorithm is looked for first."""
    try:
        return Configuration.model_validate(tables, context={"folder": folder})
    except ValidationError as error:
        raise BadInput(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    """The first error as a sentence that names the key, the value and what would do."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, BadInput):
        return str(cause)
    if isinstance(cause, ValueError):
        return f"{first['loc'][0]}: {cause}"
    location = [str(part) for part in first["loc"]]
    model = _model_at(location[:-1])
    shown = ".".join(
        part
        for k, part in enumerate(location)
        if not (k == 1 and location[0] == "data" and len(location) > 2)
    )
    if first["type"] == "extra_forbidden":
        known = list(model.model_fields) if model else []
        return f"unknown key {shown}{nearest(location[-1], known)}; known here: {', '.join(known)}"
    return f"{shown} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _model_at(location: list[str]) -> type[BaseModel] | None:
    """The model that holds the key, walking from the top; a tag of a union selects its member."""
    model: type[BaseModel] = Configuration
    candidates: list[type[BaseModel]] = [model]
    for part in location:
        found: list[type[BaseModel]] = []
        for candidate in candidates:
            if part in candidate.model_fields:
                found += _members(candidate.model_fields[part].annotation)
            else:
                source = candidate.model_fields.get("source")
                if source is not None and part in typing.get_args(source.annotation):
                    found.append(candidate)
        candidates = found
    return candidates[0] if candidates else None


def _members(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, Annotated):
        return [model for part in typing.get_args(annotation) for model in _members(part)]
    return []


assert {f.name for f in fields(Plan)} == set(PlanSettings.model_fields), (
    "[plan] and Plan must have the same fields"
)
