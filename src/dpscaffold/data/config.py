"""The ``[data]`` table of a configuration: one model per source, told apart by ``source``.

A table without ``source`` is the paper's synthetic federation. Unknown keys, unknown sources and
options that the chosen partition does not use are refused with one sentence.
"""

from __future__ import annotations

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

from dpscaffold.data.meanings import (
    Alike,
    CsvFormat,
    Ends,
    Meanings,
    PathText,
    Shape,
    Sourced,
    Stored,
    Users,
)
from dpscaffold.data.preprocessing import PreprocessingStep, check_order
from dpscaffold.data.sentences import mistake_of
from dpscaffold.data.tables.cells import Spellings, days
from dpscaffold.data.tables.dialect import is_many
from dpscaffold.data.tables.missing import NaStrings, Rule, refuse_declared
from dpscaffold.errors import BadInput, BadValue, nearest
from dpscaffold.federation.schema import Kind, Target

Partition = Literal["similarity", "dirichlet", "natural"]
#: Which options belong to which partition.
OPTIONS = {
    "similarity": {"similarity", "size_spread"},
    "dirichlet": {"alpha", "size_spread"},
    "natural": set[str](),
}
PAPER_STEPS = ("standardise", "unit-norm")
#: Of arrays, which are often scaled already: no step that is fitted on private records.
ARRAY_STEPS = ("unit-norm",)


class _Data(Sourced):
    model_config = ConfigDict(allow_inf_nan=False)
    seed: int = Field(default=0, ge=0)
    """Seed of the synthetic data, of the partition among users and of the split into train and
    test. Example: ``1``"""
    declared_sizes: int | tuple[int, ...] | None = None
    """The users' training sizes as declared to the server: one number, or one per user. Needed for
    neighbours 'add-remove'. Example: ``1000``"""
    test_ratio: float = Field(default=0.2, gt=0, lt=1)
    """The share of each user's records that is kept for testing. Example: ``0.25``"""


class Synthetic(_Data, Users, Shape):
    """The paper's synthetic federation; ``records`` counts train and test together."""

    source: Literal["synthetic"] = "synthetic"
    alpha: float = Field(default=0.0, ge=0)
    """α: how much the users' models differ. Example: ``5.0``"""
    beta: float = Field(default=0.0, ge=0)
    """β: how much the users' features differ. Example: ``5.0``"""
    users: int = Field(default=100, ge=1)
    """M, the number of users. Example: ``50``"""
    records: int = Field(default=5000, ge=2)
    """R, the number of records of each user, train and test together. By default all records are
    used. Example: ``1000``"""
    features: int = Field(default=40, ge=1)
    """d, the number of features. Example: ``20``"""
    classes: int = Field(default=10, ge=2)
    """The number of classes. Example: ``4``"""
    size_spread: float = Field(default=0.0, ge=0)
    """How unequal the users' numbers of records are: the standard deviation of their logarithm.
    Example: ``0.5``"""


class Pooled(_Data, Alike):
    """What all pooled sources share: how records are partitioned and preprocessed.

    ``users`` is M and ``records`` is R, train and test together (as many as there are when not
    given). A user with fewer than ``minimum_records`` records is left out by the natural partition
    and refused by the others.
    """

    users: int | None = Field(default=None, ge=1)
    """M, the number of users. If the data name their users, it may be left out. Example: ``50``"""
    records: int | None = Field(default=None, ge=2)
    """R, the number of records of each user, train and test together. By default all records are
    used. Example: ``1000``"""
    partition: Partition | None = None
    """How records without users are partitioned among them; 'natural' keeps the users that the data
    name. Example: ``"dirichlet"``"""
    similarity: float = Field(default=10.0, ge=0, le=100)
    """The percentage of each user's records that is drawn from all classes alike (partition
    'similarity'). Example: ``0``"""
    alpha: float = Field(default=0.5, gt=0)
    """The concentration of the Dirichlet distribution (partition 'dirichlet'); a small value gives
    uneven shares. Example: ``0.3``"""
    size_spread: float = Field(default=0.0, ge=0)
    """How unequal the users' numbers of records are: the standard deviation of their logarithm.
    Example: ``0.5``"""
    minimum_records: int = Field(default=2, ge=2)
    """A user with fewer records is left out with a note (partition 'natural') or refused (other
    partitions). Example: ``10``"""
    preprocess: tuple[PreprocessingStep, ...] = Field(default=PAPER_STEPS, validate_default=True)
    """The preprocessing steps of the features, in order. Each step states what it is fitted on.
    Value: names or tables of steps: standardise, centre, unit-norm, clip-norm, pca. Example:
    ``["standardise", "unit-norm"]``"""

    @property
    def has_users(self) -> bool:
        """Whether records come with their user."""
        return False

    @property
    def chosen_partition(self) -> Partition:
        """The partition asked for; natural users first where there are any, else similarity."""
        return self.partition or ("natural" if self.has_users else "similarity")

    def _refuse_other_options(self, chosen: Partition) -> None:
        """Refuse options of other partitions that differ from their defaults, as a resolved
        configuration spells out all of them."""
        fields, others = type(self).model_fields, set().union(*OPTIONS.values()) - OPTIONS[chosen]
        stray = sorted(name for name in others if getattr(self, name) != fields[name].default)
        if stray:
            owners = [name for name, options in OPTIONS.items() if stray[0] in options]
            raise BadValue(
                "not-applicable",
                f"{stray[0]} belongs to partition = '{owners[0]}', and the partition is '{chosen}'",
            )

    @model_validator(mode="after")
    def _consistent(self) -> Pooled:
        chosen = self.chosen_partition
        self._refuse_other_options(chosen)
        if chosen == "natural" and not self.has_users:
            raise BadValue(
                "no-user-column",
                "partition = 'natural' needs the user of each record; name the user "
                "column or choose another",
            )
        if chosen != "natural" and self.users is None:
            raise BadValue(
                "missing-key",
                f"users is missing: partition = '{chosen}' needs to know how many there are to be",
            )
        check_order(self.preprocess)
        return self


