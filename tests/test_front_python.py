"""What Python offers next to the commands: configurations run, ε solved, wrong calls refused,
values that show themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses

from dpscaffold import (
    Gaussian,
    Logistic,
    Plan,
    fedavg,
    load_model,
    run,
    scaffold,
    synthetic,
    train,
)
from dpscaffold.config import load, make_run
from dpscaffold.data import from_users
from dpscaffold.data.loading import load_federation
from dpscaffold.privacy import Statement

TABLES = {
    "data": {"users": 6, "records": 60, "features": 4, "classes": 3},
    "plan": {"rounds": 4, "local_steps": 2, "evaluate_every": 1},
}
PLAN = Plan(rounds=2, local_steps=2, user_ratio=0.5)


def test_a_configuration_runs_as_the_command_runs_it(tmp_path: Path) -> None:
    config = tmp_path / "small.toml"
    config.write_text(
        "[data]\nusers = 6\nrecords = 60\nfeatures = 4\nclasses = 3\n[plan]\nlocal_steps = 2\n"
    )
    result = run(config, ["plan.rounds=3"], out=tmp_path / "run")
    again = run(TABLES, ["plan.rounds=3", "plan.evaluate_every=10"], out=tmp_path / "again")
    assert result.rounds == 3 and torch.equal(result.params, again.params)
    assert torch.equal(load_model(tmp_path / "run").params, result.params)
    with refuses("run-exists"):
        run(config, out=tmp_path / "run")


def test_a_folder_is_written_only_where_one_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    once, twice = run(TABLES), run(TABLES)
    assert torch.equal(once.params, twice.params) and once.folder is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("privacy", "said"),
    [
        ({"release": True}, "no-run-folder: release … out='runs/first'"),
        (
            {"budget_file": "b.jsonl"},
            "no-run-folder: is 'b.jsonl' … out='runs/first'",
        ),
    ],
)
def test_a_ledger_that_must_be_kept_needs_a_folder(
    privacy: dict[str, object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before the first round, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    with refuses(said):
        run({"data": TABLES["data"], "privacy": {"noise": 4.0, **privacy}})
    given = synthetic(users=4, records=40, dimension=4, classes=3)
    allowed = {"release": ["unprotected-preprocessing"]} if "release" in privacy else privacy
    noised = Gaussian(noise=4.0, **allowed)  # type: ignore[arg-type]
    with refuses(said):
        train(given, Logistic(4, 3), fedavg(), PLAN, noised)
    assert list(tmp_path.iterdir()) == []


#: What is changed in a right call, and the sentence that a person gets.
WRONG: list[tuple[dict[str, object], str]] = [
    ({"algorithm": scaffold}, "algorithm is the function scaffold itself; call it: scaffold()"),
    ({"algorithm": "scaffold"}, "algorithm is 'scaffold'; give an algorithm, such as scaffold()"),
    ({"algorithm": {}}, "algorithm is {} (dict); give an algorithm, such as scaffold()"),
    ({"privacy": {"noise": 1}}, "privacy is {'noise': 1} (dict); give Gaussian(clip=1.0, epsilon="),
    ({"privacy": 2.0}, "privacy is 2.0 (float); give Gaussian(clip=1.0, epsilon=2.0), or None"),
    ({"privacy": Gaussian}, "privacy is the class Gaussian itself; give Gaussian(clip=1.0, eps"),
    ({"federation": (1, 2)}, "federation is (1, 2) (tuple); give a Federation, such as"),
    ({"federation": "a.csv"}, "federation is 'a.csv'; give a Federation, such as federation_of("),
    ({"task": Logistic}, "task is the class Logistic itself; give a task, such as Logistic("),
    ({"task": "logistic"}, "task is 'logistic'; give a task, such as Logistic("),
    ({"task": torch.nn.Linear(4, 3)}, "(Linear); give ModuleTask(module), which makes a task of"),
    ({"plan": {"rounds": 2}}, "plan is {'rounds': 2} (dict); give a plan, such as Plan(rounds"),
    ({"plan": Plan}, "plan is the class Plan itself; give a plan, such as Plan(rounds=100)"),
    ({"metrics": "auc"}, "metrics is 'auc'; give a list: metrics=['auc']"),
    ({"stopping": "p.csv"}, "stopping is 'p.csv'; give Stopping('public.csv', label='outcome')"),
    ({"out": 3}, "out is 3 (int); give the path of a run folder"),
]


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_a_wrong_call_ends_in_a_sentence(change: dict[str, object], said: str) -> None:
    data = synthetic(users=4, records=40, dimension=4, classes=3)
    right = {"federation": data, "task": Logistic(4, 3), "algorithm": scaffold()}
    right |= {"plan": PLAN}
    with refuses(f"not-a-list|wrong-type: {said}"):
        train(**(right | change))  # type: ignore[arg-type]


def test_wrong_rows_and_wrong_configurations_end_in_a_sentence() -> None:
    data = synthetic(users=4, records=40, dimension=4, classes=3)
    result = train(data, Logistic(4, 3), fedavg(), PLAN)
    for rows in (np.zeros((2, 7)), [[1.0, 2.0, 3.0]]):
        with refuses("wrong-column-count"):
            result.predict(rows)
    with refuses("wrong-type: rows is None"):
        result.predict(None)  # type: ignore[arg-type]
    with refuses("wrong-type"):
        run(data)  # type: ignore[arg-type]
    with refuses("not-a-list: 'plan.rounds=2'"):
        run(TABLES, "plan.rounds=2")
    with refuses("wrong-type: user 0"):
        from_users(np.zeros((2, 5)))  # type: ignore[arg-type]


@pytest.mark.parametrize("view", ["server", "third-party"])
def test_epsilon_is_solved_as_in_a_configuration(view: str) -> None:
    settings = load(None, ["privacy.epsilon=2.0", f"privacy.view={view}"], TABLES)
    data = load_federation(settings.data)
    wanted = settings.setting(data).privacy
    mechanism = Gaussian(clip=1.0, epsilon=2.0, view=view)  # type: ignore[arg-type]
    parts = (settings.task.build(data), settings.algorithm.build(), settings.plan)
    found = make_run(data.roster, *parts, mechanism)  # type: ignore[arg-type]
    assert found.privacy is not None and wanted is not None
    assert found.privacy.noise == wanted.noise != 1.0 and found.privacy.epsilon is None


def test_a_run_given_by_its_epsilon_keeps_it() -> None:
    data = synthetic(users=6, records=60, dimension=4, classes=3)
    plan = Plan(rounds=4, local_steps=2)
    result = train(data, Logistic(4, 3), scaffold(), plan, Gaussian(clip=1.0, epsilon=3.0))
    assert 2.9 < result.privacy.towards("server").epsilon <= 3.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epsilon": 0.0}, "out-of-range: epsilon is 0"),
        ({"epsilon": 1.0, "noise": 2.0}, "noise-or-epsilon"),
        ({"epsilon": 1.0, "noise": 1.0}, "noise-or-epsilon"),
        ({"view": "server"}, "noise-or-epsilon"),
        ({"epsilon": 1.0, "view": "mars"}, "unknown-choice: privacy.view is 'mars'"),
    ],
)
def test_a_mechanism_that_cannot_be_solved(given: dict[str, object], said: str) -> None:
    with refuses(said):
        Gaussian(clip=1.0, **given)  # type: ignore[arg-type]


def test_values_show_themselves_shortly() -> None:
    data = synthetic(users=6, records=60, dimension=4, classes=3)
    plan = Plan(rounds=4, local_steps=2, evaluate_every=1)
    result = train(data, Logistic(4, 3), fedavg(), plan, Gaussian(clip=1.0, noise=3.0))
    for value in (data, result, result.model):
        shown = value._repr_html_()
        assert len(repr(value)) < 600, repr(value)
        assert len(shown) < 6000 and shown.startswith("<table>") and "<script" not in shown
    assert len(repr(result.privacy)) < 600 and "<" not in result.privacy._repr_markdown_()
    assert "DP-FedAvg" in repr(result)
    assert (
        Statement.from_json(json.loads(json.dumps(result.privacy.to_json())), "it")
        == result.privacy
    )


def test_progress_is_shown_when_asked(capfd: pytest.CaptureFixture[str]) -> None:
    data = synthetic(users=6, records=60, dimension=4, classes=3)
    plan = Plan(rounds=3, local_steps=2, evaluate_every=1)
    train(data, Logistic(4, 3), fedavg(), plan)
    assert capfd.readouterr().err == ""
    train(data, Logistic(4, 3), fedavg(), plan, progress=True)
    assert "round 3/3" in capfd.readouterr().err


def test_a_run_is_followed_in_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra [track]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from dpscaffold.training.tracking import tracker

    settings = load(None, [], TABLES)
    followed = tracker("tensorboard", tmp_path / "run", settings)
    result = run(TABLES, out=tmp_path / "run", on_round=followed)
    followed.close(result.ended)
    read = EventAccumulator(str(tmp_path / "tensorboard" / "run")).Reload()
    found = [(event.step, event.value) for event in read.Scalars("test_accuracy")]
    wanted = {row["round"]: row["test_accuracy"] for row in result.history}
    assert len(found) == len(wanted) and dict(found) == pytest.approx(wanted)
    with refuses("unknown-choice: --track is 'wandb'"):
        tracker("wandb", tmp_path / "run", settings)


def test_a_run_is_followed_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, against a store of its own: numbers, settings and how it ended."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (extra [track])")
    from dpscaffold.training.tracking import tracker

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    tracker("mlflow", tmp_path / "refused", load(None, [], TABLES))  # nothing comes of this one
    followed = tracker("mlflow", tmp_path / "run", load(None, [], TABLES))
    result = run(TABLES, out=tmp_path / "run", on_round=followed)
    followed.close(result.ended)
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert found.info.run_name == "run" and found.info.status == "FINISHED"
    assert found.data.tags["ended"] == "completed"
    assert found.data.params["plan.rounds"] == str(result.rounds)
    kept = client.get_metric_history(found.info.run_id, "test_accuracy")
    wanted = {row["round"]: row["test_accuracy"] for row in result.history}
    assert {entry.step: entry.value for entry in kept} == pytest.approx(wanted)


def test_a_tracker_that_is_not_installed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpscaffold.training.tracking import tracker

    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for name in ("mlflow", "tensorboard"):
        with refuses(f"package-missing: --track {name} … dpscaffold[track]"):
            tracker(name, tmp_path / "run", load(None, [], TABLES))
