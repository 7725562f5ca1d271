"""CSV and Parquet files with a label column and, where there is one, a user column.

A file is read twice, in batches: a scan finds labels, users, categories and missing values, then
the features go straight to where they belong. Nothing but the result is held in memory, and the
result may be a mapped file (:func:`dpscaffold.data.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute

from dpscaffold.data.pool import Pool
from dpscaffold.data.readers.coding import (
    Codes,
    Table,
    category_values,
    code_labels,
    code_users,
    notes_on,
    preparation_of,
)
from dpscaffold.data.readers.columns import column_names, read_batches, require_column
from dpscaffold.errors import BadInput
from dpscaffold.schema import Prepared, Target


@dataclass(frozen=True)
class Scan:
    """What the first reading found: for every record kept its label and user, and how columns are
    coded."""

    table: Table
    numbers: tuple[str, ...]
    categories: dict[str, tuple[str, ...]]
    names: tuple[str, ...]
    kept: np.ndarray
    labels: np.ndarray
    target: Target
    users: np.ndarray | None
    user_names: tuple[str, ...]
    notes: tuple[str, ...]
    preparation: tuple[Prepared, ...]

    @property
    def dimension(self) -> int:
        """d, one per number column and one per value of a category."""
        return len(self.numbers) + sum(len(values) for values in self.categories.values())


def read_table(table: Table) -> Pool:
    """A whole file as a pool, in memory.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "visits.csv"
    ...     _ = path.write_text("clinic,age,ill\\nnorth,31,no\\nsouth,58,yes\\nnorth,44,yes\\n")
    ...     pool = read_table(Table(path, "csv", label="ill", user="clinic"))
    >>> pool.features.tolist(), pool.labels.tolist(), pool.names
    ([[31.0], [58.0], [44.0]], [0, 1, 1], ('north', 'south'))
    """
    scan = scan_table(table)
    features = np.empty((len(scan.labels), scan.dimension), dtype=np.float32)
    for start, rows in feature_blocks(scan):
        features[start : start + len(rows)] = rows
    return Pool(
        features,
        scan.labels,
        scan.target,
        table.path.name,
        1.0,
        scan.users,
        scan.user_names,
        scan.notes,
        scan.preparation,
    )


def scan_table(table: Table) -> Scan:
    """The first reading: labels, users, categories, and which records are kept."""
    names = column_names(table.path, table.kind, table.delimiter)
    numbers, texts = _roles(table, names)
    coded = [table.label] if table.target == "class" else []
    wanted = {
        text: Codes()
        for text in dict.fromkeys([*coded, *([table.user] if table.user else []), *texts])
    }
    lacking, measured = [], []
    # Numbers are looked at only where a missing one decides whether its record is kept.
    looked_at = numbers if table.missing == "drop" else ()
    if table.target == "number":
        looked_at = (*looked_at, table.label)
    for batch in read_batches(
        table.path, table.kind, looked_at, list(wanted), names, table.delimiter
    ):
        for text, column in wanted.items():
            column.add(batch.column(text))
        lacking.append(_lacking(batch, looked_at))
        if table.target == "number":
            measured.append(batch.column(table.label).to_numpy(zero_copy_only=False))
    codes = {text: found.codes() for text, found in wanted.items()}
    gone = np.concatenate(lacking) if lacking else np.empty(0, dtype=bool)
    if table.target == "number" and table.missing != "drop":
        _require_all(table, table.label, gone, fillable=False)
    kept = _kept(table, codes, gone, texts)
    if table.target == "number":
        labels, target = np.concatenate(measured)[kept].astype(np.float32), Target("number")
    else:
        known = wanted[table.label].numbers
        labels, classes = code_labels(table, known, codes[table.label][kept])
        target = Target("class", classes)
    users, user_names = (
        code_users(wanted[table.user].numbers, codes[table.user][kept])
        if table.user
        else (None, ())
    )
    categories = {text: category_values(table, text, wanted[text].numbers) for text in texts}
    columns = tuple(name for name in table.features or names if name in {*numbers, *texts})
    return Scan(
        table,
        numbers,
        categories,
        tuple(names),
        kept,
        labels,
        target,
        users,
        user_names,
        notes_on(table, categories, target, int((~kept).sum())),
        preparation_of(table, columns, categories),
    )


def feature_blocks(scan: Scan) -> Iterator[tuple[int, np.ndarray]]:
    """The second reading: (number of the first record, float32 rows) of the records that are
    kept."""
    table, seen, done = scan.table, 0, 0
    texts = list(scan.categories)
    for batch in read_batches(
        table.path, table.kind, scan.numbers, texts, scan.names, table.delimiter
    ):
        keep = scan.kept[seen : seen + batch.num_rows]
        rows = np.empty((batch.num_rows, scan.dimension), dtype=np.float32)
        for j, name in enumerate(scan.numbers):
            rows[:, j] = _number_column(table, batch.column(name), name, keep)
        at = len(scan.numbers)
        for text in texts:
            _one_hot(
                batch.column(text),
                scan.categories[text],
                rows[:, at : at + len(scan.categories[text])],
            )
            at += len(scan.categories[text])
        seen += batch.num_rows
        yield done, rows[keep]
        done += int(keep.sum())


def _roles(table: Table, names: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which columns are numbers and which categories."""
    require_column(table.path, table.label, names, "label")
    if table.user is not None:
        require_column(table.path, table.user, names, "user")
    for name in (*table.features, *table.categories):
        require_column(table.path, name, names, "feature")
    chosen = table.features or tuple(
        name for name in names if name not in (table.label, table.user)
    )
    if {table.label, table.user} & {*chosen, *table.categories}:
        raise BadInput(
            f"{table.path}: the label or user column is also listed as a feature; leave it out of "
            f"features"
        )
    texts = tuple(name for name in table.categories if name in chosen or not table.features)
    numbers = tuple(name for name in chosen if name not in table.categories)
    if not numbers and not texts:
        raise BadInput(f"{table.path} has no feature column beside label and user")
    return numbers, texts


