"""What is predicted: classes by name or numbers, from file to federation to folder."""

from __future__ import annotations

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

from dpscaffold.cli.data import label_table, summary_table
from dpscaffold.data import (
    FederationWriter,
    describe,
    digits,
    dirichlet,
    from_pooled,
    from_users,
    iid,
    load,
    load_federation,
    prepare,
    read_npz,
    save,
    similarity,
)
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Target
from dpscaffold.report.data_figures import save_description
from dpscaffold.tuning.folds import fold_federation


def houses(path: Path, kind: str = "csv", **columns: Any) -> dict[str, Any]:
    """A table of prices with two towns, and its settings."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "size": rng.normal(100, 30, 60).astype(np.float32),
            "town": ["x", "y"] * 30,
            "price": rng.normal(size=60).astype(np.float32),
            **columns,
        }
    )
    if kind == "csv":
        pa.csv.write_csv(table, path)
    else:
        pa.parquet.write_table(table, path)
    return {
        "source": kind,
        "path": str(path),
        "label": "price",
        "user": "town",
        "target": {"kind": "number", "low": -4, "high": 4},
        "preprocess": ["standardise"],
    }


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_numbers_are_read_as_numbers(tmp_path: Path, kind: str) -> None:
    options = houses(tmp_path / f"houses.{kind}", kind)
    notes: list[str] = []
    federation = load_federation(options, notes.append)
    assert federation.target == Target("number", low=-4, high=4) and federation.classes == 0
    assert federation.train.labels.dtype == federation.test.labels.dtype == torch.float32
    wanted = np.sort(np.random.default_rng(0).normal(100, 30, 60))  # the rows are all there
    assert len(wanted) == len(federation.train) + len(federation.test)
    rng = np.random.default_rng(0)
    rng.normal(100, 30, 60)
    prices = rng.normal(size=60).astype(np.float32)
    found = torch.cat([federation.train.labels, federation.test.labels]).numpy()
    assert np.array_equal(np.sort(4 * found), np.sort(prices))
    assert any("numbers to be predicted" in note for note in notes)
    # No list of labels was read from the data, so none is outside the guarantee.
    assert not any("labels" in step.sentence for step in federation.preparation)
    assert "a number" in repr(federation)
    stored = load(prepare(options, tmp_path / "kept"))
    for a, b in ((federation, stored), (federation, load(save(federation, tmp_path / "two")))):
        assert b.target == a.target and torch.equal(a.train.labels, b.train.labels)
        assert b.train.labels.dtype == torch.float32 and b.schema == a.schema
    part = fold_federation(federation, 0, folds=3)
    assert part.train.labels.dtype == torch.float32 and part.train.select([1]).kind == "number"


def test_missing_numbers(tmp_path: Path) -> None:
    prices = pa.array([None, 1.5, *range(58)], pa.float32())
    options = houses(tmp_path / "houses.parquet", "parquet", price=prices)
    with refuses("missing-value: 'price' … 1 of 60 … missing = 'drop'"):
        load_federation(options)
    with refuses("missing-value: 'price' … 1 of 60"):
        load_federation({**options, "missing": 0.0})
    kept = load_federation({**options, "missing": "drop"})
    assert len(kept.train) + len(kept.test) == 59
    endless = pa.array([np.inf, 1.5, *range(58)], pa.float32())
    options = houses(tmp_path / "houses.parquet", "parquet", price=endless)
    with refuses("bad-labels"):
        load_federation(options)


def test_class_names_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text("a,site,y\n" + "1,n,well\n2,s,ill\n3,n,ill\n4,s,well\n5,n,well\n6,s,ill\n")
    options = {"source": "csv", "path": str(path), "label": "y", "user": "site"}
    federation = load_federation(options)
    assert federation.target.classes == ("ill", "well") and federation.classes == 2
    assert load(prepare(options, tmp_path / "kept")).target == federation.target
    assert digits().target.classes == tuple("0123456789")
    rng = np.random.default_rng(0)
    x, names = rng.normal(size=(20, 2)), np.array(["well", "ill"] * 10)
    made = from_users([(x, names), (x, names)])
    assert made.target.classes == ("ill", "well")
    assert [step.protection for step in made.preparation] == ["unprotected"]
    given = from_users([(x, names)], classes=("well", "ill", "dead"))
    assert given.classes == 3 and not given.preparation
    assert set(given.train.labels.tolist()) == {0, 1}
    numbered = from_pooled(x, np.arange(20) % 2, classes=("no", "yes"))
    assert numbered.target.classes == ("no", "yes")
    np.savez(tmp_path / "named.npz", features=x, labels=np.arange(20) % 2, classes=["no", "yes"])
    assert read_npz(tmp_path / "named.npz").target.classes == ("no", "yes")


def test_arrays_and_npz_of_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 2)), rng.normal(size=20)
    made = from_users([(x, y), (x, y)], target="number")
    assert made.target.kind == "number" and made.train.labels.dtype == torch.float32
    arrays = Federation.from_arrays([(x, y)], [(x, y)], target="number")
    assert np.array_equal(arrays.train.labels.numpy(), y.astype(np.float32))
    np.savez(tmp_path / "n.npz", features=x, labels=y)
    options = {"source": "npz", "path": str(tmp_path / "n.npz"), "users": 2, "similarity": 100}
    ranged = {"kind": "number", "low": -8, "high": 8}
    held = load_federation({**options, "target": ranged, "preprocess": []})
    assert held.target == Target("number", low=-8, high=8)
    together = torch.cat([held.train.labels, held.test.labels]).numpy()
    assert np.array_equal(np.sort(together), np.sort(y.astype(np.float32) / 8))
    with refuses("bad-labels: target = 'number'"):
        load_federation(options)
    with FederationWriter(tmp_path / "w", Target("number")) as writer:
        writer.append((x, y), (x[:2], y[:2]), "a")
        writer.append((x, y), (x[:2], y[:2]), "b")
    assert torch.equal(load(tmp_path / "w").train.of(1)[1], torch.from_numpy(y).float())
    with (
        refuses("bad-labels"),
        FederationWriter(tmp_path / "v", Target("number")) as writer,
    ):
        writer.append((x, y * np.nan), (x, y))


@settings(max_examples=30, deadline=None)
@given(
    labels=st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=40),
    users=st.integers(1, 4),
)
def test_partitions_by_class_refuse_numbers_and_others_deal_them_out(
    labels: list[float], users: int
) -> None:
    numbers = np.float32(labels)
    sizes = [len(labels) // users] * users
    for refused in (
        lambda: similarity(numbers, sizes, 10.0),
        lambda: dirichlet(numbers, sizes, 0.5),
    ):
        with refuses("wrong-target"):
            refused()
    rows = np.concatenate(iid(numbers, sizes))
    assert len(set(rows.tolist())) == sum(sizes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"user": None, "users": 3, "features": ["size"]},
            "wrong-target: similarity = 10",
        ),
        (
            {"user": None, "users": 3, "features": ["size"], "partition": "dirichlet"},
            "wrong-target",
        ),
        ({"classes": ["a", "b"]}, "conflicting-arguments: target is 'number'"),
        ({"target": "numbers"}, "unknown-choice: target"),
        ({"target": "class"}, "bad-labels: target = 'number'"),
        ({"label": "town", "user": "size"}, "not-numbers: 'town'"),
    ],
)
def test_bad_targets(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    options = houses(tmp_path / "houses.csv") | changes
    with refuses(said) as caught:
        load_federation({key: value for key, value in options.items() if value is not None})
    assert "\n" not in str(caught.value)


def test_targets_check_themselves() -> None:
    for given_, said in (
        (lambda: Target("class", ("a",)), "too-few-classes: at least 2"),
        (lambda: Target("class", ("a", "b", "a")), "name-used-twice: 'a'"),
        (lambda: Target("number", ("a", "b")), "conflicting-arguments"),
        (lambda: Target("rank"), "unknown-choice: 'class' … 'number' … 'labels'"),  # type: ignore[arg-type]
    ):
        with refuses(said):
            given_()
    x, y = torch.zeros(2, 2), torch.tensor([0.0, 1.0])
    numbers = Federation.from_arrays([(x, y)], [(x, y)], target="number")
    with refuses("bad-labels: torch.float32 … target is 2"):
        Federation(numbers.train, numbers.test, Target.numbered(2)).validated()


def test_numbers_are_described_by_tenths(tmp_path: Path) -> None:
    """Users whose prices do not overlap share no tenth; users alike have all."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100, 2)), np.linspace(0, 1, 100)
    apart = Federation.from_arrays([(x, y), (x, y + 2)], [(x, y), (x, y)], target="number")
    alike = Federation.from_arrays([(x, y), (x, y)], [(x, y), (x, y)], target="number")
    assert describe(apart).label_heterogeneity == pytest.approx(0.5)
    assert describe(alike).label_heterogeneity < 0.02
    assert describe(apart).counts.sum(axis=0).tolist() == [20] * 10
    assert summary_table(describe(apart)).row_count and label_table(describe(apart)).row_count
    save_description(describe(apart), tmp_path / "apart.png")


def test_the_schema_says_what_a_row_looks_like_and_nothing_of_a_record(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    rows = [f"{i},{'fm'[i % 2]},{'uv'[i % 3 % 2]},{'ab'[i % 3 % 2]},{i % 2}" for i in range(20)]
    path.write_text("age,sex,ward,site,y\n" + "\n".join(rows) + "\n")
    options: dict[str, Any] = {
        "source": "csv",
        "path": str(path),
        "label": "y",
        "user": "site",
        "categories": {"sex": ["f", "m"], "ward": []},
        "preprocess": ["standardise", "unit-norm"],
    }
    schema = load_federation(options).schema
    assert schema.columns == ("age", "sex", "ward") and schema.dimension == 5
    assert schema.categories == (("sex", ("f", "m")),)  # the wards were read from the records
    assert schema.target.classes == ("0", "1")
    for step in schema.preparation:
        assert step.protection in ("none needed", "public") or not hasattr(step, "mean")
    assert [step.protection for step in schema.preparation] == [
        "unprotected",  # the wards
        "unprotected",  # the labels
        "none needed",  # the rule by which users are left out
        "unprotected",  # mean and deviation
        "none needed",
    ]
    assert load_federation({**options, "seed": 1}).schema == schema  # whoever holds which record
