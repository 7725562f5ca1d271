"""Folders, patterns and lists of files of new rows: what a model says of each row is what it says
of its file alone."""

from __future__ import annotations

import csv
import io
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from sklearn.metrics import roc_auc_score

from dpscaffold import Logistic, Model
from dpscaffold.data import from_users, load_federation
from dpscaffold.data.tables.rows import row_files
from dpscaffold.models import evaluate_files, predict_files

WARDS = ("Kinder", "Männer")
COLUMNS = ("patient", "age", "stay", "ward", "ill")
#: How sites write: the delimiter, the decimal sign, the encoding.
WAYS = ((",", ".", "utf-8"), (";", ",", "cp1252"), ("\t", ".", "utf-16"), (";", ",", "utf-8-sig"))
Row = dict[str, Any]


def record(
    patient: int, age: int = 31, stay: float | None = 4.5, ward: str = "Männer", ill: str = "yes"
) -> Row:
    return {"patient": f"p{patient}", "age": age, "stay": stay, "ward": ward, "ill": ill}


def write(path: Path, rows: list[Row], way: int, columns: tuple[str, ...] = COLUMNS) -> None:
    """A file in a site's own way; Parquet where its name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        kinds = {"age": pa.int64(), "stay": pa.float64()}
        arrays = [pa.array([r[c] for r in rows], kinds.get(c, pa.string())) for c in columns]
        pyarrow.parquet.write_table(pa.table(arrays, names=list(columns)), path)
        return
    sign, point, encoding = WAYS[way]
    lines = [sign.join(columns)]
    for row in rows:
        shown = ["" if row[c] is None else str(row[c]) for c in columns]
        shown = [
            s.replace(".", point) if c == "stay" else s for s, c in zip(shown, columns, strict=True)
        ]
        lines.append(sign.join(shown))
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model of a folder of one file per site, whose weights tell all columns apart."""
    home = tmp_path_factory.mktemp("training") / "sites"
    for site in ("north", "south"):
        rows = [record(i, 20 + i, i / 2, WARDS[i % 2], ("no", "yes")[i % 3 > 0]) for i in range(20)]
        write(home / f"{site}.csv", rows, 0)
    options = {"source": "csv", "path": str(home), "label": "ill", "exclude": ["patient"]}
    data = load_federation({**options, "categories": ["ward"], "missing": "drop"})
    torch.manual_seed(0)
    found = Model.of(data, Logistic(data.dimension, 2), torch.randn(2 * (data.dimension + 1)))
    object.__setattr__(found, "origin", found.origin.__class__(label="ill"))
    return found


def table(path: Path) -> list[dict[str, str]]:
    """What was written, as texts, whatever the kind."""
    if path.suffix == ".parquet":
        stream = io.BytesIO()
        pyarrow.csv.write_csv(pyarrow.parquet.read_table(path), stream)
        return list(csv.DictReader(io.StringIO(stream.getvalue().decode())))
    return list(csv.DictReader(io.StringIO(path.read_text("utf-8"))))


RECORDS = st.builds(
    record,
    st.integers(0, 999),
    st.integers(0, 110),
    st.none() | st.integers(0, 400).map(lambda tenths: tenths / 10),
    st.sampled_from((*WARDS, "Keller")),  # the training never saw a Keller
    st.sampled_from(("no", "yes")),
)
#: The files of a folder: name → rows, the way they are written, and the order of their columns.
FOLDERS = st.dictionaries(
    st.sampled_from(("b.csv", "a.csv", "z/a.csv", "c.parquet", "a.parquet", "B.tsv", "z/d.txt")),
    st.tuples(st.lists(RECORDS, max_size=6), st.integers(0, 3), st.permutations(COLUMNS)),
    min_size=1,
    max_size=4,
)


