"""A model that leaves: stored, loaded elsewhere, as a module, and what damage does to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from refusals import refuses
from small import federation, module
from test_model import clinic
from torch import nn

from dpscaffold import (
    Linear,
    Logistic,
    Mlp,
    ModuleTask,
    Plan,
    fedavg,
    load_model,
    run,
    synthetic,
    train,
)
from dpscaffold.data.tables.codec import Coding
from dpscaffold.federation.schema import schema_of
from dpscaffold.models.model import Model
from dpscaffold.tasks import LOSSES
from dpscaffold.training.evaluator import Evaluator

PLAN = Plan(rounds=20, local_steps=5, user_ratio=1.0, data_ratio=0.5, learning_rate=1.0)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]], Path]:
    place = tmp_path_factory.mktemp("clinic")
    options, rows = clinic(place / "clinic.csv")
    tables = {
        "data": options,
        "algorithm": {"name": "scaffold"},
        "plan": PLAN.stored(),
        "privacy": {"clip": 1.0, "noise": 1.0},
    }
    result = run(tables, out=place / "run")
    return result, rows, place


def test_a_stored_model_says_the_same_as_the_one_that_was_trained(ran: Any) -> None:
    result, rows, place = ran
    model = load_model(place / "run")
    assert torch.equal(model.params, result.params)
    assert torch.equal(model.scores(rows), result.model.scores(rows))
    assert model.classes == ("ill", "well") and model.columns == ("pressure", "ward", "rate")
    assert model.privacy.towards("server").epsilon == result.privacy.towards("server").epsilon
    assert (model.origin.label, model.origin.site, model.origin.rounds) == ("outcome", "site", 20)
    assert any("without protection" in text for text in model.unprotected)


def test_files_and_frames_of_raw_rows_agree(ran: Any, tmp_path: Path) -> None:
    result, rows, place = ran
    model, wanted = result.model, result.model.predict(rows)
    assert torch.equal(model.predict(place / "clinic.csv"), wanted)
    table = pa.csv.read_csv(place / "clinic.csv")
    shuffled = table.select(["rate", "outcome", "ward", "pressure", "site"])
    pa.parquet.write_table(shuffled, tmp_path / "rows.parquet")
    assert torch.equal(model.predict(tmp_path / "rows.parquet"), wanted)
    assert torch.equal(model.predict(shuffled), wanted)
    frame = {name: np.array([row[name] for row in rows]) for name in ("pressure", "rate", "ward")}
    assert torch.equal(model.predict(frame), wanted)


def test_accuracy_on_raw_held_out_rows_is_the_reported_one(ran: Any) -> None:
    """Rows found again by their prepared features: nothing of the split is assumed."""
    result, rows, _ = ran
    held = result.federation.test
    prepared = result.model.preparation
    features = np.stack([_features(prepared, row) for row in rows])
    where = {features[i].tobytes(): i for i in range(len(rows))}
    right = []
    for user in range(held.users):
        x, _ = held.of(user)
        raw = [rows[where[row.numpy().tobytes()]] for row in x]
        said = result.model.named(raw)
        right.append(np.mean([name == row["outcome"] for name, row in zip(said, raw, strict=True)]))
    assert float(np.mean(right)) == result.final["test_accuracy"]


def _features(steps: Any, row: dict[str, Any]) -> np.ndarray:
    rows = np.array([[row["pressure"], row["ward"], row["rate"]]], dtype=object)
    for step in steps:
        rows = step(rows)
    return rows.astype(np.float32)[0]


TASKS = {
    "logistic": Logistic(4, 3),
    "linear": Linear(4, 3),
    "mlp": Mlp(4, 3, hidden=6),
    "module": ModuleTask(module(4, 3), name="mine"),
}


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_stored_and_turned_into_a_module(name: str, tmp_path: Path) -> None:
    data, task = synthetic(users=3, records=30, dimension=4, classes=3), TASKS[name]
    params = torch.randn(task.parameters, generator=torch.Generator().manual_seed(0))
    model = Model.of(data, task, params)
    rows = np.random.default_rng(0).normal(size=(50, 4))
    mine = module(4, 3, seed=5) if name == "module" else None
    back = load_model(model.save(tmp_path / "model"), module=mine)
    assert torch.equal(back.scores(rows), model.scores(rows))
    torch.testing.assert_close(
        model.to_module()(torch.from_numpy(rows)), model.scores(rows), rtol=1e-5, atol=1e-5
    )


def test_numbers_are_stored_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3)).astype(np.float32)
    from dpscaffold import Federation

    data = Federation.from_arrays([(x, x[:, 0])], [(x, x[:, 0])], target="number")
    model = Model.of(data, Linear(3, 1, LOSSES["squared"]), torch.tensor([1.0, 0, 0, 0.5]))
    back = load_model(model.save(tmp_path / "model"))
    assert torch.equal(back.predict(x), torch.from_numpy(x[:, 0] + np.float32(0.5)))


def test_a_module_takes_categories_by_number_and_never_guesses(ran: Any) -> None:
    result, rows, _ = ran
    whole = result.model.to_module()
    codes = {value: i for i, value in enumerate(whole.categories["ward"])}
    raw = torch.tensor([[r["pressure"], codes[r["ward"]], r["rate"]] for r in rows])
    torch.testing.assert_close(whole(raw), result.model.scores(rows), rtol=1e-4, atol=1e-4)
    strange = raw[:3].clone()
    strange[0, 1], strange[1, 0], strange[2, 1] = 7, float("nan"), float("nan")
    assert bool(torch.isnan(whole(strange)).all())


def test_a_module_of_ones_own_must_be_given_and_must_fit(tmp_path: Path) -> None:
    data = federation()
    frozen = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    frozen[0].requires_grad_(False)
    task = ModuleTask(frozen, name="mine")
    model = Model.of(data, task, torch.randn(task.parameters))
    folder = model.save(tmp_path / "model")
    with refuses("module-needed: --module … load_model"):
        load_model(folder)
    with refuses("module-mismatch"):
        load_model(folder, module=nn.Linear(4, 3))
    other = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))  # other frozen weights
    back = load_model(folder, module=other)
    rows = torch.randn(6, 4)
    assert torch.equal(back.scores(rows), model.scores(rows))


def test_damage_is_one_sentence(tmp_path: Path) -> None:
    model = Model.of(federation(), Logistic(4, 3), torch.zeros(15))
    for k, (name, spoil) in enumerate(
        [
            ("model.json", lambda text: text[:-30]),
            ("model.json", lambda text: text.replace(b'"dimension": 4', b'"dimension": 5')),
            ("model.safetensors", lambda text: text[:-4]),
            ("model.safetensors", lambda text: text[:-1] + b"\x01"),
            ("privacy.json", lambda text: b"{}x"),
        ]
    ):
        folder = model.save(tmp_path / str(k))
        path = folder / name
        path.write_bytes(spoil(path.read_bytes()))
        with refuses("model-damaged") as caught:
            load_model(folder)
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_newer_missing_and_unfinished_folders(tmp_path: Path, ran: Any) -> None:
    folder = Model.of(federation(), Logistic(4, 3), torch.zeros(15)).save(tmp_path / "model")
    index = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**index, "format": 99}))
    with refuses("wrong-version: format 99"):
        load_model(folder)
    with refuses("not-a-model"):
        load_model(tmp_path / "nowhere")
    unfinished = tmp_path / "run"
    unfinished.mkdir()
    (unfinished / "config.toml").write_text("")
    with refuses("run-unfinished: --resume"):
        load_model(unfinished)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with refuses("folder-not-empty"):
        ran[0].model.save(tmp_path / "full")
    assert (tmp_path / "full" / "notes.txt").exists()


def test_rows_without_a_number_are_refused() -> None:
    data = synthetic(users=2, records=10, dimension=4, classes=3)
    model = Model.of(data, Logistic(4, 3), torch.zeros(15))
    rows = np.zeros((3, 4))
    rows[1, 2] = np.nan
    with refuses("not-finite"):
        model.predict(rows)


def test_a_run_without_privacy_says_so(tmp_path: Path) -> None:
    data = federation()
    plan = Plan(rounds=2, local_steps=2, data_ratio=0.5)
    result = train(data, Logistic(4, 3), fedavg(), plan, out=tmp_path / "r")
    assert load_model(tmp_path / "r").privacy.guarantee is False
    evaluate = Evaluator(data, Logistic(4, 3), 0.0, torch.device("cpu"))
    found = evaluate(load_model(tmp_path / "r").params)
    assert found["test_accuracy"] == result.final["test_accuracy"]


def test_an_unseen_category_is_zero_where_the_training_took_it_so(tmp_path: Path) -> None:
    """Rows, files and the module agree: the sites of a deployment code such a row by zeros."""
    coding = Coding(("age", "sex"), (("sex", ("f", "m")),), missing=2.0, unseen="zero")
    data = federation(dimension=3)
    schema = schema_of((coding,), data.target, 3)
    params = torch.arange(12.0)
    model = Model(Logistic(3, 3), params, (coding,), data.target, schema)
    model = load_model(model.save(tmp_path / "model"))
    rows = [{"age": 1.0, "sex": "m"}, {"age": None, "sex": "x"}, {"age": 3.0, "sex": None}]
    weights = params.view(3, 4).numpy()
    features = np.array([[1, 0, 1, 1], [2, 0, 0, 1], [3, 0, 0, 1]])
    np.testing.assert_allclose(model.scores(rows), features @ weights.T)
    path = tmp_path / "rows.csv"
    path.write_text("sex,age\nm,1\nx,\n,3\n")
    np.testing.assert_allclose(model.scores(path), features @ weights.T)
    codes = torch.tensor([[1.0, 1.0], [float("nan"), -1.0], [3.0, float("nan")]])
    np.testing.assert_allclose(model.to_module()(codes).detach(), features @ weights.T)
