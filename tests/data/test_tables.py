"""CSV and Parquet: values, users, labels, categories and missing values, and one sentence for each
defect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses

from dpscaffold.data import TableSource, load, load_federation, prepare, read_table
from dpscaffold.data.config import parse_data
from dpscaffold.data.loading import table_of
from dpscaffold.errors import BadInput


def csv(tmp_path: Path, text: str, **options: Any) -> Any:
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    return read_table(TableSource(path, "csv", **{"label": "y", **options}))


@pytest.fixture
def visits() -> pa.Table:
    """600 records of 12 clinics in random order, with a category and a text label."""
    rng = np.random.default_rng(1)
    clinic = rng.integers(0, 12, 600)
    return pa.table(
        {
            "clinic": [f"clinic {i}" for i in clinic],
            "age": rng.integers(20, 90, 600),
            "dose": rng.normal(size=600).round(4),
            "colour": rng.choice(["red", "green", "blue"], 600),
            "smokes": rng.random(600) < 0.3,
            "outcome": rng.choice(["well", "ill"], 600),
        }
    )


def write(table: pa.Table, path: Path) -> Path:
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=100)
    else:
        columns = [
            pa.compute.cast(c, pa.int8()) if pa.types.is_boolean(c.type) else c
            for c in table.columns
        ]
        pa.csv.write_csv(pa.table(dict(zip(table.column_names, columns, strict=True))), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_values_labels_users_and_categories(visits: pa.Table, tmp_path: Path, kind: str) -> None:
    path = write(visits, tmp_path / f"visits.{kind}")
    pool = read_table(
        TableSource(path, kind, label="outcome", user="clinic", categories={"colour": None})
    )  # type: ignore[arg-type]
    assert pool.features.shape == (600, 6)
    np.testing.assert_allclose(pool.features[:, 0], np.asarray(visits["age"]))
    np.testing.assert_allclose(pool.features[:, 1], np.asarray(visits["dose"]), atol=1e-6)
    np.testing.assert_allclose(pool.features[:, 2], np.asarray(visits["smokes"]))
    colours = np.asarray(visits["colour"])
    for j, colour in enumerate(["blue", "green", "red"]):
        np.testing.assert_array_equal(pool.features[:, 3 + j], colours == colour)
    np.testing.assert_array_equal(pool.labels, np.asarray(visits["outcome"]) == "well")
    np.testing.assert_array_equal(np.array(pool.names)[pool.users], np.asarray(visits["clinic"]))
    assert any("ill, well" in note for note in pool.notes) and any(
        "blue, green, red" in note for note in pool.notes
    )
    assert any(
        "categories of column 'colour'" in step.sentence and step.protection == "unprotected"
        for step in pool.preparation
    )


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_streaming_gives_what_loading_gives(
    visits: pa.Table, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpscaffold.data.tables.reader._BATCH_BYTES", 2000)  # many batches
    monkeypatch.setattr("dpscaffold.data.tables.reader._BATCH_ROWS", 37)
    path = write(visits, tmp_path / f"visits.{kind}")
    for options in (
        {"user": "clinic", "records": 30},
        {"features": ["age", "dose"], "users": 5, "similarity": 20},
    ):
        settings = {
            "source": kind,
            "path": str(path),
            "label": "outcome",
            "categories": ["colour"],
            **options,
        }
        if "features" in options:
            settings.pop("categories")
        if "user" not in options:
            settings["features"] = ["age", "dose"]
        loaded = load_federation(settings)
        stored = load(prepare(settings, tmp_path / "stored", overwrite=True))
        for a, b in ((loaded.train, stored.train), (loaded.test, stored.test)):
            assert torch.equal(a.labels, b.labels) and torch.equal(a.offsets, b.offsets)
            torch.testing.assert_close(a.features, b.features, atol=1e-5, rtol=1e-5)
        assert (loaded.names, loaded.classes, loaded.title) == (
            stored.names,
            stored.classes,
            stored.title,
        )
        assert loaded.preprocessing == stored.preprocessing
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stored", f"visits.{kind}"]


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("u,a,y\n" + "p,1,0\n" * 5 + "q,2,1\n" * 5 + "q,word,1\n")
    with refuses("not-numbers"):
        prepare({"source": "csv", "path": str(path), "label": "y", "user": "u"}, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]
    (tmp_path / "out").mkdir()
    with refuses("file-exists"):  # said before the table is read
        prepare(
            {"source": "csv", "path": str(path), "label": "y", "user": "u"},
            tmp_path / "out",
            overwrite=True,
        )
    with refuses("cannot-write"):
        prepare(
            {"source": "csv", "path": str(path), "label": "y", "user": "u"},
            path / "below" / "a file",
        )


def test_natural_users(visits: pa.Table, tmp_path: Path) -> None:
    path = write(visits, tmp_path / "visits.parquet")
    settings = {
        "source": "parquet",
        "path": str(path),
        "label": "outcome",
        "user": "clinic",
        "features": ["age"],
        "preprocess": [],
    }
    federation = load_federation(settings)
    assert federation.users == 12 and federation.names[:3] == ("clinic 0", "clinic 1", "clinic 10")
    clinics, ages = np.asarray(visits["clinic"]), np.asarray(visits["age"])
    for user, name in enumerate(federation.names):
        found = torch.cat([federation.train.of(user)[0], federation.test.of(user)[0]]).ravel()
        assert sorted(found.tolist()) == sorted(ages[clinics == name].tolist())
    few = load_federation({**settings, "users": 3, "records": 10})
    assert few.users == 3 and set((few.train.sizes + few.test.sizes).tolist()) == {10}


def test_numbers_as_labels_keep_their_order(tmp_path: Path) -> None:
    pool = csv(tmp_path, "a,y\n1,10\n2,2\n3,10\n4,9\n")
    assert pool.labels.tolist() == [2, 0, 2, 1]


def test_classes_may_be_given(tmp_path: Path) -> None:
    pool = csv(tmp_path, "a,y\n1,no\n2,yes\n", classes=("yes", "no", "maybe"))
    assert pool.labels.tolist() == [1, 0] and pool.classes == 3
    assert not any("labels was read from" in step.sentence for step in pool.preparation)
    with refuses("unknown-class: 'yess' … 'yes'"):
        csv(tmp_path, "a,y\n1,yess\n", classes=("yes", "no"))


def test_given_categories_are_public_and_closed(tmp_path: Path) -> None:
    pool = csv(tmp_path, "c,y\nred,0\nblue,1\n", categories={"c": ("red", "green", "blue")})
    assert pool.features.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert pool.preparation[0].protection == "public"
    with refuses("unknown-category: 'c' … 'gren' … 'green'"):
        csv(tmp_path, "c,y\ngren,0\nblue,1\n", categories={"c": ("red", "green", "blue")})


def test_missing_values(tmp_path: Path) -> None:
    text = "a,c,y\n1,red,0\n,red,1\n3,,1\n4,blue,\n5,blue,0\n6,red,1\n"
    with refuses("missing-value: 1 of 6 … missing = 'drop'"):
        csv(tmp_path, text, categories={"c": None})
    dropped = csv(tmp_path, text, categories={"c": None}, missing="drop")
    assert dropped.features.tolist() == [
        [1, 0, 1],
        [5, 1, 0],
        [6, 0, 1],
    ] and dropped.labels.tolist() == [
        0,
        0,
        1,
    ]
    assert any("warning: 3 of 6 records" in note for note in dropped.notes)
    filled = csv(tmp_path, text.replace("4,blue,\n", ""), categories={"c": None}, missing=-1.0)
    assert filled.features.tolist() == [[1, 0, 1], [-1, 0, 1], [3, 0, 0], [5, 1, 0], [6, 0, 1]]
    with refuses("missing-value: 'y'"):
        csv(tmp_path, text, categories={"c": None}, missing=0.0)
    with refuses("missing-value: 'a'"):
        csv(tmp_path, "a,y\n1,0\n,1\n")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        (
            "a,b,y\n1,2,0\n1,2\n",
            {},
            "row-length-differs: line 3 … row has 2",
        ),
        ("a,b,y\n1,2,0\n1,2,3,4\n", {}, "row-length-differs: row has 4"),
        (
            "a,lable\n1,0\n",
            {"label": "label"},
            "unknown-column: 'label' … 'lable'",
        ),
        ("a,y\n1,0\n", {"user": "clinic"}, "unknown-column: 'clinic'"),
        ("a,y\n1,0\n", {"features": ("b",)}, "unknown-column: 'b'"),
        (
            "a,y\n1,0\nseven,1\n",
            {},
            "not-numbers: line 3 … 'a' … 'seven'",
        ),
        ("a,y\n1,0.5\n2,1.25\n", {}, "bad-labels: 0.5"),
        ("a,y\n1,0\n2,0\n", {}, "single-class: '0'"),
        ("a,y\n", {}, "no-rows"),
        ("", {}, "empty-file"),
        ("a,a,y\n1,2,0\n", {}, "duplicate-column: 'a'"),
        ("y\n1\n", {}, "no-features"),
        ("a,y\n1,0\n", {"features": ("a", "y")}, "column-named-twice"),
        ("a,y\n,0\n,1\n", {"missing": "drop"}, "no-rows"),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, options: dict[str, Any], said: str) -> None:
    with refuses(said) as caught:
        csv(tmp_path, text, **options)
    assert "\n" not in str(caught.value)


def test_bad_parquet(visits: pa.Table, tmp_path: Path) -> None:
    path = write(visits, tmp_path / "visits.parquet")
    with refuses("not-numbers: 'colour' … 'blue'"):
        read_table(TableSource(path, "parquet", label="outcome", user="clinic"))
    path.write_bytes(path.read_bytes()[:-20])
    with refuses("file-unreadable"):
        read_table(TableSource(path, "parquet", label="outcome"))
    with refuses("file-unreadable"):
        read_table(TableSource(tmp_path / "nowhere.parquet", "parquet", label="outcome"))
    with refuses("file-unreadable"):
        read_table(TableSource(tmp_path / "nowhere.csv", "csv", label="outcome"))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "b.csv"
    path.write_bytes(b"a,y\n1,\xff\xfe\n2,ok\n")
    with pytest.raises(BadInput):
        read_table(TableSource(path, "csv", label="y"))


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(max_size=200)
    | st.text(alphabet='ay,\n"01.x ', max_size=120).map(str.encode)
    | st.text(alphabet="01,\n.", max_size=80).map(lambda text: b"a,y\n" + text.encode())
    | st.lists(st.integers(0, 3), min_size=1).map(
        lambda ys: b"a,y\n" + b"".join(b"1,%d\n" % y for y in ys)
    )
)
def test_any_bytes_give_a_pool_or_a_sentence(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "any.csv"
    path.write_bytes(content)
    try:
        pool = read_table(TableSource(path, "csv", label="y", missing="drop"))
    except BadInput as problem:
        assert "\n" not in str(problem)
    else:
        assert len(pool) > 0 and pool.classes >= 2


def test_settings_become_a_table() -> None:
    settings = parse_data(
        {
            "source": "csv",
            "path": "x.csv",
            "label": "y",
            "user": "u",
            "categories": {"c": ["a", "b"]},
            "delimiter": ";",
        }
    )
    table = table_of(settings)
    assert (table.kind, table.dialect.delimiter, table.categories) == (
        "csv",
        ";",
        {"c": ("a", "b")},
    )
