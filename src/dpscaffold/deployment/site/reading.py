"""A site's records, read by the offer's schema: nothing is inferred from them.

Whether data fit is decided by columns alone, never by what a record holds. A number that is
missing, or that the schema's ``gaps`` name, is the schema's ``missing``; a category that is missing
or unseen is zero everywhere. A record that cannot be read (a broken line, a value that is no
number, a label of no class) stays a record: it counts in R_i, and contributes nothing to any
gradient. The site's log and ``site check`` say which records these are; nobody else learns it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
import torch
from torch import Tensor

from dpscaffold.data.prepared import prepare
from dpscaffold.data.tables.marked import (
    NUMBER,
    numbers_without_markers,
    pointed,
    respelled,
    tidy,
    without_markers,
)
from dpscaffold.data.tables.markers import BLANKS, OTHERS, Markers
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
        )


def check_data_table(table: Mapping[str, Any], folder: Path) -> Path:
    """The path of a site's data, or a refusal that says what is wrong with ``[data]``."""
    path = folder / site_data({"path": "", **table}).path
    if not path.is_file():
        raise BadInput(f"data.path is {str(table.get('path'))!r}, which is not a file")
    return path


def _noted(data: SiteData, faults: UnusedRecords, fine: Sequence[str] = ()) -> tuple[Note, ...]:
    wrong = faults.sentences(lines=data.source == "csv")
    said = [*((one, False) for one in wrong), *((one, True) for one in fine)]
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
    fine: list[str] = []
    try:
        if isinstance(data, SiteArrays):
            rows, labels, faults = _from_npz(path, schema)
        else:
            schema = _with_own_gaps(schema, data)
            found = _opened(path, data, schema)
            decimal = data.decimal if isinstance(data, SiteCsv) else "."
            rows, labels, faults = _from_table(found, schema, decimal)
            fine = _filled(found, schema, decimal)
        features = _prepared(rows, schema, faults)
    except BadInput as error:
        raise Refused("data-unfit", str(error)) from error
    used = faults.used(len(labels))
    features[~used], labels = 0, np.where(used, schema.target.scaled(labels), 0)
    return SiteRecords(
        torch.from_numpy(np.ascontiguousarray(features, np.float32)),
        torch.from_numpy(np.ascontiguousarray(labels, schema.target.dtype)),
        torch.from_numpy(used),
        _noted(data, faults, fine),
    )


def _prepared(rows: np.ndarray, schema: SchemaSettings, faults: UnusedRecords) -> np.ndarray:
    """Features (n, d) by the schema's public steps. A row of zeros goes with the others, so that
    steps which do not fit are refused however many records there are."""
    steps = [step.build() for step in schema.prepare]
    rows = np.where(faults.used(len(rows))[:, None], rows, 0).astype(np.float32)
    rows = np.concatenate([rows, np.zeros((1, rows.shape[1]), np.float32)])
    try:
        with np.errstate(all="ignore"):
            features = prepare(rows, steps)[:-1]
    except ValueError as error:
        raise BadInput(f"the schema's preparation does not fit: {error}") from error
    if features.shape[1] != schema.features:
        raise BadInput(f"{features.shape[1]} features instead of {schema.features}")
    faults.add("a feature is too large", np.flatnonzero(~np.isfinite(features).all(1)))
    return features


