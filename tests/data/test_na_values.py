"""Texts that represent a missing value: a table with markers is the same table with empty cells.

That law is the oracle throughout: the empty cells are read by the readers as they were before there
were markers.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from typed import TABLE, typed

from dpscaffold.data import federation_of, load_federation
from dpscaffold.data.config import parse_data
from dpscaffold.data.loading import prepare, table_of
from dpscaffold.data.stored import entries, steps
from dpscaffold.data.tables.codec import Coding
from dpscaffold.data.tables.rows import raw_parts
from dpscaffold.data.tables.scan import read_table
from dpscaffold.models.model import Model
from dpscaffold.tasks import Logistic

MARKERS = ("?", "-", ".", "k. A.", "unknown", "-9", "9999")
NAMES = ("age", "ward", "day", "ill", "site")
KEYS: dict[str, Any] = {
    "label": "ill",
    "user": "site",
    "categories": ["ward"],
    "dates": {"day": "%Y-%m-%d"},
    "missing": {"age": "indicator", "ward": "category", "*": "drop"},
}
Row = tuple[str, ...]


def cell(name: str, i: int) -> str:
    """A value of a column that is no gap."""
    shown = {"age": f"{i * 7 % 41}.5", "ward": "ab"[i % 2], "day": f"2023-01-{i % 28 + 1:02d}"}
    return {**shown, "ill": ("no", "yes")[i % 3 > 0], "site": ("n", "s")[i % 5 > 1]}[name]


@st.composite
def holes(draw: st.DrawFn) -> tuple[list[Row], list[Row]]:
    """A table with markers, and the same with nothing in their place; some rows are whole."""
    marked, empty = [], []
    for i in range(draw(st.integers(6, 12))):
        whole = i < 6
        row, bare = [], []
        for name in NAMES:
            gap = not whole and draw(st.booleans())
            blanks = draw(st.sampled_from(["", " ", "\t"])) if gap else ""
            mark = draw(st.sampled_from(["", *MARKERS])) if gap else cell(name, i)
            row.append(f"{blanks}{mark}{blanks}" if mark else "")
            bare.append("" if gap else cell(name, i))
        marked.append(tuple(row))
        empty.append(tuple(bare))
    return marked, empty


def written(path: Path, rows: list[Row], delimiter: str = ",", comma: bool = False) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(NAMES)
        for row in rows:
            age = row[0].replace(".", ",") if comma and row[0].strip(" \t") != "." else row[0]
            writer.writerow((age if "k" not in age else row[0], *row[1:]))
    return path


def as_table(rows: list[Row]) -> pa.Table:
    """Texts as a Parquet file holds them: what is empty is null, nothing else."""
    columns = {n: [row[j] or None for row in rows] for j, n in enumerate(NAMES)}
    return pa.table({name: pa.array(cells, pa.string()) for name, cells in columns.items()})


def pool_of(path: Path, kind: str, **more: Any) -> Any:
    return read_table(table_of(parse_data({"source": kind, "path": path, **KEYS, **more})))


def assert_same(marked: Any, empty: Any) -> None:
    """The same records in every respect but what says how missing values were written."""
    np.testing.assert_array_equal(marked.features, empty.features)
    np.testing.assert_array_equal(marked.labels, empty.labels)
    np.testing.assert_array_equal(marked.users, empty.users)
    assert marked.names == empty.names and marked.target == empty.target
    left = [replace(s, na_values=()) if isinstance(s, Coding) else s for s in marked.preparation]
    assert tuple(left) == empty.preparation


@settings(max_examples=25)
@given(tables=holes(), comma=st.booleans(), by_column=st.booleans())
def test_markers_are_empty_cells(tables, comma, by_column, tmp_path_factory) -> None:
    """In CSV files with a point or a comma, Parquet files of texts, Arrow tables, and the model's
    own reading of raw rows."""
    folder = tmp_path_factory.mktemp("law")
    marked, empty = tables
    na_values = dict.fromkeys(NAMES, MARKERS) if by_column else MARKERS
    signs = {"delimiter": ";", "decimal": ","} if comma else {}
    args = (";", True) if comma else ()
    truth = pool_of(written(folder / "e.csv", empty, *args), "csv", **signs)
    here = pool_of(written(folder / "m.csv", marked, *args), "csv", na_values=na_values, **signs)
    assert_same(here, truth)
    pa.parquet.write_table(as_table(marked), folder / "m.parquet")
    assert_same(pool_of(folder / "m.parquet", "parquet", na_values=na_values), truth)
    (coding,) = [step for step in here.preparation if isinstance(step, Coding)]
    raw = np.array([row[:3] for row in marked], dtype=object)
    whole = [all(row[2:]) for row in empty]
    np.testing.assert_array_equal(coding(raw[whole]), truth.features)


@settings(max_examples=15)
@given(tables=holes())
def test_new_rows_are_read_as_the_training_was(tables, tmp_path_factory) -> None:
    """Rows that have no features are the same ones, too; a text that is no marker is none here
    either, and from there on numbers are read as texts."""
    folder = tmp_path_factory.mktemp("new")
    marked, empty = tables
    pool = pool_of(written(folder / "t.csv", empty), "csv", na_values=MARKERS)
    listed, arrays = entries(pool.preparation)
    stored = steps(listed, arrays, folder)
    plain = [replace(s, na_values=()) if isinstance(s, Coding) else s for s in stored]
    for spoilt in ((), (("strange", "a", "2023-01-02", "no", "n"),)):
        with_markers = written(folder / "m.csv", [*spoilt, *marked])
        without = written(folder / "e.csv", [*spoilt, *empty])
        parts = (
            *raw_parts(with_markers, stored, NAMES[:3], ["age", "ill"]),
            *raw_parts(with_markers, stored, NAMES[:3]),
        )
        (truth,) = raw_parts(without, plain, NAMES[:3])
        for part in parts:
            np.testing.assert_array_equal(part.complete, truth.complete)
            np.testing.assert_array_equal(part.features, truth.features)
        kept = parts[0].others.column("age").to_pylist()
        assert kept == [row[0] or None for row in (*spoilt, *marked)]  # as they stand


HOSPITALS = {
    "north.csv": "age;stay;ill\n31;4,5;no\n?;2,0;yes\n44;-9,0;no\n50;1,5;?\n61;3,5;yes\n",
    "south.csv": "age,stay,ill\n31,-9,no\n k. A. ,2.0,yes\n-9,1.5,no\n40,7.5,yes\n",
}
SAME = {
    "north.csv": "age;stay;ill\n31;4,5;no\n;2,0;yes\n44;;no\n50;1,5;\n61;3,5;yes\n",
    "south.csv": "age,stay,ill\n31,,no\n,2.0,yes\n-9,1.5,no\n40,7.5,yes\n",
}


def site_folder(place: Path, files: dict[str, str]) -> Path:
    place.mkdir()
    for name, text in files.items():
        (place / name).write_text(text)
    return place


SITES: dict[str, Any] = {"delimiter": "auto", "decimal": "auto", "label": "ill", "user": None}
SITES |= {"categories": [], "dates": {}}
SITES |= {"missing": {"age": 40.0, "stay": "indicator", "*": "drop"}}


@pytest.mark.parametrize("pattern", ["", "*.csv"])
def test_a_number_may_be_a_gap_of_one_column_only(pattern: str, tmp_path: Path) -> None:
    """-9 is a stay that nobody noted and an age that stays; sites write it in their own way."""
    na_values = {"stay": ["-9"], "*": ["?", "k. A."]}
    marked = pool_of(
        site_folder(tmp_path / "m", HOSPITALS) / pattern, "csv", **{**SITES, "na_values": na_values}
    )
    empty = pool_of(site_folder(tmp_path / "e", SAME) / pattern, "csv", **SITES)
    assert_same(marked, empty)
    assert -9.0 in marked.features[:, 0] and marked.features[:, 2].sum() == 2
    assert not [note for note in marked.notes if "na_values" in note]


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.float32(), pa.decimal128(6, 2)])
def test_numbers_that_are_typed_are_markers_by_value(kind: pa.DataType, tmp_path: Path) -> None:
    """0.1 has another value in single precision; the column's own decides."""
    values = [1, 2, -9, 4, 5, -9, 3, 6] if pa.types.is_integer(kind) else [1.5, 0.1, -9, 4, 0.1, 3]
    gap = "-9" if pa.types.is_integer(kind) else "0.1"
    rest = {"ill": ["no", "yes"] * (len(values) // 2)}
    typed_values = pa.array([float(v) for v in values], pa.float64()).cast(kind)
    pa.parquet.write_table(pa.table({"x": typed_values, **rest}), tmp_path / "t.parquet")
    keys = {"user": None, "users": 1, "categories": [], "dates": {}, "missing": {"x": -1.0}}
    pool = pool_of(tmp_path / "t.parquet", "parquet", na_values={"x": [gap]}, **keys)
    expected = [-1.0 if v == float(gap) else v for v in values]
    np.testing.assert_array_equal(pool.features[:, 0], np.float32(expected))
    assert not [note for note in pool.notes if "na_values" in note]
    (coding,) = [step for step in pool.preparation if isinstance(step, Coding)]
    raw = np.array(values, kind.to_pandas_dtype() if not pa.types.is_decimal(kind) else float)
    np.testing.assert_array_equal(coding(raw[:, None])[:, 0], np.float32(expected))
    objects = np.array(list(raw), dtype=object)[:, None]
    np.testing.assert_array_equal(coding(objects)[:, 0], np.float32(expected))


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_may_hold_markers(library: str) -> None:
    """Columns of texts, of numbers next to texts (pandas), of numbers, of times, and of words."""
    frames = pytest.importorskip(library, reason=f"needs {library}, which is not installed")
    n = 20
    columns: dict[str, list[Any]] = {
        "age": [None if i % 7 == 0 else i for i in range(n)],
        "ward": [("a", "b", None)[i % 3] for i in range(n)],
        "count": [None if i % 4 == 0 else i for i in range(n)],
        "ill": [("no", "yes")[i % 2] for i in range(n)],
        "site": [("n", "s")[i % 3 == 0] for i in range(n)],
    }
    marked = {
        **columns,
        "age": ["?" if i % 7 == 0 else str(i) for i in range(n)],
        "ward": [w or " ? " for w in columns["ward"]],
        "count": [-9 if i % 4 == 0 else i for i in range(n)],
    }
    if library == "pandas":
        marked["age"] = ["?" if i % 7 == 0 else i for i in range(n)]
    keys: dict[str, Any] = {"label": "ill", "user": "site", "categories": ["ward"]}
    keys |= {"missing": {"age": 7.5, "ward": "category", "count": "indicator"}}
    na_values = {"*": ["?"], "count": ["-9"]}
    said: list[str] = []
    found = federation_of(frames.DataFrame(marked), **keys, na_values=na_values, notify=said.append)
    truth = federation_of(pa.table(columns), **keys)
    torch.testing.assert_close(found.train.features, truth.train.features, rtol=0, atol=0)
    assert not [note for note in said if "na_values" in note]


def test_days_that_mean_none_may_be_typed() -> None:
    """1900-01-01 is a usual one; a table may hold days as times."""
    days = np.array(["1900-01-01", "2020-01-02", "2020-01-03", "1900-01-01"] * 3, "datetime64[ns]")
    table = pa.table({"day": days, "ill": ["no", "yes"] * 6})
    keys: dict[str, Any] = {"dates": {"day": "%Y-%m-%d"}, "missing": {"day": 0}, "users": 1}
    found = federation_of(table, "ill", na_values={"day": ["1900-01-01"]}, preprocess=[], **keys)
    assert {*found.train.features[:, 0].tolist()} <= {0.0, 18263.0, 18264.0}
    (coding,) = [step for step in found.preparation if isinstance(step, Coding)]
    held = table["day"].cast(pa.timestamp("s"))[0].as_py()  # as Python's own
    assert coding(np.array([[held], ["1900-01-01"]], dtype=object)).tolist() == [[0.0], [0.0]]


def test_folders_may_name_a_gap(tmp_path: Path) -> None:
    for name, rows in (("n", 6), ("unknown", 3), ("s", 6)):
        folder = tmp_path / "t" / f"site={name}"
        folder.mkdir(parents=True)
        columns = {"x": [float(i) for i in range(rows)], "ill": ["no", "yes", "yes"] * (rows // 3)}
        pa.parquet.write_table(pa.table(columns), folder / "a.parquet")
    keys = {"categories": [], "dates": {}, "missing": "drop"}
    pool = pool_of(tmp_path / "t", "parquet", na_values={"site": ["unknown"]}, **keys)
    assert pool.names == ("n", "s") and len(pool) == 12
    assert not [note for note in pool.notes if "na_values" in note]


def test_a_label_or_a_site_that_is_a_gap_is_as_an_empty_one(tmp_path: Path) -> None:
    rows = [tuple(cell(name, i) for name in NAMES) for i in range(12)]
    for place in (3, 4):
        spoilt = [
            (*row[:place], "?", *row[place + 1 :]) if i == 7 else row for i, row in enumerate(rows)
        ]
        path = written(tmp_path / "t.csv", spoilt)
        with refuses(f"missing-value: '{NAMES[place]}' … 1 of 12"):
            pool_of(path, "csv", missing="refuse", na_values=["?"])
        dropped = pool_of(path, "csv", na_values=["?"])
        assert len(dropped) == 11 and any("were left out" in note for note in dropped.notes)


def test_several_labels_and_numbers_may_lack_values(tmp_path: Path) -> None:
    text = "a,fever,cough\n1,0,1\n2,?,0\n3,1,1\n4,0,-\n5,1,0\n"
    (tmp_path / "t.csv").write_text(text)
    keys = {"user": None, "users": 1, "categories": [], "dates": {}, "missing": "drop"}
    keys |= {"na_values": ["?", "-"]}
    several = pool_of(tmp_path / "t.csv", "csv", **{**keys, "label": ["fever", "cough"]})
    assert several.features[:, 0].tolist() == [1, 3, 5]
    (tmp_path / "n.csv").write_text("a,y\n1,0.5\n2,?\n3,1\n4,2.5\n")
    ranged = {"kind": "number", "low": 0, "high": 3}
    number = pool_of(tmp_path / "n.csv", "csv", **{**keys, "label": "y", "target": ranged})
    assert number.labels.tolist() == [0.5, 1, 2.5]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"na_values": [""]}, "empty-text: na_values"),
        ({"na_values": {"age": ["?", " "]}}, "empty-text: na_values.age"),
        ({"na_values": [-9]}, "not-text: na_values … '-9'"),
        ({"na_values": {"age": [9999]}}, "not-text: na_values.age … 9999"),
        ({"na_values": "?"}, "not-a-list: na_values is '?'"),
        ({"na_values": {"age": "?"}}, "not-a-list: na_values.age is '?'"),
        ({"na_values": ["a\nb"]}, "unseen-text"),
        (
            {"na_values": ["-"], "categories": {"ward": ["+", "-"]}},
            "value-named-twice: na_values … '-' … 'ward'",
        ),
        (
            {"na_values": {"*": ["?"], "ill": ["unknown"]}, "classes": ["no", "unknown", "yes"]},
            "value-named-twice: na_values … 'unknown' … 'ill'",
        ),
        (
            {"na_values": {"aeg": ["?"]}},
            "unknown-column: na_values … 'aeg' … 'age'",
        ),
    ],
)
def test_bad_markers_are_one_sentence(keys: dict[str, Any], said: str, tmp_path: Path) -> None:
    rows = [tuple(cell(name, i) for name in NAMES) for i in range(12)]
    path = written(tmp_path / "t.csv", rows)
    with refuses(said) as told:
        pool_of(path, "csv", **keys)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("own", [[], ["?"]])
