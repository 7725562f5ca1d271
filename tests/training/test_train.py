"""train(): what it returns and writes, resuming, halting, diverging."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from refusals import refuses
from stated import over_draw, spent, summary_of

from dpscaffold import (
    Gaussian,
    Logistic,
    Mlp,
    ModuleTask,
    Plan,
    fedavg,
    load_model,
    scaffold,
    scaffold_warm,
    synthetic,
    train,
)
from dpscaffold.config import make_run
from dpscaffold.engines.machine import pick_device
from dpscaffold.errors import Diverged
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.ledger import read_account
from dpscaffold.training.training import ignore

NOISY = Gaussian(clip=1.0, noise=3.0)


@pytest.fixture(scope="module")
def federation():
    return synthetic(alpha=2, beta=2, users=12, records=100, seed=3)


def plan(**changes):
    return Plan(
        **(
            {
                "rounds": 9,
                "local_steps": 4,
                "user_ratio": 0.25,
                "learning_rate": 0.5,
                "evaluate_every": 2,
                "checkpoint_every": 3,
            }
            | changes
        )
    )


def lines(folder):
    return RunFolder(folder).metrics()


def test_the_result_holds_what_was_written(federation, tmp_path):
    """History, model and summary on disk are those of the returned result."""
    result = train(
        federation,
        Logistic(40, 10),
        scaffold(),
        plan(),
        NOISY,
        metrics=["optimum"],
        out=tmp_path / "run",
    )
    assert result.ended == "completed" and result.rounds == 9
    assert [row["round"] for row in result.history] == [2, 4, 6, 8, 9]
    assert lines(tmp_path / "run") == result.history
    summary = summary_of(tmp_path / "run")
    assert summary["final"] == result.final
    assert summary["optimum_test_accuracy"] == result.optimum.test_accuracy
    assert torch.equal(load_model(tmp_path / "run").params, result.params)
    for key in (
        "test_accuracy",
        "train_loss",
        "log10_gap",
        "gradient_dissimilarity",
        "gradient_log_dissimilarity",
        "largest_drift",
        "control_norm",
        "epsilon_server",
    ):
        assert key in result.final
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        "config.toml",
        "ledger.jsonl",
        "ledger.head",
        "metrics.jsonl",
        "checkpoint.pt",
        "model",
        "secret.json",
        ".lock",
    } == names


def test_predictions_of_the_result_have_the_reported_accuracy(federation):
    """predict() on raw test features gives the accuracy of the last evaluation."""
    result = train(federation, Logistic(40, 10), fedavg(), plan())
    per_user = []
    for user in range(federation.users):
        x, y = federation.test.of(user)
        per_user.append(float((result.predict(x, prepared=True) == y).float().mean()))
    assert np.mean(per_user) == pytest.approx(result.final["test_accuracy"], abs=1e-6)


@pytest.mark.parametrize("engine", ["loop", "simulator"])
@pytest.mark.parametrize(("algorithm", "privacy"), [(scaffold_warm, NOISY), (fedavg, None)])
def test_resuming_equals_never_stopping(federation, tmp_path, engine, algorithm, privacy):
    """A run cut after its last checkpoint and resumed ends with the very same metrics, model and
    ledger."""

    def go(folder, on_round=ignore, resume=False):
        return train(
            federation,
            Logistic(40, 10),
            algorithm(),
            plan(warm_rounds=2, averaging="tail"),
            privacy,
            out=folder,
            on_round=on_round,
            resume=resume,
            engine=engine,
        )

    class Cut(Exception):
        pass

    def cut(row):
        if row.round == 8:  # the last checkpoint is at row.round 6
            raise Cut

    whole = go(tmp_path / "whole")
    with pytest.raises(Cut):
        go(tmp_path / "cut", cut)
    resumed = go(tmp_path / "cut", resume=True)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert torch.equal(resumed.params, whole.params)
    if privacy:
        one, two = read_account(tmp_path / "whole").ledger, read_account(tmp_path / "cut").ledger
        assert one.participations.tolist() == two.participations.tolist()


def test_a_finished_run_resumes_to_itself(federation, tmp_path):
    first = train(federation, Logistic(40, 10), scaffold(), plan(), NOISY, out=tmp_path / "run")
    again = train(
        federation, Logistic(40, 10), scaffold(), plan(), NOISY, out=tmp_path / "run", resume=True
    )
    assert again.history == first.history and again.privacy.towards(
        "server"
    ) == first.privacy.towards("server")


def test_secret_noise_differs_from_run_to_run_and_a_replay_is_counted(federation, tmp_path):
    """Fresh noise in replayed rounds is spent again: the ledger and the bound count them twice."""
    secret = Gaussian(clip=1.0, noise=3.0, secret=True)

    def go(folder, on_round=ignore, resume=False):
        return train(
            federation,
            Logistic(40, 10),
            fedavg(),
            plan(),
            secret,
            out=folder,
            on_round=on_round,
            resume=resume,
        )

    one, two = go(tmp_path / "one"), go(tmp_path / "two")
    assert not torch.equal(one.params, two.params)

    def cut(row):
        if row.round == 8:
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError):
        go(tmp_path / "cut", cut)
    resumed = go(tmp_path / "cut", resume=True)
    ledger = read_account(tmp_path / "cut").ledger
    assert ledger.extra == 2  # rounds 7 and 8 ran twice
    assert ledger.participations.sum() == (9 + 2) * 3
    assert resumed.privacy.towards("server").epsilon == pytest.approx(
        over_draw(ledger.run, 9, again=2), rel=1e-6
    )
    assert resumed.privacy.towards("server").epsilon > one.privacy.towards("server").epsilon


def test_the_ledger_is_written_before_the_uploads_are_used(federation, tmp_path, monkeypatch):
    """If the engine dies in a round, that round is in the journal already."""
    from dpscaffold.engines import Simulator

    real = Simulator.gather

    def dies(self, phase, broadcast, draw):
        if broadcast.round == 5:
            raise RuntimeError("power cut")
        return real(self, phase, broadcast, draw)

    monkeypatch.setattr(Simulator, "gather", dies)
    with pytest.raises(RuntimeError):
        train(federation, Logistic(40, 10), fedavg(), plan(), NOISY, out=tmp_path / "run")
    assert read_account(tmp_path / "run").ledger.rounds == 5


def within(times):
    """A budget that lets each user take part this often."""
    roster = synthetic(alpha=2, beta=2, users=12, records=100, seed=3).roster
    run = make_run(roster, Logistic(40, 10), fedavg(), plan(), NOISY).describe()
    return NOISY.changed(user_epsilon=spent(run, times) + 1e-6)


def test_caps_make_drawn_users_decline_and_keep_the_divisor(federation, tmp_path):
    """Nobody exceeds its ε; the others' draws are those of an uncapped run."""
    capped = train(
        federation,
        Logistic(40, 10),
        fedavg(),
        plan(),
        within(1),
        out=tmp_path / "capped",
    )
    free = train(federation, Logistic(40, 10), fedavg(), plan(), NOISY, out=tmp_path / "free")
    counts, uncapped = (read_account(r.folder).ledger.participations for r in (capped, free))
    assert counts.max() == 1 and uncapped.max() > 1
    assert ((uncapped > 0) == (counts > 0)).all()
    assert capped.privacy.towards("server").given < free.privacy.towards("server").given