class Images(Pooled, Stored):
    """Published images. Those of MNIST, Fashion-MNIST and CIFAR-10 are the training files, those of
    both EMNISTs the training and test files together."""

    path: PathText | None = None
    """The folder of datasets; by default $DPSCAFFOLD_DATA. Example: ``"datasets"``"""


class Mnist(Images):
    """MNIST; the defaults are the paper's M = 60, R = 1000 on the 60,000 training images."""

    source: Literal["mnist"]
    users: int | None = Field(default=60, ge=1)
    records: int | None = Field(default=1000, ge=2)


class FashionMnist(Images):
    """Fashion-MNIST, by default partitioned as MNIST is."""

    source: Literal["fashion-mnist"]
    users: int | None = Field(default=60, ge=1)
    records: int | None = Field(default=1000, ge=2)


class Emnist(Images):
    """EMNIST 'balanced'; the defaults are the paper's M = 40, R = 2500 on train and test pooled."""

    source: Literal["emnist"]
    users: int | None = Field(default=40, ge=1)
    records: int | None = Field(default=2500, ge=2)


class Emnist47(Images):
    """The EMNIST-47 subset, partitioned as the paper's EMNIST is."""

    source: Literal["emnist47"]
    users: int | None = Field(default=40, ge=1)
    records: int | None = Field(default=2500, ge=2)


class Cifar10(Images):
    """CIFAR-10 among 50 users of 1000 records."""

    source: Literal["cifar10"]
    users: int | None = Field(default=50, ge=1)
    records: int | None = Field(default=1000, ge=2)


class Digits(Pooled):
    """The 1,797 digits of scikit-learn among 10 users; needs no files."""

    source: Literal["digits"]
    users: int | None = Field(default=10, ge=1)


class Range(Ends):
    """``target = { kind = "number", low = 0, high = 60 }``: a number, and its public range."""

    model_config = ConfigDict(allow_inf_nan=False)
    kind: Literal["number"]
    """What is predicted. Example: ``"number"``"""

    @model_validator(mode="after")
    def _ordered(self) -> Range:
        missing = [name for name in ("low", "high") if getattr(self, name) is None]
        if missing:
            raise BadValue(
                "missing-key",
                f"target.{missing[0]} is missing; give both ends of the range of the numbers",
            )
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
        raise BadValue(
            "not-applicable",
            f"target has kind {given.get('kind')!r}; only a number has more than its name: give "
            f'target = {{ kind = "number", low = 0, high = 60 }}, or target = "class"',
        )
    try:
        return Range.model_validate(given)
    except ValidationError as problem:
        raise BadValue(*mistake_of(problem, Range, "target")) from None


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
            "no-target-range",
            'data.target is "number" without a range; write the range that the numbers can have, '
            'as in target = { kind = "number", low = 0, high = 60 } (low = -1, high = 1 for '
            "numbers that are scaled already): training needs it, since clipping cuts the "
            "gradients of large numbers",
        )
    return None


#: A value that nobody has filled in yet; a configuration that holds one is refused.
BLANK = "FILL IN"


