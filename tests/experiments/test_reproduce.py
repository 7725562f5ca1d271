"""Experiments: their definitions, the published numbers, and whole reproductions at a tiny
scale."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold import BadInput, synthetic
from dpscaffold.cli import app
from dpscaffold.paper import reproduce as reproducing
from dpscaffold.paper import runner
from dpscaffold.paper.archive import Archive
from dpscaffold.paper.cases import scaled
from dpscaffold.paper.definition import experiment, names
from dpscaffold.paper.formula import most_rounds
from dpscaffold.paper.published import caption, published, table
from dpscaffold.paper.reproduce import ReproduceRequest, chosen_cases, reproduce
from dpscaffold.paper.results import Results, average, read_tidy
from dpscaffold.paper.runner import case_stacks
from dpscaffold.privacy import describe
from dpscaffold.runs.history import HistoryRow
from dpscaffold.training.events import RoundDone, StackBegun, StopRequested
from dpscaffold.training.stack import Outcome

CPU = torch.device("cpu")
TINY = 0.01


def invoke(*arguments: str):
    """The command line, with errors as it would raise them."""
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)])


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_published_tables_are_complete(name):
    cells = table(name)
    assert set(cells) == {
        (s, k) for s in (10.0, 20.0, 40.0, 80.0, 160.0) for k in (1, 5, 10, 20, 40)
    }
    assert published()[name]["where"] and published()["source"]
    best = published()[name]["best_local_steps"]
    for noise, steps in zip(published()[name]["noise"], best, strict=True):
        row = {k: cell.accuracy for (s, k), cell in cells.items() if s == noise}
        assert max(row, key=row.__getitem__) == steps


@pytest.mark.parametrize(("noise", "steps"), [(10, 1), (10, 40), (20, 20), (40, 5), (80, 10)])
def test_published_rounds_are_the_largest_that_the_published_bound_allows(noise, steps):
    run = describe(
        rounds=1,
        local_steps=steps,
        users=100,
        cohort_size=5,
        records=4000,
        batch_sizes=800,
        noise=noise,
        delta="1/records",
    )
    assert most_rounds(run, 3.0) == table("table1")[noise, steps].rounds
    assert table("table1")[noise, steps].rounds == table("table2")[noise, steps].rounds


def test_captions_name_their_source():
    for name in (
        "figure1",
        "figure2",
        "accuracy",
        "dissimilarity",
        "varying-alpha",
        "varying-beta",
        "femnist-accuracy",
        "femnist-dissimilarity",
        "tradeoff-l",
        "tradeoff-s",
    ):
        assert caption(name)["where"] and caption(name)["epsilon"]


@pytest.mark.parametrize("name", [n for n in names() if not n.startswith("tradeoff")])
def test_every_definition_is_a_list_of_valid_runs(name):
    chosen = experiment(name)
    cases = chosen.cases()
    assert cases and all(case.settings.plan.averaging != "none" for case in cases)
    if chosen.kind == "table":
        entries = {(c.labels["row"], c.labels["column"]) for c in cases}
        entered, folds = (3, 0) if name == "table1-balanced" else (25, 5)
        assert len(entries) == entered, name
        assert {c.settings.plan.rounds for c in cases} <= {
            cell.rounds for cell in table(name.removesuffix("-balanced")).values()
        }
        assert len(chosen.folded()) == folds * len(chosen.cases(1))


def test_figures_of_the_same_runs_share_them():
    digests = [
        {case.digest for case in experiment(name).cases()}
        for name in ("figure1", "accuracy", "dissimilarity")
    ]
    assert digests[0] == digests[1] == digests[2]
    femnist = {case.digest for case in experiment("femnist-accuracy").cases()}
    shared = {
        c.digest for c in experiment("figure2").cases() if c.labels["row"] == "FEMNIST"
    } & femnist
    assert len(shared) == 3 * 6 * 3 * 3  # similarities, algorithms, step sizes, seeds


def test_entries_of_a_frontier_run_their_best_choice_alone():
    for name, entries in (("frontier", 305), ("frontier-hog", 50), ("frontier-secure", 20)):
        chosen = experiment(name)
        cases = chosen.cases(1)
        places = [(c.labels["row"], c.labels["column"], c.labels["line"]) for c in cases]
        assert len(places) == len(set(places)) == entries
        assert set(places) == set(chosen.chosen)
    [case] = [
        c
        for c in experiment("frontier-hog").cases(1)
        if (c.labels["column"], c.labels["line"]) == ("0.1 poisson", "FedProx")
        and c.labels["row"].startswith("FEMNIST")
    ]
    assert case.labels["choice"] == "η₀ = 0.5 (K = 1, C = 0.5, tail = 0.25)"
    plan, privacy = case.settings.plan, case.settings.privacy
    assert (plan.learning_rate, plan.local_steps, plan.averaging, privacy.clip) == (
        0.5,
        1,
        0.25,
        0.5,
    )


def test_the_data_folder_of_a_request_names_no_other_run(tmp_path, monkeypatch):
    case = experiment("frontier-hog").cases(1)[0]
    digest, read = case.digest, []
    monkeypatch.setattr(runner, "load_federation", read.append)
    runner.Loader(data_dir=tmp_path).get(case)
    assert read[0].path == str(tmp_path)
    assert case.settings.data.path is None and replace(case, labels={}).digest == digest


def test_six_algorithms_at_three_levels_and_two_k():
    chosen = experiment("figure1")
    assert [row.label for row in chosen.rows] == ["K = 50", "K = 100"]
    assert len(chosen.columns) == 3 and len(chosen.lines) == 6
    sgd = next(c for c in chosen.cases() if c.labels["line"] == "DP-FedSGD")
    assert sgd.settings.plan.local_steps * sgd.settings.plan.data_ratio == 1


def test_a_scaled_case_keeps_ratios_and_a_warm_start():
    case = next(c for c in experiment("figure1").cases() if c.labels["line"] == "DP-SCAFFOLD-warm")
    small = scaled(case, 0.05).settings
    assert small.data.users == 10 and small.plan.user_ratio == 0.2
    assert small.plan.warm_rounds == 1 and small.plan.rounds == 20
    assert scaled(case, 1.0) is case


def test_stacks_hold_only_runs_that_fit_together():
    for cell in case_stacks(experiment("figure1").cases(), CPU):
        first = cell.cases[0].settings
        assert all(c.settings.plan.local_steps == first.plan.local_steps for c in cell.cases)
        assert all(c.private == cell.cases[0].private for c in cell.cases)
        assert sum(20 for _ in cell.cases) <= runner.ROWS["cpu"]


@pytest.mark.slow
def test_a_tiny_table_end_to_end(tmp_path):
    result = invoke("table1", "--scale", TINY, "--row", "10", "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "table1"
    files = {path.name for path in folder.iterdir()}
    assert files == {
        "runs.jsonl",
        "results.parquet",
        "figure.png",
        "figure.svg",
        "RESULT.md",
    }
    text = (folder / "RESULT.md").read_text()
    for expected in (
        "scaled down to 0.01",
        "### λ = 5e-3",
        "### λ = 0",
        "27.41 ± 0.71",
        "test data in view",
        "cross-validation",
        "x*",
        "random participation (PLD)",
        "as published",
        "replacing one record of one user",
        "standardisation on synthetic",
        "dpscaffold reproduce",
        "torch",
        "seeds: 0",
    ):
        assert expected in text, expected
    rows = read_tidy(folder)
    assert {row["local_steps"] for row in rows} == {1, 5, 10, 20, 40}
    assert {row["fold"] for row in rows} == {None, 0, 1, 2, 3, 4}


def test_of_two_copies_of_a_run_the_one_with_more_metrics_counts(tmp_path):
    full = {"digest": "a", "average": {}, "diverged": None, "seconds": 1.0, "made": {"rounds": 1}}
    for folder, gap in (("figure1", -2.0), ("warm-start", None)):
        (tmp_path / folder).mkdir()
        run = full | {"history": [{"round": 1, "log10_gap": gap}]}
        (tmp_path / folder / "runs.jsonl").write_text(json.dumps(run) + "\n")
    assert Archive(tmp_path, "figure1").finished["a"].late("log10_gap") == -2.0


class Interrupt:
    """Stops the work in the second stack."""

    def __init__(self) -> None:
        self.begun = 0

    def __call__(self, event):
        """Count stacks."""
        self.begun += isinstance(event, StackBegun)
        if self.begun == 2 and isinstance(event, RoundDone):
            raise StopRequested("SIGINT")


def test_interrupted_work_resumes_and_is_drawn_without_another_run(tmp_path, monkeypatch):
    from contextlib import nullcontext

    request = ReproduceRequest(tmp_path, scale=TINY, rows=("K = 50",))
    chosen = experiment("figure1")
    with pytest.raises(StopRequested):
        reproduce(chosen, request, CPU, lambda name, work: nullcontext(Interrupt()))
    before = Archive(tmp_path, "figure1").finished
    assert before
    ran: list[int] = []
    whole = runner.train_stack

    def counted(settings, *arguments):
        ran.append(len(settings))
        return whole(settings, *arguments)

    monkeypatch.setattr(runner, "train_stack", counted)
    reproduce(chosen, request, CPU)
    cases, _ = chosen_cases(chosen, request)
    assert sum(ran) == len({c.digest for c in cases}) - len(before)
    after = Archive(tmp_path, "figure1").finished
    assert {key: after[key] for key in before} == before
    ran.clear()
    reproduce(experiment("accuracy"), request, CPU)  # another figure of the same runs
    assert ran == []
    # A line cut short by a crash costs its own run and no other.
    path = tmp_path / "figure1" / "runs.jsonl"
    path.write_text(path.read_text()[:-40])
    reproduce(chosen, request, CPU)
    assert ran == [1]
    assert len(Archive(tmp_path, "figure1").finished) == len(after)
    drawn_with_its_gap_to_the_optimum(tmp_path)
    assert ran == [1]


def drawn_with_its_gap_to_the_optimum(folder):
    """The figure of runs that are finished."""
    request = ReproduceRequest(folder, scale=TINY, rows=("K = 50",))
    files = reproduce(experiment("figure1"), request, CPU)
    assert files == ["results.parquet", "figure.png", "figure.svg", "RESULT.md"]
    text = (folder / "figure1" / "RESULT.md").read_text()
    for expected in (
        "DP-SCAFFOLD-warm",
        "epsilon: 13.0",
        "log₁₀ excess loss",
        "(5, 5)",
        "SCAFFOLD against FedAvg",
    ):
        assert expected in text, expected


def test_no_choice_is_validated_by_a_part_of_its_folds(tmp_path):
    """A choice among the folds that happen to be finished would favour the choices that come
    first."""
    chosen = experiment("table1")
    cases = chosen.cases(1, 0.01)[:7]
    folded = [replace(case, fold=(k, 5)) for case in cases for k in range(5)]
    archive = Archive(tmp_path, "table1")

    def finish(some):
        outcomes = [
            Outcome(case.settings.setting(synthetic(users=40, records=20))) for case in some
        ]
        for k, outcome in enumerate(outcomes):
            rounds = outcome.setting.plan.rounds
            outcome.history = [HistoryRow(rounds, {"test_accuracy": 0.1 + 0.01 * k})]
            outcome.average = {"test_accuracy": 0.1 + 0.01 * k}
        archive.add(some, outcomes, {})

    finish([*cases, *folded[:-1]])
    place = ("10", "1", "λ = 5e-3")
    assert Results(chosen, cases, folded, archive).validated(place, average) is None
    finish(folded[-1:])
    assert Results(chosen, cases, folded, archive).validated(place, average) == "η₀ = 0.8"


def fill(archive, cases, device="cpu", missing=(), diverged=()):
    """Archive the cases as if they had run, but for those at some positions."""
    federation = synthetic(users=40, records=20)
    for k, case in enumerate(cases):
        if k in missing:
            continue
        outcome = Outcome(case.settings.setting(federation), seconds=1.0)
        outcome.history = [HistoryRow(outcome.setting.plan.rounds, {"test_accuracy": 0.5})]
        outcome.average = {"test_accuracy": 0.5}
        outcome.diverged = 3 if k in diverged else None
        archive.add([case], [outcome], {"device": device, "python": "3.0"})


def test_a_result_of_unfinished_runs_says_so_and_keeps_every_section(tmp_path, monkeypatch):
    """Written from a part of the runs, a table loses no line that other rows have, and names what
    is missing."""
    monkeypatch.setattr(reproducing, "_optima", lambda *given: {})
    chosen = experiment("table1")
    request = ReproduceRequest(tmp_path, seeds=1, rows=("10", "20"))
    cases, folded = chosen_cases(chosen, request)
    archive = Archive(tmp_path, "table1")
    first_row = [
        k
        for k, case in enumerate(cases)
        if case.labels["row"] == "10" and case.labels["line"] == "λ = 0"
    ]
    fill(archive, cases, "some GPU", missing=first_row, diverged=[0])
    fill(archive, folded[:3], "cpu")
    reproducing.write(chosen, request, cases, folded, archive, runner.Loader())
    text = (tmp_path / "table1" / "RESULT.md").read_text()
    assert f"**{len(first_row)} runs are not finished yet**" in text
    assert f"**{len(folded) - 3} runs of the cross-validation are not finished yet**" in text
    assert "### λ = 0" in text and "nan" not in text
    assert (
        f"device: some GPU, {len(cases) - len(first_row)} runs" in text
        and "device: cpu, 3 runs" in text
    )
    assert "some of its runs were made on a GPU" in text


def test_a_missing_entry_of_the_frontier_shifts_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(reproducing, "_optima", lambda *given: {})
    chosen = experiment("frontier")
    request = ReproduceRequest(tmp_path, seeds=1, rows=("MNIST, γ = 0 %",))
    cases, folded = chosen_cases(chosen, request)
    gone = [
        k
        for k, c in enumerate(cases)
        if c.labels["line"] == "SCAFFOLD" and c.labels["column"] == "none"
    ]
    archive = Archive(tmp_path, "frontier")
    mlp = Outcome(cases[0].settings.setting(synthetic(users=60, records=20)))
    mlp.history = [HistoryRow(mlp.setting.plan.rounds, {"test_accuracy": 0.25})]
    mlp.average = {"test_accuracy": 0.25}
    for k, case in enumerate(cases):
        if k not in gone:
            archive.add([case], [mlp], {"device": "cpu"})
    reproducing.write(chosen, request, cases, folded, archive, runner.Loader())
    text = (tmp_path / "frontier" / "RESULT.md").read_text()
    assert "(only MNIST, γ = 0 %)" in text.splitlines()[0]
    assert "| none | not private |  | 25.00 (25.00) | 25.00 (25.00) | 25.00 (25.00) |" in text
    privacy = text.partition("## Privacy")[2]
    for said in (
        "against the server",
        "δ = 1/",
        "random participation (PLD)",
        "centre on mnist, pca on mnist",
        "Outside",
    ):
        assert said in privacy, said


def test_runs_in_several_places_are_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(reproducing, "_optima", lambda *given: {})
    chosen = experiment("figure1")
    request = ReproduceRequest(tmp_path, seeds=1)
    cases, folded = chosen_cases(chosen, request)
    distinct = {case.digest: case for case in cases}
    assert len(distinct) < len(cases)
    archive = Archive(tmp_path, "figure1")
    fill(archive, distinct.values())
    reproducing.write(chosen, request, cases, folded, archive, runner.Loader())
    assert f"runs: {len(distinct)}\n" in (tmp_path / "figure1" / "RESULT.md").read_text()


def test_a_tiny_sweep_shows_every_choice(tmp_path):
    result = invoke("clip", "--scale", TINY, "--row", "λ = 5e-3", "--out", tmp_path, "--quiet")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "clip" / "RESULT.md").read_text()
    rows = [
        row for row in read_tidy(tmp_path / "clip") if row["output"] == "average of the last half"
    ]
    assert len(rows) == 2 * 6 * 7  # K, C, η₀
    best = max(
        (row for row in rows if row["column"] == "K = 20"),
        key=lambda row: float(row["test_accuracy"]),
    )
    panel = text.partition("### λ = 5e-3, K = 20")[2]
    percent = 100 * float(best["test_accuracy"])
    clip, rate = float(best["clip"]), float(best["learning_rate"])
    assert f"average {percent:.2f} (C = {clip:g}, η₀ = {rate:g})" in panel
    assert f"**{percent:.1f}**" in panel
    assert "x* of this objective" in panel


def test_the_whole_list_at_full_size_fits_a_terminal():
    result = CliRunner().invoke(app, ["reproduce", "--list"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert "…" not in result.output and "1050+1750" in result.output
    assert all(name in result.output for name in names())
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_list_as_json_has_the_runs_and_the_work_of_each(monkeypatch):
    monkeypatch.setattr("dpscaffold.paper.listing.names", lambda: ("figure1", "clip"))
    result = CliRunner().invoke(app, ["reproduce", "--list", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == ["figure1", "clip"]
    assert all(row["user-steps"].endswith(" M") for row in rows)


def test_every_experiment_fits_a_narrow_list():
    assert all(0 < len(experiment(name).brief) <= 25 and len(name) <= 21 for name in names())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tabel1"], "did you mean 'table1'"),
        (["table1", "--scale", "2"], "--scale is 2"),
        (["table1", "--seeds", "0"], "--seeds is 0"),
        (["table1", "--row", "11", "--scale", "0.01"], "has the rows '10'"),
        (["table1", "--row", "10", "--row", "11", "--scale", "0.01"], "--row is '11'"),
        (["all", "--row", "10"], "a row of one experiment"),
        (["--list", "--row", "10"], "a row of one experiment"),
        (["table1", "--device", "cuda:99"], "device is 'cuda:99'"),
        ([], "no experiment was named"),
    ],
)
def test_bad_input_is_one_sentence(arguments, sentence, tmp_path):
    result = invoke(*arguments, "--out", tmp_path)
    assert isinstance(result.exception, BadInput)
    assert sentence in str(result.exception)


def test_an_out_that_is_a_file_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text(json.dumps({}))
    with refuses("not-a-folder"):
        reproducing.ReproduceRequest(file)
