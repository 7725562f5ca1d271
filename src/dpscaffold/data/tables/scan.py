"""CSV and Parquet files with a label column and, where there is one, a user column.

A file is read twice, in batches: a scan finds labels, users, categories and missing values, then
the features go straight to where they belong. Nothing but the result is held in memory, and the
result may be a mapped file (:func:`dpscaffold.data.prepare`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpscaffold.data.pool import Pool
from dpscaffold.data.tables.cells import CellReader, alike_users
from dpscaffold.data.tables.codec import CellProblem, Coding, report
from dpscaffold.data.tables.dialect import (
    TableFile,
    is_many,
    no_tables,
    other_files_note,
    table_files,
)
from dpscaffold.data.tables.missing import Rule, SeenNaStrings
from dpscaffold.data.tables.reader import (
    NotNumbers,
    common_columns,
    no_number,
    read_batches,
    require_column,
    split_tables,
)
from dpscaffold.data.tables.source import (
    Codes,
    Identifiers,
    TableSource,
    category_values,
    check_na_strings,
    check_rules,
    code_label_sets,
    code_labels,
    code_users,
    for_the_rest,
    left_out,
    notes_on,
    preparation_of,
    ranges_of,
    rule_of,
)
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Prepared, Target

if TYPE_CHECKING:
    import pyarrow as pa
else:
    from dpscaffold.data.tables.arrow import pa


@dataclass(frozen=True)
class Scan:
    """What the first reading found: for every record kept its label and user, and how columns are
    coded."""

    table: TableSource
    files: tuple[TableFile, ...]
    coding: Coding
    names: tuple[str, ...]
    kept: np.ndarray
    labels: np.ndarray
    target: Target
    users: np.ndarray | None
    user_names: tuple[str, ...]
    notes: tuple[str, ...]
    preparation: tuple[Prepared, ...]
    seen: SeenNaStrings

    @property
    def dimension(self) -> int:
        """d."""
        return self.coding.features


def read_table(table: TableSource) -> Pool:
    """A whole file as a pool, in memory.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "visits.csv"
    ...     _ = path.write_text("clinic,age,ill\\nnorth,31,no\\nsouth,58,yes\\nnorth,44,yes\\n")
    ...     pool = read_table(TableSource(path, "csv", label="ill", user="clinic"))
    >>> pool.features.tolist(), pool.labels.tolist(), pool.names
    ([[31.0], [58.0], [44.0]], [0, 1, 1], ('north', 'south'))
    """
    scan = scan_table(table)
    features = np.empty((len(scan.labels), scan.dimension), dtype=np.float32)
    identifiers = identifiers_in(scan)
    for start, rows in feature_blocks(scan):
        features[start : start + len(rows)] = rows
        identifiers.add(rows)
    return Pool(
        features,
        scan.labels,
        scan.target,
        table.path.name,
        1.0,
        scan.users,
        scan.user_names,
        scan.notes + scan.seen.notes(table.na_values) + identifiers.notes(),
        scan.preparation,
        coded=True,
    )


def identifiers_in(scan: Scan) -> Identifiers:
    """What looks for identifiers among a table's numbers."""
    numbers = enumerate(scan.coding.numbers)
    return Identifiers({j: name for j, name in numbers if name not in scan.table.dates})


