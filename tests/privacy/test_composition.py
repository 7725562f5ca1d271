"""Several runs over the same records: sums, convolutions, and what is not promised."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from privacy.explicit_pairs import gaussian_epsilon
from privacy.settings import SMALL, run_of
from privacy.test_commands import answer, call, refused
from refusals import refuses

from dpscaffold.privacy import (
    AGGREGATE,
    RANDOM_PARTICIPATION,
    Cost,
    Ledger,
)
from dpscaffold.privacy.composition import RunPart, _convolved, together
from dpscaffold.privacy.drawn import FROM_SYSTEM, UNKNOWN, SeedKnowledge
from dpscaffold.privacy.human import losses

SERVER = {"server": RANDOM_PARTICIPATION}
#: Secret noise, and a draw that nobody chose.
OWN = {"secret": True, "drawn": FROM_SYSTEM}


def part(name: str, **changes) -> RunPart:
    run = run_of(SMALL, **changes)
    return RunPart(name, run, run.rounds, SERVER, **OWN)


def test_two_gaussians_convolve_to_one():
    """Users as the unit, all of them in every round: μ² adds, ε does not."""
    noises = (6.0, 9.0)
    parts = [part(f"run {z}", unit="user", cohort_size=10, noise=z) for z in noises]
    mu = math.sqrt(sum(60 / z**2 for z in noises))
    found = together(parts, fixed_in_advance=True)
    truth = gaussian_epsilon(2e-5, mu)
    assert found.delta == 2e-5
    assert truth * (1 - 1e-9) <= found.epsilon["server"] <= truth * 1.01
    added = together(parts)
    alone = [gaussian_epsilon(1e-5, math.sqrt(60) / z) for z in noises]
    assert sum(alone) <= added.epsilon["server"] <= sum(alone) * 1.01
    assert "Rogers" in added.method and "convolved" in found.method


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_run_cut_in_two_is_the_run(sampling):
    """T rounds in two runs with draws of their own are T rounds, each direction by itself."""
    whole = run_of(SMALL, sampling=sampling, rounds=30, delta=2e-5)
    parts = [part(f"{t} rounds", sampling=sampling, rounds=t) for t in (12, 18)]
    found = together(parts, fixed_in_advance=True).epsilon["server"]
    truth = RANDOM_PARTICIPATION.epsilon(whole)
    assert truth * (1 - 1e-9) <= found <= truth * 1.005


def test_directions_are_convolved_each_by_itself():
    """A record is in all runs or in none: each order of the pair has its own law."""
    parts = [part(f"{t} rounds", sampling="poisson", rounds=t, noise=1.0) for t in (12, 18)]
    whole = losses(RANDOM_PARTICIPATION, run_of(SMALL, sampling="poisson", rounds=30, noise=1.0))
    composed = _convolved(parts, "server")
    epsilons = np.array([0.0, 0.5, 1.0, 2.0])
    for found, law in zip(composed, whole, strict=True):
        assert np.allclose(found.deltas(epsilons), law.deltas(epsilons), rtol=0.02)
    apart = whole[0].deltas(epsilons) / whole[1].deltas(epsilons)
    assert np.any(abs(apart - 1) > 0.1)  # or the test would not tell the two from one another


small_parts = st.builds(
    lambda **kw: part("r", **kw),
    rounds=st.integers(1, 40),
    local_steps=st.integers(1, 6),
    cohort_size=st.integers(1, 9),
    noise=st.floats(1.0, 20.0),
)


@given(st.lists(small_parts, min_size=2, max_size=4))
@settings(max_examples=20, deadline=None)
def test_convolving_is_between_the_largest_and_the_sum(parts):
    added = together(parts).epsilon["server"]
    convolved = together(parts, fixed_in_advance=True)
    alone = [RANDOM_PARTICIPATION.epsilon(replace(p.run, delta=convolved.delta)) for p in parts]
    assert max(alone) * (1 - 1e-6) <= convolved.epsilon["server"] <= added * (1 + 1e-3) + 1e-3
    assert added == pytest.approx(sum(p.epsilon("server") for p in parts))


def test_costs_and_repeats_count():
    plain = [part("a"), part("b")]
    ledger = Ledger(plain[0].run)
    ledger.record(1, [0, 1])
    ledger.record(1, [0, 1], again=True)
    for fixed in (False, True):
        base = together(plain, fixed).epsilon["server"]
        cost = replace(plain[0], costs=(Cost("mean", noise=3.0),))
        again = replace(plain[0], ledger=ledger)
        assert together([cost, plain[1]], fixed).epsilon["server"] > base * 1.02
        assert together([again, plain[1]], fixed).epsilon["server"] > base * 1.001


def test_unequal_users_fall_back_to_the_servers_bound():
    """The aggregate has several candidates for the worst user; convolving takes the bound that
    has one."""
    run = run_of(
        SMALL,
        local_steps=1,
        memory=False,
        records=[100] * 5 + [400] * 5,
        batch_sizes=[20] * 5 + [40] * 5,
        weighting="records",
    )
    unequal = RunPart("a", run, run.rounds, {"third_party": AGGREGATE}, **OWN)
    server = together([replace(unequal, bounds=SERVER)] * 2, True).epsilon["server"]
    assert together([unequal] * 2, True).epsilon["third_party"] <= server * (1 + 1e-9)


def seeded(name: str, value: int | None) -> RunPart:
    """A simulation of this seed; None where its seed is not known."""
    drawn = UNKNOWN if value is None else SeedKnowledge("given", f"mark of {name}", value)
    return replace(part(name), secret=False, drawn=drawn)


def test_shared_seeds_promise_nothing():
    nothing = together([seeded("a", 7), seeded("b", 7)])
    assert nothing.epsilon == {"server": None} and not nothing.human
    assert "share the seed 7" in nothing.reason and nothing.quoted is None
    other = together([seeded("a", 7), seeded("b", 8)])
    assert other.epsilon["server"] > 0 and other.simulated and other.reason is None
    assert other.quoted == "server"


def test_a_seed_that_is_not_known_counts_as_shared():
    nothing = together([seeded("a", 7), seeded("b", None)])
    assert nothing.epsilon == {"server": None} and "may share one seed" in nothing.reason
    run = run_of(SMALL)
    assert together([RunPart(name, run, 5, SERVER) for name in "ab"]).epsilon == {"server": None}


def test_secret_runs_of_one_draw_add_their_ledgers_only():
    ledgers = []
    for _ in range(2):
        ledger = Ledger(run_of(SMALL))
        for round in range(1, 6):
            ledger.record(round, [0, round])
        ledgers.append(ledger)
    parts = [
        RunPart(
            str(k),
            ledger.run,
            5,
            SERVER,
            ledger,
            secret=True,
            drawn=SeedKnowledge("given", str(k), 3),
            data="same",
        )
        for k, ledger in enumerate(ledgers)
    ]
    found = together(parts)
    assert found.epsilon["server"] is None and "no chance" in found.reason
    assert "from the seed 3" in found.reason and found.quoted == "ledger"
    assert found.epsilon["ledger"] == pytest.approx(2 * ledgers[0].largest())
    convolved = together(parts, fixed_in_advance=True)
    ten = Ledger(run_of(SMALL, delta=2e-5))
    for round in range(1, 11):
        ten.record(round, [0])
    assert convolved.epsilon["ledger"] == pytest.approx(ten.largest(), rel=5e-3)


@pytest.mark.parametrize("origin", ["given", "default", "sites", "unknown"])
def test_runs_whose_draws_somebody_may_have_chosen_quote_their_ledgers(origin):
    """One chosen draw among the runs is enough: over the draw is a promise about chance."""
    parts = []
    for name, often in (("a", 8), ("b", 9)):
        ledger = Ledger(run_of(SMALL))
        for round in range(1, often + 1):
            ledger.record(round, [0, round % 9 + 1])
        parts.append(RunPart(name, ledger.run, 9, SERVER, ledger, data="same", **OWN))
    assert together(parts).quoted == "server"
    chosen = replace(parts[1], drawn=SeedKnowledge(origin, "own", 7))
    found = together([parts[0], chosen])
    assert found.quoted == "ledger" and found.epsilon["ledger"] > together(parts).epsilon["server"]
    spent = sum(part.ledger.of(0) for part in parts)
    assert found.epsilon["ledger"] == pytest.approx(spent)


def test_given_who_took_part_the_same_user_adds_up():
    """Over one dataset users are the same: the largest sum; over unknown ones, the sum of the
    largest."""
    parts = []
    for name, often in (("a", 0), ("b", 5)):
        ledger = Ledger(run_of(SMALL))
        for round in range(1, 9):
            ledger.record(round, [often, 1])
        ledger.record(9, [often])
        parts.append(RunPart(name, ledger.run, 9, SERVER, ledger, data="same", **OWN))
    mean = (Cost("mean", noise=3.0),)
    dearer = together([replace(p, costs=mean) for p in parts]).epsilon["ledger"]
    known = together(parts).epsilon["ledger"]
    assert dearer > known * 1.05
    unknown = together([replace(p, data=None) for p in parts])
    assert known < unknown.epsilon["ledger"] and not unknown.same_records
    one = parts[0].ledger.of(1)
    assert known == pytest.approx(2 * one)


def test_what_cannot_be_added_is_refused():
    with refuses("too-few-runs: at least 2"):
        together([part("a")])
    with refuses("units-differ"):
        together([part("a"), part("b", unit="user")])
    with refuses("units-differ"):
        together([part("a"), part("b", sampling="poisson")])
    with refuses("records-differ"):
        together([replace(part("a"), data="x"), replace(part("b"), data="y")])


def test_it_is_json():
    said = json.loads(json.dumps(together([part("a"), part("b")]).to_json(), allow_nan=False))
    assert said["runs"][1]["name"] == "b" and said["human"]["server"]["accuracy"] > 0.5


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
"""


