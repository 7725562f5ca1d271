"""A site's records, read by the offer's schema: nothing is inferred from them.

Whether data fit is decided by columns alone, never by what a record holds. A number that is
missing, or that the schema's ``na_values`` name, is the schema's ``missing``; a category that is
missing or unseen is zero everywhere. A record that cannot be read (a broken line, a value that is
no number, a label of no class) stays a record: it counts in R_i, and contributes nothing to any
gradient. The site's log and ``site check`` say which records these are; nobody else learns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from dpscaffold.deployment.site.lines import Columns, UnusedRecords, read_csv
from dpscaffold.errors import BadInput

#: A sentence, and whether what it says is fine.
Note = tuple[str, bool]
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
    return _noted(data, read_csv(path, data.delimiter, encoding=data.encoding).faults)


def read_records(table: Mapping[str, Any], folder: Path, schema: SchemaSettings) -> SiteRecords:
    """The site's records as features and labels."""
    path, data = check_data_table(table, folder), site_data(table)
    filled, ranges = list[Note](), list[str]()
    try:
        if isinstance(data, SiteArrays):
            rows, labels, faults = _from_npz(path, schema)
        else:
            schema = _with_own_na_values(schema, data)
            found = _opened(path, data, schema)
            decimal = data.decimal if isinstance(data, SiteCsv) else "."
            rows, labels, filled, ranges = _from_table(found, schema, decimal)
            faults = found.faults
        features = _prepared(rows, schema, faults)
    except BadInput as error:
        raise Refused("data-unfit", str(error)) from error
    used = faults.used(len(labels))
    features[~used], labels = 0, np.where(used, schema.target.scaled(labels), 0)
    return SiteRecords(
        torch.from_numpy(np.ascontiguousarray(features, np.float32)),
        torch.from_numpy(np.ascontiguousarray(labels, schema.target.dtype)),
        torch.from_numpy(used),
        _noted(data, faults, filled),
        tuple(ranges),
    )


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
    faults.add("a feature is too large", np.flatnonzero(~np.isfinite(features).all(1)))
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
    if features.shape[1] != schema.features:
        raise BadInput(
            "wrong-column-count", f"{path} has {features.shape[1]} features, not {schema.features}"
        )
    faults, labels = UnusedRecords(), labels.astype(np.float64)
    large = ~(np.abs(features.astype(np.float64)) <= _LARGEST).all(1)
    faults.add("a feature is not a finite number", np.flatnonzero(large))
    if schema.classes:
        known = np.isin(labels, np.arange(schema.classes))
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


def _opened(path: Path, data: SiteCsv | SiteParquet, schema: SchemaSettings) -> Columns:
    """The columns of a file that the schema asks for."""
    if not schema.columns or (schema.classes and not schema.class_names):
        raise BadInput(
            "schema-incomplete",
            "the offer's schema names no columns or no classes, so no table can be read",
        )
    wanted = (*schema.columns, schema.label)
    if isinstance(data, SiteCsv):
        found = read_csv(path, data.delimiter, wanted, data.encoding)
    else:
        found = _read_parquet(path, wanted)
    lacking = [name for name in wanted if name not in found.columns]
    stray = next((name for name in lacking if name not in schema.absent), None)
    if stray is not None:
        raise BadInput(
            "unknown-column",
            f"there is no column {stray!r}, or more than one; add it, or ask the server to name it "
            f"in schema.absent, which makes its values missing here",
        )
    empty = pa.chunked_array([pa.nulls(found.records, pa.string())])
    return replace(found, columns={**found.columns, **dict.fromkeys(lacking, empty)})


def _read_parquet(path: Path, wanted: tuple[str, ...]) -> Columns:
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = [name.strip(BLANKS) for name in file.schema_arrow.names]
        table = file.read()
    except (OSError, pa.ArrowException, ValueError) as error:
        raise BadInput("file-unreadable", f"{path} cannot be read as parquet: {error}") from error
    columns = {name: table.column(names.index(name)) for name in wanted if names.count(name) == 1}
    return Columns(columns, table.num_rows, UnusedRecords())


def _from_table(
    table: Columns, schema: SchemaSettings, decimal: str
) -> tuple[np.ndarray, np.ndarray, list[Note], list[str]]:
    """Rows (n, width) and labels (n,) by the table codec, what was filled, and ranges. Records with
    a cell that cannot be read are added to the table's unused ones."""
    columns = {name: column.combine_chunks() for name, column in table.columns.items()}
    coding, faults = schema.coding, table.faults
    reader = coding.reader(decimal)

    def unused(problem: CellProblem) -> None:
        what = "UTF-8" if problem.column in schema.categories else "a number"
        faults.add(f"{problem.column!r} is not {what}", np.flatnonzero(problem.rows))

    cells = read_cells(coding, columns, unused, reader)
    labels = read_labels(schema.target, {schema.label: columns[schema.label]}, reader)
    faults.add(_no_label(schema, repr(schema.label)), np.flatnonzero(~labels.known))
    filled, ranges = _filled(cells, table, schema), _ranges(cells, table, schema)
    return coding.layout.encode(cells), labels.values, filled, ranges


def _ranges(cells: np.ndarray, table: Columns, schema: SchemaSettings) -> list[str]:
    """The smallest and the largest number of each column of numbers."""
    said, used = [], table.faults.used(table.records)
    for name, column in zip(schema.columns, cells.T, strict=True):
        known = column[used & ~np.isnan(column)]
        if name not in schema.categories and len(known):
            said.append(f"{name} (shown to you alone): {known.min():.4g} to {known.max():.4g}")
    return said


def _filled(cells: np.ndarray, table: Columns, schema: SchemaSettings) -> list[Note]:
    """How often a missing number or an unknown category was read by the schema's rule. Where that
    is a whole column, the file is probably coded otherwise than the schema says."""
    used, said = table.faults.used(table.records), list[Note]()
    for name, column in zip(schema.columns, cells.T, strict=True):
        if name in schema.categories:
            gone = ~(column >= 0)
            rule = "not among the offer's categories, and are zero everywhere"
        else:
            gone, rule = np.isnan(column), f"missing, and read as {schema.missing:g}"
        count = int((gone & used).sum())
        if count:
            sentence = f"{count} of {int(used.sum())} values of {name!r} are {rule}"
            said.append((sentence, name in schema.absent or count < int(used.sum())))
    return said
