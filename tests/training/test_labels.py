"""Targets of several labels: from columns of 0 and 1 to a model that is used."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score, hamming_loss, roc_auc_score
from typer.testing import CliRunner

from dpscaffold import Gaussian, Linear, Plan, load_model, scaffold, train
from dpscaffold.cli import app
from dpscaffold.config import parse
from dpscaffold.data import from_users
from dpscaffold.data.loading import load_federation, prepare
from dpscaffold.federation import Federation
from dpscaffold.federation.labels import MOST_LABELS, pack, unpack
from dpscaffold.federation.schema import Target
from dpscaffold.models import evaluate_files, predict_files
from dpscaffold.tasks import LOSSES
from dpscaffold.training.optimum import solve

LABELS = ("fever", "cough", "rash")
PLAN = {"rounds": 15, "local_steps": 4, "user_ratio": 1.0, "data_ratio": 0.5, "learning_rate": 0.5}


def rows_of(seed: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows, and three labels of which the last is rare; none, some or all of them hold."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    w = np.array([[2.0, 0, 0], [0, 2.0, 1.0], [1.0, -1.0, 1.0], [0, 0, 0]])
    z = x @ w + np.array([0.0, 0.3, -1.5]) + 0.3 * rng.normal(size=(count, 3))
    return x, (z > 0).astype(int)


def write(path: Path, seed: int = 0, count: int = 240, words: tuple[str, str] = ("0", "1")) -> None:
    x, held = rows_of(seed, count)
    with path.open("w", newline="") as stream:
        out = csv.writer(stream)
        out.writerow(["a", "b", "site", *LABELS, "c", "d"])
        for i, (row, labels) in enumerate(zip(x.tolist(), held, strict=True)):
            out.writerow([*row[:2], f"s{i % 4}", *(words[v] for v in labels), *row[2:]])


def data(path: Path, **more: Any) -> dict[str, Any]:
    given = {"source": "csv", "path": str(path), "label": list(LABELS), "user": "site"}
    return {**given, "preprocess": ["standardise"], **more}


# --- sets of labels as numbers ---


@given(st.integers(1, MOST_LABELS), st.integers(0, 10**6))
def test_packed_labels_come_out_as_they_went_in(count: int, seed: int) -> None:
    held = np.random.default_rng(seed).integers(0, 2, size=(5, count))
    sets = pack(held)
    assert sets.dtype == np.int64 and sets.min() >= 0
    np.testing.assert_array_equal(unpack(torch.from_numpy(sets), count).numpy(), held)
    across = unpack(torch.from_numpy(sets), count, axis=0)
    np.testing.assert_array_equal(across.numpy(), held.T)


# --- laws ---


def one_question(labels: bool) -> Federation:
    pairs = []
    for seed in range(3):
        x, held = rows_of(seed, 40)
        pairs.append((x, held[:, :1] if labels else held[:, 0]))
    kind = "labels" if labels else "class"
    return Federation.from_arrays(pairs, pairs, target=kind)


@pytest.mark.parametrize("engine", ["simulator", "loop"])
@pytest.mark.parametrize("privacy", [None, Gaussian(clip=0.4, noise=2.0)])
def test_one_label_is_learnt_as_two_classes_are(engine: str, privacy: Gaussian | None) -> None:
    """With L = 1 the loss is the logistic one: the same batches, noise and steps, to the bit."""
    plan = Plan(rounds=4, local_steps=3, user_ratio=0.7, data_ratio=0.3, learning_rate=0.3)
    runs = [
        train(one_question(labels), Linear(4, 1, LOSSES[loss]), scaffold(), plan, privacy,
              engine=engine)
        for labels, loss in ((True, "labels"), (False, "logistic"))
    ]  # fmt: skip
    assert torch.equal(runs[0].params, runs[1].params)
    assert runs[0].final["test_label_accuracy"] == runs[1].final["test_accuracy"]
    assert runs[0].final["test_macro_f1"] == runs[1].final["test_f1"]
    assert runs[0].final["test_label_auc"] == runs[1].final["test_auc"]
    assert runs[0].final["test_label_log_loss"] == pytest.approx(runs[1].final["test_log_loss"])


def test_labels_without_a_common_layer_have_the_optima_of_each_alone() -> None:
    """F is a sum over labels, and a linear model shares nothing: scikit-learn solves each."""
    x, held = rows_of(3, 200)
    strength = 1e-2
    federation = Federation.from_arrays([(x, held)], [(x, held)], LABELS, target="labels")
    task = Linear(4, 3, LOSSES["labels"])
    found = solve(federation, task, strength)
    padded = np.concatenate([x.astype(float), np.ones((len(x), 1))], axis=1)
    for j in range(3):
        alone = LogisticRegression(C=1 / (strength * len(x)), fit_intercept=False, tol=1e-12)
        alone.fit(padded, held[:, j])
        np.testing.assert_allclose(found.params.view(3, 5)[j], alone.coef_[0], atol=2e-4)


# --- from a file to a model ---


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder of three labels, and raw rows that were not there."""
    folder = tmp_path_factory.mktemp("labels")
    write(folder / "t.csv")
    write(folder / "new.csv", seed=9, count=300, words=("false", "True"))
    text = (
        f"[data]\nsource = 'csv'\npath = '{folder}/t.csv'\nlabel = {list(LABELS)}\nuser = 'site'\n"
        "preprocess = ['standardise', 'unit-norm']\n[plan]\n"
        + "\n".join(f"{key} = {value}" for key, value in PLAN.items())
        + '\n[task]\nmetrics = ["optimum"]\n'
    )
    (folder / "c.toml").write_text(text)
    done = CliRunner().invoke(app, ["train", f"{folder}/c.toml", "--out", f"{folder}/run", "-q"])
    assert done.exit_code == 0, done.output
    return folder


