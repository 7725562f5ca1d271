"""Runs that share a budget file, end to end: granted before they begin, resumed, refused."""

from __future__ import annotations

import json
import shutil
from itertools import count
from pathlib import Path

import pytest
from refusals import refuses
from stated import described, over_draw
from training.test_crashes import DATA, SECRET, SEEDED, Crash, die_after, journalled
from typer.testing import CliRunner

from dpscaffold import BadInput, Gaussian, Logistic, Plan, fedavg, synthetic, train
from dpscaffold.cli import app
from dpscaffold.config import make_run
from dpscaffold.privacy import Ledger
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.account import PrivacyAccount
from dpscaffold.runs.budget_file import BudgetFile
from dpscaffold.runs.folder import RunFolder

PLAN = Plan(rounds=6, local_steps=2, user_ratio=0.25, evaluate_every=6, checkpoint_every=3, seed=4)
COUNT = count()


@pytest.fixture(scope="module")
def federation():
    return synthetic(**DATA)


@pytest.fixture
def file(tmp_path):
    BudgetFile.open(tmp_path / "budget.jsonl", 1.5, 0.1)
    return str(tmp_path / "budget.jsonl")


def go(federation, file, folder=None, privacy=SECRET, plan=PLAN, **options):
    if folder is None and file is not None:  # a run of its own
        folder = Path(file).parent / f"run{next(COUNT)}"
    return train(
        federation,
        Logistic(40, 10),
        fedavg(),
        plan,
        privacy and privacy.changed(budget_file=file),
        out=folder,
        resume=folder is not None,
        **options,
    )


def price(run, rounds=6, seed=4, again=()):
    """The larger of ε over the draw and ε given the seed's draw, reckoned from scratch."""
    ledger, draw = Ledger(run), Randomness(seed)
    for round in range(1, rounds + 1):
        ledger.record(round, draw.cohort(round, run.users, run.cohort_size).tolist())
    for round in again:
        users = draw.cohort(round, run.users, run.cohort_size).tolist()
        ledger.record(round, users, again=True)
    over = over_draw(run, rounds, again=ledger.extra)
    return max(over, ledger.largest())


def test_a_run_is_granted_its_whole_plan(federation, file, tmp_path):
    seen = []
    result = go(
        federation,
        file,
        tmp_path / "run",
        on_round=lambda row: seen.append(BudgetFile(file).read()),
    )
    run = result.setting.describe()
    contents = BudgetFile(file).read()
    (grant,) = contents.grants.values()
    assert grant.epsilon == pytest.approx(price(run)) and grant.delta == run.delta
    assert grant.epsilon >= result.privacy.towards("server").epsilon * (1 - 1e-9)
    assert grant.epsilon >= result.privacy.towards("server").given * (1 - 1e-9)
    identity = described(tmp_path / "run")["data"]
    assert len(identity) == 64 and identity not in (tmp_path / "budget.jsonl").read_text()
    # All of it was reserved before the first round, and each round before it was over.
    assert [dict(b.grants) for b in seen] == [{grant.run: grant}] * 6
    assert [b.participations[grant.run] for b in seen] == [1, 2, 3, 4, 5, 6]


def test_a_draw_that_nobody_chose_is_granted_over_the_draw(federation, file, tmp_path):
    """What is granted is what is stated, and does not depend on who was drawn; so are rounds that
    a crash makes a run release again."""
    plan = PLAN.changed(seed=None)
    with pytest.raises(Crash):
        go(federation, file, tmp_path / "run", plan=plan, on_round=die_after(5))
    (grant,) = BudgetFile(file).read().grants.values()
    result = go(federation, file, tmp_path / "run", plan=plan)
    run = result.setting.describe()
    assert grant.epsilon == pytest.approx(over_draw(run, 6))
    spent = over_draw(run, 6, again=2)
    assert BudgetFile(file).read().spent[0] == pytest.approx(spent)
    assert result.privacy.epsilon == pytest.approx(spent)


def test_runs_add_up_until_one_is_refused(federation, file, tmp_path):
    first = go(federation, file)
    cost = price(first.setting.describe())
    runs = int(1.5 / cost)
    assert runs >= 2
    for _ in range(runs - 1):
        go(federation, file)
    before = (tmp_path / "budget.jsonl").read_bytes()
    with refuses("budget-too-small: 6 rounds"):
        go(federation, file, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "budget.jsonl").read_bytes() == before
    assert BudgetFile(file).read().spent[0] == pytest.approx(runs * cost)