def test_resuming_a_capped_run_admits_the_same_users(federation, tmp_path):
    privacy = within(2)

    def go(folder, on_round=ignore, resume=False):
        return train(
            federation,
            Logistic(40, 10),
            scaffold(),
            plan(),
            privacy,
            out=folder,
            on_round=on_round,
            resume=resume,
        )

    def cut(row):
        if row.round == 8:
            raise RuntimeError("cut")

    whole = go(tmp_path / "whole")
    with pytest.raises(RuntimeError):
        go(tmp_path / "cut", cut)
    assert torch.equal(go(tmp_path / "cut", resume=True).params, whole.params)


def test_median_clip_and_no_privacy_state_that_there_is_no_guarantee(federation):
    median = train(
        federation, Logistic(40, 10), fedavg(), plan(), Gaussian(clip="median", noise=3.0)
    )
    assert median.privacy.towards("server").epsilon is None and "median" in median.privacy.reason
    assert median.final["epsilon_server"] is None
    bare = train(federation, Logistic(40, 10), fedavg(), plan())
    assert bare.privacy.towards("server").epsilon is None and "not private" in bare.privacy.reason


def test_no_guarantee_for_users_weighted_by_their_records(federation, tmp_path):
    """The weights tell how many records a user has: the run trains, and says that it promises
    nothing."""
    private = Gaussian(clip=1.0, noise=1.0, unit="user")
    result = train(federation, Logistic(40, 10), fedavg(), plan(weighting="records"), private)
    assert result.privacy.towards("server").epsilon is None and "weighting" in result.privacy.reason
    with refuses("no-privacy: budget_file"):
        train(
            federation,
            Logistic(40, 10),
            fedavg(),
            plan(weighting="records"),
            private.changed(budget_file="b.jsonl"),
            out=tmp_path,
        )