def trained(folder, seed: int, extra: str = "secret = true", data: str = "", options=()) -> str:
    """A run folder made by the command."""
    config = folder.parent / f"{folder.name}.toml"
    text = CONFIG.replace("records = 40\n", f"records = 40\n{data}\n")
    config.write_text(f"{text}seed = {seed}\n[privacy]\nnoise = 8.0\n{extra}\n")
    result = call("train", str(config), "--out", str(folder), *options)
    assert result.exit_code == 0, result.output
    return str(folder)


def test_run_folders_together(tmp_path):
    a, b = trained(tmp_path / "a", 1), trained(tmp_path / "b", 2)
    alone = [answer("privacy", folder) for folder in (a, b)]
    both = answer("privacy", a, b)
    assert both["epsilon"]["server"] == pytest.approx(
        sum(said["server"]["epsilon"] for said in alone)
    )
    assert both["delta"] == pytest.approx(2 * alone[0]["delta"])
    convolved = answer("privacy", a, b, "--fixed-in-advance")
    assert convolved["epsilon"]["server"] < both["epsilon"]["server"]
    at = answer("privacy", a, b, "--delta", "0.001")
    assert at["delta"] == pytest.approx(0.001) and at["runs"][0]["delta"] == pytest.approx(0.0005)
    shown = call("privacy", a, b)
    assert "together" in shown.stdout and "Rogers" in shown.stdout and "at most" in shown.stdout