@given(FOLDERS, st.booleans())
def test_a_folder_is_answered_as_its_files_one_by_one(model: Model, files: Any, all_: bool) -> None:
    """In a table with the name of each row's file, as CSV and Parquet and on a stream."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "new"
        for name, (rows, way, columns) in files.items():
            write(home / name, rows, way, tuple(columns))
        wanted, counts = [], []
        for name in sorted(files, key=Path):
            alone = Path(place) / "alone" / name
            done = predict_files(model, home / name, alone, ["patient"], all_)
            counts.append(done.files[0].predicted)
            wanted += [{"file": name} | row for row in table(alone)]
        for out in ("all.csv", "all.parquet"):
            done = predict_files(model, [home], Path(place) / out, ["patient"], all_)
            assert table(Path(place) / out) == wanted
            assert [file.predicted for file in done.files] == counts
            assert (done.rows, done.incomplete) == (
                sum(len(rows) for rows, *_ in files.values()),
                sum(
                    r["stay"] is None or r["ward"] == "Keller" for f in files.values() for r in f[0]
                ),
            )
        stream = io.BytesIO()
        predict_files(model, [home], stream, ["patient"], all_)
        assert stream.getvalue() == (Path(place) / "all.csv").read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    inside = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in inside}


def is_close(found: Any, wanted: Any) -> bool:
    """Equal but for the last digits: how many rows are scored together decides, on some
    processors, in which order the sums of a row are added."""
    if isinstance(wanted, dict):
        same = isinstance(found, dict) and found.keys() == wanted.keys()
        return same and all(is_close(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(is_close, found, wanted))
    if isinstance(wanted, float):
        return found == pytest.approx(wanted, rel=1e-5, abs=1e-6, nan_ok=True)
    return bool(found == wanted)


@given(FOLDERS)
def test_an_evaluation_of_a_folder_is_that_of_one_table_and_of_each_file(
    model: Model, files: Any
) -> None:
    """Of the whole: as of a single table that names each row's site. Of each file: as of it
    alone."""
    with tempfile.TemporaryDirectory() as place:
        home = Path(place) / "new"
        together: list[Row] = []
        stems = [Path(name).stem for name in files]
        twice = len(set(stems)) < len(stems)
        for name in sorted(files, key=Path):
            rows, way, columns = files[name]
            write(home / name, rows, way, tuple(columns))
            site = Path(name).with_suffix("").as_posix() if twice else Path(name).stem
            together += [row | {"site": site} for row in rows]
        good = [r for r in together if r["stay"] is not None and r["ward"] != "Keller"]
        if not good:
            with refuses("no-rows"):
                evaluate_files(model, home)
            return
        write(Path(place) / "one.csv", together, 0, (*COLUMNS, "site"))
        found = evaluate_files(model, home)
        whole = evaluate_files(model, Path(place) / "one.csv", site="site").whole
        told, wanted = found.whole.to_dict(), whole.to_dict()
        assert bool(told.pop("reason")) == bool(wanted.pop("reason"))
        assert is_close(told, wanted) and found.whole.rows == len(good)
        for name, entry in zip(sorted(files, key=Path), found.files, strict=True):
            assert entry.file == name
            if not entry.rows:
                assert entry.metrics == {} and name in found.notes[-1]
                continue
            alone = evaluate_files(model, home / name).whole
            figures = (entry.rows, entry.left_out, entry.reason, entry.metrics, entry.baseline)
            wanted = (alone.rows, alone.left_out, alone.reason, alone.metrics, alone.baseline)
            assert is_close(figures, wanted)


def test_metrics_of_a_folder_agree_with_another_library(model: Model, tmp_path: Path) -> None:
    random.seed(1)
    truths, chances = [], []
    for site in ("north", "south"):
        rows = [record(i, random.randint(18, 90), i / 3, random.choice(WARDS)) for i in range(30)]
        rows = [row | {"ill": random.choice(("no", "yes"))} for row in rows]
        write(tmp_path / f"{site}.csv", rows, 1)
        truths += [row["ill"] == "yes" for row in rows]
        chances += model.probabilities(rows)[:, 1].double().tolist()
    found = evaluate_files(model, [tmp_path / "north.csv", tmp_path / "south.csv"])
    right = [t == (c > 0.5) for t, c in zip(truths, chances, strict=True)]
    assert found.whole.metrics["test_auc"] == pytest.approx(roc_auc_score(truths, chances))
    each = [sum(right[:30]) / 30, sum(right[30:]) / 30]
    assert [site["accuracy"] for site in found.whole.sites] == pytest.approx(each)
    assert [file.metrics["test_accuracy"] for file in found.files] == pytest.approx(each)


def test_whose_a_row_is_comes_from_its_column_and_else_from_its_file(
    model: Model, tmp_path: Path
) -> None:
    with_sites = (*COLUMNS, "clinic")
    rows = [record(i) | {"clinic": ("east", "west")[i % 2]} for i in range(6)]
    write(tmp_path / "mixed.csv", rows, 0, with_sites)
    write(tmp_path / "north.csv", [record(9)], 0)
    trained_by_clinic = Model(
        *(getattr(model, f) for f in ("task", "params", "preparation", "target", "schema")),
        origin=model.origin.__class__(label="ill", site="clinic"),
    )
    found = evaluate_files(trained_by_clinic, tmp_path)
    assert [(s["site"], s["rows"]) for s in found.whole.sites] == [
        ("east", 3),
        ("west", 3),
        ("north", 1),
    ]
    assert "'clinic'" in found.notes[0] and "north.csv" in found.notes[0]
    with refuses("unknown-column: north.csv … 'clinic'"):
        evaluate_files(model, tmp_path, site="clinic")


def test_a_label_that_is_no_class_is_said_with_its_file(model: Model, home: Path) -> None:
    write(Path("new/south.csv"), [record(1), record(2, ill="maybe")], 0)
    with refuses("bad-labels: south.csv … 'ill' … 'maybe'"):
        evaluate_files(model, "new")


def test_folders_name_columns_and_files_come_in_the_order_asked_for(
    model: Model, tmp_path: Path
) -> None:
    """``ward=Kinder/part-0.parquet`` has a column ward, as in training."""
    inside = tuple(name for name in COLUMNS if name != "ward")
    for ward in WARDS:
        write(tmp_path / "hive" / f"ward={ward}" / "part-0.parquet", [record(1)], 0, inside)
    write(tmp_path / "flat.csv", [record(1, ward=ward) for ward in WARDS], 0)
    predict_files(model, tmp_path / "hive", tmp_path / "hive.csv")
    predict_files(model, tmp_path / "flat.csv", tmp_path / "wanted.csv")
    found = [{k: v for k, v in row.items() if k != "file"} for row in table(tmp_path / "hive.csv")]
    assert found == table(tmp_path / "wanted.csv")
    assert len({row["probability_yes"] for row in found}) == 2, "the ward counts"
    given_order = [tmp_path / "flat.csv", *sorted((tmp_path / "hive").rglob("*.parquet"))[::-1]]
    assert row_files([str(given_order[0]), tmp_path / "hive"]).names == (
        "flat.csv",
        "ward=Kinder/part-0.parquet",
        "ward=Männer/part-0.parquet",
    )
    assert [file.path for file in row_files(given_order).files] == given_order


def test_files_of_the_same_name_are_told_apart(model: Model, tmp_path: Path) -> None:
    for year in ("2023", "2024"):
        write(tmp_path / year / "north.csv", [record(int(year))], 0)
    paths = [tmp_path / "2024" / "north.csv", tmp_path / "x" / ".." / "2023" / "north.csv"]
    (tmp_path / "x").mkdir()
    done = predict_files(model, paths, tmp_path / "said.csv", ["patient"])
    assert [file.name for file in done.files] == ["2024/north.csv", "2023/north.csv"]
    said = [(row["file"], row["patient"]) for row in table(tmp_path / "said.csv")]
    assert said == [("2024/north.csv", "p2024"), ("2023/north.csv", "p2023")]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Three sites' new rows in the working folder."""
    monkeypatch.chdir(tmp_path)
    for way, site in enumerate(("north", "south", "west")):
        write(Path("new") / f"{site}.csv", [record(i) for i in range(4)], way)
    yield tmp_path


