"""What the columns of a table mean, and what follows from it: rules for missing values, classes,
users and categories, notes for people, identifiers among the columns, and the steps of the
preparation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpscaffold.data.prepared import Ranges
from dpscaffold.data.tables.cells import (
    NO_SPELLINGS,
    CellReader,
    Forms,
    Spellings,
    alike_values,
    toml_key,
    toml_text,
)
from dpscaffold.data.tables.codec import LABELS_READ, Coding, by_value, read_labels
from dpscaffold.data.tables.dialect import AUTO, Dialect, TableFile, found_in
from dpscaffold.data.tables.missing import NO_NA_STRINGS, OTHERS, NaStrings, Rule
from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation.schema import MOST_CLASSES, Kind, Prepared, Target
from dpscaffold.privacy.preparation import Remark

if TYPE_CHECKING:
    import pyarrow as pa
else:
    from dpscaffold.data.tables.arrow import pa


@dataclass(frozen=True)
class TableSource:
    """A file and what its columns mean.

    ``features`` are the columns to learn from (all but label and user when empty). ``categories``
    are those to be one-hot encoded: with their values, which are then public, or without, and then
    the values are read from the data. ``missing`` says what to do with a record that lacks a value:
    ``"refuse"`` the file, ``"drop"`` the record, or put a number there (a missing label or user
    cannot be filled, and missing categories get zeros everywhere). ``classes`` are the labels in
    order, where they are known beforehand. ``target`` says whether the label is a class or a
    number (with a public range, as a :class:`Target`); several columns as ``label`` are labels that
    each hold (1) or do not (0). ``exclude`` are columns to leave out, and ``dates`` those that hold
    dates, with their form; they become days since 1970. ``unseen`` says what a category is that is
    not among those given: refused, or zero everywhere; the same holds for raw rows of a model.
    ``missing`` may be a table of rules by column (:mod:`dpscaffold.data.tables.source`). ``path``
    may be a folder or a pattern of files with the same columns; without ``user`` each is a user
    then. ``na_values`` are the texts that represent a missing value next to an empty cell
    (:mod:`dpscaffold.data.tables.missing`), and ``values`` the other spellings of labels and
    categories (:mod:`dpscaffold.data.tables.cells`). ``absent`` are columns that some files may
    lack: their values are missing there. ``ranges`` are public ranges of columns of numbers, which
    are mapped to −1 to 1.
    """

    path: Path
    kind: Literal["csv", "parquet", "held"]
    label: str | tuple[str, ...]
    user: str | None = None
    features: tuple[str, ...] = ()
    categories: Mapping[str, Sequence[str] | None] = field(default_factory=dict)
    missing: Any = "refuse"
    classes: tuple[str, ...] = ()
    dialect: Dialect = field(default_factory=Dialect)
    target: Kind | Target = "class"
    exclude: tuple[str, ...] = ()
    dates: Mapping[str, Forms] = field(default_factory=dict)
    unseen: Literal["refuse", "zero"] = "refuse"
    #: Tables that are held already, by name, in place of files; ``many``: one per user.
    held: tuple[tuple[str, pa.Table], ...] = ()
    many: bool = False
    na_values: NaStrings = NO_NA_STRINGS
    values: Spellings = NO_SPELLINGS
    absent: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def is_optional(self, name: str) -> bool:
        """Whether a file may lack this column: its values are missing there, or nobody reads it."""
        read = not self.features or name in (*self.features, *self.labels, self.user)
        return name in (*self.absent, *self.exclude) or not read

    @property
    def predicts(self) -> Kind:
        """The kind of what is predicted."""
        return self.target if isinstance(self.target, str) else self.target.kind

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of what is predicted."""
        return (self.label,) if isinstance(self.label, str) else self.label


