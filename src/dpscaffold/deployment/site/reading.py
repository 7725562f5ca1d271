"""A site's records, read by the offer's schema: nothing is inferred from them.

Whether data fit is decided by columns alone, never by what a record holds. A number that is
missing, or that the schema's ``na_values`` name, is the schema's ``missing``; a category that is
missing or unseen is zero everywhere. A record that cannot be read (a broken line, a value that is
no number, a label of no class) stays a record: it counts in R_i, and contributes nothing to any
gradient. The site's log and ``site check`` say which records these are; nobody else learns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from torch import Tensor

from dpscaffold.data.prepared import prepare
from dpscaffold.data.tables.codec import CellProblem, read_cells, read_labels
from dpscaffold.data.tables.missing import BLANKS, OTHERS, NaStrings
from dpscaffold.deployment.protocol.agreement import SchemaSettings
from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.site.data_table import (
    SiteArrays,
    SiteCsv,
    SiteData,
    SiteParquet,
    site_data,
)
from dpscaffold.deployment.site.lines import Columns, CsvForm, UnusedRecords, csv_parts
from dpscaffold.errors import BadInput

#: A sentence, and whether what it says is fine.
Note = tuple[str, bool]
#: How many records of a Parquet file are read at a time.
_ROWS = 1 << 16
_TOO_LARGE = "a feature is too large"
#: Larger numbers are not finite in single precision.
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SiteRecords:
    """All records of a site: features (n, d), labels (n,), and which of them contribute, (n,) bool.
    Features and label of a record that does not contribute are 0. ``notes`` say how the file was
    read, each with whether that is fine; they are for the site's own people."""

    features: Tensor
    labels: Tensor
    used: Tensor
    notes: tuple[Note, ...] = ()
    #: The smallest and the largest number of each column.
    ranges: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def padded(self, least: int) -> SiteRecords:
        """At least ``least`` records: those that are added contribute nothing."""
        lacking = least - len(self)
        if lacking <= 0:
            return self
        return SiteRecords(
            torch.cat([self.features, self.features.new_zeros(lacking, self.features.shape[1])]),
            torch.cat([self.labels, self.labels.new_zeros(lacking)]),
            torch.cat([self.used, self.used.new_zeros(lacking)]),
            self.notes,
            self.ranges,
        )

    def described(self, schema: SchemaSettings) -> list[str]:
        """Label counts and ranges of the records that contribute, for the site's own people: wrong
        codes show here. Nothing of it is sent or logged."""
        labels = self.labels[self.used]
        if not len(labels):
            return ["no record can be read"]
        if schema.classes:
            names = schema.target.classes
            counts = torch.bincount(labels.long(), minlength=len(names)).tolist()
            said = ", ".join(f"{name} {n}" for name, n in zip(names, counts, strict=True))
        else:
            ends = schema.target.restored(torch.stack([labels.min(), labels.max()])).tolist()
            said = f"{ends[0]:.4g} to {ends[1]:.4g}"
        return [f"labels (shown to you alone): {said}", *self.ranges]


def check_data_table(table: Mapping[str, Any], folder: Path) -> Path:
    """The path of a site's data, or a refusal that says what is wrong with ``[data]``."""
    path = folder / site_data({"path": "", **table}).path
    if not path.is_file():
        raise BadInput(
            "file-not-found", f"data.path is {str(table.get('path'))!r}, which is not a file"
        )
    return path


def _noted(data: SiteData, faults: UnusedRecords, filled: Sequence[Note] = ()) -> tuple[Note, ...]:
    wrong = faults.sentences(lines=data.source == "csv")
    said = [*((one, False) for one in wrong), *filled]
    return tuple((f"{data.path}: {sentence}", good) for sentence, good in said)