def _ranges(given: Any) -> Any:
    """Ranges by column; a day is written as a text, and read as days since 1970."""
    if not isinstance(given, dict):
        return given
    found = {}
    for name, ends in given.items():
        if not isinstance(ends, list | tuple) or len(ends) != 2:
            raise BadValue("bad-range", f"ranges.{name} is {ends!r}; give [low, high]")
        found[name] = _low_and_high(name, ends)
    return found


def _low_and_high(name: str, ends: list[Any] | tuple[Any, ...]) -> tuple[float, float]:
    try:
        low, high = (days(name, [e], "%Y-%m-%d")[0] if isinstance(e, str) else e for e in ends)
    except BadInput:
        raise BadValue(
            "bad-range",
            f"ranges.{name} is {list(ends)}; give two numbers, or two days such as 2024-12-31",
        ) from None
    if not all(isinstance(e, int | float | np.floating) for e in (low, high)) or not low < high:
        raise BadValue("bad-range", f"ranges.{name} is {list(ends)}; low must be below high")
    return float(low), float(high)


class TabularFile(Pooled, Stored, Meanings):
    drafted: bool = False
    """Whether 'init' drafted the configuration by looking at the records. The privacy statement
    then says so, because this is outside ε. If you remove the key, you vouch that every line is
    known without looking at the records. Example: ``true``"""
    path: PathText
    """The file, or a folder or pattern ('sites/*.csv') of files with the same columns. Example:
    ``"visits.csv"``"""
    label: str | tuple[str, ...]
    """The column to predict. A list of columns with 0 and 1 makes a multi-label target. Example:
    ``"readmitted"``"""
    user: str | None = None
    """The column with the user of each record. Without it, each file of a folder or pattern is one
    user. Example: ``"hospital"``"""
    features: tuple[str, ...] = ()
    """The columns to learn from; by default all other columns. Example: ``["age", "stay"]``"""
    categories: tuple[str, ...] | dict[str, tuple[str, ...]] = ()
    """The categorical columns, or a table of these columns with their values. Values that are given
    are public; otherwise they are read from the data, outside the guarantee. Example: ``{ sex =
    ["f", "m"] }``"""
    missing: Literal["refuse", "drop"] | float | dict[str, Rule] = "refuse"
    """How missing values are treated: 'refuse'; 'drop' the record (whether a record is complete is
    then outside the guarantee); or a number that replaces them. A table gives one rule per column
    ('*' for all others), which may also be 'category' or 'indicator' (missingness becomes a
    feature). Value: 'refuse', 'drop', a number, or a table by column of these, 'indicator' or
    'category'. Example: ``{ age = "indicator", ward = "category", "*" = "drop" }``"""
    unseen: Literal["refuse", "zero"] = "refuse"
    """How a category is treated that is not among the given ones (or, in new rows, not in the
    training data): 'refuse' (predict leaves such rows without a prediction), or 'zero', which is
    none of the known categories. Example: ``"zero"``"""
    classes: tuple[str, ...] = ()
    """The class labels in order. If they are not given, they are read from the data, which is
    outside the guarantee. Example: ``["no", "yes"]``"""
    target: Predicted = "class"
    """What is predicted: a class, a number with its public range, or several labels of 0 and 1 (in
    an npz file 'labels' then has the shape (n, L)). Training maps the range to -1 to 1 and clips
    training labels outside it; predictions and metrics have the label's own units. Choose the range
    without looking at the records. Value: 'class', 'labels', or a table of kind = 'number', low and
    high. Example: ``{ kind = "number", low = 0, high = 60 }``"""
    exclude: tuple[str, ...] = ()
    """Columns to leave out, such as identifiers. Example: ``["patient_id"]``"""
    ranges: Annotated[dict[str, tuple[float, float]], BeforeValidator(_ranges)] = Field(
        default_factory=dict
    )
    """Public ranges of number and date columns. Each column is mapped to -1 to 1, and a value
    outside is clipped to the nearer end. Unlike 'standardise', this reads nothing from the records,
    so a release accepts it. Value: a table by column of [low, high]: two numbers, or two days as
    strings. Example: ``{ age = [0, 110], admitted = ["2020-01-01", "2029-12-31"] }``"""

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
            raise BadValue(
                "conflicting-arguments",
                f"label is {self.label!r}, and target is '{kind_in(self.target)}'; several labels "
                f"are a list of columns, as in label = ['fever', 'cough']",
            )
        if self.target != "labels":
            return self
        if len(self.label) < 2:
            raise BadValue(
                "single-label-list",
                f"label is {list(self.label)!r}, a list of {len(self.label)}; name two columns or "
                f"more, or one without brackets, whose values are then classes",
            )
        if self.classes:
            raise BadValue(
                "conflicting-arguments",
                "classes are given, and label names several columns, which are the labels; leave "
                "classes out",
            )
        Target("labels", tuple(self.label))
        return self

    @model_validator(mode="after")
    def _numbers(self) -> TabularFile:
        if kind_in(self.target) == "number" and self.classes:
            raise BadValue(
                "conflicting-arguments",
                "classes are given, and target is 'number'; leave one of them out",
            )
        labels = (self.label,) if isinstance(self.label, str) else self.label
        if self.user in labels:
            raise BadValue(
                "column-named-twice", f"label and user are both '{self.user}'; name two columns"
            )
        needed = next((name for name in self.absent if name in (*labels, self.user)), None)
        if needed is not None:
            raise BadValue(
                "column-needed",
                f"absent names '{needed}', the label or user column, which no record can lack; "
                f"leave it out of absent",
            )
        return self

    @model_validator(mode="after")
    def _declared(self) -> TabularFile:
        """No value that is declared is a gap at once."""
        known = dict(self.categories) if isinstance(self.categories, dict) else {}
        classes = {self.label: self.classes} if isinstance(self.label, str) else {}
        na = NaStrings.given(self.na_values)
        refuse_declared(na, known, classes)
        if self.values:
            labels = (self.label,) if isinstance(self.label, str) else self.label
            named = () if kind_in(self.target) == "number" else labels
            spelled = Spellings.given(self.values)
            spelled.require((*named, *self.categories), "values")
            spelled.require_known({**known, **classes}, na, "values")
        return self

    @property
    def has_users(self) -> bool:
        return self.user is not None or is_many(Path(self.path).expanduser())


