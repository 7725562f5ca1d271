"""A run that is given more rounds: the same rounds as a longer run's, and an account that adds.

The oracle is direct accounting: each part's ε from the description of that part alone, and the
exact composition of all rounds, below which nothing may be stated.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refuses
from typed import typed

from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic, train
from dpscaffold.privacy import Ledger, describe
from dpscaffold.privacy.adding import statement_of_parts
from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.ledger import spent
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.budget_file import BudgetFile
from dpscaffold.runs.journal import Journal
from dpscaffold.runs.ledger import read_account, read_entries
from dpscaffold.setting.budget import Budget

PLAN = Plan(rounds=6, local_steps=2, user_ratio=0.5, evaluate_every=2, checkpoint_every=2, seed=0)
NOISY, SECRET = Gaussian(clip=1.0, noise=6.0), Gaussian(clip=1.0, noise=6.0, secret=True)
DATA = synthetic(users=8, records=60, dimension=4, classes=3)


def go(plan: Plan, out: Path, resume: bool = True, privacy=NOISY, **more):
    return train(DATA, Logistic(4, 3), scaffold(), plan, privacy, out=out, resume=resume, **more)


def alone(rounds: int, run, repeats: tuple[int, ...] = ()) -> float:
    """ε of this many rounds of this mechanism, as if nothing else had run."""
    return RANDOM_PARTICIPATION.epsilon(replace(run, rounds=rounds), rounds, (), repeats)


def test_more_rounds_are_those_of_a_longer_run_and_their_epsilon_adds(tmp_path: Path) -> None:
    first = go(PLAN, tmp_path / "run", resume=False)
    longer = replace(PLAN, rounds=10)
    more = go(longer, tmp_path / "run")
    whole = go(longer, tmp_path / "whole", resume=False)
    assert torch.equal(more.params, whole.params) and more.rounds == 10
    run = read_account(tmp_path / "whole").ledger.run
    parts = alone(6, run), alone(4, run)
    said = more.privacy
    assert first.privacy["server"]["epsilon"] == parts[0]
    for view in ("server", "third_party", "participant"):
        assert said[view]["epsilon"] == math.fsum(parts) > whole.privacy[view]["epsilon"]
    assert said["delta"] == said["server"]["delta"] == 2 * run.delta and said["rounds"] == 10
    # Given who took part: each user's participations, before and after, from the journal.
    counts = [[0] * 8, [0] * 8]
    for entry in read_entries(Journal(tmp_path / "run" / "ledger.jsonl")):
        for user in entry.users:
            counts[entry.round > 6][user] += 1
    each = [
        spent(run, counts[0][u], run.group_of(u)) + spent(run, counts[1][u], run.group_of(u))
        for u in range(8)
    ]
    assert said["ledger"]["epsilon"] == pytest.approx(max(each), rel=1e-12)
    assert said["ledger"]["epsilon"] > whole.privacy["ledger"]["epsilon"]
    # The live numbers, the folder, the written statement and a later reading agree.
    assert more.final["epsilon_server"] == said["server"]["epsilon"]
    assert json.loads((tmp_path / "run" / "privacy.json").read_text()) == json.loads(
        json.dumps(read_account(tmp_path / "run").statement().to_json())
    )
    assert f"{len(said['parts'])} parts" in said["quote"]
    assert "more rounds once after" in said["quote"]
    with refuses("fewer-rounds"):
        go(PLAN, tmp_path / "run")


def test_it_can_be_given_more_twice_and_other_changes_are_refused(tmp_path: Path) -> None:
    go(PLAN, tmp_path / "run", resume=False)
    go(replace(PLAN, rounds=8), tmp_path / "run")
    last = go(replace(PLAN, rounds=11), tmp_path / "run")
    run = read_account(tmp_path / "run").ledger.run
    assert last.privacy["server"]["epsilon"] == math.fsum([alone(n, run) for n in (6, 2, 3)])
    assert last.privacy["delta"] == pytest.approx(3 * run.delta)
    with refuses("configuration-changed: plan.learning_rate = 0.5 … 0.1"):
        go(replace(PLAN, rounds=20, learning_rate=0.1), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "setting.json").read_text())["plan"]["rounds"] == 11


@pytest.mark.parametrize("privacy", [NOISY, SECRET], ids=["seeded", "secret"])
def test_a_larger_T_fixed_in_advance_is_one_mechanism(tmp_path: Path, privacy) -> None:
    """Stated before and after as what it is, T = 10, with nothing counted twice."""
    planned = replace(PLAN, max_rounds=10)
    run = go(replace(PLAN, rounds=10), tmp_path / "whole", False, privacy)
    one = run.privacy["server"]["epsilon"]
    first = go(planned, tmp_path / "run", False, privacy)
    assert first.rounds == 6 and first.privacy["rounds"] == 10
    more = go(replace(planned, rounds=10), tmp_path / "run", True, privacy)
    for result in (first, more):
        assert result.privacy["server"]["epsilon"] == one
        assert result.privacy["ledger"]["epsilon"] == run.privacy["ledger"]["epsilon"]
        assert result.privacy["delta"] == run.privacy["delta"]
        assert result.final["epsilon_server"] == one
    assert more.rounds == 10 and read_account(tmp_path / "run").ledger.repeats == ()
    if privacy is NOISY:
        assert torch.equal(more.params, run.params)
    with refuses("out-of-range: max_rounds is 10 … plan.rounds is 12"):
        replace(planned, rounds=12)
    beyond = go(replace(planned, rounds=12, max_rounds=13), tmp_path / "run", True, privacy)
    mechanism = read_account(tmp_path / "run").ledger.run
    assert beyond.privacy["server"]["epsilon"] == math.fsum([one, alone(3, mechanism)])
    assert beyond.privacy["rounds"] == 13


def test_epsilon_is_calibrated_for_the_larger_T() -> None:
    given = Gaussian(clip=1.0, epsilon=2.0)
    longer = train(DATA, Logistic(4, 3), scaffold(), replace(PLAN, rounds=10), given)
    planned = train(DATA, Logistic(4, 3), scaffold(), replace(PLAN, max_rounds=10), given)
    assert planned.setting.privacy.noise == longer.setting.privacy.noise
    assert planned.privacy["server"]["epsilon"] == longer.privacy["server"]["epsilon"] <= 2.0
    assert planned.rounds == 6 and planned.final["epsilon_server"] > 1.9


class Killed(Exception):
    """As a crash."""


def kill_at(number: int):
    def observer(round: int, row: object) -> None:
        if round == number:
            raise Killed

    return observer


@pytest.mark.parametrize("advance", [False, True], ids=["added", "fixed in advance"])
def test_a_crash_among_the_further_rounds_is_counted(tmp_path: Path, advance: bool) -> None:
    """Secret noise: rounds that a crash lost are run again with fresh noise, and cost again."""
    plan = replace(PLAN, max_rounds=10 if advance else None, evaluate_every=1)
    go(plan, tmp_path / "run", False, SECRET)
    with pytest.raises(Killed):
        go(replace(plan, rounds=10), tmp_path / "run", True, SECRET, observer=kill_at(9))
    after = read_account(tmp_path / "run")
    assert max(e.round for e in read_entries(Journal(tmp_path / "run" / "ledger.jsonl"))) >= 9
    result = go(replace(plan, rounds=10), tmp_path / "run", True, SECRET)
    run = after.ledger.run
    repeats = read_account(tmp_path / "run").ledger.repeats
    assert repeats == (1,), "round 9 was released, and lost with the crash"
    wanted = (
        RANDOM_PARTICIPATION.epsilon(run, 10, (), (1,))
        if advance
        else math.fsum([alone(6, run), alone(4, run, (1,))])
    )
    assert result.privacy["server"]["epsilon"] == wanted


def test_a_crash_between_journal_and_plan_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    from dpscaffold.runs.folder import RunFolder

    go(PLAN, tmp_path / "run", False)
    replan = RunFolder.replan

    def crash(self, config, setting):
        raise Killed

    monkeypatch.setattr(RunFolder, "replan", crash)
    with pytest.raises(Killed):
        go(replace(PLAN, rounds=10), tmp_path / "run")
    before = read_account(tmp_path / "run").statement()
    assert before["rounds"] == 6 and "parts" not in before, "no further round has been released"

    def half(self, config, setting):
        self.write_text("config.toml", config)
        raise Killed

    monkeypatch.setattr(RunFolder, "replan", half)
    with pytest.raises(Killed):
        go(replace(PLAN, rounds=10), tmp_path / "run")
    monkeypatch.setattr(RunFolder, "replan", replan)
    more = go(replace(PLAN, rounds=10), tmp_path / "run")
    run = read_account(tmp_path / "run").ledger.run
    assert more.privacy["server"]["epsilon"] == math.fsum([alone(6, run), alone(4, run)])


def test_a_plan_that_was_edited_by_hand_adds_all_the_same(tmp_path: Path) -> None:
    """Whoever writes a larger T into the folder's files gets no smaller ε for it."""
    go(PLAN, tmp_path / "run", False)
    for name in ("setting.json", "config.toml"):
        path = tmp_path / "run" / name
        path.write_text(path.read_text().replace('"rounds": 6', '"rounds": 10'))
        path.write_text(path.read_text().replace("rounds = 6\n", "rounds = 10\n"))
    more = go(replace(PLAN, rounds=10), tmp_path / "run")
    run = read_account(tmp_path / "run").ledger.run
    assert more.privacy["server"]["epsilon"] == math.fsum([alone(6, run), alone(4, run)])
    lines = (tmp_path / "run" / "ledger.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "extends" not in line]
    assert len(kept) == len(lines) - 1
    (tmp_path / "run" / "ledger.jsonl").write_text("".join(kept))
    with refuses("ledger-damaged"):
        read_account(tmp_path / "run")


def test_a_budget_file_grants_further_rounds_or_refuses_them(tmp_path: Path) -> None:
    go(PLAN, tmp_path / "probe", False)
    run = read_account(tmp_path / "probe").ledger.run
    ledger = read_account(tmp_path / "probe").ledger.largest()
    first = max(alone(6, run), ledger)
    path = tmp_path / "budget.jsonl"
    BudgetFile.open(path, epsilon=1.9 * first, delta=10 * run.delta)
    budget = Budget(file=str(path))
    go(PLAN, tmp_path / "run", False, budget=budget)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    with refuses("budget-too-small: 54 rounds"):
        go(replace(PLAN, rounds=60), tmp_path / "run", budget=budget)
    after = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    for name in ("config.toml", "setting.json", "ledger.jsonl", "privacy.json", "metrics.jsonl"):
        assert before[name] == after[name], name
    more = go(replace(PLAN, rounds=8), tmp_path / "run", budget=budget)
    contents = BudgetFile(path).read()
    granted, delta = contents.spent
    assert len(contents.grants) == 2 and delta == 2 * run.delta
    said = more.privacy
    assert granted >= max(said["server"]["epsilon"], said["ledger"]["epsilon"])
    assert delta == said["delta"]
    go(replace(PLAN, rounds=8), tmp_path / "run", budget=budget)
    assert len(BudgetFile(path).read().grants) == 2, "resuming asks for nothing again"


def test_a_target_halts_the_further_rounds(tmp_path: Path) -> None:
    probe = go(replace(PLAN, rounds=7), tmp_path / "probe", False)
    run = read_account(tmp_path / "probe").ledger.run
    assert probe.rounds == 7
    target = alone(6, run) + alone(2, run) + 1e-6
    budget = Budget(target_epsilon=target)
    go(PLAN, tmp_path / "run", False, budget=budget)
    more = go(replace(PLAN, rounds=12), tmp_path / "run", budget=budget)
    assert more.ended == "budget" and more.rounds == 8
    assert more.privacy["server"]["epsilon"] <= target


@pytest.mark.parametrize("privacy", [NOISY, SECRET], ids=["seeded", "secret"])
@pytest.mark.parametrize("counted", [True, False], ids=["and a count", "epsilon alone"])
def test_what_each_user_may_spend_holds_over_all_parts(tmp_path: Path, privacy, counted) -> None:
    """A user declines where its sum over the parts, found here from the journal alone, would exceed
    its ε, and takes part wherever it would not."""
    full = replace(PLAN, user_ratio=1.0)
    go(full, tmp_path / "probe", False, privacy)
    run = read_account(tmp_path / "probe").ledger.run
    group = run.group_of(0)
    # Six participations and two more fit, three more do not; in one part seven would be too many.
    cap = 1e-9 + spent(run, 6, group) + spent(run, 2, group)
    budget = Budget(user_epsilon=cap, max_participations=7 if counted else None)
    go(full, tmp_path / "run", False, privacy, budget=budget)
    more = go(replace(full, rounds=10), tmp_path / "run", True, privacy, budget=budget)
    took = {e.round: e.users for e in read_entries(Journal(tmp_path / "run" / "ledger.jsonl"))}
    last = 7 if counted else 8
    assert {r: len(users) for r, users in took.items()} == {
        r: 8 if r <= last else 0 for r in range(1, 11)
    }
    exact = spent(run, 6, group) + spent(run, last - 6, group)
    assert more.privacy["ledger"]["epsilon"] == pytest.approx(exact, rel=1e-12)
    assert more.privacy["ledger"]["epsilon"] <= cap < exact + spent(run, 1, group)
    assert more.privacy["delta"] == 2 * run.delta and more.rounds == 10


def test_users_of_different_pasts_decline_at_different_times(tmp_path: Path) -> None:
    run_folder, longer = tmp_path / "run", replace(PLAN, rounds=14)
    go(PLAN, tmp_path / "probe", False)
    run = read_account(tmp_path / "probe").ledger.run
    cap = spent(run, 4, run.group_of(0)) + spent(run, 2, run.group_of(0))
    budget = Budget(user_epsilon=cap)
    go(PLAN, run_folder, False, budget=budget)
    go(replace(PLAN, rounds=10), run_folder, budget=budget)
    go(longer, run_folder, budget=budget)  # three parts
    counts, declined = [[0] * 3 for _ in range(8)], 0
    streams = Randomness(longer.seed)
    for entry in read_entries(Journal(run_folder / "ledger.jsonl")):
        part = (entry.round > 6) + (entry.round > 10)
        for user in streams.cohort(entry.round, 8, 4).tolist():
            after = [n + (k == part) for k, n in enumerate(counts[user])]
            total = math.fsum(spent(run, n, run.group_of(user)) for n in after)
            assert (user in entry.users) == (total <= cap), (entry.round, user)
            declined += user not in entry.users
            counts[user] = after if user in entry.users else counts[user]
    assert declined >= 3, "the cap is met by nobody: the test shows nothing"
    again = go(longer, run_folder, budget=budget)
    assert again.privacy["ledger"]["epsilon"] <= cap


def test_a_budget_file_covers_capped_users_of_a_longer_second_part(tmp_path: Path) -> None:
    full = replace(PLAN, rounds=2, user_ratio=1.0)
    go(full, tmp_path / "probe", False)
    run = read_account(tmp_path / "probe").ledger.run
    path = tmp_path / "budget.jsonl"
    BudgetFile.open(path, epsilon=100.0, delta=10 * run.delta)
    budget = Budget(file=str(path), user_epsilon=40.0)
    go(full, tmp_path / "run", False, budget=budget)
    more = go(replace(full, rounds=12), tmp_path / "run", budget=budget)
    granted, delta = BudgetFile(path).read().spent
    assert granted >= more.privacy["ledger"]["epsilon"] > 0 and delta == more.privacy["delta"]


@pytest.mark.parametrize("rounds", [10, 14])
def test_the_average_goes_on_or_begins_anew(tmp_path: Path, rounds: int) -> None:
    """Where the longer plan's tail begins after what is done, it is that of a run planned so."""
    plan = replace(PLAN, averaging="tail", tail=0.5)
    go(plan, tmp_path / "run", False)
    more = go(replace(plan, rounds=rounds), tmp_path / "run")
    whole = go(replace(plan, rounds=rounds), tmp_path / "whole", False)
    assert torch.equal(more.params, whole.params) == (rounds == 14)


def test_without_privacy_there_is_nothing_to_add(tmp_path: Path) -> None:
    go(PLAN, tmp_path / "run", False, None)
    more = go(replace(PLAN, rounds=10), tmp_path / "run", True, None)
    whole = go(replace(PLAN, rounds=10), tmp_path / "whole", False, None)
    assert torch.equal(more.params, whole.params) and not more.privacy["guarantee"]


@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
    noise=st.floats(1.0, 30.0),
    sampling=st.sampled_from(["fixed", "poisson"]),
    unit=st.sampled_from(["record", "user"]),
    cost=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=12)
