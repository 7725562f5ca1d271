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
from stated import over_draw, read, rounds_of, spent, stated, written
from typed import typed

from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic, train
from dpscaffold.privacy import Cost, Facts, Ledger, Part, describe, state
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.budget_file import BudgetFile
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.ledger import read_account

PLAN = Plan(rounds=6, local_steps=2, user_ratio=0.5, learning_rate=0.5, evaluate_every=2,
            checkpoint_every=2, seed=0)  # fmt: skip
NOISY, SECRET = Gaussian(clip=1.0, noise=6.0), Gaussian(clip=1.0, noise=6.0, secret=True)
DATA = synthetic(users=8, records=60, dimension=4, classes=3)


def go(plan: Plan, out: Path, resume: bool = True, privacy=NOISY, limits=None, **more):
    given = privacy and privacy.changed(**(limits or {}))
    return train(DATA, Logistic(4, 3), scaffold(), plan, given, out=out, resume=resume, **more)


def alone(rounds: int, run, again: int = 0) -> float:
    """ε of this many rounds of this mechanism, as if nothing else had run."""
    return over_draw(replace(run, rounds=rounds), rounds, again=again)


def test_more_rounds_are_those_of_a_longer_run_and_their_epsilon_adds(tmp_path: Path) -> None:
    first = go(PLAN, tmp_path / "run", resume=False)
    longer = PLAN.changed(rounds=10)
    more = go(longer, tmp_path / "run")
    whole = go(longer, tmp_path / "whole", resume=False)
    assert torch.equal(more.params, whole.params) and more.rounds == 10
    run = read_account(tmp_path / "whole").ledger.run
    parts = alone(6, run), alone(4, run)
    said = more.privacy
    assert first.privacy.towards("server").epsilon == parts[0]
    for view in ("server", "third_party", "participant"):
        assert said.towards(view).epsilon == math.fsum(parts) > whole.privacy.towards(view).epsilon
    assert said.delta == 2 * run.delta and said.rounds == 10
    # Given who took part: each user's participations, before and after, from the journal.
    counts = [[0] * 8, [0] * 8]
    for entry in rounds_of(tmp_path / "run"):
        for user in entry["users"]:
            counts[entry["round"] > 6][user] += 1
    each = [spent(run, counts[0][u], u) + spent(run, counts[1][u], u) for u in range(8)]
    assert said.towards("server").given == pytest.approx(max(each), rel=1e-12)
    assert said.towards("server").given > whole.privacy.towards("server").given
    # The live numbers, the folder, the written statement and a later reading agree.
    assert more.final["epsilon_server"] == said.towards("server").epsilon
    assert written(tmp_path / "run") == said == read_account(tmp_path / "run").statement()
    assert [part.rounds for part in said.parts] == [6, 4]
    with refuses("fewer-rounds"):
        go(PLAN, tmp_path / "run")


class Killed(Exception):
    """As a crash."""


def kill_at(number: int):
    def on_round(row: HistoryRow) -> None:
        if row.round == number:
            raise Killed

    return on_round


def test_a_crash_among_the_further_rounds_is_counted(tmp_path: Path) -> None:
    """Secret noise: rounds that a crash lost are run again with fresh noise, and cost again."""
    plan = PLAN.changed(evaluate_every=1)
    go(plan, tmp_path / "run", False, SECRET)
    with pytest.raises(Killed):
        go(plan.changed(rounds=10), tmp_path / "run", True, SECRET, on_round=kill_at(9))
    after = read_account(tmp_path / "run")
    assert max(e["round"] for e in rounds_of(tmp_path / "run")) >= 9
    result = go(plan.changed(rounds=10), tmp_path / "run", True, SECRET)
    run = after.ledger.run
    extra = sum(part.ledger.extra for part in read_account(tmp_path / "run").parts)
    assert extra == 1, "round 9 was released, and lost with the crash"
    wanted = math.fsum([alone(6, run), alone(4, run, 1)])
    assert result.privacy.towards("server").epsilon == wanted


