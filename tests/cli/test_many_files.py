"""From a folder of one file per site to predictions for another such folder, as it is typed."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from hospitals import READ_AS, rows_of, write
from typed import typed

from dpscaffold import run

TABLE = {
    **READ_AS,
    "path": "sites",
    "missing": {"stay": "indicator", "ward": "category", "weight": "drop"},
}
ENCODINGS = ("utf-8", "cp1252", "utf-8-sig", "utf-16")


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten sites' training files, their new rows, a spreadsheet among them, and a run."""
    home = tmp_path_factory.mktemp("hospitals")
    for folder, first in (("sites", 0), ("new", 100)):
        (home / folder).mkdir()
        for k in range(10):
            path = home / folder / f"site{k}.csv"
            write(path, rows_of(first + k, 22), k % 2 == 1, ENCODINGS[k % 4])
    (home / "new" / "site10.xlsx").write_bytes(b"PK")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        plan = {"rounds": 2, "local_steps": 2, "user_ratio": 0.5}
        run({"data": TABLE, "plan": plan}, out=home / "run")
    return home


@pytest.fixture
def dpscaffold(hospitals: Path, tmp_path: Path, monkeypatch, capsys):
    """The command, typed where the folders are."""
    shutil.copytree(hospitals, tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return lambda line: typed(monkeypatch, capsys, *line.split())


def test_a_folder_of_ten_hospitals_is_predicted_and_told(dpscaffold) -> None:
    code, printed, said = dpscaffold("predict run new --keep patient")
    assert code == 0
    assert said.splitlines()[0] == (
        "warning: no table of .csv or .parquet, so skipped: site10.xlsx"
    )
    assert said.splitlines()[1].startswith(
        "20 of 220 rows have no prediction (site0.csv 2, site1.csv 2, site2.csv 2, site3.csv 2 and "
        "6 more): the model was trained without such records (site0.csv, row 5 lacks a value of "
        "column 'weight')"
    )
    rows = list(csv.DictReader(printed.splitlines()))
    wanted = [(f"site{k}.csv", str(100_000 * (100 + k) + i)) for k in range(10) for i in range(22)]
    assert [(row["file"], row["patient"]) for row in rows] == wanted
    assert [i for i, row in enumerate(rows[:22]) if not row["prediction"]] == [5, 16]

    code, told, said = dpscaffold("predict run new --keep patient --out said.csv --json")
    assert code == 0 and said == ""
    report = json.loads(told)
    assert (report["file"], report["rows"], report["without_prediction"]) == ("said.csv", 220, 20)
    assert report["skipped"] == ["site10.xlsx"] and len(report["notes"]) == 1
    assert report["files"][3] == {
        "file": "site3.csv",
        "rows": 22,
        "without_prediction": 2,
        "why": "row 5 lacks a value of column 'weight'",
    }
    assert Path("said.csv").read_text() == printed

    code, _, said = dpscaffold("predict run new/site[0-3].csv new/site9.csv --out five.parquet")
    assert code == 0 and "110 rows of 5 files: five.parquet" in said
    code, told, _ = dpscaffold("predict run new/*.csv --out all.csv --keep patient --json")
    report = json.loads(told)
    assert report["file"] == "all.csv"
    assert report["columns"] == list(rows[0])
    assert Path("all.csv").read_text() == printed


def test_a_folder_of_ten_hospitals_is_evaluated_as_a_whole_and_by_file(dpscaffold) -> None:
    code, told, said = dpscaffold("evaluate run new --json")
    assert code == 0 and said == ""
    found = json.loads(told)
    assert (found["rows"], found["left_out"]) == (200, 20)
    assert found["reason"] == "site0.csv, row 5 lacks a value of column 'weight'"
    assert [site["site"] for site in found["sites"]] == [f"site{k}" for k in range(10)]
    assert [file["file"] for file in found["files"]] == [f"site{k}.csv" for k in range(10)]
    assert found["skipped"] == ["site10.xlsx"]
    for file, site in zip(found["files"], found["sites"], strict=True):
        alone = json.loads(dpscaffold(f"evaluate run new/{file['file']} --json")[1])
        assert len(alone["files"]) == 1 and not alone["skipped"] and not alone["notes"]
        same = ("rows", "left_out", "reason", "metrics", "baseline")
        assert {key: file[key] for key in same} == {key: alone[key] for key in same}
        assert site["accuracy"] == file["metrics"]["test_accuracy"]
    two = json.loads(dpscaffold("evaluate run new/site1.csv new/site0.csv --json")[1])
    assert two["rows"] == 40 and two["files"] == [found["files"][1], found["files"][0]]
    code, printed, said = dpscaffold("evaluate run new --figure f.svg")
    assert code == 0 and Path("f.svg").exists() and "skipped: site10.xlsx" in said
    for words in ("200 rows", "20 rows were left out", "site0.csv, row 5", "site9"):
        assert words in printed


@pytest.mark.parametrize(
    "line", ["predict run new --out said.csv", "predict run new", "evaluate run new"]
)
def test_a_site_that_cannot_be_used_is_one_sentence_and_nothing_is_written(
    dpscaffold, line: str
) -> None:
    path = Path("new/site4.csv")
    path.write_bytes(path.read_bytes().replace(b"stay", b"days", 1))
    before = sorted(Path().rglob("*"))
    code, printed, said = dpscaffold(line)
    assert code == 2 and printed == "" and said.count("\n") == 1
    assert said.startswith("error: new/site4.csv has no feature column 'stay'")
    assert sorted(Path().rglob("*")) == before


def test_a_single_file_is_answered_without_a_column_of_files(dpscaffold) -> None:
    code, printed, _ = dpscaffold("predict run new/site1.csv")
    assert code == 0 and printed.splitlines()[0] == (
        '"prediction","probability_ja","probability_nein"'
    )
    code, _, said = dpscaffold("predict run new/site1.csv --out run")
    assert code == 2 and said == "error: run is a folder; name one of its files\n"
    code, _, said = dpscaffold("predict run nwe")
    assert code == 2 and said.startswith(
        "error: nwe cannot be read: there is no such file or folder"
    )
