"""Step sizes beyond a definition's, and the noise of the printed runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from dpscaffold.paper import reproduce as reproducing
from dpscaffold.paper.archive import Archive, FinishedRun
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment, experiment
from dpscaffold.paper.frontier_page import frontier_parts
from dpscaffold.paper.ladders import at_end, between, rungs
from dpscaffold.paper.planned import compared, planned_cases, read_planned
from dpscaffold.paper.reproduce import ReproduceRequest, chosen_cases, reproduce
from dpscaffold.paper.results import Results, average
from dpscaffold.paper.solving import solved_noise
from dpscaffold.paper.text import Provenance
from dpscaffold.paper.widening import widened
from dpscaffold.runs.history import HistoryRow

PRINTED = Path(__file__).parents[2] / "docs/results/frontier/results.parquet"


def small() -> tuple[Experiment, list[Case]]:
    """One place of the frontier: balanced controls at ε = 1 on synthetic data, two seeds, and K = 1
    to be tried besides."""
    whole = experiment("frontier")
    chosen = replace(
        whole,
        rows=(replace(whole.rows[1], steps=(1,), clips=(), tails=()),),
        columns=tuple(c for c in whole.columns if c.label == "1 poisson"),
        lines=whole.lines[-1:],
    )
    return chosen, chosen.cases(2)


def pretend(archive: Archive, cases: list[Case], peak: float, bound: float = math.inf) -> None:
    """FinishedRun runs whose accuracy falls with the distance of η₀ from a peak, and which diverge
    beyond a bound."""
    for case in cases:
        rate = case.settings.plan.learning_rate
        accuracy = {"test_accuracy": 0.9 - 0.1 * abs(math.log(rate / peak))}
        broken = 3 if rate > bound else None
        history = [] if broken else [HistoryRow(400, accuracy)]
        made = {"rounds": 400, "noise": 1.0, "device": "cpu"}
        archive.extend(
            [FinishedRun(case.digest, history, {} if broken else accuracy, broken, 1.0, made)]
        )


@pytest.mark.parametrize(("peak", "bound"), [(0.07, 99), (5, 99), (0.3, 99), (15, 99), (9, 0.2)])
def test_the_search_ends_with_its_best_inside(tmp_path, peak, bound):
    chosen, cases = small()
    archive = Archive(tmp_path, "frontier")
    pretend(archive, cases, peak, bound)
    while more := widened(chosen, cases, archive):
        assert all(case not in archive for case in more)
        assert {case.labels["seed"] for case in more} == {0, 1}
        pretend(archive, more, peak, bound)
        cases += more
    place = ("synthetic (5, 5), λ = 0", "1 poisson", "SCAFFOLD-balanced")
    results = Results(chosen, cases, (), archive)
    best = results.places[place][results.best(place, average)][0].case.settings.plan
    plans = [runs[0].case.settings.plan for runs in results.places[place].values()]
    assert len({(plan.rate, plan.local_steps) for plan in plans}) == len(plans)
    assert {plan.local_steps for plan in plans} == {10, 1}
    row = chosen.rows[0]
    every = [rate for rate in (*row.ladder, *row.finer) if rate <= bound]
    for steps in (10, 1):  # each K is searched by itself, and to the end
        tried = [plan.rate for plan in plans if plan.local_steps == steps]
        assert not at_end(tried, best.rate) and set(tried) <= {*row.ladder, *row.finer}
    rungs_below = [rate for rate in row.ladder if rate <= bound]
    coarse = min(rungs_below, key=lambda rate: abs(math.log(rate / peak)))
    if bound > peak:  # the finest that there is, but only next to the best rung
        assert best.rate == min(every, key=lambda rate: abs(math.log(rate / peak)))
    assert best.rate in (coarse, *between([*row.ladder], coarse, row.finer))


def test_one_pass_keeps_its_steps_and_other_columns_their_ladder(tmp_path):
    whole = experiment("frontier")
    chosen = replace(
        whole,
        rows=(replace(whole.rows[1], steps=(1,), clips=(), tails=()),),
        columns=tuple(c for c in whole.columns if c.label in ("none", "1 poisson", "3 poisson")),
        lines=tuple(line for line in whole.lines if line.label in ("FedSGD", "FedAvg")),
    )
    cases = chosen.cases(1)
    archive = Archive(tmp_path, "frontier")
    pretend(archive, cases, 0.8)
    while more := widened(chosen, cases, archive):
        pretend(archive, more, 0.8)
        cases += more
    steps: dict[tuple[str, str], set[int]] = {}
    for case in cases:
        plan, labels = case.settings.plan, case.labels
        steps.setdefault((labels["column"], labels["line"]), set()).add(plan.local_steps)
        if labels["column"] != "1 poisson":  # the only one that is searched finely
            assert plan.rate in chosen.rows[0].ladder
    assert steps == {
        ("none", "FedAvg"): {10},
        ("none", "FedSGD"): {5},
        ("3 poisson", "FedAvg"): {10},
        ("3 poisson", "FedSGD"): {5},
        ("1 poisson", "FedAvg"): {10, 1},
        ("1 poisson", "FedSGD"): {5},
    }


@pytest.mark.parametrize(
    ("peak", "clips"), [(0.7, {0.5, 0.75, 1.0, 1.5, 2.0}), (1.6, {1.0, 1.5, 2.0})]
)
def test_clips_are_climbed_at_the_best_steps_with_steps_as_long(tmp_path, peak, clips):
    """Accuracy peaks at one C and one ηC, and K = 1 is better: every C is searched along its own
    ladder with K = 1 alone, on and on while the best C lies at an end."""
    chosen, _ = small()
    chosen = replace(chosen, rows=(replace(chosen.rows[0], clips=(0.25, 0.5, 0.75, 1.0, 2.0)),))
    cases, archive = chosen.cases(1), Archive(tmp_path, "frontier")

    def finish(some: list[Case]) -> None:
        for case in some:
            s = case.settings
            off = abs(math.log(s.privacy.clip / peak)) + abs(
                math.log(s.plan.rate * s.privacy.clip / 3)
            )
            accuracy = {"test_accuracy": 0.9 - 0.1 * off + 0.05 * (s.plan.local_steps == 1)}
            made = {"rounds": 400, "noise": 1.0, "device": "cpu"}
            archive.extend(
                [FinishedRun(case.digest, [HistoryRow(400, accuracy)], accuracy, None, 1.0, made)]
            )

    finish(cases)
    while more := widened(chosen, cases, archive):
        assert all(case not in archive for case in more)
        finish(more)
        cases += more
    tried = {(c.settings.plan.local_steps, c.settings.privacy.clip) for c in cases}
    assert tried == {(10, 1.5), *((1, clip) for clip in clips)}
    results = Results(chosen, cases, (), archive)
    [place] = results.places
    best = results.best(place, average)
    shown = results.places[place][best][0].case.settings
    nearest = min(clips, key=lambda clip: abs(math.log(clip / peak)))
    assert shown.privacy.clip == nearest and shown.plan.local_steps == 1
    assert ("C = " in best) == (nearest != 1.5) and "K = 1" in best
    for clip in clips:  # each C to the end of its own search
        rates = {c.settings.plan.rate: c for c in cases if c.settings.privacy.clip == clip}
        top = min(rates, key=lambda rate: abs(math.log(rate * clip / 3)))
        assert not at_end(list(rates), top)


def finish(archive: Archive, cases: list[Case], clip: float, tail: float) -> None:
    """FinishedRun runs whose accuracy peaks at one C, one averaged share and an η₀ that falls with
    that share, and which are better with K = 1."""
    for case in cases:
        plan, privacy = case.settings.plan, case.settings.privacy
        assert privacy is not None and plan.averaging == "tail"
        off = [privacy.clip / clip, plan.tail / tail, plan.rate * privacy.clip * plan.tail / 1.5]
        lost = 0.1 * sum(abs(math.log(one)) for one in off)
        accuracy = {"test_accuracy": 0.9 - lost + 0.05 * (plan.local_steps == 1)}
        made = {"rounds": 400, "noise": 1.0, "device": "cpu"}
        history = [HistoryRow(400, accuracy)]
        archive.extend([FinishedRun(case.digest, history, accuracy, None, 1.0, made)])


def searched(tmp_path: Path, clip: float, tail: float) -> tuple[Experiment, list[Case], Archive]:
    """A whole search of one place, with one other K, two other C and three other shares."""
    chosen, _ = small()
    row = replace(chosen.rows[0], clips=(1.0, 2.0), tails=(0.125, 0.25, 1.0))
    chosen = replace(chosen, rows=(row,))
    cases, archive = chosen.cases(1), Archive(tmp_path, "frontier")
    finish(archive, cases, clip, tail)
    while more := widened(chosen, cases, archive):
        assert all(case not in archive for case in more)
        finish(archive, more, clip, tail)
        cases += more
    return chosen, cases, archive


@pytest.mark.parametrize(
    ("peak", "tails"),
    [
        (0.5, {0.25, 0.5, 1.0}),
        (0.9, {0.25, 0.5, 1.0}),
        (0.24, {0.125, 0.25, 0.5, 1.0}),
        (0.01, {0.125, 0.25, 0.5, 1.0}),
    ],
)
@pytest.mark.parametrize("clip", [1.0, 1.5])
def test_other_shares_are_averaged_at_the_best_steps_and_clip_alone(tmp_path, peak, tails, clip):
    chosen, cases, archive = searched(tmp_path, clip, peak)
    tried: dict[tuple[int, float], set[float]] = {}
    for case in cases:
        s = case.settings
        tried.setdefault((s.plan.local_steps, s.privacy.clip), set()).add(s.plan.tail)
    others = {(10, 1.5), (1, 1.0), (1, 1.5), (1, 2.0)} - {(1, clip)}
    assert tried == {(1, clip): tails} | {other: {0.5} for other in others}
    results = Results(chosen, cases, (), archive)
    [place] = results.places
    best = results.best(place, average)
    plan = results.places[place][best][0].case.settings.plan
    assert plan.tail == min(tails, key=lambda tail: abs(math.log(tail / peak)))
    assert ("tail = " in best) == (plan.tail != 0.5)
    assert len(results.places[place]) == len(cases)  # no two choices have the same name
    for tail in tails:  # each share to the end of its own search
        here = [c.settings for c in cases if c.settings.privacy.clip == clip]
        rates = [s.plan.rate for s in here if (s.plan.tail, s.plan.local_steps) == (tail, 1)]
        top = min(rates, key=lambda rate: abs(math.log(rate * clip * tail / 1.5)))
        assert not at_end(rates, top)


def test_the_page_and_the_tidy_rows_say_which_shares_were_averaged(tmp_path):
    chosen, cases, archive = searched(tmp_path, 1.0, 0.24)
    results = Results(chosen, cases, (), archive)
    rows = results.tidy()
    outputs = {(row["tail"], row["output"]) for row in rows if row["output"].startswith("average")}
    assert outputs == {
        (0.125, "average of the last eighth"),
        (0.25, "average of the last quarter"),
        (0.5, "average of the last half"),
        (1.0, "average of all"),
    }
    text = "\n".join(frontier_parts(results, Provenance("", 1.0, {})))
    assert "(K = 1, C = 1, tail = 0.25)" in text
    assert "C among 1, 1.5, 2 in 1 entries, whose best is the smallest of all in 1 and the" in text
    assert (
        "tail among 0.125, 0.25, 0.5, 1 in 1 entries, whose best is the smallest of all in 0"
        in text
    )
    plain = Results(chosen, chosen.cases(1), (), archive)
    assert "Searched" not in "\n".join(frontier_parts(plain, Provenance("", 1.0, {})))


FAR = {"SCAFFOLD": (50.0, 0.25, 0.25), "FedSGD": (12.0, 0.5, 1.0)}


def two_peaks(archive: Archive, cases: list[Case], common: bool) -> None:
    """FinishedRun runs of algorithms with a peak at η₀ = 2 and the definition's C and share; two of
    them climb to peaks of their own, and where these are ``common`` the others have steep ones at
    the same choices, which nobody finds who comes from η₀ = 2."""
    for case in cases:
        plan, privacy, line = case.settings.plan, case.settings.privacy, case.labels["line"]
        clip = privacy.clip if privacy else 1.5

        def off(rate: float, c: float, tail: float, here=(plan.rate, clip, plan.tail)) -> float:
            return sum(abs(math.log(a / b)) for a, b in zip(here, (rate, c, tail), strict=True))

        value = 0.7 - 0.1 * off(2.0, 1.5, 0.5)
        if line in FAR:
            value = 0.8 + 0.05 * (line == "FedSGD") - 0.02 * off(*FAR[line])
        elif common:
            value = max(value, *(0.9 - 0.4 * off(*peak) for peak in FAR.values()))
        accuracy = {"test_accuracy": value + 0.01 * (plan.local_steps == 1)}
        made = {"rounds": 400, "noise": 1.0, "device": "cpu"}
        archive.extend(
            [FinishedRun(case.digest, [HistoryRow(400, accuracy)], accuracy, None, 1.0, made)]
        )


def crossed(
    tmp_path: Path, lines: list[str], column: str = "1 poisson", common: bool = True
) -> tuple[Results, list[Case]]:
    """A whole search of one row and column by some algorithms."""
    whole = experiment("frontier")
    chosen = replace(
        whole,
        rows=(replace(whole.rows[1], steps=(1,)),),
        columns=tuple(c for c in whole.columns if c.label == column),
        lines=tuple(line for line in whole.lines if line.label in lines),
    )
    cases, archive = chosen.cases(1), Archive(tmp_path, "frontier")
    two_peaks(archive, cases, common)
    while more := widened(chosen, cases, archive):
        assert all(case not in archive for case in more)
        assert len({case.digest for case in more}) == len(more)
        two_peaks(archive, more, common)
        cases += more
    return Results(chosen, cases, (), archive), cases


def choices(cases: list[Case], line: str) -> set[tuple[int, float | None, float, float]]:
    """What an algorithm was tried with: K, C, averaged share and η₀."""
    here = [case.settings for case in cases if case.labels["line"] == line]
    return {
        (s.plan.local_steps, s.privacy and s.privacy.clip, s.plan.tail, s.plan.rate) for s in here
    }


def best_choice(results: Results, line: str) -> tuple[int, float | None, float, float]:
    [place] = [place for place in results.places if place[2] == line]
    [choice] = choices([results.places[place][results.best(place, average)][0].case], line)
    return choice


LINES = ["SCAFFOLD", "FedAvg", "FedSGD", "SCAFFOLD-balanced"]


def test_an_algorithm_reaches_a_peak_that_another_found(tmp_path):
    alone, _ = crossed(tmp_path / "alone", ["SCAFFOLD-balanced"])
    assert best_choice(alone, "SCAFFOLD-balanced") == (1, 1.5, 0.5, 2.0)
    results, cases = crossed(tmp_path / "all", LINES)
    assert best_choice(results, "SCAFFOLD") == (1, 0.25, 0.25, 50.0)
    for line in ("FedAvg", "SCAFFOLD-balanced"):  # and with K = 1, which is better there too
        assert best_choice(results, line) == (1, 0.25, 0.25, 50.0)
        assert (10, 0.5, 1.0, 12.0) in choices(cases, line)  # DP-FedSGD's, with a K of their own
        shares = {tail for k, clip, tail, _ in choices(cases, line) if (k, clip) == (1, 0.25)}
        assert shares == {0.125, 0.25, 0.5}  # searched on from there, the definition's own included
    for found in results.places.values():  # a choice names what is not its entry's own, once
        own = {r[0].case.settings.plan.local_steps for c, r in found.items() if "K = " not in c}
        assert len(own) == 1
        assert all(("C = 1.5" not in c) and ("tail = 0.5" not in c) for c in found)
    assert sum(map(len, results.places.values())) == len(cases)


@pytest.mark.parametrize("common", [True, False])
def test_in_the_end_everyone_was_tried_at_the_best_choices_of_all(tmp_path, common):
    results, cases = crossed(tmp_path, LINES, common=common)
    for line in LINES:
        tried = choices(cases, line)
        own = 5 if line == "FedSGD" else 10
        assert {steps for steps, *_ in tried} == ({5} if line == "FedSGD" else {1, 10})
        for other in LINES:
            steps, *rest = best_choice(results, other)
            steps = own if "FedSGD" in (line, other) and line != other else steps
            assert (steps, *rest) in tried, (line, other)
        *fixed, best = best_choice(results, line)
        rates = [rate for *others, rate in tried if others == fixed]
        assert not at_end(rates, best)


def test_best_choices_of_others_wait_for_all_and_for_a_column_searched_finely(tmp_path):
    whole = experiment("frontier")
    _, cases = crossed(tmp_path / "coarse", LINES, "3 poisson")
    for line in LINES:  # its own climb from η₀ = 2, 5 and 12, and no other C or share
        assert {(c, tail) for _, c, tail, _ in choices(cases, line)} == {(1.5, 0.5)}
    assert 50.0 not in {rate for line in LINES for *_, rate in choices(cases, line)}
    results, cases = crossed(tmp_path / "fine", LINES)
    missing = next(c for c in cases if c.labels["line"] == "FedAvg")
    partly = Archive(tmp_path / "partly", "frontier")
    two_peaks(partly, [case for case in cases if case.digest != missing.digest], common=True)
    climbed = [c for c in cases if c.labels["line"] != "SCAFFOLD-balanced"]
    climbed += crossed(tmp_path / "alone", ["SCAFFOLD-balanced"])[1]
    chosen = results.experiment
    assert widened(chosen, climbed, partly) == []
    two_peaks(partly, [missing], common=True)
    more = widened(chosen, climbed, partly)
    assert {case.labels["line"] for case in more} == {"SCAFFOLD-balanced"}
    assert (1, 0.25, 0.25, 50.0) in choices(more, "SCAFFOLD-balanced")
    plain = replace(chosen, rows=(replace(whole.rows[1], finer=(), clips=(), tails=()),))
    assert widened(plain, climbed, partly) == []


def test_an_unfinished_place_waits_and_a_ladder_ends(tmp_path):
    chosen, cases = small()
    archive = Archive(tmp_path, "frontier")
    pretend(archive, cases[:-1], 1e-9)
    assert widened(chosen, cases, archive) == []
    pretend(archive, cases[-1:], 1e-9)
    waves = 0
    while more := widened(chosen, cases, archive):
        pretend(archive, more, 1e-9)
        cases += more
        waves += 1
    first = {case.settings.plan.learning_rate for case in small()[1]}
    below = sum(rate < min(first) for rate in chosen.rows[0].ladder)
    assert waves == below + 3  # then what is finer next to the best, K = 1, and what is finer there


@given(st.data())
def test_rungs_stay_on_the_ladder_beyond_what_was_tried(data):
    ladder = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=1, unique=True).map(sorted))
    tried = data.draw(st.lists(st.sampled_from(ladder), min_size=1, unique=True))
    best = data.draw(st.sampled_from(tried))
    failed = data.draw(st.booleans())
    found = rungs(tried, best, ladder, failed)
    assert all(rate in ladder and rate not in tried for rate in found)
    assert not (failed and any(rate >= min(tried) for rate in found))
    if not failed:  # afterwards both rungs next to the best were tried
        place, known = ladder.index(best), {*tried, *found}
        assert known >= set(ladder[max(0, place - 1) : place + 2])
        assert len(found) <= 2


def test_printed_runs_have_the_noise_that_their_epsilon_needs_today(tmp_path):
    """The printed results stay true: the solver gives each of their cases the same noise."""
    request = ReproduceRequest(tmp_path, rows=("synthetic (5, 5)",))
    cases, _ = chosen_cases(experiment("frontier"), request)
    own = ("column", "line", "local_steps")
    printed = {
        tuple(row[name] for name in own): row["noise"]
        for row in parquet.read_table(PRINTED).to_pylist()
        if row["row"] == "synthetic (5, 5)" and row["noise"] is not None
    }
    compared = 0
    for case in (case for case in cases if case.labels["seed"] == 0):
        privacy = solved_noise(case).settings.privacy
        if privacy is not None:
            steps = case.settings.plan.local_steps
            place = (case.labels["column"], case.labels["line"], steps)
            if place in printed:
                assert privacy.noise == pytest.approx(printed[place], rel=1e-3), place
                compared += 1
    assert compared >= 10


def test_a_tiny_frontier_widens_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(reproducing, "_optima", lambda cases, scale: {})
    chosen, _ = small()
    request = ReproduceRequest(tmp_path, seeds=1, scale=0.02)
    reproduce(chosen, request, torch.device("cpu"))
    text = (tmp_path / "frontier" / "RESULT.md").read_text()
    assert "SCAFFOLD-balanced" in text and "not finished" not in text
    runs = (tmp_path / "frontier" / "runs.jsonl").read_text()
    reproduce(chosen, request, torch.device("cpu"))
    assert (tmp_path / "frontier" / "runs.jsonl").read_text() == runs


def test_planned_step_sizes_stand_beside_the_best(tmp_path, monkeypatch):
    """The planner's experiment chooses η₀ without data, runs what it chose, and both pages show
    what that lost."""
    monkeypatch.setattr(reproducing, "_optima", lambda cases, scale: {})
    whole, planning = small()[0], experiment("planner")
    planning = replace(planning, rows=whole.rows, columns=whole.columns, lines=whole.lines)
    barred = "dpscaffold.paper.solving.load_federation"
    request = ReproduceRequest(tmp_path, seeds=1, scale=0.02)
    reproduce(whole, request, torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(barred, lambda data: pytest.fail("planning must not load data"))
        reproduce(planning, request, torch.device("cpu"))
    text = (tmp_path / "planner" / "RESULT.md").read_text()
    [rate] = read_planned(tmp_path).values()
    assert rate in whole.rows[0].ladder and "Over 1 entries planning loses" in text
    reproduce(whole, request, torch.device("cpu"))
    assert f"({rate:g})" in (tmp_path / "frontier" / "RESULT.md").read_text()


def test_what_planning_loses_is_counted(tmp_path):
    chosen, cases = small()
    archive = Archive(tmp_path, "frontier")
    pretend(archive, cases, 5.0)
    results = Results(chosen, cases, (), archive)
    place = ("synthetic (5, 5), λ = 0", "1 poisson", "SCAFFOLD-balanced")
    [one] = compared(results, {place: 2.0})
    assert one.best == 5.0 and one.lost == pytest.approx(10 * math.log(2.5))
    assert compared(results, {place: 0.03}) == []
    assert [c.settings.plan.rate for c in planned_cases(cases, {place: 0.03})] == [0.03, 0.03]
    assert planned_cases(cases, {place: 2.0}) == []