def test_a_crash_between_journal_and_plan_loses_nothing(tmp_path: Path, monkeypatch) -> None:
    from dpscaffold.runs.folder import RunFolder

    go(PLAN, tmp_path / "run", False)
    replan = RunFolder.replan

    def crash(self, config, identity):
        raise Killed

    monkeypatch.setattr(RunFolder, "replan", crash)
    with pytest.raises(Killed):
        go(PLAN.changed(rounds=10), tmp_path / "run")
    before = read_account(tmp_path / "run").statement()
    assert before.rounds == 6 and len(before.parts) == 1, "no further round has been released"
    monkeypatch.setattr(RunFolder, "replan", replan)
    more = go(PLAN.changed(rounds=10), tmp_path / "run")
    run = read_account(tmp_path / "run").ledger.run
    assert more.privacy.towards("server").epsilon == math.fsum([alone(6, run), alone(4, run)])


def test_a_plan_that_was_edited_by_hand_adds_all_the_same(tmp_path: Path) -> None:
    """Whoever writes a larger T into the folder's files gets no smaller ε for it."""
    go(PLAN, tmp_path / "run", False)
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace("rounds = 6\n", "rounds = 10\n"))
    more = go(PLAN.changed(rounds=10), tmp_path / "run")
    run = read_account(tmp_path / "run").ledger.run
    assert more.privacy.towards("server").epsilon == math.fsum([alone(6, run), alone(4, run)])
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
    limits = {"budget_file": str(path)}
    go(PLAN, tmp_path / "run", False, limits=limits)
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    with refuses("budget-too-small: 54 rounds"):
        go(PLAN.changed(rounds=60), tmp_path / "run", limits=limits)
    after = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    for name in ("config.toml", "metrics.jsonl"):
        assert before[name] == after[name], name
    more = go(PLAN.changed(rounds=8), tmp_path / "run", limits=limits)
    contents = BudgetFile(path).read()
    granted, delta = contents.spent
    assert len(contents.grants) == 2 and delta == 2 * run.delta
    said = more.privacy
    assert granted >= max(said.towards("server").epsilon, said.towards("server").given)
    assert delta == said.delta
    go(PLAN.changed(rounds=8), tmp_path / "run", limits=limits)
    assert len(BudgetFile(path).read().grants) == 2, "resuming asks for nothing again"


@pytest.mark.parametrize("privacy", [NOISY, SECRET], ids=["seeded", "secret"])
def test_users_of_different_pasts_decline_at_different_times(tmp_path: Path, privacy) -> None:
    """A user declines where its sum over the parts, found here from the journal alone, would exceed
    its ε, and takes part wherever it would not."""
    run_folder, longer = tmp_path / "run", PLAN.changed(rounds=14)
    go(PLAN, tmp_path / "probe", False)
    run = read_account(tmp_path / "probe").ledger.run
    cap = spent(run, 4) + spent(run, 2)
    limits = {"user_epsilon": cap}
    go(PLAN, run_folder, False, limits=limits)
    go(PLAN.changed(rounds=10), run_folder, limits=limits)
    go(longer, run_folder, limits=limits)  # three parts
    counts, declined = [[0] * 3 for _ in range(8)], 0
    streams = Randomness(longer.seed)
    for entry in rounds_of(run_folder):
        part = (entry["round"] > 6) + (entry["round"] > 10)
        for user in streams.cohort(entry["round"], 8, 4).tolist():
            after = [n + (k == part) for k, n in enumerate(counts[user])]
            total = math.fsum(spent(run, n, user) for n in after)
            assert (user in entry["users"]) == (total <= cap), (entry["round"], user)
            declined += user not in entry["users"]
            counts[user] = after if user in entry["users"] else counts[user]
    assert declined >= 3, "the cap is met by nobody: the test shows nothing"
    again = go(longer, run_folder, limits=limits)
    assert again.privacy.towards("server").given <= cap


@pytest.mark.parametrize("rounds", [10, 14])
def test_the_average_goes_on_or_begins_anew(tmp_path: Path, rounds: int) -> None:
    """Where the longer plan's tail begins after what is done, it is that of a run planned so."""
    plan = PLAN.changed(averaging="tail")
    go(plan, tmp_path / "run", False)
    more = go(plan.changed(rounds=rounds), tmp_path / "run")
    whole = go(plan.changed(rounds=rounds), tmp_path / "whole", False)
    assert torch.equal(more.params, whole.params) == (rounds == 14)


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
    said = state(_stated_parts(parts, costs))
    delta = run.delta * len(lengths)
    exact = over_draw(replace(whole.run, delta=delta), costs=costs)
    assert said.towards("server").epsilon >= exact and said.delta == pytest.approx(delta)
    assert said.towards("server").given >= whole.at_delta(delta).largest()
    wanted = [over_draw(part.run, costs=costs if k == 0 else ()) for k, part in enumerate(parts)]
    assert said.towards("server").epsilon == math.fsum(wanted)
    for part in said.parts:
        assert sum(part.participations.values()) == 6