def test_the_live_epsilon_includes_private_preprocessing(federation):
    """What is shown while training is never below what the statement says at the end."""
    from dataclasses import replace

    from dpscaffold.privacy import Cost, Remark

    step = Remark("A private mean.", "private", Cost("private mean", noise=2.0, add_remove=4.0))
    paid = train(
        replace(federation, preparation=(step,)), Logistic(40, 10), fedavg(), plan(), NOISY
    )
    free = train(federation, Logistic(40, 10), fedavg(), plan(), NOISY)
    assert paid.final["epsilon_server"] >= paid.privacy.towards("server").epsilon * (1 - 1e-9)
    assert paid.privacy.towards("server").epsilon > 1.2 * free.privacy.towards("server").epsilon


def test_a_deleted_journal_cannot_reset_what_was_spent(federation, tmp_path):
    def cut(row):
        if row.round == 8:
            raise RuntimeError("cut")

    with pytest.raises(RuntimeError):
        train(
            federation,
            Logistic(40, 10),
            fedavg(),
            plan(),
            NOISY,
            out=tmp_path / "run",
            on_round=cut,
        )
    (tmp_path / "run" / "ledger.jsonl").unlink()
    with refuses("ledger-missing"):
        train(
            federation, Logistic(40, 10), fedavg(), plan(), NOISY, out=tmp_path / "run", resume=True
        )


def test_frozen_parameters_stay_and_the_module_is_left_alone(federation):
    module = torch.nn.Sequential(
        torch.nn.Linear(40, 8), torch.nn.Dropout(), torch.nn.Linear(8, 10)
    ).train()
    module[0].weight.requires_grad_(False)
    task = ModuleTask(module)
    assert task.parameters == 8 + 8 * 10 + 10
    train(federation, task, fedavg(), plan(rounds=2))
    assert module.training and module[2].weight.requires_grad


def test_a_diverging_run_stops_says_where_and_keeps_its_checkpoint(federation, tmp_path):
    wild = plan(learning_rate=1e30, regularisation=1.0)
    with pytest.raises(Diverged, match=r"diverged at round \d+.*lower plan.learning_rate"):
        train(federation, Logistic(40, 10), fedavg(), wild, out=tmp_path / "run")
    assert (tmp_path / "run" / "config.toml").exists()


