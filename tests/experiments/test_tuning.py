"""Tuning: folds within users, the right choice where it is known, and what is said about its
cost."""

from __future__ import annotations

import tomllib

import pytest
import torch
from refusals import refuses
from small import federation
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.config import load
from dpscaffold.tuning.folds import fold_federation
from dpscaffold.tuning.settings import DEFAULT_RATES
from dpscaffold.tuning.tuning import parse_tuning, read_tuning, tune

CPU = torch.device("cpu")
TOY = {
    "data": {"users": 6, "records": 50, "alpha": 0.0, "beta": 0.0},
    "plan": {"rounds": 30, "local_steps": 5, "user_ratio": 0.5, "data_ratio": 0.5},
    "algorithm": {"name": "fedavg"},
}


def toml(tables: dict) -> str:
    """Tables as TOML text."""
    import tomli_w

    return tomli_w.dumps(tables)


def test_folds_partition_every_users_training_records():
    data = federation((11, 7, 9))
    seen = [[] for _ in range(3)]
    for k in range(5):
        part = fold_federation(data, k, 5)
        assert (part.train.sizes + part.test.sizes == data.train.sizes).all()
        for user in range(3):
            seen[user].append(part.test.of(user)[0])
    for user in range(3):
        rows = torch.cat(seen[user])
        assert sorted(map(tuple, rows.tolist())) == sorted(
            map(tuple, data.train.of(user)[0].tolist())
        )


def test_folds_refuse_users_with_too_few_records():
    with refuses("too-few-records: user 2"):
        fold_federation(federation(), 0, 5)


def test_tuning_finds_what_is_known_to_be_best():
    grid = {"privacy.noise": [300.0, 0.01, 50.0]}
    settings, table = parse_tuning(TOY | {"privacy": {"noise": 1.0}, "tune": {"grid": grid}})
    tuned = tune(settings, table, CPU)
    assert tuned.best.values == {"privacy.noise": 0.01}
    assert len(tuned.scores) == 3 and len(tuned.best.accuracies) == 5
    assert tuned.best_tables()["privacy"]["noise"] == 0.01
    assert "outside the privacy guarantee" in tuned.privacy_note


def test_a_grid_of_several_keys_and_a_public_set():
    grid = {
        "plan": {"learning_rate": [0.001, 0.5], "local_steps": [1, 3]},
        "privacy.clip": [0.5, 2.0],
    }
    tables = TOY | {
        "privacy": {"noise": 1.0},
        "tune": {
            "grid": grid,
            "folds": 2,
            "public": {"users": 4, "records": 30},
        },
    }
    settings, table = parse_tuning(tables)
    tuned = tune(settings, table, CPU)
    assert len(tuned.scores) == 8
    assert set(tuned.best.values) == {"plan.learning_rate", "plan.local_steps", "privacy.clip"}
    assert "no privacy was spent" in tuned.privacy_note


def test_diverged_points_lose():
    tables = TOY | {
        "tune": {
            "folds": 2,
            "grid": {"plan.learning_rate": [0.3, 1e38], "plan.regularisation": [1.0]},
        }
    }
    settings, table = parse_tuning(tables)
    tuned = tune(settings, table, CPU)
    assert tuned.scores[1].diverged == 2 and tuned.best.values["plan.learning_rate"] == 0.3


def test_ten_step_sizes_and_five_folds_are_the_default():
    _, table = parse_tuning(TOY)
    assert table.grid == {"plan.learning_rate": DEFAULT_RATES} and len(DEFAULT_RATES) == 10
    assert table.folds == 5


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"fold": 3}, "unknown-key: 'folds'"),
        ({"grid": {"learning_rate": [1]}}, "unknown-key: plan.learning_rate"),
        ({"grid": {"plan.learning_rate": []}}, "empty-list"),
        ({"folds": 1}, "out-of-range: tune.folds is 1"),
        ({"grid": {"data.alpha": [1.0]}}, "unknown-key"),
    ],
)
def test_bad_tables_are_refused_in_one_sentence(given, sentence):
    with refuses(sentence):
        parse_tuning(TOY | {"tune": given})


def test_the_command_writes_the_best_configuration(tmp_path):
    config = tmp_path / "toy.toml"
    grid = {"privacy.noise": [200.0, 0.5]}
    config.write_text(toml(TOY | {"privacy": {"noise": 1.0}, "tune": {"folds": 2, "grid": grid}}))
    result = CliRunner().invoke(app, ["tune", str(config), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "best" in result.output and "outside the privacy guarantee" in result.output
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"tuning.csv", "tuning.png", "best.toml", "TUNING.md"}
    best = load(tmp_path / "out" / "best.toml")
    assert best.privacy.noise == 0.5 and best.algorithm.name == "fedavg"
    assert "0.5" in (tmp_path / "out" / "TUNING.md").read_text()


def test_overrides_reach_the_grid(tmp_path):
    config = tmp_path / "toy.toml"
    config.write_text(toml(TOY))
    _, table = read_tuning(config, ["tune.folds=3", "plan.rounds=7"])
    assert table.folds == 3
    with refuses("file-unreadable"):
        read_tuning(tmp_path / "none.toml")


def test_the_examples_are_valid():
    from pathlib import Path

    examples = sorted((Path(__file__).parents[2] / "examples").glob("tune-*.toml"))
    assert examples
    for path in examples:
        parse_tuning(tomllib.loads(path.read_text()))


@pytest.mark.parametrize(
    ("averaging", "judged"), [("tail", "average"), ("none", "last"), ("uniform", "average")]
)
def test_what_the_plan_gives_out_is_what_is_judged(averaging, judged):
    noise = {"privacy": {"noise": 20.0}}
    tables = TOY | noise | {"plan": TOY["plan"] | {"averaging": averaging}}
    own = {"folds": 2, "grid": {"plan.learning_rate": [0.5]}}
    found = tune(*parse_tuning(tables | {"tune": own}), CPU)
    assert found.output == judged
    other = {"plan": tables["plan"] | {"averaging": "tail" if judged == "last" else "none"}}
    against = tune(*parse_tuning(tables | other | {"tune": own}), CPU)
    assert found.best.accuracies != against.best.accuracies