class Csv(TabularFile, CsvFormat):
    """A CSV file with a header, or a folder or pattern of such files, one per user unless ``user``
    names a column. Titles above the header are skipped. ``"auto"`` finds encoding, delimiter and
    decimal sign file by file, from the records, which is outside the guarantee."""

    source: Literal["csv"]


class Parquet(TabularFile):
    """A Parquet file, or a folder or pattern of such files, hive-partitioned or not."""

    source: Literal["parquet"]


class Npz(Pooled, Stored):
    """A ``.npz`` file with ``features``, ``labels`` and perhaps ``users`` (for partition
    ``natural``)."""

    source: Literal["npz"]
    preprocess: tuple[PreprocessingStep, ...] = Field(default=ARRAY_STEPS, validate_default=True)
    """The preprocessing steps of the features, in order; by default rows are scaled to norm 1, for
    which no record is read. Value: names or tables of steps: standardise, centre, unit-norm,
    clip-norm, pca. Example: ``["standardise", "unit-norm"]``"""
    drafted: bool = False
    """Whether 'init' drafted the configuration by looking at the records. The privacy statement
    then says so, because this is outside ε. If you remove the key, you vouch that every line is
    known without looking at the records. Example: ``true``"""
    path: PathText
    """The .npz file. Example: ``"visits.npz"``"""
    target: Predicted = "class"
    """What is predicted: a class, a number with its public range, or several labels of 0 and 1 (in
    an npz file 'labels' then has the shape (n, L)). Training maps the range to -1 to 1 and clips
    training labels outside it; predictions and metrics have the label's own units. Choose the range
    without looking at the records. Value: 'class', 'labels', or a table of kind = 'number', low and
    high. Example: ``{ kind = "number", low = 0, high = 60 }``"""

    @property
    def has_users(self) -> bool:
        return self.partition == "natural"


class Saved(Stored):
    """A federation prepared with ``dpscaffold data prepare`` (its split and preprocessing come with
    it)."""

    source: Literal["saved"]
    path: PathText
    """The folder that 'dpscaffold data prepare' wrote. Example: ``"prepared"``"""
    declared_sizes: int | tuple[int, ...] | None = None
    """The users' training sizes as declared to the server: one number, or one per user. Needed for
    neighbours 'add-remove'. Example: ``1000``"""


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
        raise BadValue("unknown-source", f"no data source is called '{source}'{hint}")
    known = SOURCES[source].model_fields
    for key in value:
        if key not in known:
            raise BadValue(
                "unknown-key",
                f"source '{source}' has no option '{key}'{nearest(str(key), known)}; it has "
                f"{', '.join(known)}",
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
        raise BadInput(*mistake_of(problem, _Any, "data")) from None