def test_a_list_of_its_own_stands_in_place_of_the_others(own: list[str], tmp_path: Path) -> None:
    """What is a gap elsewhere may be a category here, declared or not."""
    text = "age,ward,ill,site\n1,+,no,n\n-,-,yes,n\n3,-,no,s\n4,+,yes,s\n"
    (tmp_path / "t.csv").write_text(text)
    na_values = {"*": ["-"], "ward": own}
    for categories in (["ward"], {"ward": ["+", "-"]}):
        keys = {"dates": {}, "categories": categories, "missing": "drop", "na_values": na_values}
        assert pool_of(tmp_path / "t.csv", "csv", **keys).features.tolist() == [
            [1, 1, 0],
            [3, 0, 1],
            [4, 1, 0],
        ]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_marker_that_stands_nowhere_is_pointed_out(streamed: bool, tmp_path: Path) -> None:
    """Of a list where no column has it, of a table where its own has not; and what every file
    means a gap by is not looked for."""
    rows = [(*(cell(n, i) if (n, i) != ("age", 5) else "?" for n in NAMES),) for i in range(40)]
    path = written(tmp_path / "t.csv", rows)
    said: list[str] = []
    na_values = {"*": ["?", "NA", "??"], "age": ["?", "-9"], "ward": ["?"]}
    data = {"source": "csv", "path": path, **KEYS, "na_values": na_values, "preprocess": []}
    if streamed:
        prepare(data, tmp_path / "out", notify=said.append)
    else:
        load_federation(data, said.append)
    assert [note for note in said if "na_values" in note] == [
        "na_values names '?', which no column holds",
        "na_values names '??', which no column holds",
        "na_values.age names '-9', which it never holds",
        "na_values.ward names '?', which it never holds",
    ]