def test_nothing_is_stated_below_the_exact_composition(lengths, noise, sampling, unit, cost, seed):
    """Of every view, the ledger and every bound, with what the preparation cost counted once."""
    run = describe(
        rounds=lengths[0], local_steps=2, users=6, cohort_size=3, records=50, batch_sizes=5,
        noise=noise, sampling=sampling, unit=unit,
    )  # fmt: skip
    costs = (Cost("mean", noise=5.0),) if cost and unit == "record" else ()
    draw = torch.Generator().manual_seed(seed)
    whole = Ledger(replace(run, rounds=sum(lengths)), costs=costs)
    parts = []
    for length in lengths:
        part = Ledger(replace(run, rounds=length))
        for round in range(1, length + 1):
            users = torch.randperm(6, generator=draw)[:3].tolist()
            part.record(round, users)
            whole.record(whole.rounds + 1, users)
        parts.append(part)
    said = statement_of_parts(parts, extra_costs=costs)
    delta = run.delta * len(lengths)
    exact = RANDOM_PARTICIPATION.epsilon(replace(whole.run, delta=delta), costs=costs)
    assert said["server"]["epsilon"] >= exact and said["delta"] == pytest.approx(delta)
    assert said["ledger"]["epsilon"] >= Ledger.largest(_at(whole, delta).charged(costs))
    wanted = [
        RANDOM_PARTICIPATION.epsilon(part.run, costs=costs if k == 0 else ())
        for k, part in enumerate(parts)
    ]
    assert said["server"]["epsilon"] == math.fsum(wanted)
    assert sum(said["ledger"]["participations"].values()) == 6
    for row in said["bounds"]:
        if row["applies"] and row["name"] == "random_participation":
            assert row["epsilon"] == said["server"]["epsilon"]


