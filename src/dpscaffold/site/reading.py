"""A site's records, read by the offer's schema: nothing is inferred from them.

Whether data fit is decided by columns and sizes alone. What a single record holds never makes the
reading fail: a number that is missing, or is none, or means missing by the schema's ``gaps``, is
its ``missing``; a category that is missing or unseen is zero everywhere; an unseen class counts as
the first. The site's log says how often that happened; nobody else learns it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor

from dpscaffold.data.markers import BLANKS, number_gaps
from dpscaffold.data.prepared import prepare
from dpscaffold.engines.letters import Refused
from dpscaffold.errors import BadInput
from dpscaffold.offer import Schema

#: The sources that a site may have, and the keys of their tables.
SOURCES = {
    "csv": {"source", "path", "delimiter"},
    "parquet": {"source", "path"},
    "npz": {"source", "path"},
}


@dataclass(frozen=True)
class SiteRecords:
    """All records of a site, (n, d) features and (n,) labels, and their digest, which is never
    written as it is."""

    features: Tensor
    labels: Tensor
    digest: str

    def __len__(self) -> int:
        return len(self.labels)


def check_data_table(table: Mapping[str, Any], folder: Path) -> Path:
    """The path of a site's data, or a refusal that says what is wrong with ``[data]``."""
    source = table.get("source")
    if source not in SOURCES:
        raise BadInput(f"data.source is {source!r}; a site's is one of {', '.join(SOURCES)}")
    for key in table:
        if key not in SOURCES[source]:
            raise BadInput(
                f"data.{key} is not of a site's {source} data; the schema comes with the offer, "
                f"and all records are training records of this one user"
            )
    path = folder / str(table.get("path", ""))
    if not path.is_file():
        raise BadInput(f"data.path is {str(table.get('path'))!r}, which is not a file")
    return path


def read_records(
    table: Mapping[str, Any],
    folder: Path,
    schema: Schema,
    log: Callable[[str], None] = lambda sentence: None,
) -> SiteRecords:
    """The site's records as features and labels."""
    path = check_data_table(table, folder)
    try:
        if table["source"] == "npz":
            rows, labels = _from_npz(path, schema, log)
        else:
            rows, labels = _from_table(_opened(path, table), schema, log)
        features = prepare(rows, [step.build() for step in schema.prepare])
    except BadInput as error:
        raise Refused("data-unfit", str(error)) from error
    if features.shape[1] != schema.features or not len(labels):
        raise Refused("data-unfit", f"{features.shape} features and {len(labels)} labels")
    labels = np.ascontiguousarray(schema.target.scaled(labels), schema.target.dtype)
    whole = hashlib.sha256(np.ascontiguousarray(features).tobytes())
    whole.update(labels.tobytes())
    return SiteRecords(
        torch.from_numpy(np.ascontiguousarray(features, np.float32)),
        torch.from_numpy(labels),
        whole.hexdigest(),
    )


def _from_npz(
    path: Path, schema: Schema, log: Callable[[str], None]
) -> tuple[np.ndarray, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            features, labels = arrays["features"], arrays["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise BadInput(f"{path} does not hold features and labels: {error}") from error
    kinds = "iu" if schema.classes else "iuf"
    if features.ndim != 2 or labels.shape != (len(features),) or labels.dtype.kind not in kinds:
        raise BadInput(f"{path} has features of shape {features.shape}, labels {labels.shape}")
    if features.shape[1] != schema.features:
        raise BadInput(f"{path} has {features.shape[1]} features, not {schema.features}")
    if not schema.classes:
        return features.astype(np.float32), np.nan_to_num(labels, posinf=0.0, neginf=0.0)
    strange = (labels < 0) | (labels >= schema.classes)
    _report(log, int(strange.sum()), "labels are of no class of the schema")
    return features.astype(np.float32), np.where(strange, 0, labels)


def _opened(path: Path, table: Mapping[str, Any]) -> pa.Table:
    """The file's columns, all as text where it is a CSV file."""
    try:
        if table["source"] == "parquet":
            return pyarrow.parquet.read_table(path)
        delimiter = str(table.get("delimiter", ","))
        with pyarrow.csv.open_csv(
            path, parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter)
        ) as stream:
            names = stream.schema.names
        return pyarrow.csv.read_csv(
            path,
            parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True
            ),
        )
    except (OSError, pa.ArrowInvalid, ValueError) as error:
        raise BadInput(f"{path} cannot be read as {table['source']}: {error}") from error


def _from_table(
    table: pa.Table, schema: Schema, log: Callable[[str], None]
) -> tuple[np.ndarray, np.ndarray]:
    if not schema.columns or (schema.classes and not schema.class_names):
        raise BadInput("the offer's schema names no columns or no classes, so no table can be read")
    lacking = [name for name in (*schema.columns, schema.label) if name not in table.column_names]
    if lacking:
        raise BadInput(f"there is no column {lacking[0]!r}")
    numbers = [
        _numbers(table[name], schema, name, log)
        for name in schema.columns
        if name not in schema.categories
    ]
    coded = [
        _one_hot(table[name], schema.categories[name])
        for name in schema.columns
        if name in schema.categories
    ]
    rows = np.column_stack([*numbers, *coded]).astype(np.float32)
    if not schema.classes:
        return rows, _numbers(table[schema.label], schema, schema.label, log)
    texts = _texts(table[schema.label])
    index = pc.index_in(texts, pa.array(schema.class_names)).to_numpy(zero_copy_only=False)
    index = np.nan_to_num(index.astype(np.float64), nan=-1)
    _report(log, int((index < 0).sum()), f"values of {schema.label!r} are no class of the schema")
    return rows, np.where(index < 0, 0, index).astype(np.int64)


def _numbers(
    column: pa.ChunkedArray, schema: Schema, name: str, log: Callable[[str], None]
) -> np.ndarray:
    try:
        values = pc.cast(column, pa.float64())
    except pa.ArrowInvalid:
        values = pa.array([_number(text) for text in column.to_pylist()], pa.float64())
    found = np.asarray(pc.fill_null(values, float("nan")), dtype=np.float64)
    single = pa.types.is_float32(column.type)  # 0.1 is another number there
    marked = number_gaps(found.astype(np.float32) if single else found, schema.markers.of(name))
    strange = ~np.isfinite(found) | marked
    _report(log, int(strange.sum()), f"values of {name!r} are missing or no numbers")
    return np.where(strange, schema.missing, found)


def _number(text: object) -> float | None:
    try:
        return float(str(text))
    except ValueError:
        return None


def _one_hot(column: pa.ChunkedArray, values: tuple[str, ...]) -> np.ndarray:
    found = pc.index_in(_texts(column), pa.array(values)).to_numpy(zero_copy_only=False)
    index = np.nan_to_num(found.astype(np.float64), nan=-1)
    chosen: np.ndarray = index[:, None] == np.arange(len(values))[None]
    return chosen.astype(np.float32)


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column as texts without the blanks around them, as the run's model reads them."""
    return pc.utf8_trim(pc.cast(column, pa.string()), BLANKS)


def _report(log: Callable[[str], None], count: int, what: str) -> None:
    if count:
        log(f"{count} {what}; they are read by the schema's rule")