def test_a_text_among_numbers_is_explained_with_na_values(tmp_path: Path) -> None:
    """With or without other markers, and a number with a comma is not taken for one."""
    rows = [tuple(cell(name, i) for name in NAMES) for i in range(12)]
    for wrong, advice in (
        ("nil", "if 'nil' means missing, name that in na_values"),
        ("1,5", "decimal"),
    ):
        path = written(tmp_path / "t.csv", [*rows, (wrong, *rows[0][1:])])
        for na_values in ([], ["?"]):
            with refuses(f"not-numbers: 'age' … '{wrong}' … {advice}"):
                pool_of(path, "csv", na_values=na_values)


def test_a_model_for_other_software_knows_numbers_that_are_na_values(tmp_path: Path) -> None:
    """-9 of a measured column is missing; of a date's column it is a day."""
    coding = Coding(
        ("age", "day", "ward"),
        (("ward", ("a", "b")),),
        dates=(("day", "%Y-%m-%d"),),
        fills=(("age", 40.0), ("day", 7.0)),
        indicators=("age",),
        own=("ward",),
        na_values=(("age", ("-9", "?")), ("day", ("-9",)), ("ward", ("?",))),
    )
    federation = federation_of(
        pa.table({"x": list(range(12)), "ill": ["no", "yes"] * 6}), "ill", users=1, preprocess=[]
    )
    schema = replace(federation.schema, columns=coding.columns, dimension=coding.features)
    params = torch.linspace(-1, 1, 2 * (coding.features + 1))
    model = Model(Logistic(coding.features, 2), params, (coding,), federation.target, schema)
    module = model.to_module()
    rows = torch.tensor([[-9.0, -9.0, 0.0], [40.0, -9.0, 1.0], [31.0, 3.0, torch.nan]])
    emptied = torch.tensor([[torch.nan, -9.0, 0.0], [40.0, -9.0, 1.0], [31.0, 3.0, torch.nan]])
    torch.testing.assert_close(module(rows), module(emptied), rtol=0, atol=0)
    assert not torch.equal(module(rows)[0], module(torch.tensor([[40.0, -9.0, 0.0]]))[0])
    texts = model.scores(
        [["-9.0", "1969-12-23", "a"], [40, "1969-12-23", "b"], ["31", "1970-01-04", "?"]]
    )
    torch.testing.assert_close(module(rows), texts)