def scan_table(table: TableSource) -> Scan:
    """The first reading: labels, users, categories, and which records are kept."""
    files, skipped = split_tables(files_of(table))
    files, names = common_columns(files, table.is_optional, needed(table))
    numbers, texts = _roles(table, names)
    check_rules(table, numbers, texts)
    check_na_strings(table, names)
    coded = [] if table.predicts == "number" else list(table.labels)
    wanted = {
        text: Codes()
        for text in dict.fromkeys([*coded, *([table.user] if table.user else []), *texts])
    }
    # Numbers are looked at only where a missing one decides something.
    rules = {name: rule_of(table, name) for name in numbers}
    looked_at = [name for name in numbers if rules[name] == "drop"]
    if table.predicts == "number":
        looked_at += table.labels
    seen = SeenNaStrings()
    found, sizes = _looked_through(files, table, looked_at, wanted, names, seen)
    codes = {text: column.codes() for text, column in wanted.items()}
    kept, na_values = _kept(table, codes, found, texts, sum(sizes))
    labels, target = _labels(table, wanted, codes, found, kept)
    users, user_names = _users(table, files, sizes, wanted, codes, kept)
    categories = {text: category_values(table, text, wanted[text].numbers) for text in texts}
    coding = Coding(
        tuple(name for name in table.features or names if name in {*numbers, *texts}),
        tuple(categories.items()),
        for_the_rest(table),
        tuple(name for name in categories if not table.categories[name]),
        table.unseen,
        dates=tuple((name, form) for name, form in table.dates.items() if name in numbers),
        fills=(*_number_fills(table, rules), *_constant_fills(table, texts)),
        indicators=tuple(name for name in numbers if rules[name] == "indicator"),
        own=tuple(text for text in texts if rule_of(table, text) == "category"),
        na_values=table.na_values.among(
            name for name in names if name in {*numbers, *texts, *needed(table)}
        ),
        values=table.values.among(names),
        absent=tuple(name for name in table.absent if name in {*numbers, *texts}),
    )
    return Scan(
        table,
        files,
        coding,
        tuple(names),
        kept,
        labels,
        target,
        users,
        user_names,
        (
            *_skipped(table, skipped),
            *notes_on(table, categories, target, left_out(kept, na_values), int(kept.sum())),
            *alike_users(table.user, user_names),
        ),
        preparation_of(table, coding, files),
        seen,
    )