class Codes:
    """Text values numbered in order of appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.parts: list[np.ndarray] = []

    def add(self, column: pa.Array) -> None:
        encoded = column.dictionary_encode()
        known = [
            self.numbers.setdefault(value, len(self.numbers))
            for value in encoded.dictionary.to_pylist()
        ]
        lookup = np.array([*known, -1], dtype=np.int32)
        self.parts.append(lookup[np.asarray(encoded.indices.fill_null(len(known)))])

    def codes(self) -> np.ndarray:
        return np.concatenate(self.parts) if self.parts else np.empty(0, dtype=np.int32)


def code_labels(
    table: TableSource, numbers: dict[str, int], codes: np.ndarray
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(N,) labels counted from 0, and what they represent."""
    texts = list(numbers)
    present = [texts[i] for i in np.unique(codes)]
    classes = table.classes or tuple(sorted(present, key=by_value))
    if not table.classes:
        fraction = next((text for text in present if _is_fraction(text)), None)
        if fraction is not None:
            raise BadInput(
                "bad-labels",
                f"{table.path}: label column '{table.label}' holds {fraction}, a fraction; a "
                f"classifier needs classes (to predict numbers, set target = 'number')",
            )
        if len(classes) > MOST_CLASSES:
            raise BadInput(
                "too-many-classes",
                f"{table.path}: label column '{table.label}' has {len(classes)} different values; "
                f"is it the label?",
            )
    if len(classes) < 2:
        raise BadInput(
            "single-class",
            f"{table.path}: label column '{table.label}' holds a single class, '{classes[0]}'; a "
            "classifier needs at least 2",
        )
    found = read_labels(Target("class", classes), {"": pa.array(texts, pa.string())}, CellReader())
    strange = next((texts[i] for i in np.unique(codes) if not found.known[i]), None)
    if strange is not None:
        raise BadInput(
            "unknown-class",
            f"{table.path}: label '{strange}' is not among classes{nearest(strange, classes)}; "
            f"they are {', '.join(classes[:10])} (values.{toml_key(str(table.label))} reads other "
            f"spellings as one of them)",
        )
    return found.values[codes], classes


def code_label_sets(
    table: TableSource, numbers: Mapping[str, Mapping[str, int]], codes: Mapping[str, np.ndarray]
) -> np.ndarray:
    """(N,) sets of labels from the coded texts of every label column."""
    held = {
        name: pa.array([*numbers[name]], pa.string()).take(pa.array(codes[name]))
        for name in table.labels
    }
    found = read_labels(Target("labels", table.labels), held, CellReader())
    if found.problem:
        raise BadInput("bad-labels", f"{table.path}: {found.problem}")
    return found.values


def code_users(numbers: dict[str, int], codes: np.ndarray) -> tuple[np.ndarray, tuple[str, ...]]:
    """(N,) users counted from 0 in the order of their names, and the names."""
    texts = list(numbers)
    present = sorted({texts[i] for i in np.unique(codes)}, key=by_value)
    index = {text: i for i, text in enumerate(present)}
    lookup = np.array([index.get(text, -1) for text in texts], dtype=np.int64)
    return lookup[codes], tuple(present)


def category_values(table: TableSource, name: str, numbers: dict[str, int]) -> tuple[str, ...]:
    given = table.categories[name]
    if not given:
        return tuple(sorted(numbers, key=by_value))
    strange = next((text for text in numbers if text not in given), None)
    if strange is not None and table.unseen == "refuse":
        raise BadInput(
            "unknown-category",
            f"{table.path}: column '{name}' holds '{strange}'{nearest(strange, given)}; its "
            f"categories are {', '.join(given)} (unseen = 'zero' takes others for none of them, "
            f"values.{toml_key(name)} reads other spellings as one of them)",
        )
    return tuple(given)


#: A column with this many categories or more is worth a word.
MANY_CATEGORIES = 100


def left_out(kept: np.ndarray, na_values: Mapping[str, int], most: int = 4) -> str:
    """How many records were left out because they lack a value, and of which columns.

    >>> left_out(np.array([True, False, True]), {"site": 1})
    'warning: 1 of 3 records lack a value and were left out: site (1)'
    """
    if kept.all():
        return ""
    named = [f"{name} ({count})" for name, count in na_values.items()]
    more = f" and {len(named) - most} more columns" if len(named) > most else ""
    return (
        f"warning: {int((~kept).sum())} of {len(kept)} records lack a value and were left out: "
        f"{', '.join(named[:most])}{more}"
    )


def notes_on(
    table: TableSource,
    categories: dict[str, tuple[str, ...]],
    target: Target,
    dropped: str,
    records: int,
) -> tuple[str, ...]:
    """What was decided, for whoever reads the file."""
    notes = [f"column '{table.label}' holds the numbers to be predicted"]
    if target.kind == "labels":
        notes = [f"each of these columns is a label of its own: {', '.join(target.classes)}"]
    if target.kind == "class":
        names = target.classes
        shown = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
        notes = [
            f"column '{table.label}' has {len(names)} classes, numbered in this order: {shown}"
        ]
    notes += [
        f"column '{name}' is one-hot: {', '.join(values[:12])}{', …' if len(values) > 12 else ''}"
        for name, values in categories.items()
    ]
    if target.kind == "class":
        notes += alike_values(str(table.label), target.classes, "class")
    for name, values in categories.items():
        notes += alike_values(name, values, "category")
    if dropped:
        notes.append(dropped)
    if isinstance(table.missing, float | int):
        notes.append(f"missing values were replaced by {table.missing:g}")
    for name, values in categories.items():
        if len(values) >= min(MANY_CATEGORIES, max(records, 3)):
            unique = "a value of its own for every record" if len(values) >= records else ""
            said = unique or f"{len(values)} different values"
            notes.append(
                f"warning: column '{name}' has {said}; if it names people or visits, exclude it"
            )
    return tuple(notes)