def people(path: Path, mark: str, rows: int = 60) -> Path:
    """People of two sites, some without an age or a ward."""
    lines = []
    for i in range(rows):
        age = mark if i % 9 == 4 else i * 7 % 50
        ward = mark if i % 8 == 3 else "ab"[i % 3 > 0]
        lines.append(f"{'ns'[i % 2]},{age},{ward},{'yn'[i * 7 % 4 < 2]}")
    path.write_text("\n".join(["site,age,ward,ill", *lines]) + "\n")
    return path


def test_a_trained_model_takes_new_files_with_its_markers(tmp_path, monkeypatch, capsys) -> None:
    """The whole way: train, resume under other markers (refused), predict, evaluate, in the folder
    that was exported too."""
    monkeypatch.chdir(tmp_path)
    people(tmp_path / "table.csv", "?")
    more = 'categories = ["ward"]\nmissing = { age = "indicator", ward = "category" }\n'
    Path("run.toml").write_text(
        TABLE.replace("[plan]", f'{more}na_values = {{ "*" = ["?"] }}\n[plan]')
    )
    code, _, err = typed(monkeypatch, capsys, "train", "run.toml", "--out", "r")
    assert code == 0, err
    other = Path("run.toml").read_text().replace('["?"]', '["?", "-"]')
    Path("other.toml").write_text(other)
    code, _, err = typed(monkeypatch, capsys, "train", "other.toml", "--out", "r", "--resume")
    assert code == 2 and "na_values" in err
    assert typed(monkeypatch, capsys, "train", "r/config.toml", "--resume")[0] == 0
    people(tmp_path / "empty.csv", "")
    truth = typed(monkeypatch, capsys, "predict", "r", "empty.csv")[1]
    assert truth.count("\n") == 61 and ",\n" not in truth
    code, out, err = typed(monkeypatch, capsys, "predict", "r", "table.csv", "--keep", "age")
    assert code == 0 and '\n"?",' in out, err
    assert [line.split(",", 1)[1] for line in out.splitlines()] == truth.splitlines()
    assert typed(monkeypatch, capsys, "export", "r", "--to", "safetensors", "--out", "m")[0] == 0
    assert typed(monkeypatch, capsys, "predict", "m", "table.csv")[1] == truth
    shown = [
        typed(monkeypatch, capsys, "evaluate", "r", f, "--json") for f in ("table.csv", "empty.csv")
    ]
    assert shown[0][0] == 0 and shown[0][1].replace("table", "empty") == shown[1][1]


