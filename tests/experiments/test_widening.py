"""Step sizes beyond a definition's, and runs that are taken over from an earlier results.csv."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dpscaffold import BadInput
from dpscaffold.cli import app
from dpscaffold.paper import reproduce as reproducing
from dpscaffold.paper.archive import Archive, Finished
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment, experiment
from dpscaffold.paper.planned import compared, planned_cases, read_planned
from dpscaffold.paper.reproduce import Request, chosen_cases, reproduce
from dpscaffold.paper.results import Results, average
from dpscaffold.paper.takeover import take_over
from dpscaffold.paper.widening import at_end, between, rungs, widened

PRINTED = Path(__file__).parents[2] / "docs/results/frontier/results.csv"


def small() -> tuple[Experiment, list[Case]]:
    """One place of the frontier: balanced controls at ε = 1 on synthetic data, two seeds, and K = 1
    to be tried besides."""
    whole = experiment("frontier")
    chosen = replace(
        whole,
        rows=(replace(whole.rows[1], steps=(1,), clips=()),),
        columns=tuple(c for c in whole.columns if c.label == "1 poisson"),
        lines=whole.lines[-1:],
    )
    return chosen, chosen.cases(2)


def pretend(archive: Archive, cases: list[Case], peak: float, bound: float = math.inf) -> None:
    """Finished runs whose accuracy falls with the distance of η₀ from a peak, and which diverge
    beyond a bound."""
    for case in cases:
        rate = case.settings.plan.learning_rate
        accuracy = {"test_accuracy": 0.9 - 0.1 * abs(math.log(rate / peak))}
        broken = 3 if rate > bound else None
        history = [] if broken else [{"round": 400} | accuracy]
        made = {"rounds": 400, "noise": 1.0, "device": "cpu"}
        archive.extend(
            [Finished(case.digest, history, {} if broken else accuracy, broken, 1.0, made)]
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
    if bound > peak:  # the finest that there is, but only beside the best rung
        assert best.rate == min(every, key=lambda rate: abs(math.log(rate / peak)))
    assert best.rate in (coarse, *between([*row.ladder], coarse, row.finer))


def test_one_pass_keeps_its_steps_and_other_columns_their_ladder(tmp_path):
    whole = experiment("frontier")
    chosen = replace(
        whole,
        rows=(replace(whole.rows[1], steps=(1,), clips=()),),
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
                [Finished(case.digest, [{"round": 400} | accuracy], accuracy, None, 1.0, made)]
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
    assert waves == below + 3  # then what is finer beside the best, K = 1, and what is finer there


@given(st.data())
def test_rungs_stay_on_the_ladder_beyond_what_was_tried(data):
    ladder = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=1, unique=True).map(sorted))
    tried = data.draw(st.lists(st.sampled_from(ladder), min_size=1, unique=True))
    best = data.draw(st.sampled_from(tried))
    failed = data.draw(st.booleans())
    found = rungs(tried, best, ladder, failed)
    assert all(rate in ladder and rate not in tried for rate in found)
    assert not (failed and any(rate >= min(tried) for rate in found))
    if not failed:  # afterwards both rungs beside the best were tried
        place, known = ladder.index(best), {*tried, *found}
        assert known >= set(ladder[max(0, place - 1) : place + 2])
        assert len(found) <= 2


def test_printed_runs_are_taken_over_where_they_are_the_same(tmp_path):
    whole = experiment("frontier")
    request = Request(tmp_path, rows=("synthetic (5, 5)",))
    cases, _ = chosen_cases(whole, request)
    archive = Archive(tmp_path, "frontier")
    told = take_over(whole, cases, archive, PRINTED)
    with PRINTED.open(encoding="utf-8") as stream:
        printed = [row for row in csv.DictReader(stream) if row["row"] == "synthetic (5, 5)"]
    own = ("column", "line", "seed", "learning_rate", "clip")
    runs = {tuple(row[k] for k in own) for row in printed}
    assert told.taken == len(runs) >= len(cases) and told.known == 0  # later rungs are runs too
    again = take_over(whole, cases, Archive(tmp_path, "frontier"), PRINTED)
    assert (again.taken, again.known) == (0, told.taken)
    results = Results(whole, cases, (), Archive(tmp_path, "frontier"))
    keys = (*own, "output", "round")
    known = {tuple(row[k] for k in keys): float(row["test_accuracy"]) for row in printed}
    assert len(known) == len(printed)
    found = results.tidy()
    assert 2 * len(cases) <= len(found) <= len(printed)  # both outputs of every first step size
    for row in found:
        key = tuple("" if row[k] is None else str(row[k]) for k in keys)
        assert known[key] == pytest.approx(row["test_accuracy"], abs=1e-6), key


@pytest.mark.parametrize("column", ["noise", "rounds", "clip", "local_steps", "regularisation"])
def test_a_run_that_differs_is_left(tmp_path, column):
    whole = experiment("frontier")
    cases, _ = chosen_cases(whole, Request(tmp_path, rows=("synthetic (5, 5)",)))
    with PRINTED.open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    rows = [r for r in rows if (r["row"], r["column"]) == ("synthetic (5, 5)", "1 fixed")][:2]
    rows[0][column] = rows[1][column] = str(1.01 * float(rows[0][column]))
    altered = tmp_path / "results.csv"
    with altered.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    told = take_over(whole, cases, Archive(tmp_path, "frontier"), altered)
    assert (told.taken, told.left) == (0, {f"another {column}": 1})


def test_what_is_no_results_file_is_refused(tmp_path):
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    for name, said in (("none.csv", "cannot be read"), ("other.csv", "no results.csv")):
        with pytest.raises(BadInput, match=said):
            take_over(*small(), Archive(tmp_path, "frontier"), tmp_path / name)
    wrong = CliRunner().invoke(app, ["reproduce", "all", "--take", str(PRINTED)])
    assert isinstance(wrong.exception, BadInput) and "--take" in str(wrong.exception)


def test_a_tiny_frontier_widens_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(reproducing, "_optima", lambda cases, scale: {})
    chosen, _ = small()
    request = Request(tmp_path, seeds=1, scale=0.02)
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
    request = Request(tmp_path, seeds=1, scale=0.02)
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
