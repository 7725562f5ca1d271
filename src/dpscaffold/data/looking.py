"""A look at a table, to draft the configuration that reads it: what each column seems to be, and
why.

The look reads private records, so it is for whoever may see them, and no ε covers it; what is
drafted is written down for people to check.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from dpscaffold.data.cell_kinds import but_for, form_of, in_thousands, is_compact, numbers_in
from dpscaffold.data.gap_guesses import markers_in, pointed_out
from dpscaffold.data.markers import BLANKS
from dpscaffold.data.readers.columns import common_columns, read_batches, require_column
from dpscaffold.data.readers.files import (
    AUTO,
    OTHERS,
    UNKNOWN,
    Dialect,
    Format,
    TableFile,
    is_many,
    table_files,
)
from dpscaffold.data.readers.marked import tidy
from dpscaffold.data.table_coding import by_value, held_labels
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Target

Role = Literal["label", "user", "number", "category", "date", "left out"]
#: How many rows are looked at in all, the same number of every file.
ROWS = 2000
#: How much of a table the rows are drawn from, from its beginning: reading that takes seconds.
MOST_BYTES = 1 << 29
#: Names under which labels and sites usually go.
LABELS = r"label|target|y|class|outcome|diagnosis|readmitted|readmission|died|dead|death|ill|event"
SITES = (
    r"(site|hospital|clinic|centre|center|institution|facility|practice|user|client|klinik|"
    r"krankenhaus|standort|zentrum|praxis|h[oô]pital|clinique|[eé]tablissement|ospedale|"
    r"cl[ií]nica|centro|sede|ziekenhuis)[ _.-]?(id|nr|no|number|name|code)?"
)
#: Parts of a site, taken for sites only where no column names one.
WARDS = r"ward|department|unit|station"
IDENTIFIERS = r"(^|_)(id|nr|no|num|number|uuid|mrn|case|patient|pid|visit|name|ssn)(_|$)"
#: A text column with more values than this is not taken for a category.
MOST_CATEGORIES = 40
#: A label that holds numbers with more values than this is taken for a number, not for classes.
MOST_CLASSES = 20


@dataclass(frozen=True)
class Column:
    """One column: what it seems to be, why, and whether values are missing. ``gaps`` are the texts
    that seem to stand for a missing value, ``maybe`` the values that might; and in how many
    rows."""

    name: str
    role: Role
    why: str
    missing: bool = False
    form: str = ""
    values: tuple[str, ...] = ()
    gaps: Mapping[str, int] = field(default_factory=dict)
    maybe: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Look:
    """What was found in a table; ``target`` has the range that a number seems to have."""

    path: Path
    kind: Format
    dialect: Dialect
    columns: tuple[Column, ...]
    users: int
    by_file: bool
    target: Target
    rows: int

    def of(self, role: Role) -> list[Column]:
        """The columns of one role."""
        return [column for column in self.columns if column.role == role]


def look(path: Path, label: str | None = None, user: str | None = None, rows: int = ROWS) -> Look:
    """Look at some rows of every file and guess what the columns are. ``label`` may name several
    columns, with commas between them."""
    kind = kind_of(path)
    files = table_files(path, kind, UNKNOWN)
    names = common_columns(files)
    told = _labels_in(label, names)
    for wanted in told:
        require_column(path, wanted, names, "label")
    if user is not None:
        require_column(path, user, names, "user")
    strange = {} if kind == "csv" else _strange(files)
    names = [name for name in names if name not in strange or name in (*told, user)]
    cells = _sample(files, names, rows)
    seen = len(next(iter(cells.values()))) if cells else 0
    if not seen:
        raise BadInput(f"{path} holds no record; name a table with some")
    gaps = {name: markers_in(cells[name]) for name in names}
    cells = {name: _without(cells[name], gaps[name]) for name in names}
    chosen = told or (_label(names, cells),)
    for name in chosen if len(chosen) > 1 else ():
        held_labels([cell for cell in cells[name] if cell is not None], name)
    site = user or _site(names, cells, chosen, files)
    counts = {name: _counted(files, name, gaps[name]) for name in chosen}
    target = _target(path, counts)
    columns = [
        _with_gaps(
            _label_column(name, counts[name], target, bool(told))
            if name in chosen
            else _column(name, cells[name], site, user is not None),
            gaps[name],
            cells[name],
        )
        for name in names
    ]
    columns += [
        Column(name, "left out", f"it holds {held}, neither numbers nor texts")
        for name, held in strange.items()
        if name not in names
    ]
    by_file = site is None and is_many(path)
    shared = _shared([file.dialect for file in files])
    users = len(files) if by_file else len(set(cells[site]) - {None}) if site else 0
    return Look(path, kind, shared, tuple(columns), users, by_file, target, seen)


def _strange(files: Sequence[TableFile]) -> dict[str, str]:
    """The columns of Parquet files that hold neither numbers nor texts, and what they hold."""
    found: dict[str, str] = {}
    for file in files:
        for column in pa.parquet.read_schema(file.path):
            kind = column.type
            if pa.types.is_nested(kind) or pa.types.is_duration(kind) or _is_binary(kind):
                found.setdefault(column.name, str(kind))
    return found


def _is_binary(kind: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or fixed)


def _without(cells: list[str | None], gaps: Mapping[str, int]) -> list[str | None]:
    """The cells with nothing in place of what seems to stand for it."""
    if not gaps:
        return cells
    return [None if cell is None or cell.strip(BLANKS) in gaps else cell for cell in cells]


def _with_gaps(column: Column, gaps: Mapping[str, int], cells: list[str | None]) -> Column:
    """A column with what seems to stand for a missing value, where the column is used."""
    if column.role == "left out":
        return column
    maybe = pointed_out(cells)
    why = column.why
    if gaps:
        why += f", but for {_some(gaps)}: taken for missing"
    if maybe:
        why += f"; does {_some(maybe)} mean missing?"
    return replace(column, why=why, gaps=gaps, maybe=maybe)


def _some(texts: Iterable[str], most: int = 3) -> str:
    """The first of some texts, and how many more there are."""
    quoted = [f"'{text}'" for text in texts]
    more = f" and {len(quoted) - most} more" if len(quoted) > most else ""
    return ", ".join(quoted[:most]) + more


def _shared(dialects: list[Dialect]) -> Dialect:
    """The dialect of all files, or one to be found file by file; a sign of comments that some use
    does no harm to the others."""
    comment = max(dialect.comment for dialect in dialects)
    headers = {dialect.header for dialect in dialects}
    header = headers.pop() if len(headers) == 1 else AUTO
    alike = {replace(dialect, comment=comment, header=header) for dialect in dialects}
    return alike.pop() if len(alike) == 1 else Dialect(AUTO, AUTO, AUTO, comment, header)


def _labels_in(label: str | None, names: list[str]) -> tuple[str, ...]:
    """The columns that a label names: itself, or several with commas between them."""
    if label is None or label in names or "," not in label:
        return () if label is None else (label,)
    return tuple(part.strip() for part in label.split(","))


def _counted(files: Sequence[TableFile], name: str, gaps: Mapping[str, int]) -> Counter[str]:
    """How many rows hold each value of a column: of all rows, since a rare value matters, too."""
    counts: Counter[str] = Counter()
    most = max(1, MOST_BYTES // len(files))
    for file in files:
        read = 0
        for batch in read_batches(file, [], [name], [name]):
            counts.update(_cells(file, batch, name))
            read += batch.nbytes
            if read >= most:
                break
    return Counter({v: n for v, n in counts.items() if v is not None and v not in gaps})


def _cells(file: TableFile, batch: pa.RecordBatch, name: str) -> list[str | None]:
    """A column of a batch as texts with a decimal point."""
    texts: list[str | None] = tidy(batch.column(name)).to_pylist()
    return [_pointed(text) for text in texts] if file.decimal == "," else texts


def _target(path: Path, counts: Mapping[str, Counter[str]]) -> Target:
    """What the label columns hold."""
    if len(counts) > 1:
        return Target("labels", tuple(counts))
    ((name, found),) = counts.items()
    if len(found) < 2:
        held = f"holds a single value, '{next(iter(found))}'" if found else "is empty"
        raise BadInput(
            f"{path}: the label column '{name}' {held}, so there is nothing to learn; name another "
            f"with --label COLUMN"
        )
    numbers = numbers_in(list(found.elements()))
    if numbers is None or not is_measured(numbers):
        return Target("class", tuple(sorted(found, key=by_value)))
    low, high = rounded_range(numbers)
    return Target("number", low=low, high=high)


def _label_column(name: str, counts: Counter[str], target: Target, told: bool) -> Column:
    """A label column, with its values or the range that was guessed."""
    why = "as you said" if told else "guessed: its name, or few values"
    if target.kind == "number":
        why += (
            f"; a number: its range, low = {target.low:.12g} and high = {target.high:.12g}, was "
            f"guessed from the data, so write what it can be"
        )
    else:
        shown = [f"'{value}' in {count} rows" for value, count in counts.most_common(MOST_CLASSES)]
        more = f" and {len(counts) - len(shown)} more" if len(counts) > len(shown) else ""
        why += f"; {len(counts)} values: {', '.join(shown)}{more}"
    return Column(name, "label", why, values=tuple(counts))


def is_measured(numbers: np.ndarray) -> bool:
    """Whether numbers are a measurement rather than the numbers of classes: fractions, or many
    different values.

    >>> [is_measured(np.array(one)) for one in ([0, 1, 1], [0.5, 1], range(30))]
    [False, True, True]
    """
    return bool((numbers != np.floor(numbers)).any()) or len(np.unique(numbers)) > MOST_CLASSES


def rounded_range(numbers: np.ndarray) -> tuple[float, float]:
    """A range of round numbers that holds these, from 0 where that is near. Where a few lie far
    outside, it holds 99 % of them.

    >>> rounded_range(np.array([9.0, 31.0, 58.0])), rounded_range(np.array([320.0, 485.0, 626.0]))
    ((0.0, 60.0), (300.0, 650.0))
    """
    low, high = float(numbers.min()), float(numbers.max())
    inner = np.quantile(numbers, [0.005, 0.995])
    if high - low > 3 * (inner[1] - inner[0]) > 0:
        low, high = float(inner[0]), float(inner[1])
    if 0 < low < high / 3:
        low = 0.0
    step = _round_step((high - low) / 5 or abs(high) or 1.0)
    low, high = step * math.floor(low / step), step * math.ceil(high / step)
    return _clean(low), _clean(high if high > low else low + step)


def _round_step(width: float) -> float:
    """1, 2 or 5 times a power of ten: the largest that is at most this wide."""
    power = 10.0 ** math.floor(math.log10(width))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= width * (1 + 1e-9))


def _clean(value: float) -> float:
    """A multiple of a round step without the last digits of its arithmetic."""
    return float(f"{value:.12g}")


def kind_of(path: Path) -> Format:
    """Which files a path stands for: those of its ending, or those that a folder holds."""
    if path.is_dir():
        ends = {file.suffix.lower() for file in path.rglob("*")}
        if ends & {".parquet", ".pq"}:
            return "parquet"
        if ends & {".csv", ".tsv", ".txt"}:
            return "csv"
        raise BadInput(f"{path} holds no .csv and no .parquet file; name a folder that does")
    if not path.exists() and not is_many(path):
        raise BadInput(f"{path} does not exist; name a table, a folder of tables, or an .npz file")
    if path.suffix.lower() in OTHERS:
        raise BadInput(f"{path} is no .csv, .parquet or .npz file; unpack it, or convert it to one")
    return "parquet" if path.suffix.lower() in (".parquet", ".pq") else "csv"


def _sample(files: Sequence[TableFile], names: list[str], rows: int) -> dict[str, list[str | None]]:
    """Some rows of every file as texts with a decimal point, by column."""
    each, most = max(10, rows // len(files)), max(1, MOST_BYTES // len(files))
    cells: dict[str, list[str | None]] = {name: [] for name in names}
    for file in files:
        for part in _drawn(file, names, each, most):
            for name in names:
                cells[name] += _cells(file, part, name)
    return cells


def _drawn(file: TableFile, names: list[str], rows: int, most: int) -> list[pa.RecordBatch]:
    """So many rows, drawn from all of a file: the first ones of a table that is sorted by site, or
    by label, show one of them. The same rows each time; each row draws a number, and the smallest
    stay."""
    draw, keys, read = np.random.default_rng(0), np.empty(0), 0
    kept: list[pa.RecordBatch] = []
    for batch in read_batches(file, [], names, names):
        fresh = draw.random(batch.num_rows)
        keys = np.concatenate([keys, fresh])
        bound = np.partition(keys, rows - 1)[rows - 1] if len(keys) > rows else 1.0
        at = np.cumsum([0, *(part.num_rows for part in kept)])
        ends = zip(kept, at, at[1:], strict=False)
        kept = [part.filter(pa.array(keys[begin:end] <= bound)) for part, begin, end in ends]
        kept.append(batch.filter(pa.array(fresh <= bound)))
        keys = keys[keys <= bound]
        read += batch.nbytes
        if read >= most:
            break
    return kept


def _pointed(text: str | None) -> str | None:
    return text.replace(",", ".") if text and re.fullmatch(r"-?\d+,\d+", text) else text


def _label(names: list[str], cells: dict[str, list[str | None]]) -> str:
    """A column with a label's name, else the last with few values."""
    for name in names:
        if re.fullmatch(LABELS, name.lower()):
            return name
    few = [name for name in names if 2 <= len(set(cells[name]) - {None}) <= 20]
    if not few:
        raise BadInput("no column looks like a label (2 to 20 values); name it with --label COLUMN")
    return few[-1]