def _spent(said: object, place: str = "") -> dict[str, float]:
    """Every ε, and what it means, that a statement holds, by its place; of the whole run alone."""
    found: dict[str, float] = {}
    if isinstance(said, dict):
        for key, value in said.items():
            if key in ("epsilon", "accuracy") and isinstance(value, float):
                found[f"{place}/{key}"] = value
            elif key != "parts":
                found |= _spent(value, f"{place}/{key}")
    elif isinstance(said, list):
        for k, value in enumerate(said):
            found |= _spent(value, f"{place}/{k}")
    return found


@pytest.mark.parametrize("draw_given", [False, True])
@pytest.mark.parametrize("seed_public", [False, True])
def test_no_number_of_a_statement_is_that_of_the_first_part(draw_given, seed_public) -> None:
    """Whatever is quoted, tabled or told to a person is of the whole run."""
    run = describe(rounds=4, local_steps=2, users=4, cohort_size=2, records=50, batch_sizes=5,
                   noise=4.0, delta=0.003)  # fmt: skip
    parts = [Ledger(run), Ledger(run)]
    for part in parts:
        for round in range(1, 5):
            part.record(round, [0, round % 3 + 1])
    told = {"draw_given": draw_given, "seed_public": seed_public}
    one, both = (statement_of_parts(parts[:count], **told) for count in (1, 2))
    before, after = _spent(one.to_json()), _spent(both.to_json())
    missing = before.keys() - after.keys()  # a number that is not there has no guarantee
    assert len(before) > 10 and all("/groups/" in place for place in missing)
    assert not [place for place in before.keys() - missing if after[place] <= before[place]]
    first = "ledger" if draw_given and not seed_public else "server"
    assert both["quoted"]["epsilon"] == both[first]["epsilon"]
    sentence = both["human"][first]["sentence"]
    assert both["person"].lower().endswith(sentence[1:].lower())
    assert one["delta_note"] is None and "delta = 0.006" in both["delta_note"]
    assert both["outside"][0] == both["delta_note"]


