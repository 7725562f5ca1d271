"""The ``[data]`` table of a configuration: one model per source, told apart by ``source``.

A table without ``source`` is the paper's synthetic federation. Unknown keys, unknown sources and
options that the chosen partition does not use are refused with one sentence.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from dpscaffold.data.preprocessing import PreprocessingStep, check_order, sentence
from dpscaffold.data.tables.files import AUTO, is_many
from dpscaffold.data.tables.fills import PrivateFill
from dpscaffold.data.tables.markers import Markers, checked_markers, refuse_declared
from dpscaffold.data.tables.spellings import Spellings, checked_spellings
from dpscaffold.data.tables.table_coding import Forms, days, refuse_two_readings
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation.schema import Kind, Target

Partition = Literal["similarity", "dirichlet", "shards", "quantity", "natural"]
#: Which options belong to which partition.
OPTIONS = {
    "similarity": {"similarity", "size_spread"},
    "dirichlet": {"alpha", "size_spread"},
    "shards": {"shards", "size_spread"},
    "quantity": {"alpha"},
    "natural": set[str](),
}
PAPER_STEPS = ("standardise", "unit-norm")


#: A path as text, given as either.
PathText = Annotated[str, BeforeValidator(lambda p: os.fspath(p) if isinstance(p, Path) else p)]


def located(path: str, data_dir: str | None) -> Path:
    """A path as given or, where it is not there, under the data folder that the settings name."""
    given = Path(path).expanduser()
    found = given.exists() or any(given.parent.glob(given.name)) if given.name else True
    if given.is_absolute() or found or data_dir is None:
        return given
    return Path(data_dir).expanduser() / path


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0)
    declared_sizes: int | tuple[int, ...] | None = None
    test_ratio: float = Field(default=0.2, gt=0, lt=1)


class Synthetic(_Data):
    """The paper's synthetic federation; ``records`` counts train and test together."""

    source: Literal["synthetic"] = "synthetic"
    alpha: float = Field(default=0.0, ge=0)
    beta: float = Field(default=0.0, ge=0)
    users: int = Field(default=100, ge=1)
    records: int = Field(default=5000, ge=2)
    dimension: int = Field(default=40, ge=1)
    classes: int = Field(default=10, ge=2)
    label_noise: float = Field(default=0.05, ge=0, le=1)
    iid: bool = False
    size_spread: float = Field(default=0.0, ge=0)


class Pooled(_Data):
    """What all pooled sources share: how records are dealt out and preprocessed.

    ``users`` is M and ``records`` is R, train and test together (as many as there are when not
    given). A user with fewer than ``minimum_records`` records is left out by the natural partition
    and refused by the others; one with fewer than ``minimum_classes`` labels among its training
    records is refused.
    """

    users: int | None = Field(default=None, ge=1)
    records: int | None = Field(default=None, ge=2)
    partition: Partition | None = None
    similarity: float = Field(default=10.0, ge=0, le=100)
    alpha: float = Field(default=0.5, gt=0)
    shards: int = Field(default=2, ge=1)
    size_spread: float = Field(default=0.0, ge=0)
    minimum_records: int = Field(default=2, ge=2)
    minimum_classes: int = Field(default=1, ge=1)
    preprocess: tuple[PreprocessingStep, ...] = Field(default=PAPER_STEPS, validate_default=True)
    data_dir: PathText | None = None

    @property
    def has_users(self) -> bool:
        """Whether records come with their user."""
        return False

    @property
    def chosen_partition(self) -> Partition:
        """The partition asked for; natural users first where there are any, else similarity."""
        return self.partition or ("natural" if self.has_users else "similarity")

    @model_validator(mode="after")
    def _consistent(self) -> Pooled:
        chosen = self.chosen_partition
        # Only options that differ from their defaults: a resolved configuration spells out all of
        # them.
        options = set().union(*OPTIONS.values()) - OPTIONS[chosen]
        stray = sorted(
            name for name in options if getattr(self, name) != type(self).model_fields[name].default
        )
        if stray:
            owners = [name for name, options in OPTIONS.items() if stray[0] in options]
            raise ValueError(
                f"{stray[0]} belongs to partition = '{owners[0]}', and the partition is '{chosen}'"
            )
        if chosen == "natural" and not self.has_users:
            raise ValueError(
                "partition = 'natural' needs data that say whose each record is; name the user "
                "column or choose another"
            )
        if chosen != "natural" and self.users is None:
            raise ValueError(
                f"users is missing: partition = '{chosen}' needs to know how many there are to be"
            )
        target = kind_in(getattr(self, "target", "class"))
        if self.minimum_classes > 1 and target != "class":
            raise ValueError(
                f"minimum_classes is {self.minimum_classes}, and target is '{target}'; leave it out"
            )
        check_order(self.preprocess)
        return self