def test_rounds_run_again_raise_the_grant(federation, file, tmp_path):
    """Killed after round 5 with a checkpoint at 3: rounds 4 and 5 are released twice."""
    with pytest.raises(Crash):
        go(federation, file, tmp_path / "run", on_round=die_after(5))
    before = BudgetFile(file).read()
    result = go(federation, file, tmp_path / "run")
    assert result.ended == "completed" and journalled(tmp_path / "run") == (6, (1, 1))
    contents = BudgetFile(file).read()
    (run,) = before.grants
    assert contents.spent[0] == pytest.approx(price(result.setting.describe(), again=(4, 5)))
    assert contents.spent[0] > before.spent[0] and contents.spent[1] == before.spent[1]
    assert {name.split("+")[0] for name in contents.grants} == {run}
    assert contents.participations == {run: 8}


def test_a_repeat_without_room_halts(federation, tmp_path):
    run = go(federation, None).setting.describe()
    BudgetFile.open(tmp_path / "b", price(run) * 1.0001, 0.01)
    with pytest.raises(Crash):
        go(federation, str(tmp_path / "b"), tmp_path / "run", on_round=die_after(5))
    halted = go(federation, str(tmp_path / "b"), tmp_path / "run")
    first = 4 if price(run, again=(4,)) > price(run) * 1.0001 else 5
    assert price(run, again=(4, 5)) > price(run) * 1.0001
    assert halted.ended == "budget" and halted.rounds == first - 1
    assert f"round {first} would be run again with fresh noise" in halted.message
    assert BudgetFile(tmp_path / "b").read().spent[0] <= price(run) * 1.0001


def test_a_simulation_repeats_its_rounds_for_nothing(federation, file, tmp_path):
    with pytest.raises(Crash):
        go(federation, file, tmp_path / "run", SEEDED, on_round=die_after(5))
    go(federation, file, tmp_path / "run", SEEDED)
    contents = BudgetFile(file).read()
    assert sum(contents.participations.values()) == 6 and len(contents.grants) == 1
    with refuses("seed-repeated"):
        go(federation, file, privacy=SEEDED)


def test_a_copy_of_a_run_is_noticed(federation, file, tmp_path):
    with pytest.raises(Crash):
        go(federation, file, tmp_path / "run", on_round=die_after(3))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    go(federation, file, tmp_path / "copy")
    with refuses("run-copied"):
        go(federation, file, tmp_path / "run")


@pytest.mark.parametrize("damage", ["shortened", "another", "gone"])
def test_a_budget_file_that_lost_the_grant_is_refused(federation, file, tmp_path, damage):
    with pytest.raises(Crash):
        go(federation, file, tmp_path / "run", on_round=die_after(3))
    path = tmp_path / "budget.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.unlink()
    if damage == "shortened":
        path.write_text(lines[0])
    elif damage == "another":
        BudgetFile.open(path, 1.5, 0.1)
    code = "not-a-budget-file" if damage == "gone" else "budget-file-damaged"
    with refuses(code):
        go(federation, file, tmp_path / "run")


