"""Results of another machine: what their tidy rows hold is not run again."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dpscaffold import BadInput
from dpscaffold.cli import app
from dpscaffold.paper import runner
from dpscaffold.paper.archive import Archive
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import experiment
from dpscaffold.paper.reproduce import ReproduceRequest, chosen_cases, reproduce
from dpscaffold.paper.results import read_tidy
from dpscaffold.paper.stored import StoredRuns
from dpscaffold.paper.whole_plans import LINE

CPU = torch.device("cpu")
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
CHOSEN = experiment("figure1")


def asked(out: Path, stored: Path | None = None) -> ReproduceRequest:
    return ReproduceRequest(out, scale=0.01, rows=("K = 50",), stored=stored)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished reproduction of another machine, without its runs."""
    folder = tmp_path_factory.mktemp("made")
    reproduce(CHOSEN, asked(folder), CPU)
    (folder / "figure1" / "runs.jsonl").unlink()
    return folder


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many runs were trained, stack by stack."""
    count, whole = list[int](), runner.train_stack

    def counted(settings, *arguments):
        count.append(len(settings))
        return whole(settings, *arguments)

    monkeypatch.setattr(runner, "train_stack", counted)
    return count


@pytest.mark.parametrize("kept", ["results.csv", "results.parquet"])
def test_stored_results_are_written_again_without_a_run(made, ran, tmp_path, kept):
    stored, out = tmp_path / "stored" / "figure1", tmp_path / "out"
    stored.mkdir(parents=True)
    for name in (kept, "RESULT.md"):
        shutil.copy(made / "figure1" / name, stored)
    reproduce(CHOSEN, asked(out, stored.parent), CPU)
    assert ran == []
    first, again = (folder / "figure1" / "results.csv" for folder in (made, out))
    assert again.read_text() == first.read_text()
    old, new = ((folder / "figure1" / "RESULT.md").read_text() for folder in (made, out))
    table, _, how = new.partition("## How it was made")
    assert table == old.partition("## How it was made")[0]
    cases = {case.digest for case in chosen_cases(CHOSEN, asked(out))[0]}
    assert f"{len(cases)} runs were taken from stored results, whose page says: cpu, " in how
    assert "--stored RESULTS`" in how and "- device: " not in how
    # Stored once more, it still tells who made them.
    assert StoredRuns(out / "figure1").made == StoredRuns(made / "figure1").made


def test_what_is_not_stored_is_run(made, ran, tmp_path):
    stored = tmp_path / "stored" / "figure1"
    stored.mkdir(parents=True)
    rows = read_tidy(made / "figure1")
    cases = chosen_cases(CHOSEN, asked(tmp_path))[0]
    gone = next(case for case in cases if [c.digest for c in cases].count(case.digest) == 1)
    place = tuple(gone.labels[name] for name in ("row", "column", "line"))
    left = [row for row in rows if (row["row"], row["column"], row["line"]) != place]
    assert len(left) < len(rows)
    with (stored / "results.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(left)
    out = tmp_path / "out"
    reproduce(CHOSEN, asked(out, stored.parent), CPU)
    assert ran == [1]
    # Only what ran here is written as a run; the rest stays where it was stored.
    assert set(Archive(out, "figure1").finished) == {gone.digest}
    assert len(read_tidy(out / "figure1")) == len(rows)


def test_another_number_of_a_run_is_another_run(made):
    found = StoredRuns(made / "figure1")
    case = next(case for case in chosen_cases(CHOSEN, asked(made))[0] if case.private)
    assert found(case) is not None
    for key, value in (("plan.learning_rate", 0.123), ("plan.rounds", 5), ("privacy.clip", 7.0)):
        assert found(case.with_set({key: value})) is None, key
    assert found(Case(case.labels | {"seed": 9}, case.tables)) is None


def test_a_plan_is_never_taken_from_stored_results(made, monkeypatch):
    """Its row does not say by which algorithm it was made."""
    case = chosen_cases(CHOSEN, asked(made))[0][0]
    rows = [row | {"line": LINE} for row in read_tidy(made / "figure1")]
    rows += [row for row in read_tidy(made / "figure1") if row["line"] == case.labels["line"]]
    monkeypatch.setattr("dpscaffold.paper.stored.read_tidy", lambda folder: rows)
    found = StoredRuns(made / "figure1")
    assert found(case) is not None
    assert found(Case(case.labels | {"line": LINE}, case.tables)) is None


@pytest.mark.parametrize("name", ["frontier-hog", "fashion-mnist"])
def test_the_results_of_the_docs_hold_every_first_run(name):
    chosen = experiment(name)
    found = StoredRuns(RESULTS / name)
    for case in chosen.cases(chosen.seeds):
        run = found(case)
        assert run is not None, case.labels
        assert 0 < float(run.average["test_accuracy"] or 0) < 1 and run.diverged is None
        assert "NVIDIA H200" in " ".join(run.made["stored"])


def test_a_folder_without_results_is_one_sentence(tmp_path):
    words = ["reproduce", "figure1", "--stored", str(tmp_path), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, BadInput)
    assert "--stored has no results.parquet or results.csv" in str(result.exception)
    assert not (tmp_path / "out").exists()
