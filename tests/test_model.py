"""A trained model on raw rows: what it says is what the federation's own features give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses

from dpscaffold import Logistic, Plan, fedavg, synthetic, train
from dpscaffold.data import load_federation
from dpscaffold.federation import Federation
from dpscaffold.federation.schema import Target
from dpscaffold.models.model import Model

ROWS = 240


def clinic(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A CSV whose columns mean nothing before they are standardised, its settings, and its rows."""
    rng = np.random.default_rng(1)
    rows = []
    for i in range(ROWS):
        ill = i % 2
        rows.append(
            {
                "pressure": float(np.float32(10_000 + 30 * rng.normal() + 90 * ill)),
                "ward": "abc"[int(rng.integers(3))],
                "rate": float(np.float32(0.001 * rng.normal() - 0.001 * ill)),
                "site": f"s{i % 4}",
                "outcome": ("well", "ill")[ill],
            }
        )
    names = list(rows[0])
    lines = [",".join(names), *(",".join(str(row[name]) for name in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    options = {
        "source": "csv",
        "path": str(path),
        "label": "outcome",
        "user": "site",
        "categories": ["ward"],
    }
    return options, rows


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    options, rows = clinic(tmp_path_factory.mktemp("clinic") / "clinic.csv")
    federation = load_federation(options)
    plan = Plan(rounds=30, local_steps=5, user_ratio=1.0, data_ratio=0.5, learning_rate=1.0)
    return train(federation, Logistic(federation.dimension, 2), fedavg(), plan), rows


def test_raw_rows_are_prepared_as_the_training_rows_were(trained: Any) -> None:
    result, rows = trained
    truth = np.array([row["outcome"] for row in rows])
    federation = result.federation
    features = torch.cat([federation.train.features, federation.test.features])
    labels = torch.cat([federation.train.labels, federation.test.labels])
    prepared = float((result.predict(features, prepared=True) == labels).double().mean())
    raw = float((np.array(result.model.named(rows)) == truth).mean())
    assert raw == prepared and raw > 0.85
    # The columns alone, unprepared, tell nothing: the test can fail.
    bare = np.array([[r["pressure"], r["rate"], *(r["ward"] == w for w in "abc")] for r in rows])
    unprepared = result.predict(bare.astype(np.float32), prepared=True).numpy()
    index = (truth == "well").astype(int)
    assert abs(float((unprepared == index).mean()) - 0.5) < 0.1


def test_rows_may_come_in_any_form(trained: Any) -> None:
    result, rows = trained
    model = result.model
    assert model.columns == ("pressure", "ward", "rate") and model.classes == ("ill", "well")
    wanted = model.predict(rows)
    columns = {name: [row[name] for row in rows] for name in reversed(list(rows[0]))}
    table = np.array([[row[name] for name in model.columns] for row in rows], dtype=object)
    texts = np.array([[str(cell) for cell in row] for row in table])
    for form in (columns, table, texts, table.tolist()):
        assert torch.equal(model.predict(form), wanted)
    chances = model.probabilities(rows)
    assert torch.equal(chances.argmax(1), wanted)
    torch.testing.assert_close(chances.sum(1), torch.ones(len(rows)))
    scores = model.scores(rows).double().numpy()
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chances.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"pressure": [1.0], "rate": [1.0]}, "unknown-column: 'ward'"),
        ({"pressure": [1.0], "ward": ["a"], "rate": []}, "rows-differ"),
        (np.zeros((2, 2)), "wrong-column-count"),
        (np.zeros(3), "wrong-shape"),
        ([{"pressure": 1.0, "ward": "z", "rate": 0.0}], "unknown-category: 'ward' … 'z'"),
        ([{"pressure": "high", "ward": "a", "rate": 0.0}], "unreadable-value: 'pressure' … 'high'"),
        ([{"pressure": None, "ward": "a", "rate": 0.0}], "missing-value"),
        (np.zeros((0, 3)), "no-rows"),
    ],
)
def test_rows_that_do_not_fit(trained: Any, rows: Any, said: str) -> None:
    with refuses(said) as caught:
        trained[0].model.predict(rows)
    assert "\n" not in str(caught.value)


def test_prepared_rows_of_another_width() -> None:
    federation = synthetic(users=2, records=10, dimension=4, classes=3)
    model = Model.of(federation, Logistic(4, 3), torch.zeros(15))
    with refuses("wrong-column-count"):
        model.predict(torch.zeros(2, 5), prepared=True)


class OneScore:
    """A score that is the row's first feature."""

    name, parameters, convex, width = "one", 1, True, 1

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def scores(self, params: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return params * features[:, :1]


def test_one_score_is_the_second_class_or_the_number() -> None:
    x = torch.tensor([[-2.0, 0.0], [3.0, 0.0]])
    pair = [(x, torch.tensor([0, 1]))]
    two = Model.of(Federation.from_arrays(pair, pair), OneScore(), torch.ones(1))  # type: ignore[arg-type]
    assert two.predict(x).tolist() == [0, 1]
    chances = two.probabilities(x)
    np.testing.assert_allclose(chances[:, 1], 1 / (1 + np.exp([2.0, -3.0])), rtol=1e-6)
    np.testing.assert_allclose(chances.sum(1), 1.0)
    numbers = Federation.from_arrays(pair, pair, target="number")
    model = Model.of(numbers, OneScore(), torch.ones(1))  # type: ignore[arg-type]
    assert model.target == Target("number") and model.predict(x).tolist() == [-2.0, 3.0]
    for refused in (model.probabilities, model.named):
        with refuses("wrong-target"):
            refused(x)