ONE_STEP = """
[data]
source = "synthetic"
users = 8
records = 20
[plan]
rounds = 3
local_steps = 1
user_ratio = 1.0
data_ratio = 0.5
seed = {seed}
[algorithm]
name = "fedavg"
[privacy]
noise = 4.0
delta = 0.001
secret = true
{more}
"""


def one_step(folder, seed: int, more: str = "") -> str:
    """A configuration of FedAvg with one local step, where participants hide each other."""
    config = folder / f"seed{seed}.toml"
    config.write_text(ONE_STEP.format(seed=seed, more=more))
    return str(config)


@pytest.mark.parametrize("advance", [(), ("--fixed-in-advance",)], ids=["added", "convolved"])
def test_colluders_count_in_several_runs(tmp_path, advance):
    """Together ε is at least that of each run alone with the same colluders; the runs' own count,
    and whoever colludes in one run may do so in all of them."""
    a, b = one_step(tmp_path, 1, "colluders = 5"), one_step(tmp_path, 2)
    for option, k in (((), 5), (("--colluders", "6"), 6), (("--colluders", "1"), 1)):
        alone = [
            answer("privacy", run, "--colluders", str(k), "--delta", "0.0005") for run in (a, b)
        ]
        both = answer("privacy", a, b, "--delta", "0.001", *advance, *option)
        values = [said["participant"]["epsilon"] for said in alone]
        assert both["colluders"] == k
        assert both["epsilon"]["participant"] >= max(values)
        if not advance:
            assert both["epsilon"]["participant"] == pytest.approx(sum(values))
        listed = [run["epsilon"]["participant"] for run in both["runs"]]
        assert listed == pytest.approx(values)
    assert "colluders=8 of 8 users" in refused("privacy", a, b, "--colluders", "8", *advance)
    assert "5 participants" in call("privacy", a, b).stdout


