"""``dpscaffold privacy``, end to end."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold.cli import app, main
from dpscaffold.privacy import Statement, round_up

OPTIONS = (
    "--users 100 --records 4000 --rounds 400 --local-steps 50 --user-ratio 0.2 --data-ratio "
    "0.2 --noise 60 --delta 2.5e-6"
)
SYNTHETIC = OPTIONS.split()
ONE_STEP = "--users 40 --records 50 --rounds 10 --local-steps 1 --user-ratio 0.2 --data-ratio 0.2"
SUMS = [*ONE_STEP.split(), "--delta", "1e-4", "--algorithm", "fedavg"]


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["privacy", *arguments], env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def answer(*arguments: str) -> dict[str, Any]:
    return json.loads(call(*arguments, "--json"))


def stated(*arguments: str) -> Statement:
    values = answer(*arguments)
    said = {key: value for key, value in values.items() if key not in ("noise", "rounds")}
    return Statement.from_json(said, "")


def changed(name: str, *value: str) -> list[str]:
    """The options of a plan with another value of one of them, or without it."""
    place = SYNTHETIC.index(name)
    return [*SYNTHETIC[:place], *((name, *value) if value else ()), *SYNTHETIC[place + 2 :]]


def test_a_plan_by_its_numbers():
    said = stated(*SYNTHETIC)
    assert said.delta == 2.5e-6 and said.epsilon == pytest.approx(0.860, rel=0.005)
    text = call(*SYNTHETIC)
    assert "0.861" in text and "2.5e-06" in text and "A plan for 100 users" in text
    poisson = stated(*SYNTHETIC, "--sampling", "poisson")
    assert poisson.epsilon == pytest.approx(0.404, rel=0.005)
    assert "whole dataset" in stated(*SYNTHETIC, "--unit", "user").neighbours
    for algorithm, theorem in (("fedavg", "2"), ("scaffold", "1")):
        one = stated(*SUMS[:-1], algorithm, "--noise", "3").towards("third_party")
        assert one.theorem == theorem


#: A plan whose noise is to be found.
FREE = changed("--noise")


@pytest.mark.parametrize("against", ["server", "third-party", "participant"])
def test_what_is_solved_for_is_what_is_stated(against):
    options = [*SUMS, "--colluders", "4"]
    for goal, value in (("epsilon", "1"), ("guess", "60")):
        found = answer(*options, f"--{goal}", value, "--against", against)
        said = stated(*options, "--noise", str(found["noise"]))
        one = said.towards(against.replace("-", "_"))
        target = float(value) / (100 if goal == "guess" else 1)
        assert target * 0.985 < getattr(one, goal) <= target
        assert found["guarantees"] == said.to_json()["guarantees"]
    again = [*SUMS, "--noise", "5"]
    place = again.index("--rounds") + 1
    without = [*again[: place - 1], *again[place + 1 :]]
    rounds = answer(*without, "--epsilon", "1", "--solve", "rounds")["rounds"]
    epsilons = []
    for many in (rounds, rounds + 1):
        again[place] = str(many)
        epsilons.append(stated(*again).epsilon)
    assert epsilons[0] <= 1.0 < epsilons[1]
    assert call(*options, "--epsilon", "1").startswith("noise = ")


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (changed("--records"), "missing-argument: --records"),
        (changed("--user-ratio", "1.5"), "out-of-range: --user-ratio is 1.5"),
        (changed("--user-ratio", "0.001"), "no-participants: selects none of 100"),
        (changed("--data-ratio", "-1"), "out-of-range: --data-ratio is -1.0"),
        (changed("--records", "2"), "empty-batch: a batch of 0"),
        (changed("--rounds", "0"), "out-of-range: rounds is 0"),
        (changed("--noise", "nan"), "out-of-range|not-a-number: nan"),
        (changed("--noise", "1e-10"), "noise-out-of-range: 1e-10"),
        (changed("--delta", "0"), "out-of-range: delta=0"),
        (changed("--delta", "1.5"), "out-of-range: delta=1.5"),
        ([*SYNTHETIC, "--sampling", "shuffled"], "unknown-choice: --sampling is 'shuffled'"),
        ([*SYNTHETIC, "--unit", "group"], "unknown-choice: --unit is 'group'"),
        ([*SYNTHETIC, "--algorithm", "none"], "unknown-algorithm: --algorithm is 'none'"),
        ([*SYNTHETIC, "--colluders", "0"], "out-of-range: colluders=0"),
        ([*SYNTHETIC, "--colluders", "100"], "out-of-range: colluders=100"),
        ([*FREE, "--epsilon", "-1"], "out-of-range: epsilon is -1"),
        ([*FREE, "--guess", "50"], "out-of-range: 50 %"),
        ([*FREE, "--guess", "60", "--epsilon", "1"], "conflicting-arguments: --guess"),
        ([*FREE, "--epsilon", "1", "--solve", "clip"], "unknown-choice: --solve is 'clip'"),
        (
            [*changed("--rounds"), "--guess", "60", "--solve", "rounds"],
            "not-applicable: --solve is rounds",
        ),
        ([*FREE, "--epsilon", "1", "--against", "me"], "unknown-choice: --against is 'me'"),
        ([*SYNTHETIC, "--fixed-in-advance"], "not-applicable|conflicting-arguments: several runs"),
        (["nowhere.toml"], "file-not-found: nowhere.toml does not exist"),
        (changed("--noise", "0"), ""),
    ],
)
def test_bad_input_is_one_sentence(options, refusal):
    if not refusal:
        assert "Nothing is guaranteed: no noise" in call(*options)
        return
    with refuses(refusal) as caught:
        call(*options)
    assert "\n" not in str(caught.value)


def test_the_program_ends_with_status_2(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dpscaffold", "privacy", *changed("--rounds", "0")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "rounds is 0" in said and "Traceback" not in said


CONFIG = """
[data]
source = "synthetic"
users = 4
records = 40
{data}
[plan]
rounds = 3
local_steps = 2
user_ratio = 0.5
data_ratio = 0.5
{plan}
[privacy]
noise = 8.0
{privacy}
"""


def trained(folder: Path, *options: str, data="", plan="", privacy="secret = true") -> str:
    """A run folder made by the command."""
    config = folder.parent / f"{folder.name}.toml"
    config.write_text(CONFIG.format(data=data, plan=plan, privacy=privacy))
    result = CliRunner().invoke(app, ["train", str(config), "--out", str(folder), *options])
    if isinstance(result.exception, ValueError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return str(folder)


def test_a_configuration_and_its_run(tmp_path):
    folder = trained(tmp_path / "a")
    planned, ran = stated(f"{folder}.toml"), stated(folder)
    assert planned.held == "plan" and ran.held == "one computer" and ran.rounds == 3
    assert planned.towards("server").epsilon == ran.towards("server").epsilon
    assert ran.towards("server").given > 0 and ran.journal is not None
    text = call(folder)
    assert "One computer held the records of all 4 users" in text
    assert stated(folder, "--delta", "1e-2").epsilon < ran.epsilon
    solved = stated(f"{folder}.toml", "--epsilon", "0.5")
    assert 0.495 <= solved.epsilon <= 0.5
    for options, refusal in (
        (["--noise", "3"], "not-applicable|conflicting-arguments: --noise is given"),
        (["--epsilon", "1"], "not-applicable: one plan"),
    ):
        with refuses(refusal):
            call(folder, *options)
    model = stated(f"{folder}/model")
    assert model.towards("server").epsilon == ran.towards("server").epsilon
    (Path(folder) / "model" / "privacy.json").write_text('{"held": 1}')
    with refuses("run-damaged: privacy.json cannot be read") as refused:
        call(f"{folder}/model")
    assert str(refused.value).count("restore it") == 1
    (Path(folder) / "noised.jsonl").write_text("")
    with refuses("wrong-version: --already-spent"):
        call(folder)


def test_several_runs_together(tmp_path):
    a, b = trained(tmp_path / "a"), trained(tmp_path / "b")
    alone = [stated(folder) for folder in (a, b)]
    both, fixed = stated(a, b), stated(a, b, "--fixed-in-advance")
    for name in ("server", "third_party", "participant"):
        each = [said.towards(name).epsilon for said in alone]
        assert both.towards(name).epsilon == pytest.approx(sum(each))
        assert max(each) < fixed.towards(name).epsilon < sum(each)
    assert both.delta == pytest.approx(sum(said.delta for said in alone))
    at = stated(a, b, "--delta", "0.001")
    assert at.epsilon != both.epsilon and len(at.parts) == 2
    text = call(a, b)
    assert "2 parts together" in text and round_up(alone[0].towards("server").epsilon) in text
    user = trained(tmp_path / "u", privacy='secret = true\nunit = "user"')
    plain = tmp_path / "plain.toml"
    plain.write_text(CONFIG.partition("[privacy]")[0].format(data="", plan=""))
    for sources, refusal in (
        ((a, a), "run-named-twice: given twice"),
        ((a, user), "units-differ: same unit"),
        ((a, str(plain)), "no-privacy: without privacy"),
        ((a, b, "--noise", "3"), "not-applicable|conflicting-arguments: --noise"),
        ((a, b, "--epsilon", "3"), "not-applicable: one plan"),
        ((a, str(tmp_path / "none")), "file-not-found: does not exist"),
        ((a, b, "--same-records"), "not-applicable: --same-records"),
    ):
        with refuses(refusal):
            call(*sources)


@pytest.mark.parametrize("cut", [1, 2])
def test_a_journal_that_records_less_than_was_counted(tmp_path, cut):
    folder = Path(trained(tmp_path / "a"))
    journal = folder / "ledger.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:-cut]))
    with refuses("ledger-damaged|run-damaged|run-file-changed: ledger"):
        call(str(folder))


def test_copies_of_a_run_are_counted_once(tmp_path):
    folder = trained(tmp_path / "a")
    copy = shutil.copytree(folder, tmp_path / "copy")
    with refuses("run-copied: is a copy of"):
        call(folder, str(copy))


def test_runs_that_share_a_seed(tmp_path):
    seeded = [trained(tmp_path / name, plan="seed = 5", privacy="") for name in "ab"]
    said = stated(*seeded)
    assert not said.guarantee and "share the seed 5" in said.reason
    secret = [trained(tmp_path / name, plan="seed = 5") for name in "cd"]
    said = stated(*secret)
    assert said.towards("server").epsilon is None and said.epsilon > 0 and said.quotes_given


def test_runs_over_other_records(tmp_path):
    """Runs made with one key file are compared; without it they count as over the same records."""
    key = ("--data-key", str(tmp_path / "records.key"))
    a, same = (trained(tmp_path / name, *key) for name in "ab")
    other = trained(tmp_path / "c", *key, data="seed = 77")
    with refuses("records-differ: ran on other data"):
        call(a, other)
    assert stated(a, other, "--same-records").epsilon > 0
    assert stated(a, same).epsilon == pytest.approx(2 * stated(a).epsilon)


def test_a_budget_file(tmp_path):
    """Opened, shown, charged by runs, and refused to a run that would exceed it."""
    path = str(tmp_path / "budget.jsonl")
    with refuses("missing-argument: --epsilon is given without --delta"):
        call(path, "--epsilon", "2")
    assert "left: epsilon = 0.500" in call(path, "--epsilon", "0.5", "--delta", "0.01")
    private = f'secret = true\nbudget_file = "{path}"'
    spent = stated(trained(tmp_path / "a", privacy=private)).towards("server")
    text, values = call(path), answer(path)
    granted = float(re.search(r"granted: epsilon = (\S+) of 0.5", text)[1])
    left = float(re.search(r"left: epsilon = (\S+),", text)[1])
    assert granted >= spent.epsilon and granted + left <= 0.5 + 1e-3
    assert "3 of 3 rounds" in text and values["epsilon"] == 0.5
    with refuses("budget-too-small|budget-spent: epsilon"):
        for name in "bcdefgh":
            trained(tmp_path / name, privacy=private)
