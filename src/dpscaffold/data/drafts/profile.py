"""A look at a table, to draft the configuration that reads it: what each column seems to be, and
why.

The look reads private records, so it is for whoever may see them, and no ε covers it; what is
drafted is written down for people to check.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from dpscaffold.data.drafts.guesses import (
    but_for,
    described_label,
    forms_of,
    in_thousands,
    is_compact,
    markers_in,
    numbers_in,
    pointed_out,
    target_in,
)
from dpscaffold.data.tables.cells import CellReader, as_text, same_values
from dpscaffold.data.tables.codec import read_labels
from dpscaffold.data.tables.dialect import (
    OTHERS,
    UNKNOWN,
    Dialect,
    Format,
    TableFile,
    is_many,
    no_tables,
    other_files_note,
    table_files,
)
from dpscaffold.data.tables.missing import BLANKS, GROUPED, tidy
from dpscaffold.data.tables.reader import (
    column_names,
    common_columns,
    read_batches,
    require_column,
    split_tables,
)
from dpscaffold.errors import BadInput
from dpscaffold.federation.schema import Target

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet
else:
    from dpscaffold.data.tables.arrow import pa, parquet

Role = Literal["label", "user", "number", "category", "date", "left out"]
#: How many rows are looked at in all, the same number of every file.
ROWS = 2000
#: How much of a table the rows are drawn from, from its beginning: reading that takes seconds.
MOST_BYTES = 1 << 29
#: Different texts of a label that is guessed by its name, at most.
MOST_CLASSES = 50
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
#: Sites with fewer records are left out by a draft.
LEAST_RECORDS = 10
#: A column of free text by its name; such texts may name people.
FREE_TEXT = (
    r"(^|_)(notes?|comments?|remarks?|text|free_?text|description|bemerkung(en)?|kommentar|notiz"
    r"(en)?|befund|anamnese|freitext|remarques?|commentaires?|observations?|nota|notas|opmerking"
    r"(en)?)(_|$)"
)


@dataclass(frozen=True)
class ColumnProfile:
    """One column: what it seems to be, why, and whether values are missing. ``na_values`` are the
    texts that seem to represent a missing value, ``maybe`` the values that might; and in how many
    rows. ``same`` are other spellings of its values."""

    name: str
    role: Role
    why: str
    missing: bool = False
    forms: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    na_values: Mapping[str, int] = field(default_factory=dict)
    maybe: Mapping[str, int] = field(default_factory=dict)
    same: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: bool = False


@dataclass(frozen=True)
class TableProfile:
    """What was found in a table; ``target`` has the range that a number seems to have, ``sizes``
    are the records of every site by name (of the whole table where it names none), and ``notes``
    say which files were left out."""

    path: Path
    kind: Format
    dialect: Dialect
    columns: tuple[ColumnProfile, ...]
    by_file: bool
    target: Target
    rows: int
    sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    #: How each file is written, by its name.
    dialects: tuple[tuple[str, Dialect], ...] = ()

    @property
    def users(self) -> int:
        """How many sites there are; 0 where nothing names one."""
        return len(self.sizes) if self.by_file or self.of("user") else 0

    def of(self, role: Role) -> list[ColumnProfile]:
        """The columns of one role."""
        return [column for column in self.columns if column.role == role]


def look(
    path: Path, label: str | None = None, user: str | None = None, rows: int = ROWS
) -> TableProfile:
    """Look at some rows of every file and guess what the columns are. ``label`` may name several
    columns, with commas between them."""
    kind = kind_of(path)
    files, texts = split_tables(table_files(path, kind, UNKNOWN))
    lacking = _may_lack(files)
    given = _labels_in(label, [*lacking, *column_names(files[0])])
    files, names = common_columns(files, lambda name: name in lacking, (*given, user))
    for wanted in given:
        require_column(path, wanted, names, "label")
    if user is not None:
        require_column(path, user, names, "user")
    if user in given:
        raise BadInput(
            "column-named-twice", f"--user and --label are both '{user}'; name two columns"
        )
    strange = {} if kind == "csv" else _strange(files)
    names = [name for name in names if name not in strange or name in (*given, user)]
    cells = _sample(files, names, rows)
    seen = len(next(iter(cells.values()))) if cells else 0
    if not seen:
        raise BadInput("no-rows", f"{path} holds no record; name a table with some")
    na_values = {name: markers_in(cells[name]) for name in names}
    cells = {name: _without(cells[name], na_values[name]) for name in names}
    whole = [name for name in names if name not in lacking]
    chosen = given or (_label(whole, cells),)
    for name in chosen if len(chosen) > 1 else ():
        there = pa.array([cell for cell in cells[name] if cell is not None], pa.string())
        read_labels(Target("labels", chosen), {name: there}, CellReader()).require()
    site = user or _site(whole, cells, chosen, files)
    by_file = site is None and is_many(path)
    found = _counted(
        files, {name: na_values[name] for name in (*chosen, *([site] if site else ()))}
    )
    counts = {name: found.values[name] for name in chosen}
    sizes = (
        found.values[site] if site else found.sizes if by_file else {"": sum(found.sizes.values())}
    )
    _require_sites(path, site, by_file, sizes)
    target = target_in(path, counts)
    columns = []
    for name in names:
        if name in chosen:
            column = _label_column(name, counts[name], target, bool(given))
            column = replace(column, missing=None in cells[name])
        else:
            column = _column(name, cells[name], site, user is not None)
            column = _absent(column, lacking.get(name, ()), len(files))
        columns.append(_with_na_values(column, na_values[name], cells[name]))
    columns += [
        ColumnProfile(name, "left out", f"it holds {held}, neither numbers nor texts")
        for name, held in strange.items()
        if name not in names
    ]
    shared = _shared([file.dialect for file in files])
    notes = tuple(note for note in (other_files_note(path, kind), no_tables(texts)) if note)
    dialects = tuple((file.path.name, file.dialect) for file in files)
    return TableProfile(
        path, kind, shared, tuple(columns), by_file, target, seen, sizes, notes, dialects
    )


def _may_lack(files: Sequence[TableFile]) -> dict[str, tuple[str, ...]]:
    """The columns that some files lack, and which files: where a file has at least half of all
    columns, others may be missing there. A file of another kind is refused elsewhere."""
    found = [{*column_names(file)} for file in files]
    every = set().union(*found)
    if any(2 * len(each) < len(every) for each in found):
        return {}
    return {
        name: tuple(
            file.path.name for file, each in zip(files, found, strict=True) if name not in each
        )
        for name in every
        if not all(name in each for each in found)
    }


def _absent(column: ColumnProfile, files: Sequence[str], count: int) -> ColumnProfile:
    """A column that some files lack: its values are missing there, unless few files have it."""
    if not files or column.role == "left out":
        return column
    named = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    if 2 * len(files) > count:
        return ColumnProfile(column.name, "left out", f"most files lack it: {named}")
    why = f"{column.why}; {named} lacks it, so its values are missing there"
    return replace(column, why=why, missing=True, absent=True)


@dataclass(frozen=True)
class _Counts:
    """How many rows hold each value of some columns, and how many rows each file has."""

    values: dict[str, Counter[str]]
    sizes: dict[str, int]


def _counted(files: Sequence[TableFile], columns: Mapping[str, Mapping[str, int]]) -> _Counts:
    """The values of columns, without what means a missing one, in all rows: a rare value matters,
    too."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in columns}
    sizes = {file.user: 0 for file in files}
    most = max(1, MOST_BYTES // len(files))
    for file in files:
        read = 0
        for batch in read_batches(file, [], list(columns), list(columns)):
            for name, na_values in columns.items():
                cells = _cells(file, batch, name)
                counts[name].update(c for c in cells if c is not None and c not in na_values)
            sizes[file.user] += batch.num_rows
            read += batch.nbytes
            if read >= most:
                break
    return _Counts(counts, sizes)


def _require_sites(path: Path, site: str | None, by_file: bool, sizes: Mapping[str, int]) -> None:
    """Refuse a table of which training would keep fewer than two sites."""
    large = sum(size >= LEAST_RECORDS for size in sizes.values())
    if site is None and not by_file:
        if sum(sizes.values()) < 2 * LEAST_RECORDS:
            raise BadInput(
                "too-few-records",
                f"{path} holds {sum(sizes.values())} records, and two sites need "
                f"{LEAST_RECORDS} each; name a table with more",
            )
        return
    if large < 2:
        what = f"the column '{site}' names" if site else f"{path} holds"
        unit = "site" if site else "file"
        raise BadInput(
            "too-few-users",
            f"{what} {len(sizes)} {unit}{'' if len(sizes) == 1 else 's'}, of which {large} "
            f"{'has' if large == 1 else 'have'} {LEAST_RECORDS} records or more; federated "
            f"training needs two such sites: name the column of sites with --user COLUMN",
        )


def _label_column(name: str, counts: Counter[str], target: Target, given: bool) -> ColumnProfile:
    """A label, with its values and their counts or the range that was guessed."""
    named = re.fullmatch(LABELS, name.lower())
    guessed = "the name suggests it" if named else f"{len(counts)} distinct values"
    why = "given by --label" if given else f"guessed: {guessed}"
    column = ColumnProfile(name, "label", f"{why}; {described_label(counts, target)}")
    return _with_spellings(column, counts) if target.kind == "class" else column


def _with_spellings(column: ColumnProfile, counts: Counter[str]) -> ColumnProfile:
    """A column of classes or categories with spellings that seem to be one value."""
    same = same_values(counts)
    others = {other for group in same.values() for other in group}
    why, values = column.why, tuple(v for v in column.values if v not in others)
    if same:
        pairs = (f"{_some(group)} as '{value}'" for value, group in same.items())
        why += f"; read as one: {', '.join(pairs)}"
    return replace(column, why=why, values=values, same=same)


def _strange(files: Sequence[TableFile]) -> dict[str, str]:
    """The columns of Parquet files that hold neither numbers nor texts, and what they hold."""
    found: dict[str, str] = {}
    for file in files:
        for column in parquet.read_schema(file.path):
            kind = column.type
            if pa.types.is_nested(kind) or pa.types.is_duration(kind) or _is_binary(kind):
                found.setdefault(column.name, str(kind))
    return found


def _is_binary(kind: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or fixed)


def _without(cells: list[str | None], na_values: Mapping[str, int]) -> list[str | None]:
    """The cells with nothing in place of what seems to represent it."""
    if not na_values:
        return cells
    return [None if cell is None or cell.strip(BLANKS) in na_values else cell for cell in cells]


def _with_na_values(
    column: ColumnProfile, na_values: Mapping[str, int], cells: list[str | None]
) -> ColumnProfile:
    """A column with what seems to represent a missing value, where the column is used."""
    if column.role == "left out":
        return column
    maybe = pointed_out(cells)
    why = column.why
    if na_values:
        why += f"; {_some(na_values)} read as missing"
    if maybe:
        why += f"; does {_some(maybe)} mean missing?"
    return replace(column, why=why, na_values=na_values, maybe=maybe)


def _some(texts: Iterable[str], most: int = 3) -> str:
    """The first of some texts, and how many more there are."""
    quoted = [f"'{text}'" for text in texts]
    more = f" and {len(quoted) - most} more" if len(quoted) > most else ""
    return ", ".join(quoted[:most]) + more


def _shared(dialects: list[Dialect]) -> Dialect:
    """The dialect of all files, or one to be found file by file."""
    alike = {replace(dialect, header=1) for dialect in dialects}
    return alike.pop() if len(alike) == 1 else UNKNOWN


def _labels_in(label: str | None, names: list[str]) -> tuple[str, ...]:
    """The columns that a label names: itself, or several with commas between them."""
    if label is None or label in names or "," not in label:
        return () if label is None else (label,)
    return tuple(part.strip() for part in label.split(","))


def _cells(file: TableFile, batch: pa.RecordBatch, name: str) -> list[str | None]:
    """A column of a batch as texts with a decimal point."""
    texts: list[str | None] = tidy(as_text(batch.column(name), name)[0]).to_pylist()
    return [_pointed(text) for text in texts] if file.decimal == "," else texts


def kind_of(path: Path) -> Format:
    """Which files a path represents: those of its ending, or those that a folder holds."""
    if path.is_dir():
        ends = {file.suffix.lower() for file in path.rglob("*")}
        if ends & {".parquet", ".pq"}:
            return "parquet"
        if ends & {".csv", ".tsv", ".txt"}:
            return "csv"
        raise BadInput(
            "no-files", f"{path} holds no .csv and no .parquet file; name a folder that does"
        )
    if not path.exists() and not is_many(path):
        raise BadInput(
            "file-not-found",
            f"{path} does not exist; name a table or a folder of tables",
        )
    if path.suffix.lower() == ".npz":
        raise BadInput(
            "wrong-file-type",
            f"{path} holds arrays, and init drafts tables; write a configuration with source = "
            f"'npz' and path = '{path}' under [data]",
        )
    if path.suffix.lower() in OTHERS:
        raise BadInput(
            "wrong-file-type",
            f"{path} is no .csv or .parquet file; unpack it, or convert it to one",
        )
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
    """This many rows, drawn from all of a file: the first ones of a table that is sorted by site,
    or by label, show one of them. The same rows each time; each row draws a number, and the
    smallest stay."""
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
    """A number of a file with decimal commas as one with a point; any other text as it is."""
    if not text:
        return text
    plain = text.replace(".", "") if re.fullmatch(GROUPED, text) else text
    return plain.replace(",", ".") if re.fullmatch(r"[+-]?\d+(,\d*)?", plain) else text


def _label(names: list[str], cells: dict[str, list[str | None]]) -> str:
    """A column with a label's name, else the last with few values."""
    for name in names:
        if re.fullmatch(LABELS, name.lower()):
            return _no_site(name, {cell for cell in cells[name] if cell is not None})
    few = [name for name in names if 2 <= len(set(cells[name]) - {None}) <= 20]
    if not few:
        raise BadInput(
            "no-label-found",
            "no column looks like a label (2 to 20 values); name it with --label COLUMN",
        )
    return few[-1]


def _no_site(name: str, values: set[str]) -> str:
    """The column, unless it has so many texts that it rather names school classes or wards."""
    if len(values) > MOST_CLASSES and numbers_in(list(values)) is None:
        raise BadInput(
            "no-label-found",
            f"the column '{name}' has the name of a label, but {len(values)} different texts; name "
            f"the label with --label COLUMN, and if '{name}' is the site of each row, add --user "
            f"'{name}'",
        )
    return name


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
) -> ColumnProfile:
    """What a column seems to be that is no label."""
    there = [cell for cell in cells if cell is not None]
    missing = len(there) < len(cells)
    if name == site:
        return ColumnProfile(name, "user", "given by --user" if named else "its name", missing)
    values = set(there)
    if len(values) <= 1:
        return ColumnProfile(name, "left out", "it has a single value" if values else "it is empty")
    numbers = numbers_in(there)
    hinted = re.search(IDENTIFIERS, name.lower()) is not None
    unique = len(values) == len(there) and len(there) >= 20
    whole = numbers is not None and bool((numbers == np.floor(numbers)).all())
    forms = () if numbers is not None and not is_compact(there) else forms_of(there)
    if forms:
        why = f"dates in the format {' or '.join(forms)}"
        return ColumnProfile(name, "date", why, missing, forms)
    if numbers is None and (grouped := in_thousands(there)):
        why = f"numbers with a thousands separator ('{grouped}'); write them without to use it"
        return ColumnProfile(name, "left out", why)
    if unique and (numbers is None or whole):
        return ColumnProfile(name, "left out", "an identifier: no value occurs twice")
    if hinted and len(values) > len(there) // 2:
        return ColumnProfile(
            name, "left out", "an identifier by its name, with hardly any repeated value"
        )
    if numbers is not None:
        return ColumnProfile(name, "number", "numbers", missing)
    if broken := but_for(there):
        return ColumnProfile(name, "left out", broken)
    if _is_free_text(name, values):
        why = (
            "free text, it seems, which may name people; if its values are a few fixed answers, "
            "list it in categories"
        )
        return ColumnProfile(name, "left out", why)
    if len(values) > MOST_CATEGORIES:
        return ColumnProfile(
            name, "left out", f"text with {len(values)} distinct values in {len(there)} rows"
        )
    known = tuple(sorted(values))
    column = ColumnProfile(
        name, "category", f"text with {len(values)} distinct values", missing, values=known
    )
    return _with_spellings(column, Counter(there))


def _is_free_text(name: str, values: Iterable[str]) -> bool:
    """Whether texts are sentences rather than the names of categories."""
    words = [len(value.split()) for value in values]
    mean = sum(words) / len(words)
    named = re.search(FREE_TEXT, name.lower()) is not None
    return mean >= 4 or (named and mean > 1.2)
