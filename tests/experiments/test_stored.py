"""Results of another machine: what their tidy rows hold is not run again."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold import BadInput
from dpscaffold.cli import app
from dpscaffold.paper import runner
from dpscaffold.paper.archive import Archive
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import experiment, names
from dpscaffold.paper.reproduce import ReproduceRequest, chosen_cases, reproduce
from dpscaffold.paper.results import LATE, read_tidy
from dpscaffold.paper.stored import StoredRuns, checksum
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


def write_rows(folder: Path, rows: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "results.csv").open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_what_is_not_stored_is_run(made, ran, tmp_path):
    stored = tmp_path / "stored" / "figure1"
    stored.mkdir(parents=True)
    rows = read_tidy(made / "figure1")
    cases = chosen_cases(CHOSEN, asked(tmp_path))[0]
    gone = next(case for case in cases if [c.digest for c in cases].count(case.digest) == 1)
    place = tuple(gone.labels[name] for name in ("row", "column", "line"))
    left = [row for row in rows if (row["row"], row["column"], row["line"]) != place]
    assert len(left) < len(rows)
    write_rows(stored, left)
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
    for key, value in (
        ("plan.learning_rate", 0.123),
        ("plan.rounds", 5),
        ("privacy.clip", 7.0),
        ("privacy.noise", 59.0),
    ):
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


def lines_of(made: Path) -> list[str]:
    return (made / "figure1" / "results.csv").read_text().splitlines()


def test_a_file_that_holds_no_such_results_is_one_sentence(made, tmp_path):
    """A foreign file, one with only its header, and a row that is cut short at any place."""
    header, first = lines_of(made)[:2]
    values = first.split(",")
    cuts = {f"cut {n}": f"{header}\n{','.join(values[:n])}\n" for n in range(1, len(values))}
    texts = {"foreign": "a,b\n1,2\n", "longer": f"{header}\n{first},1\n", **cuts}
    for name, text in texts.items():
        folder = tmp_path / name / "figure1"
        folder.mkdir(parents=True)
        (folder / "results.csv").write_text(text)
        with refuses("file-unreadable: results of figure1"):
            StoredRuns(folder)
    for name, text in {"empty": "", "header": f"{header}\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.csv").write_text(text)
        with refuses("no-finished-run: results.csv, which holds no finished run"):
            StoredRuns(tmp_path / name)


@pytest.mark.parametrize("junk", [b"PAR1 is not all", b"", b"\xff\xfe\x00"])
@pytest.mark.parametrize("name", ["results.csv", "results.parquet"])
def test_junk_is_one_sentence(tmp_path, name, junk):
    (tmp_path / name).write_bytes(junk)
    with pytest.raises(BadInput) as refused:
        StoredRuns(tmp_path)
    assert refused.value.code in ("file-unreadable", "no-finished-run")
    assert name in str(refused.value)


def test_every_run_has_one_summary_of_its_last_iterates(made, tmp_path):
    rows = read_tidy(made / "figure1")
    late = next(row for row in rows if row["output"] == LATE)
    write_rows(tmp_path / "none", [row for row in rows if row is not late])
    with refuses("file-unreadable: has 0 rows"):
        StoredRuns(tmp_path / "none")
    write_rows(tmp_path / "two", [*rows, late])
    with refuses("file-unreadable: has 2 rows"):
        StoredRuns(tmp_path / "two")
    for number, (name, value) in enumerate(
        [("rounds", "x"), ("test_accuracy", "x"), ("diverged", "inf"), ("output", "")]
    ):
        write_rows(tmp_path / str(number), [late | {name: value}])
        with refuses("file-unreadable"):
            StoredRuns(tmp_path / str(number))


def test_all_stored_results_are_looked_at_before_any_experiment_begins(made, monkeypatch, tmp_path):
    """Those of the first are there, and those of the second are not."""
    begun = list[str]()
    monkeypatch.setattr(
        "dpscaffold.paper.reproduce.reproduce",
        lambda chosen, *given: begun.append(chosen.name) or [],
    )
    first, second = names("all", ())[:2]
    shutil.copytree(made / "figure1", tmp_path / "stored" / first)
    words = ["reproduce", "all", "--stored", str(tmp_path / "stored"), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, BadInput) and result.exception.code == "no-finished-run"
    assert second in str(result.exception) and begun == []


def test_the_page_says_once_that_runs_came_from_elsewhere(made, tmp_path):
    """Also without a page, and with several machines; and so does the page of that page."""
    count = len({case.digest for case in chosen_cases(CHOSEN, asked(made))[0]})
    begin = f"- {count} runs were taken from stored results"
    several = (
        "- device: cpu, 3 runs in 1 s; versions: a\n- device: H200, 4 runs in 2 s; versions: b\n"
    )
    wanted = {
        "": [f"{begin}, without a RESULT.md that says where they were made"],
        several: [
            f"{begin}, whose page says:",
            "  - cpu, 3 runs in 1 s; versions: a",
            "  - H200, 4 runs in 2 s; versions: b",
        ],
    }
    for number, (text, said) in enumerate(wanted.items()):
        stored = tmp_path / f"{number} stored"
        write_rows(stored / "figure1", read_tidy(made / "figure1"))
        if text:
            (stored / "figure1" / "RESULT.md").write_text(text)
        for again in range(2):
            out = tmp_path / f"{number} {again}"
            reproduce(CHOSEN, asked(out, stored), CPU)
            page = (out / "figure1" / "RESULT.md").read_text()
            assert "\n".join(said) in page and page.count(begin) == 1
            stored = out


def test_ranks_agree_on_the_stored_results(made, monkeypatch, tmp_path):
    """Each rank would find other runs in other results."""
    agreed = list[str]()

    def agree(name, value):
        if name == "stored results":
            agreed.append(value)
            raise BadInput("ranks-differ", "this is as far as the test needs it")

    monkeypatch.setattr("dpscaffold.training.sweep.agree", agree)
    shutil.copytree(made, tmp_path / "same")
    shutil.copytree(made, tmp_path / "less")
    (tmp_path / "less" / "figure1" / "results.csv").write_text("\n".join(lines_of(made)[:9]) + "\n")
    for stored in (made, tmp_path / "same", tmp_path / "less", tmp_path / "none", None):
        given = [] if stored is None else ["--stored", str(stored)]
        size = ["--scale", "0.01", "--row", "K = 50", "--out", str(tmp_path / "out")]
        CliRunner().invoke(app, ["reproduce", "figure1", *given, *size])
    assert len(agreed) == 5 and agreed[0] == agreed[1] == checksum(made, ["figure1"])
    assert len(set(agreed)) == 4
