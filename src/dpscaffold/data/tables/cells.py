"""How single columns of a table are read: texts, numbers and dates, whatever they are read for.

A column is an Arrow array, of texts or of typed values. Every cell is read by itself: no cell
changes how another one is read.

Files spell one value in several ways ("Yes", "ja" and "ys" for "yes"). Which spellings mean the
same is for people to say (``data.values``): each would otherwise be a class, category or user of
its own. Blanks around a text do not count. Values that differ only in how they are written
(``Köln`` and ``KÖLN``, ``1`` and ``true``) are pointed out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from dpscaffold.data.tables.missing import (
    BLANKS,
    NO_NA_STRINGS,
    NUMBER,
    NaStrings,
    SeenNaStrings,
    numbers_without_na,
    respelled,
    tidy,
    with_point,
    without_na,
)
from dpscaffold.errors import BadInput, BadValue, nearest

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc
else:
    from dpscaffold.data.tables.arrow import pa, pc

#: A column, and each of its values with the other spellings of it.
Columns = tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...]


@dataclass(frozen=True)
class Spellings:
    """The values of columns, each with its other spellings.

    >>> known = Spellings.given({"ready": {"yes": ["Yes", "ja"], "no": ["nein"]}})
    >>> known.of("ready"), known.of("age")
    ({'Yes': 'yes', 'ja': 'yes', 'nein': 'no'}, {})
    """

    columns: Columns = ()

    @classmethod
    def given(cls, values: Mapping[str, Mapping[str, Sequence[str]]] | None) -> Spellings:
        """Those of ``data.values``."""
        return cls(
            tuple(
                (name, tuple((value, tuple(listed)) for value, listed in table.items()))
                for name, table in (values or {}).items()
            )
        )

    def of(self, name: str) -> dict[str, str]:
        """The value of every other spelling in a column."""
        pairs = dict(self.columns).get(name, ())
        return {text: value for value, listed in pairs for text in listed}

    def among(self, names: Iterable[str]) -> Columns:
        """What is said of these columns."""
        wanted = {*names}
        return tuple(entry for entry in self.columns if entry[0] in wanted)

    def require(self, names: Iterable[str], key: str) -> None:
        """Refuse a column whose values are not texts to be told apart."""
        known = [*names]
        for name, _ in self.columns:
            if name not in known:
                raise BadInput(
                    "unknown-column",
                    f"{key} names '{name}'{nearest(name, known)}, which is neither a label of "
                    f"classes nor in categories ({', '.join(known) or 'none'}); list it in "
                    f"categories, or leave it out of {key}",
                )

    def require_known(self, known: Mapping[str, Sequence[str]], na: NaStrings, key: str) -> None:
        """Refuse a value that is not among those that are given for a column, a spelling that is
        one of them, and one that means missing."""
        for name, pairs in self.columns:
            given = known.get(name) or ()
            for value, listed in pairs:
                if given and value not in given:
                    raise BadInput(
                        "unknown-category",
                        f"{key}.{name} reads spellings as '{value}', which is not among the given "
                        f"values of the column ({', '.join(given[:8])}); name one of these",
                    )
                both = next((text for text in listed if text in given), None)
                if both is not None:
                    raise BadInput(
                        "value-named-twice",
                        f"{key}.{name} reads '{both}' as '{value}', and '{both}' is among the "
                        f"given values of the column; take it out of one of them",
                    )
                gap = next((text for text in (value, *listed) if text in na.of(name)), None)
                if gap is not None:
                    raise BadInput(
                        "value-named-twice",
                        f"{key}.{name} and na_values both name '{gap}'; take it out of one of them",
                    )


def toml_text(value: str) -> str:
    """A text of TOML, which takes no DEL as it is."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(name: str) -> str:
    """A key of TOML, in quotes where it needs them.

    >>> toml_key("ready"), toml_key("blood pressure")
    ('ready', '"blood pressure"')
    """
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml_text(name)