def test_predictions_of_a_file_are_one_column_a_label(run: Path) -> None:
    model = load_model(run / "run")
    assert model.classes == LABELS and model.target.kind == "labels"
    predict_files(model, run / "new.csv", run / "said.csv", ["site"])
    with (run / "said.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    said = np.array([[int(row[f"prediction_{name}"]) for name in LABELS] for row in rows])
    chance = np.array([[float(row[f"probability_{name}"]) for name in LABELS] for row in rows])
    assert list(rows[0]) == ["site", *(f"prediction_{n}" for n in LABELS),
                             *(f"probability_{n}" for n in LABELS)]  # fmt: skip
    np.testing.assert_array_equal(said, model.predict(run / "new.csv").numpy())
    np.testing.assert_allclose(chance, model.probabilities(run / "new.csv").numpy(), rtol=1e-6)
    np.testing.assert_array_equal(said, chance > 0.5)
    assert (said == rows_of(9, 300)[1]).mean() > 0.75
    named = model.named(run / "new.csv")
    assert named[0] == tuple(name for name, holds in zip(LABELS, said[0], strict=True) if holds)


def test_an_evaluation_agrees_with_scikit_learn(run: Path) -> None:
    model, (_, true) = load_model(run / "run"), rows_of(9, 300)
    found = evaluate_files(model, run / "new.csv").whole
    said = model.predict(run / "new.csv").numpy()
    chance = model.probabilities(run / "new.csv").numpy()
    pooled = evaluate_files(model, run / "new.csv", site="a").whole  # every row is its own site
    assert pooled.metrics["test_label_accuracy"] == pytest.approx(1 - hamming_loss(true, said))
    assert pooled.metrics["test_subset_accuracy"] == pytest.approx(accuracy_score(true, said))
    assert found.metrics["test_micro_f1"] == pytest.approx(f1_score(true, said, average="micro"))
    assert found.metrics["test_macro_f1"] == pytest.approx(f1_score(true, said, average="macro"))
    auc = roc_auc_score(true, chance, average="macro")
    assert found.metrics["test_label_auc"] == pytest.approx(auc)
    for j, entry in enumerate(found.by_class):
        assert entry["label"] == LABELS[j] and entry["rows"] == true[:, j].sum()
        assert entry["accuracy"] == pytest.approx(accuracy_score(true[:, j], said[:, j]))
        assert entry["baseline"] == pytest.approx(max(true[:, j].mean(), 1 - true[:, j].mean()))
        assert entry["f1"] == pytest.approx(f1_score(true[:, j], said[:, j]))
        assert entry["auc"] == pytest.approx(roc_auc_score(true[:, j], chance[:, j]))
    majority = np.where(true.mean(0) > 0.5, 1, 0)
    assert pooled.baseline["test_label_accuracy"] == pytest.approx((true == majority).mean())
    assert sum(bin.rows for bin in found.calibration) == 900 and found.confusion == ()
    assert len(found.sites) == 4 and found.sites[0]["macro_f1"] is not None


def test_labels_come_from_arrays_and_parquet_and_prepared_folders(tmp_path: Path) -> None:
    x, held = rows_of(2, 40)
    np.savez(tmp_path / "t.npz", features=x, labels=held, classes=np.array(LABELS))
    from_npz = load_federation({"source": "npz", "path": f"{tmp_path}/t.npz", "target": "labels",
                                "users": 2, "similarity": 100})  # fmt: skip
    assert from_npz.target == Target("labels", LABELS)
    columns = {f"x{j}": x[:, j] for j in range(4)} | {"u": np.arange(40) % 2}
    columns |= {name: held[:, j].astype(bool) for j, name in enumerate(LABELS)}
    pa.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    given = data(tmp_path / "t.parquet", source="parquet", user="u")
    stored = prepare(given, tmp_path / "stored")
    loaded = load_federation({"source": "saved", "path": str(stored)})
    assert loaded.target == Target("labels", LABELS)
    every = np.concatenate([loaded.train.labels, loaded.test.labels])
    np.testing.assert_array_equal(np.sort(every), np.sort(pack(held)))
    in_memory = load_federation(given)
    assert torch.equal(in_memory.train.labels, loaded.train.labels)


# --- bad input ---


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"label": ["fever"]}, "single-label-list"),
        ({"label": ["fever", "fever"]}, "name-used-twice: 'fever'"),
        ({"label": ["fever", "cuogh"]}, "unknown-column: 'cuogh'"),
        ({"label": [*LABELS], "classes": ["a", "b"]}, "conflicting-arguments"),
        ({"label": [*LABELS], "target": "number"}, "conflicting-arguments"),
        (
            {"label": "fever", "target": "labels"},
            "conflicting-arguments: label = ['fever', 'cough']",
        ),
        ({"label": ["fever", "a"]}, "bad-labels: 'a'"),
        ({"label": [*LABELS], "features": ["a", "rash"]}, "column-named-twice"),
        ({"label": [*LABELS], "exclude": ["rash"]}, "column-needed"),
    ],
)
def test_wrong_label_columns_are_refused_in_a_sentence(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    write(tmp_path / "t.csv", count=40)
    with refuses(said):
        load_federation(parse({"data": data(tmp_path / "t.csv", **change)}).data)


def test_wrong_arrays_of_labels_are_refused_in_a_sentence() -> None:
    x, held = rows_of(0, 10)
    for labels, names, said in (
        (held * 2, None, "bad-labels: holds is 1"),
        (held[:, 0], None, "wrong-shape"),
        (held + np.nan, None, "bad-labels: hold nan"),
        (held, ("a", "b"), "count-differs: 2 names … are 3"),
        (held, ("a", "b", "a"), "name-used-twice: 'a'"),
        (held[:5], None, "wrong-shape"),
    ):
        with refuses(said):
            from_users([(x, labels)], classes=names, target="labels")
    with refuses("wrong-shape: target = 'labels'"):
        from_users([(x, held)])
    with refuses("count-differs: target has 3"):
        Federation.from_arrays([(x, held)], [(x, held[:, :2])], target="labels")
    with refuses("wrong-shape: 1 to"):
        pack(np.zeros((2, 64)))
    with refuses("bad-labels: the 2"):
        raw = Federation.from_arrays([(x, pack(held))], [(x, pack(held))])
        Federation(raw.train, raw.test, Target("labels", ("a", "b"))).validated()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"kind": "linear", "loss": "softmax"}, "wrong-loss"),
        ({"kind": "linear", "class_weights": [1, 2, 3]}, "not-applicable"),
        ({"kind": "logistic", "loss": "softmax"}, "wrong-loss"),
        ({"kind": "linear", "metrics": ["auc"]}, "wrong-target: 'auc' … target is 3"),
    ],
)
def test_settings_that_do_not_fit_labels_are_refused(
    tmp_path: Path, task: dict[str, Any], said: str
) -> None:
    write(tmp_path / "t.csv", count=60)
    (tmp_path / "c.toml").write_text("")
    from dpscaffold import run

    with refuses(said):
        run({"data": data(tmp_path / "t.csv"), "task": task, "plan": PLAN}, out=tmp_path / "run")
