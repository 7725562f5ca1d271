"""Tables that people hold in Python: read as a file of their columns is."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest
import torch
from refusals import refuses

from dpscaffold import Gaussian, run
from dpscaffold.data import federation_of, load_federation

ROWS = 60
COLUMNS: dict[str, list[Any]] = {
    "age": [20 + 7 * i % 71 for i in range(ROWS)],
    "stay": [None if i % 7 == 0 else i % 9 / 2 for i in range(ROWS)],
    "ward": [("a", "b", None)[i % 3] for i in range(ROWS)],
    "when": [datetime(2023, 1, 1) + timedelta(days=i) for i in range(ROWS)],
    "site": [("north", "söuth", "10", "9")[i % 4] for i in range(ROWS)],
    "ill": [("no", "yes")[i * 5 % 3 == 0] for i in range(ROWS)],
}
KEYS: dict[str, Any] = {
    "label": "ill",
    "user": "site",
    "categories": ["ward"],
    "dates": {"when": "%Y-%m-%d"},
    "missing": {"stay": "indicator", "ward": "category"},
    "preprocess": ["standardise"],
}


def frame(kind: str) -> Any:
    if kind == "arrow":
        return pa.table(COLUMNS)
    needed = {"lazy": "polars", "huggingface": "datasets"}.get(kind, kind)
    library = pytest.importorskip(needed, reason=f"needs {needed}, which is not installed")
    if kind == "pandas":
        return library.DataFrame(COLUMNS).iloc[::-1].iloc[::-1]
    if kind == "huggingface":
        return library.Dataset.from_dict(COLUMNS)
    made = library.DataFrame(COLUMNS)
    return made.lazy() if kind == "lazy" else made


class Streamed:
    """As a Hugging Face dataset that is streamed: columns, but no number of rows."""

    column_names = ("age", "ill")

    def with_format(self, kind: str) -> Streamed:
        return self

    def __iter__(self) -> Any:
        return iter([{"age": 1, "ill": "no"}])


def test_a_streamed_dataset_is_refused_in_one_sentence() -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets, which is not installed")
    streamed = datasets.Dataset.from_dict({"age": [1, 2], "ill": [0, 1]}).to_iterable_dataset()
    with refuses("wrong-type"):
        federation_of(streamed, label="ill", users=1)


@pytest.mark.parametrize("text", [pa.string(), pa.large_string(), pa.string_view()])
def test_categories_may_be_coded_whatever_their_texts_are(text: pa.DataType) -> None:
    """Polars hands categories out as views of texts."""
    words = pa.array(["a", None, "b", "a"] * 10, pa.string())
    kind = pa.dictionary(pa.uint32(), text)
    coded = words.dictionary_encode()
    ward = pa.DictionaryArray.from_arrays(
        coded.indices.cast(pa.uint32()), coded.dictionary.cast(text)
    )
    assert ward.type == kind
    table = pa.table({"age": range(40), "ward": ward, "ill": [0, 1] * 20})
    keys: dict[str, Any] = {"label": "ill", "users": 2, "categories": ["ward"], "preprocess": []}
    found = federation_of(table, missing={"ward": "category"}, similarity=100.0, **keys)
    plain = table.set_column(1, "ward", words)
    expected = federation_of(plain, missing={"ward": "category"}, similarity=100.0, **keys)
    assert torch.equal(found.train.features, expected.train.features)


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The federation of the same columns in a CSV file."""
    path = tmp_path_factory.mktemp("objects") / "visits.csv"
    text = {**COLUMNS, "when": [when.strftime("%Y-%m-%d") for when in COLUMNS["when"]]}
    pa.csv.write_csv(pa.table(text), path)
    return load_federation({"source": "csv", "path": path, **KEYS})


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars", "lazy", "huggingface"])
def test_a_frame_is_read_as_a_file_of_its_columns_is(kind: str, from_file: Any) -> None:
    found = federation_of(frame(kind), **KEYS)
    assert found.names == from_file.names and found.target == from_file.target
    assert torch.equal(found.train.features, from_file.train.features)
    assert torch.equal(found.test.labels, from_file.test.labels)
    assert [step.protection for step in found.preparation] == [
        step.protection for step in from_file.preparation
    ]
    # And the kept preparation takes raw rows, as it does from a file.
    raw = [[COLUMNS[name][3] for name in found.preparation[0].columns]]
    assert found.preparation[0](np.array(raw, dtype=object)).shape == (1, 7)


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars", "huggingface"])
def test_one_frame_per_user(kind: str, from_file: Any) -> None:
    whole = frame(kind) if kind != "huggingface" else frame("arrow")
    table = pa.table(COLUMNS)
    keys = {k: v for k, v in KEYS.items() if k != "user"} | {"exclude": ["site"]}
    parts: dict[str, Any] = {}
    for site in from_file.names:
        rows = [i for i, name in enumerate(COLUMNS["site"]) if name == site]
        part = table.take(rows)
        if kind == "pandas":
            part = whole.iloc[rows]
        elif kind == "polars":
            part = whole[rows]
        elif kind == "huggingface":
            part = frame(kind).select(rows)
        parts[site] = part
    found = federation_of(parts, **keys)
    assert found.names == from_file.names
    for user in range(len(found.names)):
        assert torch.equal(found.train.of(user)[1], from_file.train.of(user)[1])
    listed = federation_of(list(parts.values()), **keys)
    assert listed.names == ("0", "1", "2", "3")
    assert torch.equal(listed.train.features, found.train.features)