def test_averages_are_the_mean_of_the_iterates(federation):
    """Uniform and tail averaging equal the mean of separately recorded iterates."""
    iterates = []
    for rounds in range(1, 7):
        iterates.append(
            train(federation, Logistic(40, 10), fedavg(), plan(rounds=rounds), NOISY).params
        )
    uniform = train(
        federation, Logistic(40, 10), fedavg(), plan(rounds=6, averaging="uniform"), NOISY
    ).params
    tail = train(
        federation, Logistic(40, 10), fedavg(), plan(rounds=6, averaging="tail"), NOISY
    ).params
    torch.testing.assert_close(uniform, torch.stack(iterates).mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(tail, torch.stack(iterates[3:]).mean(0), rtol=1e-4, atol=1e-5)


def test_networks_and_modules_train(federation):
    module = ModuleTask(
        torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    )
    for task in (Mlp(40, 10, hidden=8), module):
        result = train(federation, task, scaffold(), plan(rounds=3), NOISY)
        assert result.final["log10_gap"] is None and 0 <= result.final["test_accuracy"] <= 1


class TestRefusals:
    """One clear sentence, and nothing written."""

    def test_a_folder_that_holds_another_run(self, federation, tmp_path):
        train(federation, Logistic(40, 10), fedavg(), plan(), out=tmp_path / "run")
        with refuses("run-exists"):
            train(federation, Logistic(40, 10), fedavg(), plan(), out=tmp_path / "run")
        with refuses("fewer-rounds: plan.rounds = 9"):
            train(
                federation,
                Logistic(40, 10),
                fedavg(),
                plan(rounds=8),
                out=tmp_path / "run",
                resume=True,
            )

    def test_a_folder_with_something_else_in_it(self, federation, tmp_path):
        (tmp_path / "letters.txt").write_text("mine")
        with refuses("folder-not-empty"):
            train(federation, Logistic(40, 10), fedavg(), plan(), out=tmp_path)
        assert [p.name for p in tmp_path.iterdir()] == ["letters.txt"]

    def test_tasks_that_do_not_fit(self, federation, tmp_path):
        with refuses("task-failed"):
            train(federation, Logistic(39, 10), fedavg(), plan(), out=tmp_path / "run")
        with refuses("not-convex"):
            train(
                federation, Mlp(40, 10), fedavg(), plan(), metrics=["optimum"], out=tmp_path / "run"
            )
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("name", ["cuda:99", "tpu", "mps", "nonsense:1"])
    def test_devices_that_are_not_there(self, name):
        with refuses("device-not-found|unknown-device: device is"):
            pick_device(name)

    def test_a_damaged_checkpoint_or_ledger(self, federation, tmp_path):
        run = tmp_path / "run"
        train(federation, Logistic(40, 10), fedavg(), plan(), NOISY, out=run)
        whole = (run / "checkpoint.pt").read_bytes()
        (run / "checkpoint.pt").write_bytes(whole[:100])
        with refuses("checkpoint-damaged"):
            train(federation, Logistic(40, 10), fedavg(), plan(), NOISY, out=run, resume=True)
        (run / "checkpoint.pt").write_bytes(whole)
        journal = (run / "ledger.jsonl").read_text().splitlines()
        journal[2] = journal[2].replace("[", "[0, ", 1)
        (run / "ledger.jsonl").write_text("\n".join(journal) + "\n")
        with refuses("ledger-damaged: line 3"):
            train(federation, Logistic(40, 10), fedavg(), plan(), NOISY, out=run, resume=True)

    def test_a_ledger_shorter_than_its_summary(self, federation, tmp_path):
        """Deleting lines from the journal cannot lower what was spent."""
        run = tmp_path / "run"
        train(federation, Logistic(40, 10), fedavg(), plan(), NOISY, out=run)
        journal = (run / "ledger.jsonl").read_text().splitlines()
        (run / "ledger.jsonl").write_text("\n".join(journal[:4]) + "\n")
        with refuses("ledger-damaged"):
            read_account(run)

    @pytest.mark.parametrize(
        "bad",
        [
            {"delta": 0.0},
            {"delta": 1.5},
            {"user_epsilon": -1.0},
            {"user_epsilon": float("nan")},
        ],
    )
    def test_budgets_out_of_range(self, bad):
        with refuses(f"not-a-number|out-of-range: {next(iter(bad))}"):
            Gaussian(noise=1.0, **bad)