class _Images(Pooled):
    part: Literal["train", "test", "both"] = "train"
    verify: bool = True


class Mnist(_Images):
    """MNIST; the defaults are the paper's M = 60, R = 1000 on the 60,000 training images."""

    source: Literal["mnist"]
    users: int | None = Field(default=60, ge=1)
    records: int | None = Field(default=1000, ge=2)


class FashionMnist(_Images):
    """Fashion-MNIST, by default dealt out as MNIST is."""

    source: Literal["fashion-mnist"]
    users: int | None = Field(default=60, ge=1)
    records: int | None = Field(default=1000, ge=2)


class Emnist(_Images):
    """EMNIST; the defaults are the paper's M = 40, R = 2500 on train and test pooled."""

    source: Literal["emnist"]
    split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    part: Literal["train", "test", "both"] = "both"
    users: int | None = Field(default=40, ge=1)
    records: int | None = Field(default=2500, ge=2)


class Emnist47(_Images):
    """The EMNIST-47 subset, dealt out as the paper's EMNIST is."""

    source: Literal["emnist47"]
    part: Literal["train", "test", "both"] = "both"
    users: int | None = Field(default=40, ge=1)
    records: int | None = Field(default=2500, ge=2)


class Cifar10(_Images):
    """CIFAR-10 among 50 users of 1000 records."""

    source: Literal["cifar10"]
    users: int | None = Field(default=50, ge=1)
    records: int | None = Field(default=1000, ge=2)


class Digits(Pooled):
    """The 1,797 digits of scikit-learn among 10 users; needs no files."""

    source: Literal["digits"]
    users: int | None = Field(default=10, ge=1)