def _from_npz(path: Path, schema: SchemaSettings) -> tuple[np.ndarray, np.ndarray, UnusedRecords]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            features, labels = arrays["features"], arrays["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise BadInput(f"{path} does not hold features and labels: {error}") from error
    numeric = features.dtype.kind in "biuf" and labels.dtype.kind in "biuf"
    if features.ndim != 2 or labels.shape != (len(features),) or not numeric:
        raise BadInput(
            f"{path} has features of shape {features.shape} ({features.dtype}) and labels of shape "
            f"{labels.shape} ({labels.dtype}); give numbers of shape (records, features) and "
            f"(records,)"
        )
    if features.shape[1] != schema.features:
        raise BadInput(f"{path} has {features.shape[1]} features, not {schema.features}")
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


def _with_own_gaps(schema: SchemaSettings, data: SiteCsv | SiteParquet) -> SchemaSettings:
    """The schema with the site's own NA strings added to those of each column."""
    if not data.gaps:
        return schema
    own, wanted = Markers.given(data.gaps), (*schema.columns, schema.label)
    stray = next((n for n, _ in own.columns if n not in (*wanted, OTHERS)), None)
    if stray is not None:
        raise BadInput(f"data.gaps names {stray!r}, which is not a column of the offer")
    return schema.changed(gaps={name: (*schema.markers.of(name), *own.of(name)) for name in wanted})


def _opened(path: Path, data: SiteCsv | SiteParquet, schema: SchemaSettings) -> Columns:
    """The columns of a file that the schema asks for."""
    if not schema.columns or (schema.classes and not schema.class_names):
        raise BadInput("the offer's schema names no columns or no classes, so no table can be read")
    wanted = (*schema.columns, schema.label)
    if isinstance(data, SiteCsv):
        found = read_csv(path, data.delimiter, wanted, data.encoding)
    else:
        found = _read_parquet(path, wanted)
    lacking = [name for name in wanted if name not in found.columns]
    stray = next((name for name in lacking if name not in schema.absent), None)
    if stray is not None:
        raise BadInput(
            f"there is no column {stray!r}, or more than one; add it, or ask the server to name it "
            f"in schema.absent, which makes its values missing here"
        )
    empty = pa.chunked_array([pa.nulls(found.records, pa.string())])
    return replace(found, columns={**found.columns, **dict.fromkeys(lacking, empty)})


def _read_parquet(path: Path, wanted: tuple[str, ...]) -> Columns:
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = [name.strip(BLANKS) for name in file.schema_arrow.names]
        table = file.read()
    except (OSError, pa.ArrowException, ValueError) as error:
        raise BadInput(f"{path} cannot be read as parquet: {error}") from error
    columns = {name: table.column(names.index(name)) for name in wanted if names.count(name) == 1}
    return Columns(columns, table.num_rows, UnusedRecords())


def _from_table(
    table: Columns, schema: SchemaSettings, decimal: str
) -> tuple[np.ndarray, np.ndarray, UnusedRecords]:
    """Rows (n, width) as numbers, then one-hot categories, and labels (n,)."""
    faults, parts = table.faults, []
    for name in schema.columns:
        if name not in schema.categories:
            values, wrong = _numbers(table.columns[name], schema.markers.of(name), decimal)
            faults.add(f"{name!r} is not a number", np.flatnonzero(wrong))
            parts.append(np.where(np.isnan(values), schema.missing, values)[:, None])
    for name in schema.columns:
        if name in schema.categories:
            known = schema.categories[name]
            index, wrong = _index(table.columns[name], known, schema.spellings.of(name))
            faults.add(f"{name!r} is not UTF-8", np.flatnonzero(wrong))
            parts.append(index[:, None] == np.arange(len(known)))
    label = table.columns[schema.label]
    if schema.classes:
        labels, _ = _index(label, schema.class_names, schema.spellings.of(schema.label))
        unknown = labels < 0
    else:
        labels, wrong = _numbers(label, schema.markers.of(schema.label), decimal)
        unknown = wrong | np.isnan(labels)
    faults.add(_no_label(schema, repr(schema.label)), np.flatnonzero(unknown))
    return np.concatenate(parts, axis=1), np.where(unknown, 0, labels), faults


def _filled(table: Columns, schema: SchemaSettings, decimal: str) -> list[str]:
    """How often a missing number or an unknown category was read by the schema's rule."""
    used, said = table.faults.used(table.records), []
    for name in schema.columns:
        if name in schema.categories:
            known = schema.categories[name]
            index, _ = _index(table.columns[name], known, schema.spellings.of(name))
            gone, rule = index < 0, "not among the offer's categories, and are zero everywhere"
        else:
            values, _ = _numbers(table.columns[name], schema.markers.of(name), decimal)
            gone, rule = np.isnan(values), f"missing, and read as {schema.missing:g}"
        count = int((gone & used).sum())
        if count:
            said.append(f"{count} of {int(used.sum())} values of {name!r} are {rule}")
    return said


def _numbers(
    column: pa.ChunkedArray, markers: tuple[str, ...], decimal: str
) -> tuple[np.ndarray, np.ndarray]:
    """A column as float32, NaN where a number is missing, and where something else stands that is
    no finite number, (n,) bool. Each value by itself: none changes how another one is read."""
    typed = pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal
    if any(of(column.type) for of in typed):
        known = numbers_without_markers(column, markers)
        wrong = np.zeros(len(column), dtype=bool)
    else:
        text, wrong = _texts(column)
        plain = tidy(without_markers(text, markers, number=True, decimal=decimal))
        text = pointed(pc.utf8_trim_whitespace(plain), decimal)
        right = pc.match_substring_regex(text, NUMBER)
        wrong = wrong | ~_plain(pc.fill_null(right, True)).astype(bool)
        known = pc.if_else(right, text, pa.scalar(None, pa.string()))
    values = _plain(pc.cast(known, pa.float32(), safe=False).fill_null(np.nan))
    return values, wrong | np.isinf(values)


def _index(
    column: pa.ChunkedArray, known: tuple[str, ...], other: Mapping[str, str]
) -> tuple[np.ndarray, np.ndarray]:
    """Which of the known texts each value is, also in an ``other`` spelling, -1 for none of them;
    and which are not even text."""
    text, wrong = _texts(column)
    names = pa.array([name.strip(BLANKS) for name in known], pa.string())
    found = pc.index_in(respelled(pc.utf8_trim(text, BLANKS), other), names)
    return _plain(pc.fill_null(found, -1)).astype(np.int64), wrong


def _texts(column: pa.ChunkedArray) -> tuple[pa.ChunkedArray, np.ndarray]:
    """A column as texts, and which values are not UTF-8, (n,) bool; these are None."""
    try:
        text = pc.cast(column, pa.string())
        text.validate(full=True)
        return text, np.zeros(len(column), dtype=bool)
    except pa.ArrowInvalid:
        raw = pc.cast(column, pa.large_binary()).to_pylist()
    except pa.ArrowNotImplementedError as error:
        raise BadInput(f"a column holds neither numbers nor texts: {error}") from error
    texts = [None if value is None else _decoded(value) for value in raw]
    wrong = [text is None and value is not None for text, value in zip(texts, raw, strict=True)]
    return pa.chunked_array([texts], pa.string()), np.array(wrong, dtype=bool)


def _decoded(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _plain(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(column.to_numpy())