#: What to write in place of a rule that leaves records out.
NOT_DROPPED = (
    'missing = { COLUMN = "indicator", "*" = 0.0 } (records without a label must be taken out of '
    "the files)"
)


def ranges_of(table: TableSource, coding: Coding) -> Ranges:
    """The step that maps the columns of numbers with a range."""
    stray = next((name for name in table.ranges if name not in coding.numbers), None)
    if stray is not None:
        raise BadInput(
            "unknown-column",
            f"{table.path}: ranges names '{stray}'{nearest(stray, coding.numbers)}, which is no "
            f"column of numbers to learn from; they are {', '.join(coding.numbers[:8]) or 'none'}",
        )
    ends = np.array([[-np.inf], [np.inf]]).repeat(coding.features, axis=1)
    for j, name in enumerate(coding.numbers):
        ends[:, j] = table.ranges.get(name, ends[:, j])
    return Ranges(ends[0], ends[1], tuple(name for name in coding.numbers if name in table.ranges))


def _ranged(target: Target) -> str:
    """What is done to numbers with a range."""
    return (
        f"Labels were mapped from their given range, {target.low:g} to {target.high:g}, to -1 to "
        f"1, and cut to it, record by record (no fit)."
    )


_LABELS = Remark(LABELS_READ, "unprotected", remedy='classes = ["…", "…"]')

#: A record that maps to nothing changes R_i, which neighbours of every kind leave as it is.
LEFT_OUT = (
    "Records with missing values were left out: whether a record is complete, and what the number "
    "of complete ones decides (batches, divisors, noise)."
)


def remark_on_guesses(dialect: Dialect, files: Sequence[TableFile]) -> Remark | None:
    """What is said of keys that are ``"auto"``: a byte of one record can change what is guessed,
    and with it how all other records of its file are read."""
    guessed = [name for name, value in vars(dialect).items() if value == AUTO]
    if not guessed:
        return None
    keys = " and ".join(f"data.{name}" for name in guessed)
    said = (
        f"How the files are written was guessed from their records ({keys} = 'auto'), so one "
        f"record can change how all others are read."
    )
    lines = []
    for name in guessed:
        values = found_in((file.path.name, vars(file.dialect)[name]) for file in files)
        only, *others = values
        line = f"data.{name} = {toml_text(only)}"
        if others:
            line = f"data.{name}, with all files saved alike (found: {listed_by_value(values)})"
        lines.append(line)
    return Remark(said, "unprotected", remedy=" and ".join(lines))


def listed_by_value(values: Mapping[str, Sequence[str]], most: int = 4) -> str:
    """Each value and the files that have it.

    >>> listed_by_value({"utf-8": ["a.csv", "c.csv"], "cp1252": ["b.csv"]})
    '"utf-8" in a.csv, c.csv; "cp1252" in b.csv'
    """
    parts = []
    for value, names in values.items():
        more = f" and {len(names) - most} more" if len(names) > most else ""
        parts.append(f"{toml_text(value)} in {', '.join(names[:most])}{more}")
    return "; ".join(parts)


def preparation_of(
    table: TableSource,
    coding: Coding,
    files: Sequence[TableFile],
) -> tuple[Prepared, ...]:
    """How the file's columns become features, and what that says about private records.
    ``files`` are those that were read, each with its own dialect."""
    steps: list[Prepared] = [coding]
    if table.ranges:
        steps.append(ranges_of(table, coding))
    if table.predicts == "class" and not table.classes:
        steps.append(_LABELS)
    if isinstance(table.target, Target) and table.target.low is not None:
        steps.append(Remark(_ranged(table.target), "public"))
    rules = table.missing.values() if isinstance(table.missing, Mapping) else [table.missing]
    if table.kind == "csv":
        guesses = remark_on_guesses(table.dialect, files)
        steps += [guesses] if guesses else []
    if "drop" in rules:
        steps.append(Remark(LEFT_OUT, "unprotected", remedy=NOT_DROPPED))
    for constant in dict.fromkeys(rule for rule in rules if isinstance(rule, int | float)):
        filled = f"Missing values were replaced by {constant:g}, a constant (no fit)."
        steps.append(Remark(filled, "none needed"))
    return tuple(steps)


def _is_fraction(text: str) -> bool:
    try:
        return not float(text).is_integer()
    except ValueError:
        return False


