"""Files as hospitals send them: one per site, each written by its own spreadsheet."""

from __future__ import annotations

import json
import tomllib
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from hospitals import READ_AS, WARDS, rows_of, write
from refusals import refuses
from stated import summary_of
from stated import written as statement_in
from typed import typed

from dpscaffold.data import load_federation, prepare
from dpscaffold.data.config import parse_data
from dpscaffold.data.loading import read_pool

TABLE = {
    **READ_AS,
    "missing": {"stay": 3.5, "ward": "category", "weight": "indicator"},
    "preprocess": ["standardise", "unit-norm"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty sites, half of them German, in four encodings; the last has a single record."""
    home = tmp_path_factory.mktemp("hospitals") / "sites"
    home.mkdir()
    for site in range(30):
        encoding = ("utf-8", "cp1252", "utf-8-sig", "utf-16")[site % 4]
        rows = rows_of(site, 1 if site == 29 else 40)
        write(home / f"site{site:02}.csv", rows, site % 2 == 1, encoding)
    return home


def test_a_folder_of_mixed_files_is_read_as_its_records_are(folder: Path) -> None:
    """Against the rows that were written: every cell, whatever its file's encoding and comma."""
    pool = read_pool(parse_data({**TABLE, "path": str(folder)}))
    rows = [row for site in range(30) for row in rows_of(site, 1 if site == 29 else 40)]
    expected = []
    for row in rows:
        day, month, year = map(int, str(row["admitted"]).split("."))
        numbers = [row["age"], 3.5 if row["stay"] is None else row["stay"]]
        numbers += [0.0 if row["weight"] is None else row["weight"]]
        numbers += [(date(year, month, day) - date(1970, 1, 1)).days, row["weight"] is None]
        expected.append([*numbers, *(row["ward"] == w for w in WARDS), row["ward"] is None])
    np.testing.assert_array_equal(pool.features, np.array(expected, dtype=np.float32))
    assert pool.names == tuple(f"site{site:02}" for site in range(30))
    assert pool.users is not None and (np.bincount(pool.users) == [40] * 29 + [1]).all()
    assert pool.target.classes == ("ja", "nein")
    said = " ".join(step.sentence for step in pool.preparation if step.protection == "unprotected")
    assert "'ward'" in said and "'stay'" not in said


def test_raw_rows_are_coded_as_the_file_was(folder: Path) -> None:
    """What a model is given later goes through the same rules."""
    pool = read_pool(parse_data({**TABLE, "path": str(folder)}))
    coding = pool.preparation[0]
    rows = [[row[name] for name in coding.columns] for row in rows_of(0)]  # type: ignore[attr-defined]
    np.testing.assert_array_equal(coding(np.array(rows, dtype=object)), pool.features[:40])


def test_a_file_of_new_rows_is_coded_as_the_training_files_were(folder: Path) -> None:
    """Both ways in for new rows, a file in its own dialect and a torch module, give the very
    features that training had."""
    from dpscaffold.data.tables.rows import raw_parts
    from dpscaffold.models.module import _Coding

    pool = read_pool(parse_data({**TABLE, "path": str(folder)}))
    coding = pool.preparation[0]
    part = next(iter(raw_parts(folder / "site01.csv", [coding], coding.columns)))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(part.features, pool.features[40:80])
    codes = {
        name: {v: float(i) for i, v in enumerate(values)} for name, values in coding.categories
    }  # type: ignore[attr-defined]
    rows = []
    for row, features in zip(rows_of(1), pool.features[40:80], strict=True):
        told = {**row, "admitted": features[3], "ward": codes["ward"].get(row["ward"])}  # type: ignore[arg-type]
        rows.append([np.nan if told[n] is None else told[n] for n in coding.columns])  # type: ignore[attr-defined]
    module = _Coding(coding)  # type: ignore[arg-type]
    out = module(torch.tensor(np.array(rows, dtype=np.float32)))
    np.testing.assert_array_equal(out.numpy(), pool.features[40:80])


def test_a_pattern_chooses_files(folder: Path) -> None:
    pool = read_pool(parse_data({**TABLE, "path": str(folder / "site0*.csv")}))
    assert len(pool.names) == 10


def test_who_is_left_out_is_named(folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """In describe, in the run, in the statement and in the ledger; with users as the unit
    the rule alone."""
    lines = [
        f"{key} = {value}"
        for key, value in (
            ("source", '"csv"'),
            ("path", json.dumps(str(folder))),
            ("label", '"readmitted"'),
            ("encoding", '"auto"'),
            ("delimiter", '"auto"'),
            ("decimal", '"auto"'),
            ("exclude", '["patient", "admitted", "ward", "weight"]'),
            ("missing", '"drop"'),
        )
    ]
    plan = "[plan]\nrounds = 2\nlocal_steps = 2\n[privacy]\nnoise = 5.0\n"
    (tmp_path / "c.toml").write_text("[data]\n" + "\n".join(lines) + "\n" + plan)
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> str:
        code, out, err = typed(monkeypatch, capsys, *words)
        assert code == 0, err
        return out + err

    assert "site29" in run("data", "describe", "c.toml")
    assert "Left out for too few records: site29" in run("train", "c.toml", "--out", "run")
    for name in ("ledger.jsonl", "model/privacy.json", "model/privacy.md"):
        assert "site29" in (tmp_path / "run" / name).read_text(), name
    run("train", "c.toml", "--out", "hidden", "--set", "privacy.unit=user")
    for name in ("ledger.jsonl", "model/privacy.json", "model/privacy.md"):
        text = (tmp_path / "hidden" / name).read_text()
        assert "site29" not in text and "fewer than 2 records" in text, name


def test_hive_folders_are_columns(tmp_path: Path) -> None:
    for site in ("north", "south"):
        (tmp_path / f"site={site}").mkdir()
        table = pa.table({"age": [1.0, 2.0, 3.0], "ill": ["no", "yes", "no"]})
        pa.parquet.write_table(table, tmp_path / f"site={site}" / "part-0.parquet")
    settings = {"source": "parquet", "path": str(tmp_path), "label": "ill", "user": "site"}
    pool = read_pool(parse_data({**settings, "preprocess": []}))
    assert pool.names == ("north", "south") and pool.features.shape == (6, 1)


def test_titles_are_skipped_comments_refused_and_encodings_named(tmp_path: Path) -> None:
    text = "# exported\nage;ort;ill\n31,5;Köln;no\n58,0;Bonn;yes\n"
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    settings = {
        "source": "csv",
        "path": str(tmp_path / "a.csv"),
        "label": "ill",
        "users": 2,
        "delimiter": ";",
        "decimal": ",",
        "encoding": "latin-1",
        "categories": ["ort"],
    }
    pool = read_pool(parse_data(settings))
    assert pool.features.tolist() == [[31.5, 0.0, 1.0], [58.0, 1.0, 0.0]]
    assert pool.preparation[0].categories[0][1] == ("Bonn", "Köln")  # type: ignore[attr-defined]
    (tmp_path / "a.csv").write_bytes(text.replace("58", "# page 2\n58").encode("latin-1"))
    with refuses("row-length-differs: (line 4) … take lines of comments out"):
        read_pool(parse_data(settings))


def spoil(folder: Path, tmp_path: Path, change) -> dict[str, object]:
    """A copy of three sites, one of them spoilt, and its settings."""
    home = tmp_path / "sites"
    home.mkdir()
    for site in range(3):
        write(home / f"site{site}.csv", rows_of(site), german=False)
    change(home / "site1.csv")
    return {**TABLE, "path": str(home)}


def replacing(old: str, new: str):
    return lambda path: path.write_text(path.read_text().replace(old, new, 1))


def one_more(path: Path) -> None:
    """A whole further column."""
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{head},extra", *(f"{line},1" for line in lines)]) + "\n")


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (replacing("stay", "stey"), {}, "columns-differ: site1.csv … 'stay' … 'stey'"),
        (replacing("age,", "age,extra,"), {}, "row-length-differs: site1.csv … line 2 … row has 7"),
        (one_more, {}, "columns-differ: site0.csv … 'extra'"),
        (replacing(".2023", "/2023"), {}, "unreadable-value: site1.csv … 'admitted'"),
        (
            lambda path: path.write_bytes(path.read_bytes().replace("Männer".encode(), b"M\xe4")),
            {"encoding": "utf-8"},
            "wrong-encoding: site1.csv",
        ),
        (lambda path: None, {"encoding": "klingon"}, "wrong-encoding"),
        (lambda path: None, {"missing": {"stey": 0}}, "unknown-column: 'stay'"),
        (lambda path: None, {"missing": {"ward": "indicator"}}, "wrong-column-kind"),
        (lambda path: None, {"exclude": ["readmitted"]}, "column-needed"),
        (lambda path: None, {"missing": "refuse"}, "missing-value"),
        (lambda path: path.write_text("x" * 40), {}, "empty-file: site1.csv"),
    ],
)
def test_bad_files_are_one_sentence(folder, tmp_path, change, more, said) -> None:
    with refuses(said):
        load_federation({**spoil(folder, tmp_path, change), **more})


def test_a_missing_site_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("site,age,ill\nnorth,1,no\n,2,yes\nsouth,3,no\n")
    with refuses("missing-value: 'site' … 1 of 3"):
        load_federation(
            {"source": "csv", "path": str(tmp_path / "a.csv"), "label": "ill", "user": "site"}
        )


@pytest.mark.parametrize("streamed", [False, True], ids=["in memory", "prepared"])
def test_identifiers_and_crowds_of_categories_are_pointed_out(
    tmp_path: Path, streamed: bool
) -> None:
    """Long numbers too, which float32 would make equal; ages, dates and amounts are left alone."""
    lines = [
        f"{1000 + i},{i % 7},c{i % 120},{4_000_000_000 + i},{i / 3:.3f},{i % 2}" for i in range(360)
    ]
    header = "visit,age,code,insurance,dose,ill\n"
    (tmp_path / "a.csv").write_text(header + "\n".join(lines) + "\n")
    notes: list[str] = []
    settings = {"source": "csv", "path": str(tmp_path / "a.csv"), "label": "ill", "users": 3}
    settings |= {"categories": ["code"]}
    if streamed:
        prepare(settings, tmp_path / "prepared", notify=notes.append)
    else:
        load_federation(settings, notes.append)
    warnings = [note for note in notes if note.startswith("warning:")]
    assert {w.split("'")[1] for w in warnings} == {"visit", "code", "insurance"}, notes
    assert all("exclude it" in warning for warning in warnings)


def test_an_identifier_is_one_over_all_files(tmp_path: Path) -> None:
    """Within each small file ages differ too; bed numbers begin again in each."""
    for site in range(6):
        rows = [f"{site * 10 + i},{20 + i},{i},{i % 2}" for i in range(8)]
        text = "visit,age,bed,ill\n" + "\n".join(rows) + "\n"
        (tmp_path / f"site{site}.csv").write_text(text)
    notes: list[str] = []
    load_federation({"source": "csv", "path": str(tmp_path), "label": "ill"}, notes.append)
    warnings = [note for note in notes if note.startswith("warning: column")]
    assert [w.split("'")[1] for w in warnings] == ["visit"], notes


def test_thirty_hospitals_in_two_commands(folder: Path, tmp_path: Path, monkeypatch, capsys):
    """From a folder of mixed files to a private model, without touching what was drafted."""
    monkeypatch.chdir(tmp_path)
    code, out, err = typed(monkeypatch, capsys, "init", folder)
    assert code == 0, err
    assert "Epsilon does not cover" in out and "patient: left out (an identifier" in out
    text = (tmp_path / "sites.toml").read_text()
    tables = tomllib.loads(text)
    data = tables["data"]
    assert data["label"] == "readmitted" and data["dates"] == {"admitted": "%d.%m.%Y"}
    assert data["exclude"] == ["patient"] and data["categories"] == ["ward"]
    assert data["encoding"] == data["decimal"] == data["delimiter"] == "auto"
    assert "learning_rate" not in tables["plan"], "a step size that suits the noise"
    assert data["missing"]["stay"] == "indicator" and data["missing"]["ward"] == "category"
    code, out, err = typed(monkeypatch, capsys, "train", "sites.toml")
    assert code == 0, err
    assert "site29" in err, "who is left out is named"
    said = statement_in(tmp_path / "runs" / "sites")
    assert 0.95 <= said.towards("server").epsilon <= 1.0
    summary = summary_of(tmp_path / "runs" / "sites")
    assert summary["ended"] == "completed" and summary["rounds"] == 100
    code, _, err = typed(monkeypatch, capsys, "init", folder)
    assert code == 2 and "is there already" in err and text == (tmp_path / "sites.toml").read_text()


def test_init_reads_other_kinds(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        (tmp_path / "hive" / f"hospital={site}").mkdir(parents=True)
        table = pa.table({"age": rng.normal(size=40), "ill": ["no", "yes"] * 20})
        pa.parquet.write_table(table, tmp_path / "hive" / f"hospital={site}" / "0.parquet")
    lines = [f"{rng.normal():.3f},{i % 3},{rng.normal():.4f}" for i in range(90)]
    (tmp_path / "one.csv").write_text("dose,site,target\n" + "\n".join(lines) + "\n")
    ranged = {"kind": "number", "low": -3, "high": 4}
    for name, expected in (
        ("hive", {"source": "parquet", "user": "hospital", "label": "ill"}),
        ("one.csv", {"source": "csv", "user": "site", "target": ranged}),
    ):
        code, _, err = typed(monkeypatch, capsys, "init", name, "--json")
        assert code == 0, err
        tables = tomllib.loads((tmp_path / f"{Path(name).stem}.toml").read_text())
        assert {key: tables["data"][key] for key in expected} == expected
        short = ["--set", "plan.rounds=2", "--set", "plan.local_steps=1", "-q"]
        code, _, err = typed(monkeypatch, capsys, "train", f"{Path(name).stem}.toml", *short)
        assert code == 0, (name, err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "does not exist"),
        ([".", "--epsilon", "0"], "--epsilon is 0"),
        (["a.csv", "--label", "il"], "did you mean 'ill'"),
        (["empty.csv"], "empty.csv"),
        (["a.npz"], "init drafts tables"),
    ],
)
def test_init_refuses_in_one_sentence(words, said, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("age,ill\n1,no\n2,yes\n")
    (tmp_path / "empty.csv").write_text("age,ill\n")
    (tmp_path / "a.npz").write_text("no array")
    code, _, err = typed(monkeypatch, capsys, "init", *words)
    assert code == 2 and said in err and err.count("error:") == 1
    assert not list(tmp_path.glob("*.toml"))