def _site(
    names: list[str],
    cells: dict[str, list[str | None]],
    labels: tuple[str, ...],
    files: Sequence[TableFile],
) -> str | None:
    """A column with a site's name; the columns that folders name come first."""
    constants = [name for name, _ in files[0].constants]
    if len(files) > 1 and not constants:
        return None
    for wanted in (SITES, WARDS):
        for name in (*constants, *names):
            values = set(cells[name]) - {None}
            several = 2 <= len(values) <= max(2, len(cells[name]) // 4)
            if name not in labels and several and re.fullmatch(wanted, name.lower()):
                return name
    return None


def _column(
    name: str,
    cells: list[str | None],
    site: str | None,
    named: bool,
) -> Column:
    """What a column seems to be that is no label."""
    there = [cell for cell in cells if cell is not None]
    missing = len(there) < len(cells)
    if name == site:
        return Column(name, "user", "as you said" if named else "its name")
    values = set(there)
    if len(values) <= 1:
        return Column(name, "left out", "it holds a single value" if values else "it is empty")
    numbers = numbers_in(there)
    hinted = re.search(IDENTIFIERS, name.lower()) is not None
    unique = len(values) == len(there) and len(there) >= 20
    whole = numbers is not None and bool((numbers == np.floor(numbers)).all())
    form = "" if numbers is not None and not is_compact(there) else form_of(there)
    if form:
        return Column(name, "date", f"it holds dates of the form {form}", missing, form)
    if numbers is None and (grouped := in_thousands(there)):
        why = f"numbers with a sign between thousands ('{grouped}'); write them without to use it"
        return Column(name, "left out", why)
    if unique and (numbers is None or whole):
        return Column(name, "left out", "an identifier: no two records agree")
    if hinted and len(values) > len(there) // 2:
        return Column(name, "left out", "an identifier by its name, with hardly a value twice")
    if numbers is not None:
        return Column(name, "number", "it holds numbers", missing)
    if broken := but_for(there):
        return Column(name, "left out", broken)
    if len(values) > MOST_CATEGORIES:
        return Column(name, "left out", f"a text with {len(values)} values in {len(there)} rows")
    return Column(
        name, "category", f"a text with {len(values)} values", missing, values=tuple(sorted(values))
    )