def broken_lines(table: Mapping[str, Any], folder: Path) -> tuple[Note, ...]:
    """What is wrong with the lines of a CSV file, whatever they are read for."""
    path, data = check_data_table(table, folder), site_data(table)
    if not isinstance(data, SiteCsv):
        return ()
    merged = _Merged()
    for part in csv_parts(path, CsvForm(data.delimiter, data.encoding)):
        merged.add(part.faults, part.records)
    return _noted(data, merged.faults(()))


def read_records(table: Mapping[str, Any], folder: Path, schema: SchemaSettings) -> SiteRecords:
    """The site's records as features and labels. They are read and coded some at a time, so that
    little more than the result is held in memory."""
    path, data = check_data_table(table, folder), site_data(table)
    filled, ranges = list[Note](), list[str]()
    merged, parts = _Merged(), list[tuple[np.ndarray, np.ndarray, np.ndarray]]()
    try:
        if isinstance(data, SiteArrays):
            rows, labels, faults = _from_npz(path, schema)
            parts.append(_finished(rows, labels, faults, schema))
            merged.add(faults, len(labels))
        else:
            schema = _with_own_na_values(schema, data)
            seen = _Seen(schema)
            for found in _opened(path, data, schema):
                rows, labels = _from_table(found, schema, data, seen)
                parts.append(_finished(rows, labels, found.faults, schema))
                merged.add(found.faults, found.records)
            filled, ranges = seen.filled(), seen.ranges()
    except BadInput as error:
        raise Refused("data-unfit", str(error)) from error
    features, labels, used = (np.concatenate(column) for column in zip(*parts, strict=True))
    return SiteRecords(
        torch.from_numpy(features),
        torch.from_numpy(labels),
        torch.from_numpy(used),
        _noted(data, merged.faults(_reasons(schema)), filled),
        tuple(ranges),
    )