def written(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    """The line of a configuration that reads spellings of a column as one value.

    >>> written("ready", {"yes": ["Yes", "ja"]})
    'values.ready = { yes = ["Yes", "ja"] }'
    """
    pairs = (
        f"{toml_key(value)} = [{', '.join(map(toml_text, listed))}]"
        for value, listed in groups.items()
    )
    return f"values.{toml_key(name)} = {{ {', '.join(pairs)} }}"


#: Every text is a value of its own.
NO_SPELLINGS = Spellings()


def checked_spellings(given: Any) -> Any:
    """Spellings as they are given, without blanks around them; refused where one represents two
    values, or where something is no text."""
    if given is None:
        return None
    if not isinstance(given, dict) or not all(isinstance(table, dict) for table in given.values()):
        raise BadValue(
            "not-a-table",
            f"values is {given!r}; give a table by column, such as "
            f"{{ ready = {{ yes = ['Yes', 'ja'] }} }}",
        )
    return {name: _checked(f"values.{name}", table) for name, table in given.items()}


def _checked(key: str, table: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    taken: dict[str, str] = {value.strip(BLANKS): value for value in table}
    for value, listed in table.items():
        if not isinstance(listed, list | tuple) or not all(isinstance(t, str) for t in listed):
            raise BadValue(
                "not-a-list",
                f'{key}.{value} is {listed!r}; give a list of texts, as in ["Yes", "ja"]',
            )
        plain = dict.fromkeys(text.strip(BLANKS) for text in listed)
        plain.pop(value.strip(BLANKS), None)
        for text in plain:
            if text in taken:
                raise BadValue(
                    "value-named-twice",
                    f"{key} reads '{text}' as '{value}', and it already means '{taken[text]}' "
                    f"already; name it once",
                )
            if not text:
                raise BadValue(
                    "empty-text",
                    f"{key}.{value} holds an empty text; empty cells are missing values",
                )
            taken[text] = value
        found[value.strip(BLANKS)] = tuple(plain)
    return found


_ONE = {"true": "1", "false": "0"}


def alike(values: Iterable[str]) -> list[tuple[str, ...]]:
    """The values that may be the same, together; values of their own are left out.

    >>> alike(["Köln", "KÖLN", "Bonn", "1", "true"])
    [('Köln', 'KÖLN'), ('1', 'true')]
    """
    groups: dict[str, list[str]] = {}
    for value in values:
        groups.setdefault(_folded(value), []).append(value)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def _folded(value: str) -> str:
    text = " ".join(value.split()).casefold()
    text = _ONE.get(text, text)
    try:
        return f"{float(text):.17g}"
    except ValueError:
        return text


#: Words for yes and for no, as forms in several languages have them.
_YES = "yes y ja j oui o si sí sì s sim tak t ano da kyllä jah evet true wahr vrai vero"
_NO = "no n nein non não nao nie ne nee nej nei ei hayır false falsch faux falso"
_ANSWERS = dict.fromkeys(_YES.split(), "yes") | dict.fromkeys(_NO.split(), "no")


def same_values(counts: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """The values that seem to be one, by the most frequent of them: those that differ in capitals
    or blanks only, and yes and no in several languages.

    >>> same_values({"ja": 5, "nein": 7, "yes": 6, "No": 2, "maybe": 1})
    {'nein': ('No',), 'yes': ('ja',)}
    """
    groups: dict[str, list[str]] = {}
    for value in counts:
        groups.setdefault(_ANSWERS.get(_folded(value), _folded(value)), []).append(value)
    found = {}
    for group in groups.values():
        first = max(group, key=lambda value: counts[value])
        if len(group) > 1:
            found[first] = tuple(value for value in group if value != first)
    return dict(sorted(found.items()))


def alike_values(name: str, values: Iterable[str], what: str) -> tuple[str, ...]:
    """A warning of a column whose values may be the same; ``what`` each of them is.

    >>> alike_values("ill", ["JA", "ja", "nein"], "class")[0][:61]
    "warning: column 'ill' holds 'JA' and 'ja': each is a class of"
    """
    groups = same_values(dict.fromkeys(values, 1))
    if not groups:
        return ()
    first, others = next(iter(groups.items()))
    shown = " and ".join(f"'{value}'" for value in (first, *others)[:3])
    more = f" (and {len(groups) - 1} more such)" if len(groups) > 1 else ""
    return (
        f"warning: column '{name}' holds {shown}{more}: each is a {what} of its own; if they are "
        f"one, add {written(name, groups)} to [data]",
    )


def alike_users(name: str | None, users: Iterable[str]) -> tuple[str, ...]:
    """A warning of users who may be the same. It names none of them: that somebody took part may be
    what is hidden.

    >>> alike_users("site", ["Bonn", "BONN"])[0][:71]
    "warning: 2 names in column 'site' differ in capitals or blanks only: ea"
    """
    count = sum(len(group) for group in alike(users))
    if name is None or not count:
        return ()
    return (
        f"warning: {count} names in column '{name}' differ in capitals or blanks only: each is a "
        f"user of its own; if they are one, write them alike",
    )


#: The form of a column's dates (strptime's codes), or several of them.
Forms = str | tuple[str, ...]


@dataclass(frozen=True)
class CellReader:
    """How the cells of a table are read: its NA strings, spellings and dates by column, and the
    decimal sign of its texts. ``seen`` collects the NA strings that were found.

    >>> reader = CellReader(NaStrings((("*", ("-9",)),)), decimal=",")
    >>> [part.tolist() for part in reader.numbers("age", pa.array([" 31,5", "-9,0", "x"]))]
    [[31.5, nan, nan], [False, False, True]]
    """

    na: NaStrings = NO_NA_STRINGS
    spellings: Spellings = NO_SPELLINGS
    dates: Mapping[str, Forms] = field(default_factory=dict)
    decimal: str = "."
    seen: SeenNaStrings | None = None

    def texts(self, name: str, column: pa.Array) -> tuple[pa.Array, np.ndarray]:
        """A column as texts without blanks around them and with one spelling of each value, null
        where a value is missing; and which cells are not text, (N,) bool."""
        text, wrong = as_text(column, name)
        plain = tidy(without_na(text, self.na.of(name), seen=self._seen(name)))
        return respelled(plain, self.spellings.of(name)), wrong

    def numbers(self, name: str, column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """A column of numbers or dates as float32 (N,), NaN where a value is missing or is no
        number; and which cells hold something else, (N,) bool."""
        form = self.dates.get(name)
        if form is not None:
            text, wrong = self.texts(name, column)
            values, strange = _read_days(text.to_pylist(), name, form)
            return values, wrong | strange
        column = _decoded(column)
        if _is_number(column.type):
            known = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
            known = numbers_without_na(known, self.na.of(name), self._seen(name))
            return _float32(known), np.zeros(len(column), dtype=bool)
        if not _is_text(column.type):
            raise BadInput(
                "not-numbers",
                f"column '{name}' holds {column.type}, and numbers are expected; list it in "
                f"categories or dates, or leave it out (exclude)",
            )
        text, wrong = as_text(column, name)
        plain = without_na(text, self.na.of(name), True, self.decimal, self._seen(name))
        plain = with_point(pc.utf8_trim_whitespace(tidy(plain)), self.decimal)
        right = pc.match_substring_regex(plain, NUMBER)
        values = _float32(pc.if_else(right, plain, pa.scalar(None, pa.string())))
        return values, wrong | ~right.fill_null(True).to_numpy(zero_copy_only=False)

    def _seen(self, name: str) -> tuple[SeenNaStrings, str] | None:
        return None if self.seen is None else (self.seen, name)


def as_text(column: pa.Array, name: str = "") -> tuple[pa.Array, np.ndarray]:
    """A column as texts, and which cells are bytes that are no text, (N,) bool; these are null."""
    if pa.types.is_dictionary(column.type):  # its values may be of a kind that cannot be taken
        column = column.dictionary.cast(pa.string()).take(column.indices)
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("s"), safe=False)  # a form of dates has no more
    try:
        text = column.cast(pa.string())
        text.validate(full=True)
        return text, np.zeros(len(column), dtype=bool)
    except pa.ArrowInvalid:
        raw = pc.cast(column, pa.large_binary()).to_pylist()
    except pa.ArrowException:
        raise BadInput(
            "not-text",
            f"column '{name}' holds {column.type}, and texts are expected; leave it out (exclude)",
        ) from None
    texts = [None if value is None else _utf8(value) for value in raw]
    wrong = [text is None and value is not None for text, value in zip(texts, raw, strict=True)]
    return pa.array(texts, pa.string()), np.array(wrong, dtype=bool)


def _utf8(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _decoded(column: pa.Array) -> pa.Array:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_number(kind: pa.DataType) -> bool:
    tests = (
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_boolean,
        pa.types.is_null,
    )
    return any(test(kind) for test in tests)


def _is_text(kind: pa.DataType) -> bool:
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(kind) for test in tests)


def _float32(column: pa.Array) -> np.ndarray:
    values = column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False)
    return np.asarray(values, dtype=np.float32)


def forms_in(forms: Forms) -> tuple[str, ...]:
    """The forms of a column, one or several."""
    return (forms,) if isinstance(forms, str) else forms


def refuse_two_readings(name: str, forms: Forms) -> None:
    """Refuse forms of a column that read the same text as different days.

    >>> refuse_two_readings("born", ("%d.%m.%Y", "%Y-%m-%d"))
    """
    for form, other in permutations(forms_in(forms), 2):
        text = _PROBE.strftime(form)
        try:
            read = (datetime.strptime(text, form), datetime.strptime(text, other))
        except ValueError:
            continue
        if read[0].date() != read[1].date():
            raise BadInput(
                "ambiguous-date",
                f"dates.{name} lists {form} and {other}, which read {text} as different days; "
                f"keep one of them, and write the dates of the other files in another form",
            )


#: A day whose day, month and year differ in every form.
_PROBE = datetime(2003, 2, 1)


def days(name: str, cells: Sequence[Any], form: Forms) -> np.ndarray:
    """Dates of a form (strptime's codes), or of the first of several that fits, as days since
    1970-01-01, (N,) float32, NaN where one is missing.

    >>> days("born", ["02.01.1970", None, "1970-01-03"], ("%d.%m.%Y", "%Y-%m-%d")).tolist()
    [1.0, nan, 2.0]
    """
    out = np.full(len(cells), np.nan, dtype=np.float32)
    first, forms = datetime(1970, 1, 1), forms_in(form)
    for row, value in enumerate(cells):
        if value is None:
            continue
        try:
            when = value if isinstance(value, datetime) else _when(str(value), forms)
        except ValueError:
            raise BadInput(
                "not-a-date",
                f"column '{name}' holds '{value}', which is no date of the form "
                f"{' or '.join(forms)}; correct the value, or add its form to dates.{name}",
            ) from None
        out[row] = (when.replace(tzinfo=None) - first).total_seconds() / 86400
    return out


#: How a typed time of a Parquet file or a data frame is written; it needs no form.
_TYPED = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?")


def _when(text: str, forms: tuple[str, ...]) -> datetime:
    """The day and time of the first form that fits."""
    if _TYPED.fullmatch(text):
        return datetime.fromisoformat(text)
    for form in forms[:-1]:
        try:
            return datetime.strptime(text, form)
        except ValueError:
            continue
    return datetime.strptime(text, forms[-1])


def _read_days(
    cells: Sequence[str | None], name: str, form: Forms
) -> tuple[np.ndarray, np.ndarray]:
    """Days since 1970, NaN where there is no date, and which cells hold something else."""
    wrong = np.zeros(len(cells), dtype=bool)
    try:
        return days(name, cells, form), wrong
    except BadInput:  # rare, so cells are read one by one only then
        pass
    values = np.full(len(cells), np.nan, dtype=np.float32)
    for row, cell in enumerate(cells):
        try:
            values[row] = days(name, [cell], form)[0]
        except BadInput:
            wrong[row] = True
    return values, wrong