def test_a_copy_from_between_the_ledger_and_the_budget_file(
    federation, file, tmp_path, monkeypatch
):
    """A kill between the two leaves the file one round short. The copy of that moment must not pass
    for the newest folder once one more round has run elsewhere: that round would not be counted."""
    real = BudgetFile.participate

    def dies(self, run, round, *more):
        if round == 5:
            raise Crash
        real(self, run, round, *more)

    with monkeypatch.context() as patch:
        patch.setattr(BudgetFile, "participate", dies)
        with pytest.raises(Crash):
            go(federation, file, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with pytest.raises(Crash):
        go(federation, file, tmp_path / "run", on_round=die_after(4))
    rounds, again = journalled(tmp_path / "run")
    assert (rounds, again) == (5, (1,))  # round 4 once more, so the copy lacks one
    assert sum(BudgetFile(file).read().participations.values()) == rounds + sum(again)
    with refuses("run-copied"):
        go(federation, file, tmp_path / "copy")
    result = go(federation, file, tmp_path / "run")
    rounds, again = journalled(tmp_path / "run")
    assert (rounds, again) == (6, (1, 2))
    spent = over_draw(result.setting.describe(), rounds, again=sum(again))
    assert result.privacy.towards("server").epsilon == pytest.approx(spent)
    contents = BudgetFile(file).read()
    assert sum(contents.participations.values()) == rounds + sum(again)
    granted = price(result.setting.describe(), again=(4, 4, 5))
    assert contents.spent[0] == pytest.approx(granted) and granted >= spent


@pytest.mark.parametrize("room", [1.5, None])
def test_users_who_are_counted_again_raise_the_grant(federation, tmp_path, room):
    """A site that answered a round with fresh noise released twice: so says the file, and where it
    has no room for that, no further round runs."""
    draw = Randomness(4)
    setting = make_run(
        federation.roster,
        Logistic(40, 10),
        fedavg(),
        PLAN,
        SECRET.changed(budget_file=str(tmp_path / "b")),
    )
    run = setting.describe()
    BudgetFile.open(tmp_path / "b", room or price(run) * 1.0001, 0.1)
    account = PrivacyAccount(setting)
    account.attach(RunFolder(tmp_path), "data", setting.seed())
    users = draw.cohort(1, run.users, run.cohort_size)
    assert account.draw(draw, 1) is not None
    for _ in range(6):
        account.count_again(1, users.tolist())
    further = account.draw(draw, 2)
    contents = BudgetFile(tmp_path / "b").read()
    assert sum(contents.participations.values()) == 7 + (room is not None)
    if room is None:
        assert further is None and "round 1 was run again with fresh noise" in account.refusal
    else:
        spent = price(run, again=(1,) * 6)
        assert spent > price(run) * 1.0001 and contents.spent[0] == pytest.approx(spent)


def test_what_no_budget_can_count_is_refused(federation, file, tmp_path):
    for privacy, words in (
        (Gaussian(clip="median", noise=3.0), "no-privacy: clip='median'"),
        (Gaussian(clip=1.0, noise=0.0), "no-privacy"),
    ):
        with refuses(words):
            go(federation, file, tmp_path / "run", privacy)
    with refuses("units-differ"):
        go(federation, file)
        go(federation, file, privacy=Gaussian(1.0, 30.0, unit="user", secret=True))
    assert not (tmp_path / "run").exists()
    with refuses("not-text: budget_file is 3"):
        Gaussian(noise=1.0, budget_file=3)


CONFIG = """
[data]
source = "synthetic"
users = 4
records = 40
[plan]
rounds = 3
local_steps = 2
user_ratio = 0.5
data_ratio = 0.5
[privacy]
noise = 8.0
delta = "1/records"
secret = true
budget_file = "FILE"
"""


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "160"})


def test_the_commands(tmp_path):
    file, config = tmp_path / "budget.jsonl", tmp_path / "run.toml"
    config.write_text(CONFIG.replace("FILE", str(file)).replace("[plan]", "[plan]\nseed = 0"))
    missing = call("train", config, "--out", tmp_path / "a")
    assert "no budget file; open one with: dpscaffold privacy" in str(missing.exception)
    opened = call("privacy", file, "--epsilon", "0.3", "--delta", "0.1")
    assert opened.exit_code == 0 and "left: epsilon = 0.300" in opened.stdout
    assert call("train", config, "--out", tmp_path / "a").exit_code == 0
    refused = call("train", config, "--out", tmp_path / "b", "--set", "plan.seed=9")
    assert isinstance(refused.exception, BadInput) and "\n" not in str(refused.exception)
    assert not (tmp_path / "b").exists()
    said = json.loads(call("privacy", file, "--json").stdout)
    assert said["runs"][0]["participations"] == 3 and said["runs"][0]["noise_seed"] is None
    assert call("train", config, "--out", tmp_path / "a", "--resume").exit_code == 0


def test_bad_commands_are_one_sentence(tmp_path):
    file = tmp_path / "budget.jsonl"
    cases = {
        ("privacy", file): "is no budget file",
        ("privacy", file, "--epsilon", "1"): "--epsilon is given without --delta",
        ("privacy", file, "--delta", "0.1"): "--delta is given without --epsilon",
        ("privacy", file, "--epsilon", "-1", "--delta", "0.1"): "epsilon is -1",
        ("privacy", file, "--epsilon", "inf", "--delta", "0.1"): "epsilon is inf",
        ("privacy", file, "--epsilon", "1", "--delta", "2"): "delta is 2",
        ("privacy", file, "--epsilon", "1", "--delta", "0"): "delta is 0",
        (
            "privacy",
            tmp_path / "no" / "b.jsonl",
            "--epsilon",
            "1",
            "--delta",
            "0.1",
        ): "folder does not",
    }
    for arguments, words in cases.items():
        error = call(*arguments).exception
        assert isinstance(error, BadInput) and words in str(error) and "\n" not in str(error)
    assert not list(tmp_path.iterdir())
    BudgetFile.open(file, 1.0, 0.1).participate("a", 1, after=0)
    assert "exists" in str(call("privacy", file, "--epsilon", "1", "--delta", "0.1").exception)
    (tmp_path / "text.jsonl").write_text("hello\n")
    assert "damaged" in str(call("privacy", tmp_path / "text.jsonl").exception)
    tune = tmp_path / "tune.toml"
    tune.write_text(CONFIG.replace("FILE", str(file)))
    assert "tuning reserves none" in str(call("tune", tune).exception)