def _looked_through(
    files: Sequence[TableFile],
    table: TableSource,
    numbers: Sequence[str],
    texts: Mapping[str, Codes],
    names: list[str],
    seen: SeenNaStrings,
) -> tuple[dict[str, np.ndarray], list[int]]:
    """All values of these columns of numbers, and the records of every file; the values of columns
    of text are added to their codes."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in numbers}
    sizes = []
    for file in files:
        records, refuse = 0, RefuseRecords(file.path)
        for batch, reader in _batches(file, table, numbers, list(texts), names, seen):
            with _named(file):
                for name, codes in texts.items():
                    text, wrong = reader.texts(name, batch.column(name))
                    report(refuse, name, "unreadable", wrong, batch.column(name), known=("",))
                    codes.add(text)
                for name in numbers:
                    values, wrong = reader.numbers(name, batch.column(name))
                    form = table.dates.get(name)
                    report(refuse, name, "unreadable", wrong, batch.column(name), form)
                    found[name].append(values)
            records += batch.num_rows
        sizes.append(records)
    return {name: np.concatenate(parts) if parts else _NONE for name, parts in found.items()}, sizes


def _batches(
    file: TableFile,
    table: TableSource,
    numbers: Sequence[str],
    texts: Sequence[str],
    names: list[str],
    seen: SeenNaStrings,
) -> Iterator[tuple[pa.RecordBatch, CellReader]]:
    """Batches of a file, and how their cells are read."""
    reader = CellReader(table.na_values, table.values, table.dates, file.decimal, seen)
    plain = [name for name in numbers if name not in table.dates]
    dated = [name for name in numbers if name in table.dates]
    for batch in read_batches(file, plain, [*texts, *dated], names):
        yield batch, reader


@contextmanager
def _named(file: TableFile) -> Iterator[None]:
    """Whatever is wrong with the columns of a file is said with its path."""
    try:
        yield
    except BadInput as problem:
        raise (
            problem
            if str(file.path) in str(problem)
            else BadInput(problem.code, f"{file.path}: {problem}")
        ) from None


class RefuseRecords:
    """The policy for training: a cell that cannot be read refuses the file, and so does a missing
    value of a record that is kept (all are, if ``keep`` is not given)."""

    def __init__(self, path: Path, keep: np.ndarray | None = None) -> None:
        self.path, self.keep, self.lacking = path, keep, ""

    def __call__(self, problem: CellProblem) -> None:
        name = problem.column
        if problem.kind == "missing" and (self.keep is None or (problem.rows & self.keep).any()):
            self.lacking = self.lacking or name
        if problem.kind != "unreadable":
            return  # numbers that are not finite are refused after the preparation
        if problem.form is None and not problem.known:
            raise NotNumbers("not-numbers", no_number(self.path, name, problem.text))
        what = f"holds '{problem.text}', {problem.unreadable()}"
        raise BadInput("unreadable-value", f"{self.path}: column '{name}' {what}")

    def require_all(self) -> None:
        """Refuse missing values, once all cells have been read."""
        name = self.lacking
        if name:
            raise BadInput(
                "missing-value",
                f"{self.path}: column '{name}' lacks a value in some records; set missing = 'drop' "
                f"to leave them out or a number to fill them, or missing.{name} = 'indicator'",
            )


def files_of(table: TableSource) -> tuple[TableFile, ...]:
    """The files of a table, or what is held in their place."""
    if table.kind == "held":
        held = (TableFile(Path(n), "held", user=n, table=t) for n, t in table.held)
        return tuple(replace(file, na_values=table.na_values) for file in held)
    files = table_files(table.path, table.kind, table.dialect, needed(table))
    return tuple(replace(file, na_values=table.na_values) for file in files)


def _skipped(table: TableSource, texts: Sequence[str]) -> tuple[str, ...]:
    """A note about files that are not read."""
    said = "" if table.kind == "held" else other_files_note(table.path, table.kind)
    return tuple(note for note in (said, no_tables(texts)) if note)


_NONE = np.empty(0, dtype=np.float32)


def _labels(
    table: TableSource,
    wanted: Mapping[str, Codes],
    codes: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    kept: np.ndarray,
) -> tuple[np.ndarray, Target]:
    """What is predicted of the records that are kept, and what it represents."""
    first = table.labels[0]
    if table.predicts == "number":
        target = table.target if isinstance(table.target, Target) else Target("number")
        return found[first][kept].astype(np.float32), target
    if table.predicts == "labels":
        numbers = {name: wanted[name].numbers for name in table.labels}
        used = {name: codes[name][kept] for name in table.labels}
        return code_label_sets(table, numbers, used), Target("labels", table.labels)
    labels, classes = code_labels(table, wanted[first].numbers, codes[first][kept])
    return labels, Target("class", classes)


def _number_fills(table: TableSource, rules: Mapping[str, Rule]) -> tuple[tuple[str, float], ...]:
    """The number that represents a missing one, of every column with a rule of its own."""
    if not isinstance(table.missing, Mapping):
        return ()
    fills = []
    for name, rule in rules.items():
        if rule == "indicator":  # next to it any number will do
            fills.append((name, sum(table.ranges.get(name, (0.0, 0.0))) / 2))
        elif not isinstance(rule, str):
            fills.append((name, float(rule)))
    return tuple(fills)


def _constant_fills(table: TableSource, texts: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Categorical columns with a number as their own rule: a record without a value has zeros."""
    if not isinstance(table.missing, Mapping):
        return ()
    rules = {text: rule_of(table, text) for text in texts}
    return tuple((text, float(r)) for text, r in rules.items() if isinstance(r, int | float))


