"""What a look at a table finds, and what it says of it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from refusals import refuses
from typed import typed

from dpscaffold.data.drafts.profile import look


def test_records_left_out_for_a_gap_are_counted_by_column(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    rows = [f"{'ns'[i % 2]},{i % 7},{'yn'[i * 7 % 4 < 2]}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["site,age,ill", *rows, ",3,y", ",4,n", "n,5,"]))
    keys = ["path=" + str(tmp_path / "t.csv"), "source=csv", "label=ill", "user=site"]
    words = [word for key in [*keys, "missing=drop"] for word in ("--set", f"data.{key}")]
    words += ["--set", "plan.rounds=1", "--set", "plan.user_ratio=1", "--out", str(tmp_path / "r")]
    code, _, err = typed(monkeypatch, capsys, "train", *words)
    assert code == 0, err
    said = "warning: 3 of 63 records lack a value and were left out: ill (1), site (2)"
    assert said in " ".join(err.split())


@pytest.mark.parametrize("name", ["hospital", "Krankenhaus", "site_id", "clinic name", "ward"])
def test_init_finds_the_sites_of_a_sorted_table(name: str, tmp_path: Path) -> None:
    """A table that is sorted by site, and within it by label, begins with one of each."""
    path = tmp_path / "sorted.csv"
    rows = (f"s{i // 5000},{i % 83},{i % 5000 // 4000},{'ab'[i // 10000]}" for i in range(20000))
    path.write_text("\n".join([f"{name},age,readmitted,kind", *rows]))
    found = look(path)
    roles = {column.name: column.role for column in found.columns}
    assert roles == {name: "user", "age": "number", "readmitted": "label", "kind": "category"}
    assert found.users == 4 and found.rows == 2000 and found.target.classes == ("0", "1")


def test_a_ward_is_no_site_where_a_hospital_is_named(tmp_path: Path) -> None:
    rows = [f"{'ab'[i % 2]},{'ns'[i % 3 > 0]},{i % 7},{i % 2}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["ward,hospital,age,ill", *rows]))
    assert [column.name for column in look(tmp_path / "t.csv").of("user")] == ["hospital"]


@pytest.mark.parametrize(
    ("cell", "said"),
    [("<5", "numbers, but for '<5'"), ("7 kg", "numbers, but for '7 kg'")],
)
def test_init_says_what_keeps_a_column_from_being_numbers(cell, said, tmp_path: Path) -> None:
    rows = [f"{i % 7 if i % 20 else cell},2020-01-{i % 28 + 1:02d},{i % 2}" for i in range(60)]
    rows.append("1,2020-13-44,1")
    (tmp_path / "t.csv").write_text("\n".join(["age,day,ill", *rows]))
    why = {column.name: column.why for column in look(tmp_path / "t.csv").of("left out")}
    assert said in why["age"] and "%Y-%m-%d, but for '2020-13-44'" in why["day"]


@pytest.mark.parametrize("begins", ["# of March\n# by north\n", "\ufeff# of March\n"])
def test_lines_above_the_header_are_found(begins, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{'ns'[i % 2]},{i % 7},{'yn'[i * 7 % 4 < 2]}" for i in range(60)]
    Path("t.csv").write_text(begins + "\n".join(["site,age,ill", *rows]), encoding="utf-8")
    code, _, err = typed(monkeypatch, capsys, "init", "t.csv")
    assert code == 0, err
    short = ["--set", "plan.rounds=1", "--set", "plan.learning_rate=0.1", "--out", "r"]
    assert typed(monkeypatch, capsys, "train", "t.toml", *short)[0] == 0
    code, out, err = typed(monkeypatch, capsys, "predict", "r", "t.csv")
    assert code == 0 and len(out.splitlines()) == 61, err


def test_a_header_that_begins_with_a_hash_is_one(tmp_path: Path) -> None:
    rows = [f"{i % 7},{i % 2}" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["#age,ill", *rows]))
    assert [column.name for column in look(tmp_path / "t.csv").columns] == ["#age", "ill"]


@pytest.mark.parametrize(
    "form", ["%d.%m.%Y", "%d.%m.%y", "%m/%d/%Y", "%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%d %H:%M", "%d-%m-%Y"]
)
def test_dates_are_found_as_they_are_written(form: str, tmp_path: Path) -> None:
    days = [datetime(2019, 1, 1) + timedelta(days=37 * i, minutes=i) for i in range(60)]
    rows = [f"{day.strftime(form)},{i % 2}" for i, day in enumerate(days)]
    (tmp_path / "t.csv").write_text("\n".join(["admitted,ill", *rows]))
    found = look(tmp_path / "t.csv").of("date")
    assert [column.forms for column in found] == [(form,)]


def test_what_is_said_to_programs_names_what_is_outside(tmp_path, monkeypatch, capsys) -> None:
    rows = [f"{i % 7},{i % 2}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["age,ill", *rows]))
    monkeypatch.chdir(tmp_path)
    code, out, err = typed(monkeypatch, capsys, "init", "t.csv", "--json")
    assert code == 0 and "Epsilon does not cover" in json.loads(out)["outside"], err


def test_a_site_that_sent_another_kind_of_file_is_named(tmp_path, monkeypatch, capsys) -> None:
    """Its records would be missing without a word."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "sites"
    (folder / ".hidden").mkdir(parents=True)
    for name in ("north", "south"):
        rows = [f"{i % 7},{'yn'[i * 7 % 4 < 2]}" for i in range(40)]
        (folder / f"{name}.csv").write_text("\n".join(["age,ill", *rows]))
    for name in ("east.xlsx", "west.csv.gz", "notes.md", ".hidden/a.xlsx"):
        (folder / name).write_bytes(b"PK")
    said = "warning: no csv tables, so skipped: east.xlsx, west.csv.gz"
    code, _, err = typed(monkeypatch, capsys, "init", "sites")
    assert code == 0 and said + "\n" in err
    short = ["--set", "plan.rounds=1", "--set", "plan.learning_rate=0.1", "--out", "r"]
    code, _, err = typed(monkeypatch, capsys, "train", "sites.toml", *short)
    assert code == 0 and said in " ".join(err.split())
    code, out, _ = typed(monkeypatch, capsys, "data", "describe", "sites.toml")
    assert code == 0 and said in " ".join(out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.csv.gz"], "unpack it, or convert it"),
        (["a.xlsx"], "unpack it, or convert it"),
        (["t.csv", "--epsilon", "inf"], "--epsilon is inf"),
    ],
)
def test_what_cannot_be_looked_at_is_one_sentence(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("a.csv.gz", "a.xlsx", "t.csv"):
        Path(name).write_text("age,ill\n1,0\n2,1\n")
    code, _, err = typed(monkeypatch, capsys, "init", *words)
    assert code == 2 and said in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*.toml"))


@pytest.mark.parametrize("numbers", [False, True])
def test_a_column_of_school_classes_is_not_taken_for_the_label(tmp_path, numbers):
    """Its name is that of a label; with so many texts it is not one. A number may have any."""
    path = tmp_path / "pupils.csv"
    values = [str(k % 60) if numbers else f"c{k % 60}" for k in range(600)]
    rows = [f"{k % 7},{k % 11},{value}" for k, value in enumerate(values)]
    path.write_text("\n".join(["iq,score,class", *rows]) + "\n", encoding="utf-8")
    if numbers:
        assert [one.name for one in look(path).of("label")] == ["class"]
        return
    with refuses("no-label-found: 'class' … --user 'class'"):
        look(path)
    assert [one.name for one in look(path, "score", "class").of("user")] == ["class"]