BROKEN = {
    "a column of another name": (lambda b: b.replace(b"ward", b"wing"), "unknown-column: 'ward'"),
    "bytes that are no text": (
        lambda b: b + b"\x81\x8d\xff;1;1,0;1;1\n",
        "wrong-encoding",
    ),
    "nothing": (lambda b: b"", "empty-file"),
    "a short last row": (lambda b: b + b"p9;31\n", "row-length-differs: row has 2"),
    "two signs for decimals": (lambda b: b + b"p9;31;4.5;Kinder;no\n", "ambiguous-decimal"),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("out", ["all.csv", "all.parquet"])
def test_one_file_that_fails_leaves_nothing(
    model: Model, home: Path, broken: str, out: str
) -> None:
    """One sentence with the file's name; not a byte is written, and what was there stays."""
    target = Path(out)
    predict_files(model, "new", target)
    change, said = BROKEN[broken]
    path = Path("new/south.csv")
    path.write_bytes(change(path.read_bytes()))
    before = contents(home)
    with refuses(said) as caught:
        predict_files(model, "new", target)
    assert "south.csv" in str(caught.value) and "\n" not in str(caught.value)
    assert contents(home) == before
    with refuses(said):
        evaluate_files(model, "new")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines of a file of several batches, with a gap in the first and two in the last."""
    columns = [",".join(COLUMNS)]
    rows = [record(i, stay=None if i in (5, 119_000, 119_001) else 4.5) for i in range(120_000)]
    return columns + [",".join("" if v is None else str(v) for v in r.values()) for r in rows]


def test_a_file_that_fails_at_its_end_leaves_nothing(
    model: Model, home: Path, long: list[str]
) -> None:
    """Long after the first rows were predicted, and rows of another file before them."""
    path, target = Path("new/south.csv"), Path("all.csv")
    path.write_text("\n".join(long) + "\n", "utf-8")
    done = predict_files(model, "new", target)
    assert (done.rows, done.incomplete) == (120_008, 3)
    assert done.reason == "south.csv, row 5 lacks a value of column 'stay'"
    with path.open("a") as file:
        file.write("p9,31\n")
    before = contents(home)
    with refuses("row-length-differs: south.csv … row has 2"):
        predict_files(model, "new", target)
    assert contents(home) == before


def test_a_text_that_breaks_off_is_named_without_advice_that_leads_nowhere(
    model: Model, home: Path
) -> None:
    """Encodings of new rows are found: there is no key in which to name one."""
    lines = [",".join(COLUMNS), *["p1,31,4.5,Kinder,no"] * 20_000]
    Path("new/west.csv").write_bytes("\n".join(lines).encode("utf-16")[:-1])
    with refuses("wrong-encoding: west.csv"):
        predict_files(model, "new", "all.csv")


#: Class names that a careless naming of columns would mix up or lose.
ODD = ("", "a,b", 'say "yes"', "two\nlines", "prediction", "probability_", "file", "ä ß", "1.0")


def test_every_class_has_a_probability_under_its_own_name(tmp_path: Path) -> None:
    """Whatever the classes are called: as CSV, as Parquet and for several files."""
    features = [torch.randn(20, 2, generator=torch.Generator().manual_seed(0))] * 2
    data = from_users([(x, torch.arange(20) % len(ODD)) for x in features], classes=ODD)
    model = Model.of(data, Logistic(2, len(ODD)), torch.arange(3.0 * len(ODD)).sin())
    names = [f"probability_{name}" for name in ODD]
    rows = np.round(features[0].numpy(), 3)
    text = "\n".join([",".join(model.columns), *(",".join(map(str, row)) for row in rows)])
    (tmp_path / "new.csv").write_text(text + "\n")
    wanted = model.probabilities(tmp_path / "new.csv").numpy()
    for out in ("one.csv", "one.parquet"):
        predict_files(model, tmp_path / "new.csv", tmp_path / out)
        found = table(tmp_path / out)
        assert list(found[0]) == ["prediction", *names]
        given_ = [[float(row[name]) for name in names] for row in found]
        np.testing.assert_allclose(given_, wanted, rtol=1e-5)
        assert [row["prediction"] for row in found] == [ODD[k] for k in wanted.argmax(1)]
    predict_files(model, [tmp_path / "new.csv"], tmp_path / "all.csv")
    assert list(table(tmp_path / "all.csv")[0]) == ["file", "prediction", *names]


@pytest.mark.parametrize(
    ("given_", "out", "said"),
    [
        ("new", "new/all.csv", "overwrites-input: --out … all.csv"),
        ("new", "new", "not-a-file: new"),
        ("new/*.csv", "new/all.csv", "overwrites-input: --out … all.csv"),
        ("new", "thesis", "wrong-file-type: --out … thesis"),
        (
            "new",
            "all.xlsx",
            "wrong-file-type: --out … all.xlsx",
        ),
        ("new", "thesis/said.csv", "cannot-write"),
        ("empty", "all.csv", "no-files"),
        ("other", "all.csv", "no-files: thesis.docx"),
        ("new/*.cvs", "all.csv", "no-files"),
        ("new/*.csv new/west.csv", "all.csv", "file-named-twice: west.csv"),
        ("new other/thesis.docx", "all.csv", "wrong-file-type: thesis.docx"),
        ("new nwe", "all.csv", "file-not-found"),
        ("", "all.csv", "missing-argument"),
    ],
)
def test_what_would_be_lost_or_read_again_is_refused(
    model: Model, home: Path, given_: str, out: str, said: str
) -> None:
    """Labelled records are called as the new rows are: predictions never take their place."""
    Path("other").mkdir()
    Path("empty").mkdir()
    Path("other/thesis.docx").write_text("years of work")
    Path("thesis").write_text("more years")
    before = contents(home)
    with refuses(said) as caught:
        predict_files(model, given_.split(), Path(out))
    assert "\n" not in str(caught.value) and contents(home) == before


@pytest.mark.parametrize(
    ("out", "said"),
    [("new/north.csv", "overwrites-input: north.csv"), ("said", "wrong-file-type: said")],
)
def test_the_rows_of_one_file_are_not_overwritten(model: Model, home: Path, out, said) -> None:
    before = contents(home)
    with refuses(said):
        predict_files(model, "new/north.csv", out)
    assert contents(home) == before


def test_other_files_and_columns_that_are_not_needed_are_named(model: Model, home: Path) -> None:
    Path("new/east.xlsx").write_bytes(b"PK")
    Path("new/.hidden.csv").write_text("x\n")
    write(Path("new/zone.csv"), [record(1)], 0, ("patient", "age", "stay", "ward"))
    done = predict_files(model, "new/*", Path("all.csv"))
    assert done.skipped == ("east.xlsx",) and len(done.files) == 4
    assert done.notes == (
        "warning: no table of .csv or .parquet, so skipped: east.xlsx",
        "warning: zone.csv lacks the column 'ill' of north.csv; it is not needed",
    )


def test_a_column_of_ones_own_does_not_become_that_of_the_files(model: Model, home: Path) -> None:
    rows = [record(1) | {"file": "scan.tif"}]
    write(Path("new/north.csv"), rows, 0, (*COLUMNS, "file"))
    with refuses("name-used-twice: --keep … 'file'"):
        predict_files(model, ["new/north.csv"], Path("all.csv"), ["file"])
    predict_files(model, "new/north.csv", Path("said.csv"), ["file"])
    assert table(Path("said.csv"))[0]["file"] == "scan.tif"