def _users(
    table: TableSource,
    files: Sequence[TableFile],
    sizes: Sequence[int],
    wanted: Mapping[str, Codes],
    codes: Mapping[str, np.ndarray],
    kept: np.ndarray,
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The user of each record: by its column, or by its file where there are many."""
    if table.user:
        return code_users(wanted[table.user].numbers, codes[table.user][kept])
    if not (table.many if table.held else is_many(table.path)):
        return None, ()
    numbers = np.repeat(np.arange(len(files), dtype=np.int64), sizes)
    return numbers[kept], tuple(file.user for file in files)


def feature_blocks(scan: Scan) -> Iterator[tuple[int, np.ndarray]]:
    """The second reading: (number of the first record, float32 rows) of the records that are
    kept."""
    table, coding, seen, done = scan.table, scan.coding, 0, 0
    texts, names = [name for name, _ in coding.categories], list(scan.names)
    mapped = ranges_of(table, coding) if table.ranges else None
    for file in scan.files:
        for batch, reader in _batches(file, table, coding.numbers, texts, names, scan.seen):
            keep = scan.kept[seen : seen + batch.num_rows]
            columns = {name: batch.column(name) for name in coding.columns}
            with _named(file):
                refuse = RefuseRecords(file.path, keep)
                kept = coding.encode(columns, refuse, reader)[keep]
                refuse.require_all()
            seen += batch.num_rows
            yield done, kept if mapped is None else mapped(kept)
            done += len(kept)


def _roles(table: TableSource, names: list[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which columns are numbers and which categories."""
    for name in table.labels:
        require_column(table.path, name, names, "label")
    if table.user is not None:
        require_column(table.path, table.user, names, "user")
    listed = (*table.features, *table.categories, *table.dates, *table.exclude, *table.absent)
    for name in listed:
        require_column(table.path, name, names, "feature")
    if {*table.labels, table.user} & {*table.exclude}:
        raise BadInput(
            "column-needed",
            f"{table.path}: exclude names the label or user column; leave it out there",
        )
    chosen = table.features or tuple(
        name for name in names if name not in (*table.labels, table.user)
    )
    chosen = tuple(name for name in chosen if name not in table.exclude)
    both = sorted({*table.dates} & {*table.categories})
    if both:
        raise BadInput(
            "conflicting-arguments",
            f"{table.path}: column '{both[0]}' is in dates and in categories; choose",
        )
    if {*table.labels, table.user} & {*chosen, *table.categories}:
        raise BadInput(
            "column-named-twice",
            f"{table.path}: the label or user column is also listed as a feature; leave it out of "
            f"features",
        )
    texts = tuple(name for name in table.categories if name in chosen)
    numbers = tuple(name for name in chosen if name not in table.categories)
    if not numbers and not texts:
        raise BadInput(
            "no-features", f"{table.path} has no feature column apart from label and user"
        )
    return numbers, texts


def _kept(
    table: TableSource,
    codes: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    texts: Sequence[str],
    records: int,
) -> tuple[np.ndarray, dict[str, int]]:
    """Which records stay: those that lack nothing whose absence drops a record. And how many lack
    which column."""
    na_values: dict[str, int] = {}
    lacking = np.zeros(records, dtype=bool)
    absent = {name: column < 0 for name, column in codes.items()}
    absent |= {name: np.isnan(column) for name, column in found.items()}
    for name, gone in absent.items():
        if not gone.any():
            continue
        rule = rule_of(table, name)
        needs = name in needed(table)
        if rule == "drop":
            lacking |= gone
            na_values[name] = int(gone.sum())
        elif rule == "refuse" or needs:
            _require_all(table, name, gone, fillable=name in texts and not needs)
    if not (~lacking).any():
        raise BadInput(
            "no-rows", f"{table.path} has no {'complete ' if len(lacking) else ''}record"
        )
    return ~lacking, na_values


def needed(table: TableSource) -> tuple[str, ...]:
    """The columns without which a record is none: of its labels and of its user."""
    return (*table.labels, *([table.user] if table.user else []))


def _require_all(table: TableSource, name: str, gone: np.ndarray, fillable: bool) -> None:
    """Refuse a column that lacks values."""
    if gone.any():
        advice = "set missing = 'drop' to leave such records out" + (
            " or a number to fill them" if fillable else ""
        )
        raise BadInput(
            "missing-value",
            f"{table.path}: column '{name}' lacks a value in {int(gone.sum())} of {len(gone)} "
            f"records; {advice}",
        )