def test_truths_and_sites_that_are_na_values_are_empty_ones(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    people(tmp_path / "table.csv", "?")
    more = 'categories = ["ward"]\nna_values = ["?"]\n'
    more += 'missing = { age = "indicator", ward = "category" }\n'
    Path("run.toml").write_text(TABLE.replace("[plan]", f"{more}[plan]"))
    assert typed(monkeypatch, capsys, "train", "run.toml", "--out", "r")[0] == 0
    text = Path("table.csv").read_text()
    for gap in ("", "?"):
        Path("new.csv").write_text(text + f"n,3,a,{gap}\n")
        code, _, err = typed(monkeypatch, capsys, "evaluate", "r", "new.csv")
        assert code == 2 and "column 'ill' lacks a value" in err
        Path("new.csv").write_text(text + f"{gap},3,a,y\n")
        code, out, _ = typed(monkeypatch, capsys, "evaluate", "r", "new.csv", "--json")
        assert code == 0 and '"(none)"' in out and '"?"' not in out


def test_a_measured_truth_is_missing_by_value(tmp_path, monkeypatch, capsys) -> None:
    """As it was in training, however the file writes it; as the name of a class it is a text."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{'ns'[i % 2]},{i % 7},{i % 7 / 2 if i % 9 else -9}" for i in range(60)]
    Path("table.csv").write_text("\n".join(["site,age,ill", *rows]) + "\n")
    more = 'target = { kind = "number", low = 0, high = 3 }\n'
    more += 'missing = "drop"\nna_values = { ill = ["-9"] }\n'
    linear = '[task]\nkind = "linear"\n[plan]'
    Path("run.toml").write_text(TABLE.replace("[plan]", f"{more}{linear}"))
    code, _, err = typed(monkeypatch, capsys, "train", "run.toml", "--out", "r")
    assert code == 0 and "7 of 60 records lack a value" in " ".join(err.split()), err
    for gap in ("-9", "-9.0", " -9 "):
        Path("new.csv").write_text(f"site,age,ill\nn,3,1.5\ns,4,{gap}\n")
        code, _, err = typed(monkeypatch, capsys, "evaluate", "r", "new.csv")
        assert code == 2 and "column 'ill' lacks a value" in err
    for name, text in (("points", "3;1.5"), ("commas", "3;1,5")):
        Path(f"{name}.csv").write_text(f"site;age;ill\nn;{text}\ns;4;2\n")
    told = [
        typed(monkeypatch, capsys, "evaluate", "r", f"{n}.csv", "--json")
        for n in ("points", "commas")
    ]
    assert told[0][0] == 0 and told[0][1].replace("points", "commas") == told[1][1]


def test_a_stray_text_in_a_parquet_file_spoils_its_own_row_only(tmp_path: Path) -> None:
    """Numbers that are held as texts have a decimal point there."""
    coding = Coding(("age",), na_values=(("age", ("?", "-9")),), fills=(("age", 7.0),))
    cells = pa.array(["1.5", "?", "-9.0", "strange", "2"], pa.string())
    pa.parquet.write_table(pa.table({"age": cells}), tmp_path / "t.parquet")
    (part,) = raw_parts(tmp_path / "t.parquet", (coding,), ["age"])
    assert part.features[:, 0].tolist() == [1.5, 7, 7, 2]
    assert part.complete.tolist() == [True, True, True, False, True]


def test_among_texts_a_marker_is_its_text(tmp_path: Path) -> None:
    """9.0 is a category of its own where 9 is a gap: in the training, in new files and rows."""
    text = "age,ward,ill,site\n1,9.0,no,n\n2,9,yes,n\n3,a,no,s\n4, 9 ,yes,s\n"
    (tmp_path / "t.csv").write_text(text)
    keys = {"dates": {}, "missing": {"ward": "category"}, "na_values": {"ward": ["9"]}}
    pool = pool_of(tmp_path / "t.csv", "csv", **keys)
    expected = [[1, 1, 0, 0], [2, 0, 0, 1], [3, 0, 1, 0], [4, 0, 0, 1]]
    assert pool.features.tolist() == expected
    (part,) = raw_parts(tmp_path / "t.csv", pool.preparation, ["age", "ward"])
    assert part.features.tolist() == expected
    (coding,) = [step for step in pool.preparation if isinstance(step, Coding)]
    rows = np.array([[1, "9.0"], [2, "9"], [3, "a"], [4, 9]], dtype=object)
    assert coding(rows).tolist() == expected
