"""train(): what it returns and writes, resuming, caps, averages, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refuses
from stated import spent, summary_of

from dpscaffold import (
    Federation,
    Gaussian,
    Logistic,
    Mlp,
    Plan,
    fedavg,
    load_model,
    scaffold,
    scaffold_warm,
    synthetic,
    train,
)
from dpscaffold.config import make_run
from dpscaffold.privacy import Cost, Remark
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.ledger import read_account
from dpscaffold.training.result import Result

NOISY = Gaussian(clip=1.0, noise=3.0)
DATA = synthetic(alpha=2, beta=2, users=12, records=100, seed=3)
PLAN = Plan(
    rounds=9,
    local_steps=4,
    user_ratio=0.25,
    learning_rate=0.5,
    evaluate_every=2,
    checkpoint_every=3,
)


class Cut(Exception):
    """A process that dies."""


def cut(row: HistoryRow) -> None:
    """The last checkpoint is that of round 6."""
    if row.round == 8:
        raise Cut


def go(
    privacy: Gaussian | None = NOISY,
    algorithm: Any = fedavg,
    task: Any = None,
    data: Federation = DATA,
    plan: Plan = PLAN,
    **options: Any,
) -> Result:
    return train(data, task or Logistic(40, 10), algorithm(), plan, privacy, **options)


def test_the_result_holds_what_was_written(tmp_path: Path) -> None:
    """History, model and summary on disk are those of the returned result."""
    folder = tmp_path / "run"
    result = go(algorithm=scaffold, metrics=["optimum"], out=folder)
    assert result.ended == "completed" and result.rounds == 9
    assert [row["round"] for row in result.history] == [2, 4, 6, 8, 9]
    assert RunFolder(folder).metrics() == result.history
    summary = summary_of(folder)
    assert summary["final"] == result.final and result.optimum is not None
    assert summary["optimum_test_accuracy"] == result.optimum.metrics["test_accuracy"]
    assert torch.equal(load_model(folder).params, result.params)
    gradients = {"gradient_dissimilarity", "gradient_log_dissimilarity", "largest_drift"}
    model = {"test_accuracy", "train_loss", "log10_gap", "control_norm", "epsilon_server"}
    assert gradients | model <= set(result.final)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize(("algorithm", "privacy"), [(scaffold_warm, NOISY), (fedavg, None)])
def test_resuming_equals_never_stopping(
    tmp_path: Path, engine: str, algorithm: Any, privacy: Gaussian | None
) -> None:
    """A run cut after its last checkpoint and resumed ends with the very same metrics and model;
    then it resumes to itself."""
    plan = PLAN.changed(warm_rounds=2, averaging="tail")
    asked: dict[str, Any] = {"algorithm": algorithm, "plan": plan, "engine": engine}
    whole = go(privacy, out=tmp_path / "whole", **asked)
    with pytest.raises(Cut):
        go(privacy, out=tmp_path / "cut", on_round=cut, **asked)
    for _ in range(2):
        resumed = go(privacy, out=tmp_path / "cut", resume=True, **asked)
        assert RunFolder(tmp_path / "cut").metrics() == RunFolder(tmp_path / "whole").metrics()
        assert torch.equal(resumed.params, whole.params)


def within(times: int) -> Gaussian:
    """A budget that lets each user take part this often."""
    run = make_run(DATA.roster, Logistic(40, 10), fedavg(), PLAN, NOISY).describe()
    return NOISY.changed(user_epsilon=spent(run, times) + 1e-6)


def test_caps_make_drawn_users_decline_and_keep_the_divisor(tmp_path: Path) -> None:
    """Nobody exceeds its ε; the others' draws are those of an uncapped run, and a resumed run
    admits the same users."""
    capped = go(within(1), out=tmp_path / "capped")
    free = go(out=tmp_path / "free")
    counts, uncapped = (
        read_account(tmp_path / name).ledger.participations for name in ("capped", "free")
    )
    assert counts.max() == 1 and uncapped.max() > 1
    assert ((uncapped > 0) == (counts > 0)).all()
    assert capped.privacy.towards("server").given < free.privacy.towards("server").given
    whole = go(within(2))
    with pytest.raises(Cut):
        go(within(2), out=tmp_path / "cut", on_round=cut)
    assert torch.equal(go(within(2), out=tmp_path / "cut", resume=True).params, whole.params)


@pytest.mark.parametrize(
    ("privacy", "weighting", "why"),
    [
        (None, "uniform", "not private"),
        (Gaussian(clip="median", noise=3.0), "uniform", "median"),
        # The weights tell how many records a user has.
        (Gaussian(clip=1.0, noise=1.0, unit="user"), "records", "weighting"),
    ],
)
def test_what_has_no_guarantee_says_so(
    tmp_path: Path, privacy: Gaussian | None, weighting: str, why: str
) -> None:
    plan = PLAN.changed(weighting=weighting)
    result = go(privacy, plan=plan)
    assert result.privacy.towards("server").epsilon is None and why in result.privacy.reason
    assert result.final.metrics.get("epsilon_server") is None
    if privacy is not None:
        with refuses("no-privacy: budget_file"):
            go(privacy.changed(budget_file="b.jsonl"), plan=plan, out=tmp_path)


def test_the_live_epsilon_includes_private_preprocessing() -> None:
    """What is shown while training is never below what the statement says at the end."""
    step = Remark("A private mean.", "private", Cost("private mean", noise=2.0, add_remove=4.0))
    paid, free = go(data=replace(DATA, preparation=(step,))), go()
    assert paid.final["epsilon_server"] >= paid.privacy.towards("server").epsilon * (1 - 1e-9)
    assert paid.privacy.towards("server").epsilon > 1.2 * free.privacy.towards("server").epsilon


def test_averages_are_the_mean_of_the_iterates() -> None:
    """Uniform and tail averaging equal the mean of separately recorded iterates."""
    iterates = torch.stack([go(plan=PLAN.changed(rounds=t)).params for t in range(1, 7)])
    for averaging, wanted in (("uniform", iterates), ("tail", iterates[3:])):
        found = go(plan=PLAN.changed(rounds=6, averaging=averaging)).params
        torch.testing.assert_close(found, wanted.mean(0), rtol=1e-4, atol=1e-5)


def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with refuses("task-failed"):
        go(task=Logistic(39, 10), out=folder)
    with refuses("not-convex"):
        go(task=Mlp(40, 10), metrics=["optimum"], out=folder)
    with refuses("not-a-list"):
        go(metrics="auc", out=folder)
    with refuses("unknown-engine"):
        go(engine="simulater", out=folder)
    assert not folder.exists()
    go(None, out=folder)
    with refuses("run-exists"):
        go(None, out=folder)
    with refuses("fewer-rounds: plan.rounds = 9"):
        go(None, plan=PLAN.changed(rounds=8), out=folder, resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letters.txt").write_text("mine")
    with refuses("folder-not-empty"):
        go(None, out=tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letters.txt"]