class Range(BaseModel):
    """``target = { kind = "number", low = 0, high = 60 }``: a number, and its public range."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    kind: Literal["number"]
    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        _ = self.target
        return self

    @property
    def target(self) -> Target:
        """What is predicted."""
        return Target("number", low=self.low, high=self.high)


def _range(given: Any) -> Any:
    """A table as a range, so that a mistake in it is named."""
    if isinstance(given, Target):
        given = {"kind": given.kind, "low": given.low, "high": given.high}
    if not isinstance(given, dict):
        return given
    if given.get("kind") != "number":
        raise ValueError(
            f"target has kind {given.get('kind')!r}; only a number has more than its name: give "
            f'target = {{ kind = "number", low = 0, high = 60 }}, or target = "class"'
        )
    try:
        return Range.model_validate(given)
    except ValidationError as problem:
        raise ValueError(f"target: {sentence(problem)}") from None


#: What is predicted: its kind, or a number with its range.
Predicted = Annotated[Kind | Range, BeforeValidator(_range)]


def kind_in(target: Kind | Range) -> Kind:
    """The kind of a target, with or without a range."""
    return target if isinstance(target, str) else target.kind


def range_of(settings: TabularFile | Npz) -> Range | None:
    """The public range of the numbers to predict, which they need; None for other targets."""
    target = settings.target
    if isinstance(target, Range):
        return target
    if target == "number":
        raise BadInput(
            'data.target is "number" without a range; write the range that the numbers can have, '
            'as in target = { kind = "number", low = 0, high = 60 } (low = -1, high = 1 for '
            "numbers that are scaled already): training needs it, since clipping cuts the "
            "gradients of large numbers"
        )
    return None


_Rule = Literal["refuse", "drop", "mean", "median", "indicator", "category"] | float | PrivateFill


def _fills(given: Any) -> Any:
    """Rules by column, those that are tables as private fills, so that what is wrong with one is
    said of it."""
    if not isinstance(given, dict):
        return given
    rules = {}
    for name, rule in given.items():
        try:
            rules[name] = PrivateFill.model_validate(rule) if isinstance(rule, dict) else rule
        except ValidationError as problem:
            raise ValueError(f"missing.{name}: {sentence(problem)}") from None
    return rules


#: A value that nobody has filled in yet; a configuration that holds one is refused.
BLANK = "FILL IN"


def _ranges(given: Any) -> Any:
    """Ranges by column; a day is written as a text, and read as days since 1970."""
    if not isinstance(given, dict):
        return given
    found = {}
    for name, ends in given.items():
        if not isinstance(ends, list | tuple) or len(ends) != 2:
            raise ValueError(f"ranges.{name} is {ends!r}; give [low, high]")
        try:
            low, high = (days(name, [e], "%Y-%m-%d")[0] if isinstance(e, str) else e for e in ends)
        except BadInput:
            raise ValueError(
                f"ranges.{name} is {list(ends)}; give two numbers, or two days such as 2024-12-31"
            ) from None
        if not all(isinstance(e, int | float | np.floating) for e in (low, high)) or not low < high:
            raise ValueError(f"ranges.{name} is {list(ends)}; low must be below high")
        found[name] = (float(low), float(high))
    return found


#: Texts that mean a missing value: a list for all columns, or lists by column.
NaStrings = Annotated[
    tuple[str, ...] | dict[str, tuple[str, ...]] | None, BeforeValidator(checked_markers)
]
#: The character between two columns of a CSV file.
Delimiter = Annotated[str, Field(min_length=1, max_length=1)] | Literal["auto"]
#: The character before the decimals of a number.
DecimalSign = Literal[".", ",", "auto"]


def check_sign(name: str, sign: str) -> None:
    """Refuse a delimiter or comment sign that no CSV file can use."""
    if sign and sign != AUTO and (not sign.isascii() or sign in '"\r\n\0'):
        raise ValueError(f"{name} is {sign!r}; give one plain sign, such as ';' or '#'")


class TabularFile(Pooled):
    drafted: bool = False
    path: PathText
    label: str | tuple[str, ...]
    user: str | None = None
    features: tuple[str, ...] = ()
    categories: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    missing: Annotated[
        Literal["refuse", "drop"] | float | dict[str, _Rule], BeforeValidator(_fills)
    ] = "refuse"
    gaps: NaStrings = None
    values: Annotated[
        dict[str, dict[str, tuple[str, ...]]] | None, BeforeValidator(checked_spellings)
    ] = None
    unseen: Literal["refuse", "zero"] = "refuse"
    classes: tuple[str, ...] = ()
    target: Predicted = "class"
    exclude: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    dates: dict[str, Forms] = Field(default_factory=dict)
    ranges: Annotated[dict[str, tuple[float, float]], BeforeValidator(_ranges)] = Field(
        default_factory=dict
    )

    @model_validator(mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        """Several columns as label make a target of labels, said or not."""
        listed = isinstance(given, dict) and isinstance(given.get("label"), list | tuple)
        if listed and given.get("target", "class") == "class":
            return {**given, "target": "labels"}
        return given

    @model_validator(mode="after")
    def _labels(self) -> TabularFile:
        if (self.target == "labels") == isinstance(self.label, str):
            raise ValueError(
                f"label is {self.label!r}, and target is '{kind_in(self.target)}'; several labels "
                f"are a list of columns, as in label = ['fever', 'cough']"
            )
        if self.target != "labels":
            return self
        if len(self.label) < 2:
            raise ValueError(
                f"label is {list(self.label)!r}, a list of {len(self.label)}; name two columns or "
                f"more, or one without brackets, whose values are then classes"
            )
        if self.classes:
            raise ValueError(
                "classes are given, and label names several columns, which are the labels; leave "
                "classes out"
            )
        Target("labels", tuple(self.label))
        return self

    @model_validator(mode="after")
    def _numbers(self) -> TabularFile:
        if kind_in(self.target) == "number" and self.classes:
            raise ValueError("classes are given, and target is 'number'; leave one of them out")
        labels = (self.label,) if isinstance(self.label, str) else self.label
        if self.user in labels:
            raise ValueError(f"label and user are both '{self.user}'; name two columns")
        needed = next((name for name in self.absent if name in (*labels, self.user)), None)
        if needed is not None:
            raise ValueError(
                f"absent names '{needed}', the label or user column, which no record can lack; "
                f"leave it out of absent"
            )
        return self

    @model_validator(mode="after")
    def _dates(self) -> TabularFile:
        """Every column of dates has a form, and no text is read in two ways."""
        for name, forms in self.dates.items():
            if not forms:
                raise ValueError(f"dates.{name} lists no form; give one, such as '%Y-%m-%d'")
            refuse_two_readings(name, forms)
        return self

    @model_validator(mode="after")
    def _declared(self) -> TabularFile:
        """No value that is declared is a gap at once."""
        known = dict(self.categories) if isinstance(self.categories, dict) else {}
        classes = {self.label: self.classes} if isinstance(self.label, str) else {}
        markers = Markers.given(self.gaps)
        refuse_declared(markers, known, classes)
        if self.values:
            labels = (self.label,) if isinstance(self.label, str) else self.label
            named = () if kind_in(self.target) == "number" else labels
            spelled = Spellings.given(self.values)
            spelled.require((*named, *self.categories), "values")
            spelled.require_known({**known, **classes}, markers, "values")
        return self

    @property
    def has_users(self) -> bool:
        return self.user is not None or is_many(located(self.path, self.data_dir))


class Csv(TabularFile):
    """A CSV file with a header, or a folder or pattern of such files, one per user unless ``user``
    names a column. ``"auto"`` finds encoding, delimiter, decimal sign and header file by file."""

    source: Literal["csv"]
    delimiter: Delimiter = ","
    encoding: str = "utf-8"
    decimal: DecimalSign = "."
    comment: str = Field(default="", max_length=1)
    header: Annotated[int, Field(ge=1, le=1000)] | Literal["auto"] = 1

    @model_validator(mode="after")
    def _signs(self) -> Csv:
        check_sign("delimiter", self.delimiter)
        check_sign("comment", self.comment)
        if self.comment and self.comment == self.delimiter:
            raise ValueError(f"comment and delimiter are both {self.comment!r}; choose two signs")
        return self


class Parquet(TabularFile):
    """A Parquet file, or a folder or pattern of such files, hive-partitioned or not."""

    source: Literal["parquet"]


class Npz(Pooled):
    """A ``.npz`` file with ``features``, ``labels`` and perhaps ``users`` (for partition
    ``natural``)."""

    source: Literal["npz"]
    drafted: bool = False
    path: PathText
    target: Predicted = "class"

    @property
    def has_users(self) -> bool:
        return self.partition == "natural"


class Leaf(Pooled):
    """LEAF-style JSON: a file, a folder of files, or a folder with ``train`` and ``test``."""

    source: Literal["leaf"]
    path: PathText

    @property
    def has_users(self) -> bool:
        return True


class Saved(BaseModel):
    """A federation prepared with ``dpscaffold data prepare`` (its split and preprocessing come with
    it)."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    source: Literal["saved"]
    path: PathText
    mapped: bool = True
    verify: bool = False
    declared_sizes: int | tuple[int, ...] | None = None