def _at(ledger: Ledger, delta: float) -> Ledger:
    other = Ledger.from_dict(ledger.to_dict())
    other.run = replace(other.run, delta=delta)
    return other


CONFIG = """
[data]
users = 6
records = 40
dimension = 4
classes = 3
[plan]
rounds = 4
local_steps = 2
user_ratio = 0.5
[privacy]
epsilon = 3.0
"""


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CONFIG)

    return partial(typed, monkeypatch, capsys)


def test_from_the_command_line(command, tmp_path: Path) -> None:
    code, out, err = command("train", "c.toml", "--out", "run", "--json")
    assert code == 0, err
    first = json.loads(out)["privacy"]
    code, out, err = command("train", "--resume", "run", "--set", "plan.rounds=7", "--json")
    assert code == 0, err
    more = json.loads(out)
    assert more["rounds"] == 7 and more["privacy"]["delta"] == 2 * first["delta"]
    assert more["privacy"]["server"]["epsilon"] > first["server"]["epsilon"]
    code, out, _ = command("privacy", "run", "--json")
    assert json.loads(out) == more["privacy"]
    code, out, _ = command("privacy", "run")
    assert code == 0 and "2 parts" in " ".join(out.split())
    # Next to another run: three parts, added.
    shutil.copy("c.toml", "other.toml")
    command("train", "other.toml", "--out", "other", "--set", "plan.seed=5", "-q")
    code, out, err = command("privacy", "run", "other", "--json")
    assert code == 0, err
    both = json.loads(out)
    other = json.loads((tmp_path / "other" / "privacy.json").read_text())
    total = more["privacy"]["server"]["epsilon"] + other["server"]["epsilon"]
    assert both["epsilon"]["server"] == pytest.approx(total, rel=1e-12)
    assert both["delta"] == pytest.approx(3 * first["delta"]) and len(both["runs"]) == 3
    for words, said in (
        (["privacy", "run", "other", "--fixed-in-advance"], "was given more rounds after"),
        (["calibrate", "run", "--epsilon", "1"], "only add up"),
        (["train", "--resume", "run", "--set", "plan.rounds=5"], "more rounds, not fewer"),
        (["train", "--resume", "run", "--set", "plan.local_steps=3"], "plan.local_steps = 2"),
    ):
        code, _, err = command(*words)
        assert code == 2 and said in err and err.count("error:") == 1, (words, err)
    code, out, err = command("compare", "run", "other", "--json")
    assert code == 0, err
    code, out, err = command("report", "run")
    assert code == 0, err