def test_view_acts_on_several_runs(tmp_path):
    a, b = one_step(tmp_path, 1, "colluders = 6"), one_step(tmp_path, 2)
    both = answer("privacy", a, b)
    one = call("privacy", a, b, "--view", "third-party").stdout
    assert "third party" in one and "server" not in one
    sentence = both["human"]["third_party"]["sentence"]
    assert sentence in " ".join(one.split()) and sentence != both["human"]["server"]["sentence"]
    assert "--view is 'nobody'" in refused("privacy", a, b, "--view", "nobody")
    assert "--json holds every view" in refused("privacy", a, b, "--view", "server", "--json")


def test_run_folders_over_other_records(tmp_path):
    """Runs made with one key file are compared; without it they count as over the same records."""
    key = ("--data-key", str(tmp_path / "records.key"))
    a = trained(tmp_path / "a", 1, options=key)
    other = trained(tmp_path / "b", 2, data="seed = 77", options=key)
    assert "ran on other data" in refused("privacy", a, other)
    said = answer("privacy", a, other, "--same-records")
    assert said["same_records"] is False and said["epsilon"]["server"] > 0
    same = trained(tmp_path / "c", 3, options=key)
    assert answer("privacy", a, same)["same_records"] is True
    alone = trained(tmp_path / "d", 4, data="seed = 77")
    for runs in ((a, alone), (a, same, alone), (alone, trained(tmp_path / "e", 5))):
        said = answer("privacy", *runs)
        assert said["same_records"] is False
        sums = [run["epsilon"]["server"] for run in said["runs"]]
        assert said["epsilon"]["server"] == pytest.approx(sum(sums))
        shown = " ".join(call("privacy", *runs).stdout.split())
        assert "count as over the same records" in shown and "--data-key" in shown


def test_run_folders_that_share_a_seed(tmp_path):
    seeded = [trained(tmp_path / name, 5, "") for name in "ab"]
    shown = call("privacy", *seeded)
    assert "nothing is guaranteed" in shown.stdout and shown.exit_code == 0
    assert answer("privacy", *seeded)["epsilon"]["server"] is None
    secret = [trained(tmp_path / name, 5) for name in "cd"]
    said = answer("privacy", *secret)
    assert said["epsilon"]["server"] is None and said["epsilon"]["ledger"] > 0


def test_bad_compositions_are_one_sentence(tmp_path):
    a = trained(tmp_path / "a", 1)
    user = trained(tmp_path / "u", 2, 'secret = true\nunit = "user"')
    assert "given twice" in refused("privacy", a, a)
    assert "same unit" in refused("privacy", a, user)
    assert "--noise is given, and" in refused("privacy", a, user, "--noise", "3")
    assert "does not exist" in refused("privacy", a, str(tmp_path / "none"))
    assert "--fixed-in-advance is given, which is about several" in refused(
        "privacy", a, "--fixed-in-advance"
    )
    assert "delta is 2.0" in refused("privacy", a, user, "--delta", "2")
    plain = tmp_path / "plain.toml"
    plain.write_text(CONFIG)
    assert "without privacy" in refused("privacy", a, str(plain))