def _finished(
    rows: np.ndarray, labels: np.ndarray, faults: UnusedRecords, schema: SchemaSettings
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features (n, d) float32, labels (n,) and which records contribute (n,); zeros elsewhere."""
    features = _prepared(rows, schema, faults)
    used = faults.used(len(labels))
    features[~used], labels = 0, np.where(used, schema.target.scaled(labels), 0)
    return (
        np.ascontiguousarray(features, np.float32),
        np.ascontiguousarray(labels, schema.target.dtype),
        used,
    )


class _Merged:
    """The unused records of the parts of a table, by their numbers in the whole of it."""

    def __init__(self) -> None:
        self.found: dict[str, list[np.ndarray]] = {}
        self.records = 0

    def add(self, faults: UnusedRecords, records: int) -> None:
        """The next part."""
        for reason, numbers in faults.found.items():
            self.found.setdefault(reason, []).append(numbers + self.records)
        self.records += records

    def faults(self, last: Sequence[str]) -> UnusedRecords:
        """All of them; the reasons ``last`` come after all others, in this order."""
        at = {reason: place for place, reason in enumerate(last)}
        order = sorted(self.found, key=lambda reason: at.get(reason, -1))
        return UnusedRecords({reason: np.concatenate(self.found[reason]) for reason in order})


def _prepared(rows: np.ndarray, schema: SchemaSettings, faults: UnusedRecords) -> np.ndarray:
    """Features (n, d) by the schema's public steps. A row of zeros goes with the others, so that
    steps which do not fit are refused however many records there are."""
    steps = schema.steps
    rows = np.where(faults.used(len(rows))[:, None], rows, 0).astype(np.float32)
    rows = np.concatenate([rows, np.zeros((1, rows.shape[1]), np.float32)])
    try:
        with np.errstate(all="ignore"):
            features = prepare(rows, steps)[:-1]
    except ValueError as error:
        raise BadInput(
            "schema-mismatch", f"the schema's preparation does not fit: {error}"
        ) from error
    if features.shape[1] != schema.dimension:
        raise BadInput(
            "wrong-column-count", f"{features.shape[1]} features instead of {schema.dimension}"
        )
    faults.add(_TOO_LARGE, np.flatnonzero(~np.isfinite(features).all(1)))
    return features


def _from_npz(path: Path, schema: SchemaSettings) -> tuple[np.ndarray, np.ndarray, UnusedRecords]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            features, labels = arrays["features"], arrays["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise BadInput(
            "unknown-array", f"{path} does not hold features and labels: {error}"
        ) from error
    numeric = features.dtype.kind in "biuf" and labels.dtype.kind in "biuf"
    if features.ndim != 2 or labels.shape != (len(features),) or not numeric:
        raise BadInput(
            "wrong-shape",
            f"{path} has features of shape {features.shape} ({features.dtype}) and labels of shape "
            f"{labels.shape} ({labels.dtype}); give numbers of shape (records, features) and "
            f"(records,)",
        )
    if features.shape[1] != schema.width:
        raise BadInput(
            "wrong-column-count", f"{path} has {features.shape[1]} features, not {schema.width}"
        )
    faults, labels = UnusedRecords(), labels.astype(np.float64)
    large = ~(np.abs(features.astype(np.float64)) <= _LARGEST).all(1)
    faults.add("a feature is not a finite number", np.flatnonzero(large))
    if schema.classes:
        known = np.isin(labels, np.arange(schema.class_count))
    else:
        known = np.abs(labels) <= _LARGEST
    faults.add(_no_label(schema, "the label"), np.flatnonzero(~known))
    return features, np.where(known, labels, 0), faults


def _no_label(schema: SchemaSettings, name: str) -> str:
    return f"{name} is not a class of the offer" if schema.classes else f"{name} is not a number"


def _with_own_na_values(schema: SchemaSettings, data: SiteCsv | SiteParquet) -> SchemaSettings:
    """The schema with the site's own NA strings added to those of each column."""
    if not data.na_values:
        return schema
    own, wanted = NaStrings.given(data.na_values), (*schema.columns, schema.label)
    stray = next((n for n, _ in own.columns if n not in (*wanted, OTHERS)), None)
    if stray is not None:
        raise BadInput(
            "unknown-column", f"data.na_values names {stray!r}, which is not a column of the offer"
        )
    return schema.changed(
        na_values={name: (*schema.na_strings.of(name), *own.of(name)) for name in wanted}
    )


def _opened(path: Path, data: SiteCsv | SiteParquet, schema: SchemaSettings) -> Iterator[Columns]:
    """The columns of a file that the schema asks for, some records at a time."""
    if not schema.columns or (schema.classes and not schema.class_names):
        raise BadInput(
            "schema-incomplete",
            "the offer's schema names no columns or no classes, so no table can be read",
        )
    wanted = (*schema.columns, schema.label)
    if isinstance(data, SiteCsv):
        numbers = _read_as_numbers(schema) if data.decimal == "." else ()
        parts = csv_parts(path, CsvForm(data.delimiter, data.encoding, wanted, numbers))
    else:
        parts = _parquet_parts(path, wanted)
    for found in parts:
        lacking = [name for name in wanted if name not in found.columns]
        stray = next((name for name in lacking if name not in schema.absent), None)
        if stray is not None:
            raise BadInput(
                "unknown-column",
                f"there is no column {stray!r}, or more than one; add it, or ask the server to "
                f"name it in schema.absent, which makes its values missing here",
            )
        empty = pa.nulls(found.records, pa.string())
        yield replace(found, columns={**found.columns, **dict.fromkeys(lacking, empty)})


def _read_as_numbers(schema: SchemaSettings) -> list[str]:
    """Columns whose cells mean what a plain number in a file means: no date, no category, and no NA
    string, which would be compared with the text of a cell."""
    others = {*schema.categories, *schema.dates, *((schema.label,) if schema.classes else ())}
    names = (*schema.columns, schema.label)
    return [n for n in names if n not in others and not schema.na_strings.of(n)]


def _parquet_parts(path: Path, wanted: tuple[str, ...]) -> Iterator[Columns]:
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = [name.strip(BLANKS) for name in file.schema_arrow.names]
            places = {name: names.index(name) for name in wanted if names.count(name) == 1}
            empty = True
            for batch in file.iter_batches(batch_size=_ROWS):
                columns = {name: batch.column(place) for name, place in places.items()}
                yield Columns(columns, batch.num_rows, UnusedRecords())
                empty = False
            if empty:
                none = file.schema_arrow.empty_table()
                columns = {n: none.column(k).combine_chunks() for n, k in places.items()}
                yield Columns(columns, 0, UnusedRecords())
    except (OSError, pa.ArrowException, ValueError) as error:
        raise BadInput("file-unreadable", f"{path} cannot be read as parquet: {error}") from error


def _from_table(
    table: Columns, schema: SchemaSettings, data: SiteCsv | SiteParquet, seen: _Seen
) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n, width) and labels (n,) by the table codec. Records with a cell that cannot be read
    are added to the table's unused ones, and ``seen`` learns what the cells hold."""
    coding, faults = schema.coding, table.faults
    decimal = data.decimal if isinstance(data, SiteCsv) else "."
    reader = coding.reader(decimal)

    def unused(problem: CellProblem) -> None:
        faults.add(_unreadable(schema, problem.column), np.flatnonzero(problem.rows))

    cells = read_cells(coding, table.columns, unused, reader)
    labels = read_labels(schema.target, {schema.label: table.columns[schema.label]}, reader)
    faults.add(_no_label(schema, repr(schema.label)), np.flatnonzero(~labels.known))
    seen.add(cells, faults.used(table.records))
    return coding.layout.encode(cells), labels.values