_Any = (
    Synthetic
    | Mnist
    | FashionMnist
    | Emnist
    | Emnist47
    | Cifar10
    | Digits
    | Csv
    | Parquet
    | Npz
    | Leaf
    | Saved
)
SOURCES: dict[str, type[BaseModel]] = {
    "synthetic": Synthetic,
    "mnist": Mnist,
    "fashion-mnist": FashionMnist,
    "emnist": Emnist,
    "emnist47": Emnist47,
    "cifar10": Cifar10,
    "digits": Digits,
    "csv": Csv,
    "parquet": Parquet,
    "npz": Npz,
    "leaf": Leaf,
    "saved": Saved,
}


def _named(value: Any) -> Any:
    """Put in the default source; refuse a source or a key that does not exist, suggesting one that
    does."""
    if not isinstance(value, dict):
        return value
    source = value.get("source", "synthetic")
    if not isinstance(source, str) or source not in SOURCES:
        hint = nearest(str(source), SOURCES) or f"; there are {', '.join(SOURCES)}"
        raise ValueError(f"no data source is called '{source}'{hint}")
    known = SOURCES[source].model_fields
    for key in value:
        if key not in known:
            raise ValueError(
                f"source '{source}' has no option '{key}'{nearest(str(key), known)}; it has "
                f"{', '.join(known)}"
            )
    return {"source": source, **value}


DataSettings = Annotated[Annotated[_Any, Field(discriminator="source")], BeforeValidator(_named)]
_ADAPTER: TypeAdapter[Any] = TypeAdapter(DataSettings)


def parse_data(table: dict[str, Any]) -> Any:
    """The settings of a ``[data]`` table.

    >>> parse_data({"source": "mnist", "similarity": 0}).users
    60
    >>> parse_data({"source": "minst"})
    Traceback (most recent call last):
        ...
    dpscaffold.errors.BadInput: data: no data source is called 'minst' (did you mean 'mnist'?)
    """
    try:
        return _ADAPTER.validate_python(table)
    except ValidationError as problem:
        raise BadInput(f"data: {sentence(problem)}") from None