def _stated_parts(parts: list[Ledger], costs: tuple[Cost, ...] = ()) -> list[Part]:
    """The parts of one run, whose preparation is spent by the first."""
    return [
        Part(part.run, part.rounds, part, () if k else costs, source="one run")
        for k, part in enumerate(parts)
    ]


def _spent(said: object, place: str = "") -> dict[str, float]:
    """Every ε, and what it means, that a statement holds, by its place; of the whole run alone."""
    found: dict[str, float] = {}
    if isinstance(said, dict):
        for key, value in said.items():
            if key in ("epsilon", "given", "guess", "given_guess") and isinstance(value, float):
                found[f"{place}/{key}"] = value
            elif key != "parts":
                found |= _spent(value, f"{place}/{key}")
    elif isinstance(said, list):
        for k, value in enumerate(said):
            found |= _spent(value, f"{place}/{k}")
    return found


@pytest.mark.parametrize("draw_given", [False, True])
@pytest.mark.parametrize("seeded", [False, True])
def test_no_number_of_a_statement_is_that_of_the_first_part(draw_given, seeded) -> None:
    """Whatever is quoted, tabled or told to a person is of the whole run."""
    run = describe(rounds=4, local_steps=2, users=4, cohort_size=2, records=50, batch_sizes=5,
                   noise=4.0, delta=0.003)  # fmt: skip
    parts = [Ledger(run), Ledger(run)]
    for part in parts:
        for round in range(1, 5):
            part.record(round, [0, round % 3 + 1])
    facts = Facts(draw_given=draw_given, seeded=seeded)
    one, both = (state(_stated_parts(parts[:count]), facts) for count in (1, 2))
    before, after = _spent(one.to_json()), _spent(both.to_json())
    assert len(before) > 10 and before.keys() == after.keys()
    assert not [place for place in before if after[place] <= before[place]]
    assert both.quotes_given == (draw_given and not seeded)
    server = both.towards("server")
    assert both.epsilon == (server.given if both.quotes_given else server.epsilon)
    assert "large-delta" not in dict(one.outside) and "large-delta" in dict(both.outside)


CONFIG = """
[data]
users = 6
records = 40
features = 4
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
    first = read(json.loads(out)["privacy"])
    code, out, err = command("train", "--resume", "run", "--set", "plan.rounds=7", "--json")
    assert code == 0, err
    more = read(json.loads(out)["privacy"])
    assert json.loads(out)["rounds"] == 7 and more.delta == 2 * first.delta
    assert more.epsilon > first.epsilon
    assert stated("run").guarantees == more.guarantees
    code, out, _ = command("privacy", "run")
    assert code == 0 and "2 parts" in " ".join(out.split())
    # Next to another run: three parts, added.
    shutil.copy("c.toml", "other.toml")
    command("train", "other.toml", "--out", "other", "--set", "plan.seed=5", "-q")
    both, other = stated("run", "other"), written(tmp_path / "other")
    total = more.towards("server").epsilon + other.towards("server").epsilon
    assert both.towards("server").epsilon == pytest.approx(total, rel=1e-12)
    assert both.delta == pytest.approx(3 * first.delta) and len(both.parts) == 3
    for words, said in (
        (["privacy", "run", "other", "--fixed-in-advance"], "was given more rounds after"),
        (["privacy", "run", "--epsilon", "1"], "solve for one plan"),
        (["train", "--resume", "run", "--set", "plan.rounds=5"], "more rounds, not fewer"),
        (["train", "--resume", "run", "--set", "plan.local_steps=3"], "plan.local_steps = 2"),
    ):
        code, _, err = command(*words)
        assert code == 2 and said in err and err.count("error:") == 1, (words, err)
    code, out, err = command("compare", "run", "other", "--json")
    assert code == 0, err
    code, out, err = command("report", "run")
    assert code == 0, err