def _unreadable(schema: SchemaSettings, name: str) -> str:
    return f"{name!r} is not {'UTF-8' if name in schema.categories else 'a number'}"


def _reasons(schema: SchemaSettings) -> list[str]:
    """Why a record that could be read contributes nothing, in the order in which it is looked
    at."""
    cells = [_unreadable(schema, name) for name in schema.columns]
    return [*cells, _no_label(schema, repr(schema.label)), _TOO_LARGE]


class _Seen:
    """What the columns of a table hold, added up over its parts: how many values are missing or
    unknown, and the smallest and the largest number."""

    def __init__(self, schema: SchemaSettings) -> None:
        self.schema = schema
        self.used = 0
        self.gone = np.zeros(len(schema.columns), np.int64)
        self.ends = [(np.float32(np.inf), np.float32(-np.inf)) for _ in schema.columns]

    def add(self, cells: np.ndarray, used: np.ndarray) -> None:
        """Cells (n, columns) of the next part, and which records contribute (n,)."""
        self.used += int(used.sum())
        for place, name in enumerate(self.schema.columns):
            column = cells[:, place] if used.all() else cells[used, place]
            if name in self.schema.categories:
                self.gone[place] += int((~(column >= 0)).sum())
                continue
            missing = int(np.isnan(column).sum())
            self.gone[place] += missing
            if missing < len(column):
                low, high = self.ends[place]
                self.ends[place] = (
                    min(low, np.nanmin(column)),
                    max(high, np.nanmax(column)),
                )

    def ranges(self) -> list[str]:
        """The smallest and the largest number of each column of numbers."""
        pairs = zip(self.schema.columns, self.ends, strict=True)
        return [
            f"{name} (shown to you alone): {low:.4g} to {high:.4g}"
            for name, (low, high) in pairs
            if low <= high
        ]

    def filled(self) -> list[Note]:
        """How often a missing number or an unknown category was read by the schema's rule. Where
        that is a whole column, the file is probably coded otherwise than the schema says."""
        schema, said = self.schema, list[Note]()
        for name, count in zip(schema.columns, self.gone.tolist(), strict=True):
            if name in schema.categories:
                rule = "not among the offer's categories, and are zero everywhere"
            else:
                rule = f"missing, and read as {schema.missing:g}"
            if count:
                sentence = f"{count} of {self.used} values of {name!r} are {rule}"
                said.append((sentence, name in schema.absent or count < self.used))
        return said