def rule_of(table: TableSource, name: str) -> Rule:
    """The rule of one column.

    >>> from pathlib import Path
    >>> table = TableSource(Path("a.csv"), "csv", "ill", missing={"age": "indicator", "*": "drop"})
    >>> rule_of(table, "age"), rule_of(table, "stay")
    ('indicator', 'drop')
    """
    rules: Mapping[str, Rule] | Rule = table.missing
    if not isinstance(rules, Mapping):
        return rules
    found = rules.get(name, rules.get(OTHERS, "refuse"))
    if name in (*table.labels, table.user) and found not in ("refuse", "drop"):
        return "refuse"
    return found


def for_the_rest(table: TableSource) -> Literal["refuse", "drop"] | float:
    """What holds for columns without a rule of their own, as one word or number."""
    rules: Mapping[str, Rule] | Literal["refuse", "drop"] | float = table.missing
    if not isinstance(rules, Mapping):
        return rules
    others = rules.get(OTHERS)
    if isinstance(others, int | float):
        return float(others)
    return "drop" if "drop" in rules.values() else "refuse"


def check_rules(table: TableSource, numbers: tuple[str, ...], texts: tuple[str, ...]) -> None:
    """Refuse rules for columns that are not there, or that do not suit them."""
    if not isinstance(table.missing, Mapping):
        return
    known = (*numbers, *texts, *table.labels, *([table.user] if table.user else ()), OTHERS)
    for name, rule in table.missing.items():
        if name not in known:
            raise BadInput(
                "unknown-column",
                f"missing names the column '{name}'{nearest(name, known)}, which is no feature, "
                f"label or user of {table.path}",
            )
        if name in texts and rule == "indicator":
            raise BadInput(
                "wrong-column-kind",
                f"missing.{name} is 'indicator', and the column holds categories; use 'category', "
                f"'drop' or 'refuse'",
            )
        if name in numbers and rule == "category":
            raise BadInput(
                "wrong-column-kind",
                f"missing.{name} is 'category', and the column holds numbers; use a number, "
                f"'indicator', 'drop' or 'refuse'",
            )


def check_na_strings(table: TableSource, names: Sequence[str]) -> None:
    """Refuse NA strings for a column that is not there."""
    for name, _ in table.na_values.columns:
        if name not in (*names, OTHERS):
            raise BadInput(
                "unknown-column",
                f"na_values names the column '{name}'{nearest(name, names)}, which is not in "
                f"{table.path}",
            )


#: Records from which on a column is evaluated, and those that are looked at: enough to tell an
#: identifier, and memory stays bounded however long a table is.
LEAST, MOST = 20, 200_000
#: From here on float32 does not tell neighbouring integers apart.
COARSE = 1 << 24


class Identifiers:
    """Finds whole-number columns in which no two records agree, block by block, and those whose
    numbers are too long to be told apart, as identifiers are.

    >>> found = Identifiers({0: "visit", 1: "age", 2: "insurance"})
    >>> n = np.arange(30.0)
    >>> found.add(np.stack([n, n % 7, 4e9 + 100 * n], axis=1).astype(np.float32))
    >>> [name for name, _ in found.named()]
    ['visit', 'insurance']
    """

    def __init__(self, columns: Mapping[int, str]) -> None:
        self._open = dict(columns)  # the places of columns that may still be identifiers
        self._seen: dict[int, list[np.ndarray]] = {place: [] for place in columns}
        self._rows = 0

    def add(self, rows: np.ndarray) -> None:
        """Look at further records, (N, d)."""
        rows = rows[: MOST - self._rows]
        if not len(rows):
            return
        self._rows += len(rows)
        for place in list(self._open):
            column = rows[:, place]
            whole = bool(np.isfinite(column).all() and (column == np.floor(column)).all())
            unique = len(np.unique(column)) == len(column)
            if whole and (unique or _coarse(column)):
                self._seen[place].append(column.copy())
            else:
                del self._open[place], self._seen[place]

    def named(self) -> Iterator[tuple[str, str]]:
        """Each such column and what is said of it."""
        for place, name in self._open.items() if self._rows >= LEAST else ():
            column = np.concatenate(self._seen[place])
            if len(np.unique(column)) == len(column):
                yield name, "has a number of its own for every record"
            elif _coarse(column) and len(np.unique(column)) > 1:
                yield name, f"holds whole numbers beyond {COARSE}, which a model cannot tell apart"

    def notes(self) -> tuple[str, ...]:
        """A sentence about each."""
        advice = "if it names people or visits, exclude it"
        return tuple(f"warning: column '{name}' {said}; {advice}" for name, said in self.named())


def _coarse(column: np.ndarray) -> bool:
    """Whether most numbers are too long for float32."""
    return bool((np.abs(column) > COARSE).mean() > 0.5)