def test_a_huggingface_dataset_names_its_classes() -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets, which is not installed")
    held = datasets.Dataset.from_dict(
        {"age": list(range(24)), "label": [i % 2 for i in range(24)]},
        features=datasets.Features(
            {"age": datasets.Value("int64"), "label": datasets.ClassLabel(names=["cat", "dog"])}
        ),
    )
    assert federation_of(held, "label", users=3).target.classes == ("cat", "dog")
    with refuses("split-not-chosen"):
        federation_of(datasets.DatasetDict({"train": held, "test": held}), "label")


@pytest.mark.parametrize(
    ("data", "keys", "said"),
    [
        (3, {}, "wrong-type"),
        (torch.utils.data.TensorDataset(torch.zeros(3, 2)), {"label": "ill"}, "wrong-type"),
        (Streamed(), {"label": "ill"}, "wrong-type"),
        ({"north": Streamed()}, {"label": "ill"}, "wrong-type"),
        ([], {}, "no-users"),
        (pa.table(COLUMNS), {"users": 2}, "missing-argument"),
        (pa.table(COLUMNS), {"label": "il", "users": 2}, "unknown-column: 'ill'"),
        (pa.table(COLUMNS), {"label": "ill", "categoriess": 1}, "unknown-key: categoriess"),
        (pa.table(COLUMNS), {"label": "ill", "users": 2}, "not-numbers: 'ward' … 'a'"),
        ([object()], {"label": "ill"}, "wrong-type"),
    ],
)
def test_bad_objects_are_one_sentence(data: Any, keys: dict[str, Any], said: str) -> None:
    with refuses(said):
        federation_of(data, **keys)


def test_paths_may_be_paths(tmp_path: Path) -> None:
    """In tables, in overrides and in a budget."""
    lines = "\n".join(f"{i % 7},{'ab'[i % 2]},{'yn'[i * 3 % 5 % 2]}" for i in range(60))
    (tmp_path / "a.csv").write_text(f"age,site,ill\n{lines}\n")
    tables = {"data": {"source": "csv", "path": tmp_path / "a.csv", "label": "ill", "user": "site"}}
    plan = ["plan.rounds=1", "plan.local_steps=1", "plan.user_ratio=1.0"]
    one = run(tables, plan, out=tmp_path / "one")
    other = {"data": {**tables["data"], "path": "nowhere"}}
    two = run(other, [*plan, f"data.path={tmp_path}/a.csv"], out=str(tmp_path / "two"))
    assert torch.equal(one.params, two.params)
    file = tmp_path / "b.jsonl"
    assert Gaussian(noise=1.0, budget_file=file) == Gaussian(noise=1.0, budget_file=str(file))
