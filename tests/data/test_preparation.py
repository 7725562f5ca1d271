"""Preparation as data: the stored steps, applied to raw rows, give the federation's features, and
what they say about private records is a value that no name of a column can change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from refusals import refuses
from stated import page_of

from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic, train
from dpscaffold.data import digits, from_users, load, load_federation, prepare, save
from dpscaffold.data.prepared import (
    ClipNorm,
    Project,
    Scale,
    Shift,
    Standardised,
    UnitNorm,
    applied,
)
from dpscaffold.data.prepared import prepare as prepared
from dpscaffold.data.stored import entries, steps
from dpscaffold.data.tables.codec import Coding
from dpscaffold.federation import Federation
from dpscaffold.privacy import Cost, Remark
from dpscaffold.runs.ledger import read_account

PIPELINES: list[list[Any]] = [
    ["standardise", "unit-norm"],
    ["centre", "clip-norm:1.5", "pca:2"],
    [{"step": "standardise", "fit": "private", "norm_bound": 2.0, "noise": 1.0}, "unit-norm"],
    [{"step": "centre", "fit": "public", "mean": 0.25}],
]

numbers = st.floats(-1e6, 1e6, width=32).map(lambda x: repr(float(np.float32(x))))
cells = st.one_of(numbers, st.sampled_from(["", "NA", "7", "-0", "1e-3", "3.1415926535897931"]))
colours = st.sampled_from(["red", "green", "deep blue", "", "NA"])


def visits(path: Path, rows: list[tuple[str, str, str]], **options: Any) -> dict[str, Any]:
    """A CSV of (number, colour, number) with two users and two classes, and its settings."""
    lines = [
        f"{a},{colour},{b},{'north' if i % 2 else 'south'},{'ill' if i % 3 else 'well'}"
        for i, (a, colour, b) in enumerate(rows)
    ]
    path.write_text("a,colour,b,clinic,outcome\n" + "\n".join(lines) + "\n")
    return {
        "source": "csv",
        "path": str(path),
        "label": "outcome",
        "user": "clinic",
        "categories": ["colour"],
        "missing": 0.5,
        **options,
    }


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T)]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(cells, colours, numbers), min_size=12, max_size=30),
    steps=st.sampled_from([[], ["standardise", "unit-norm"], ["clip-norm:3"]]),
)
def test_raw_rows_of_a_table_become_the_features_exactly(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]], steps: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("visits")
    if all(colour in ("", "NA") for _, colour, _ in rows):
        rows[0] = (rows[0][0], "red", rows[0][2])
    options = visits(folder / "visits.csv", rows, preprocess=steps, test_ratio=0.3)
    federation = load_federation(options)
    stored = load(prepare(options, folder / "kept"))
    for data in (federation, stored):
        features = np.concatenate([data.train.features.numpy(), data.test.features.numpy()])
        raw = np.array(rows, dtype=object)
        assert np.array_equal(
            sorted_rows(prepared(raw, data.preparation)), sorted_rows(features), equal_nan=False
        )


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_raw_arrays_become_the_features_exactly_before_and_after_storage(
    pipeline: list[Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    users = [(rng.normal(1, 2, size=(20, 3)).astype(np.float32), np.arange(20) % 2)] * 2
    raw = from_users(users, seed=1)
    done = from_users(users, seed=1, preprocess=pipeline)
    found = load(save(done, tmp_path / "kept"))
    assert found.preparation == done.preparation and len(done.preparation) == len(pipeline)
    for table, features in ((raw.train, done.train), (raw.test, done.test)):
        again = prepared(table.features.numpy(), found.preparation)
        assert np.array_equal(again, features.features.numpy())


def test_raw_synthetic_and_image_rows_become_the_features_exactly(tmp_path: Path) -> None:
    made = synthetic(alpha=1, beta=1, users=3, records=40, dimension=5)
    standardised = made.preparation[0]
    assert isinstance(standardised, Standardised) and standardised.protection == "unprotected"
    # Undo the steps by hand: standardised rows have mean 0 and deviation 1 over the training data.
    raw = np.random.default_rng(0).normal(size=(9, 5)).astype(np.float32)
    expected = (raw - standardised.mean) / standardised.deviation
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.array_equal(prepared(raw, made.preparation), expected.astype(np.float32))
    pool = digits()
    images = load_federation({"source": "digits", "users": 3, "similarity": 100})
    found = load(save(images, tmp_path / "digits"))
    features = np.concatenate([images.train.features.numpy(), images.test.features.numpy()])
    again = prepared(pool.features, found.preparation)
    assert set(map(bytes, features)) <= set(map(bytes, again))


ROWS = hnp.arrays(np.float32, (5, 4), elements=st.floats(-1e3, 1e3, width=32))
COST = Cost("mean", noise=2.0, add_remove=4.0, seeded=True)
EVERY_STEP = [
    Shift(np.float32([1, 2, 3, 4]), None, "public", "a"),
    Shift(np.float32([0, 2, 3, 4]), np.float32([1, 2, 1, 2]), "private", "b", COST),
    Standardised(np.arange(4.0), np.full(4, 3.0), "unprotected", "c"),
    UnitNorm(),
    ClipNorm(0.5),
    Scale(np.asarray(1 / 255, dtype=np.float32)),
    Scale(np.float32([1, 2, 1, 0.5]), "Scaled."),
    Remark("A remark.", "unprotected"),
    Project(np.eye(4, 2, dtype=np.float32), "unprotected", "d"),
]


@settings(max_examples=25, deadline=None)
@given(rows=ROWS, order=st.permutations(EVERY_STEP[:-1]))
def test_every_step_survives_storage(rows: np.ndarray, order: list[Any]) -> None:
    steps_made = (*order, EVERY_STEP[-1])
    listed, arrays = entries(steps_made)
    found = steps(json.loads(json.dumps(listed)), arrays, Path("federation.json"))
    assert found == tuple(steps_made)
    assert np.array_equal(prepared(rows, found), prepared(rows, steps_made))
    assert [step.cost for step in found] == [step.cost for step in steps_made]


def test_equality_of_steps_looks_at_their_numbers() -> None:
    assert EVERY_STEP[0] != EVERY_STEP[1] and EVERY_STEP[5] != EVERY_STEP[6]
    assert Shift(np.float32([1]), None, "public", "a") != Shift(
        np.float32([2]), None, "public", "a"
    )


def test_codings_survive_storage() -> None:
    coding = Coding(("a", "sex"), (("sex", ("f", "m")),), 0.5, ("sex",))
    listed, arrays = entries([coding])
    assert steps(json.loads(json.dumps(listed)), arrays, Path("federation.json")) == (coding,)
    typed = [[True, "m"], [np.float32(2), None], [None, "f"]]
    rows = coding(np.array(typed, dtype=object))
    assert rows.tolist() == [[1, 0, 1], [2, 0, 0], [0.5, 1, 0]]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([[1.0, "x"]], "unknown-category: 'sex' … 'x'"),
        ([["one", "f"]], "unreadable-value: 'a' … 'one'"),
        ([[[1], "f"]], "unreadable-value"),
        ([[None, "f"]], "missing-value: 'a'"),
        ([[1.0, ""]], "missing-value: 'sex'"),
        ([[1.0]], "wrong-column-count"),
    ],
)
def test_rows_that_cannot_be_coded(rows: list[list[Any]], said: str) -> None:
    table = np.empty((len(rows), len(rows[0])), dtype=object)
    for i, row in enumerate(rows):
        for j, cell in enumerate(row):
            table[i, j] = cell
    with refuses(said) as caught:
        Coding(("a", "sex"), (("sex", ("f", "m")),))(table)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("stored", [False, True])
def test_a_column_cannot_talk_its_way_into_the_guarantee(tmp_path: Path, stored: bool) -> None:
    """The words that a sentence holds decide nothing: a column may be called '(no fit)'."""
    path = tmp_path / "people.csv"
    rows = [f"{i},{'fm'[i % 2]},{'ab'[i % 3 % 2]},{i % 2}" for i in range(20)]
    path.write_text("age,sex (no fit),site,y\n" + "\n".join(rows) + "\n")
    options: dict[str, Any] = {
        "source": "csv",
        "path": str(path),
        "label": "y",
        "user": "site",
        "categories": ["sex (no fit)"],
        "preprocess": ["unit-norm"],
    }
    federation = load(prepare(options, tmp_path / "kept")) if stored else load_federation(options)
    said = train(
        federation,
        Logistic(federation.dimension, 2),
        fedavg(),
        Plan(rounds=1, local_steps=1, user_ratio=1.0, data_ratio=0.5),
        Gaussian(clip=1.0, noise=5.0),
        out=tmp_path / "run",
    ).privacy
    outside = [sentence for _, sentence in said.outside]
    assert len([sentence for sentence in outside if "sex (no fit)" in sentence]) == 1
    assert not any("unit norm" in sentence for sentence in outside)
    page = page_of(tmp_path / "run").split("**Not covered:**")[1]
    assert "sex (no fit)" in page
    # The folder alone says the same.
    remarks = read_account(tmp_path / "run").opening.preparation
    said_of = [step.protection for step in remarks if "sex (no fit)" in step.sentence]
    assert said_of == ["unprotected"]


def test_unknown_and_damaged_preparations_are_refused(tmp_path: Path) -> None:
    made = synthetic(users=3, records=20, dimension=4)
    folder = save(made, tmp_path / "kept")
    index = json.loads((folder / "federation.json").read_text())

    def refused(said: str, **changes: Any) -> None:
        (folder / "federation.json").write_text(json.dumps(index | changes))
        with refuses(f"data-damaged|wrong-version: {said}") as caught:
            load(folder)
        assert "\n" not in str(caught.value)

    for other in (1, 99):  # 1 was never released
        refused(f"format {other}, and this version reads 2 and 3", format=other)
    refused("step 'whiten' that this version does not know", preparation=[{"kind": "whiten"}])
    first = index["preparation"][0]
    refused("protection", preparation=[first | {"protection": "surely"}])
    refused("cannot be read", preparation=[first | {"mean": {"array": "9.mean"}}])
    refused("cannot be read", preparation=[{"kind": "clip norm"}])
    refused("is damaged", preparation=None)
    with open(folder / "preparation.npz", "r+b") as file:
        file.seek(100)
        file.write(b"\xff\xff")
    refused("its checksum differs")
    (folder / "preparation.npz").unlink()
    refused("preparation.npz cannot be read")


class Doubled:
    """Your own step: it can be applied, and not stored."""

    protection, cost, sentence = "none needed", None, "Doubled."

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        return rows * 2


def test_steps_of_ones_own(tmp_path: Path) -> None:
    x, y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    done = applied(Federation.from_arrays([(x, y)], [(x, y)]), [Doubled()])  # type: ignore[list-item]
    assert done.train.features.tolist() == [[2.0, 2.0]] * 4
    with refuses("step-not-stored"):
        save(done, tmp_path / "kept")
    assert not list(tmp_path.iterdir())
