"""Exported models agree with ours on raw rows: every kind of task, target and preparation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses
from torch import nn

from dpscaffold import Linear, Logistic, Mlp, Model, ModuleTask, load_model
from dpscaffold.data import from_users
from dpscaffold.data.loading import load_federation
from dpscaffold.data.tables.cells import days
from dpscaffold.federation import Federation
from dpscaffold.models.export import export
from dpscaffold.tasks import LOSSES

ROWS = 60
WARDS = ("a", "b", "c")


def visits(path: Path) -> list[dict[str, Any]]:
    """A table with everything at once: numbers, missing values and NA strings, dates,
    categories."""
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = [
        {
            "age": (None, -9.0)[i % 2] if i % 7 == 3 else round(float(rng.normal(50, 20)), 2),
            "weight": None if i % 5 == 1 else round(float(rng.normal(70, 15)), 2),
            "ward": WARDS[i % 3],
            "sex": (None, "?")[i % 4 == 1] if i % 6 == 5 else "fm"[i % 2],
            "born": f"{1 + i % 28:02d}.{1 + i % 12:02d}.{1930 + i}",
            "site": f"s{i % 3}",
            "grade": "xyz"[int(rng.integers(3))],
            "fever": int(rng.integers(2)),
            "cough": int(rng.integers(2)),
        }
        for i in range(ROWS)
    ]
    lines = [",".join(rows[0])]
    lines += [",".join("" if v is None else str(v) for v in row.values()) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return rows


def table(folder: Path, **more: Any) -> tuple[Federation, list[dict[str, Any]]]:
    rows = visits(folder / "visits.csv")
    settings = {
        "source": "csv",
        "path": str(folder / "visits.csv"),
        "label": "grade",
        "user": "site",
        "features": ["age", "ward", "born", "weight", "sex"],
        "categories": {"ward": list(WARDS), "sex": ["f", "m"]},
        "dates": {"born": "%d.%m.%Y"},
        "missing": {"age": 44.0, "weight": "indicator", "sex": "category"},
        "na_values": {"age": ["-9"], "sex": ["?"]},
        "preprocess": ["standardise", "unit-norm"],
        **more,
    }
    return load_federation(settings), rows


def arrays(target: str, steps: list[Any], width: int = 6) -> tuple[Federation, np.ndarray]:
    rng = np.random.default_rng(1)
    x = (3 * rng.normal(size=(40, width)) + np.arange(width)).astype(np.float32)
    y = {"class": rng.integers(0, 2, 40), "number": rng.normal(size=40)}.get(
        target, rng.integers(0, 2, (40, 3))
    )
    pairs = [(x[:20], y[:20]), (x[20:], y[20:])]
    return from_users(pairs, preprocess=steps, target=target), x  # type: ignore[arg-type]


def net(width: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, outputs))


def pictures() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))


@dataclass(frozen=True)
class Case:
    """Data and the task that is made for their number of features."""

    data: Callable[[Path], tuple[Federation, Any]]
    task: Callable[[int], Any]


CASES = {
    "softmax on a table of everything": Case(table, lambda d: Logistic(d, 3)),
    "labels of a table by a network": Case(
        lambda f: table(f, label=["fever", "cough"]),
        lambda d: Mlp(d, 2, 4, LOSSES["labels"]),
    ),
    "unseen as zero, missing values filled by a number": Case(
        lambda f: table(f, unseen="zero", missing=1.5, preprocess=["centre"]),
        lambda d: ModuleTask(net(d, 3)),
    ),
    "regression behind pca": Case(
        lambda f: arrays("number", ["standardise", {"step": "pca", "components": 3}, "unit-norm"]),
        lambda d: Linear(d, 1, LOSSES["squared"]),
    ),
    "two classes by one score": Case(
        lambda f: arrays("class", [{"step": "clip-norm", "norm": 2.0}]),
        lambda d: Linear(d, 1, LOSSES["logistic"]),
    ),
    "labels of arrays": Case(
        lambda f: arrays("labels", ["standardise"]), lambda d: Linear(d, 3, LOSSES["labels"])
    ),
    "pictures by a convolution": Case(
        lambda f: arrays("class", [], width=9), lambda d: ModuleTask(pictures(), (1, 3, 3))
    ),
}
each = pytest.mark.parametrize("name", CASES)


def made(name: str, folder: Path) -> tuple[Model, Any]:
    """The model of a case, its parameters drawn at random, and raw rows."""
    case = CASES[name]
    data, rows = case.data(folder)
    task = case.task(data.dimension)
    params = torch.randn(task.parameters, generator=torch.Generator().manual_seed(3))
    return Model.of(data, task, params), rows


def by_number(model: Model, rows: Any) -> torch.Tensor:
    """Raw rows as a torch module takes them: categories by number, dates as days."""
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(rows)
    known = {"ward": WARDS, "sex": ("f", "m")}
    columns = []
    for name in model.columns:
        cells = [row[name] for row in rows]
        if name == "born":
            columns.append(days(name, cells, "%d.%m.%Y"))
        elif name in known:
            places = {value: float(k) for k, value in enumerate(known[name])}
            columns.append([np.nan if v in (None, "?") else places.get(v, -1.0) for v in cells])
        else:
            columns.append([np.nan if v is None else v for v in cells])
    return torch.tensor(np.array(columns, dtype=np.float32).T)


def as_inputs(model: Model, rows: Any) -> dict[str, np.ndarray]:
    """Raw rows as the ONNX model takes them: texts as they are, the rest as one table."""
    if isinstance(rows, np.ndarray):
        return {"numbers": rows}
    table = by_number(model, rows).numpy()
    texts = ("ward", "sex")
    numbers = [j for j, name in enumerate(model.columns) if name not in texts]
    named = {name: np.array([[row[name] or ""] for row in rows], dtype=object) for name in texts}
    return {"numbers": table[:, numbers], **named}


@each
def test_the_torch_module_agrees_on_raw_rows(name: str, tmp_path: Path) -> None:
    model, rows = made(name, tmp_path)
    found = model.to_module()(by_number(model, rows))
    torch.testing.assert_close(found, model.scores(rows), rtol=1e-4, atol=1e-5)


SLOW = ("two classes by one score", "labels of arrays", "pictures by a convolution")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES]
)
def test_onnx_agrees_on_raw_rows(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra [onnx]")
    model, rows = made(name, tmp_path)
    session = runtime.InferenceSession(str(export(model, "onnx", tmp_path / "model.onnx")))
    (found,) = session.run(None, as_inputs(model, rows))
    np.testing.assert_allclose(found, model.scores(rows).numpy(), rtol=1e-4, atol=1e-4)
    one = {key: value[:1] for key, value in as_inputs(model, rows).items()}  # any number of rows
    np.testing.assert_allclose(session.run(None, one)[0], found[:1], rtol=1e-5, atol=1e-6)
    said = session.get_modelmeta().custom_metadata_map
    assert json.loads(said["target"]) == model.target.kind
    assert json.loads(said["columns"]) == list(model.columns)
    assert json.loads(said["classes"]) == list(model.classes)
    assert "privacy" in said and "leaves_unprotected" in said


@pytest.mark.parametrize("name", ["labels of a table by a network", "regression behind pca"])
def test_an_exported_program_needs_no_package_of_ours(name: str, tmp_path: Path) -> None:
    model, rows = made(name, tmp_path)
    given, path = by_number(model, rows), export(model, "torch", tmp_path / "m.pt2")
    found = torch.export.load(path).module()(given)
    torch.testing.assert_close(found, model.scores(rows), rtol=1e-4, atol=1e-5)


def test_what_ours_refuses_is_nan_elsewhere_and_what_it_takes_is_not(tmp_path: Path) -> None:
    """A ward that the training never saw, by every way out; with unseen = "zero" it is taken."""
    for name, taken in (
        ("softmax on a table of everything", False),
        ("unseen as zero, missing values filled by a number", True),
    ):
        model, rows = made(name, tmp_path)
        strange = [{**rows[0], "ward": "zz"}, rows[1]]
        found = model.to_module()(by_number(model, strange))
        assert bool(torch.isfinite(found[0]).all()) is taken
        assert bool(torch.isfinite(found[1]).all())
        if taken:
            torch.testing.assert_close(found, model.scores(strange), rtol=1e-4, atol=1e-5)
        else:
            with refuses("unknown-category: 'zz'"):
                model.scores(strange)


@each
def test_the_folder_is_read_back_as_it_was(name: str, tmp_path: Path) -> None:
    model, rows = made(name, tmp_path)
    own = {
        "pictures by a convolution": pictures,
        "unseen as zero, missing values filled by a number": lambda: net(model.schema.dimension, 3),
    }
    module = own[name]() if name in own else None
    again = load_model(export(model, "safetensors", tmp_path / "folder"), module)
    assert again.target == model.target and again.columns == model.columns
    assert torch.equal(again.scores(rows), model.scores(rows))