def _lacking(batch: pa.RecordBatch, columns: Sequence[str]) -> np.ndarray:
    lacking = np.zeros(batch.num_rows, dtype=bool)
    for name in columns:
        column = batch.column(name)
        lacking |= np.isnan(column.to_numpy(zero_copy_only=False))
    return lacking


def _kept(
    table: Table, codes: dict[str, np.ndarray], lacking: np.ndarray, texts: Sequence[str]
) -> np.ndarray:
    for name, column in codes.items():
        gone = column < 0
        if not gone.any():
            continue
        if table.missing == "refuse" or (
            name in (table.label, table.user) and table.missing != "drop"
        ):
            _require_all(table, name, gone, fillable=name in texts)
        if table.missing == "drop":
            lacking = lacking | gone
    if not (~lacking).any():
        raise BadInput(f"{table.path} has no {'complete ' if len(lacking) else ''}record")
    return ~lacking


def _require_all(table: Table, name: str, gone: np.ndarray, fillable: bool) -> None:
    """Refuse a column that lacks values."""
    if gone.any():
        advice = "set missing = 'drop' to leave such records out" + (
            " or a number to fill them" if fillable else ""
        )
        raise BadInput(
            f"{table.path}: column '{name}' lacks a value in {int(gone.sum())} of {len(gone)} "
            f"records; {advice}"
        )


def _number_column(table: Table, column: pa.Array, name: str, keep: np.ndarray) -> np.ndarray:
    values = column.to_numpy(zero_copy_only=False)
    gone = np.isnan(values) & keep
    if not gone.any():
        return values
    if isinstance(table.missing, str):
        raise BadInput(
            f"{table.path}: column '{name}' lacks a value in some records; set missing = 'drop' "
            f"to leave them out "
            "or a number to fill them"
        )
    return np.where(gone, np.float32(table.missing), values)


def _one_hot(column: pa.Array, values: tuple[str, ...], out: np.ndarray) -> None:
    index = (
        pa.compute.index_in(column, pa.array(values, pa.string()))
        .fill_null(-1)
        .to_numpy(zero_copy_only=False)
    )
    out[:] = index[:, None] == np.arange(len(values))
