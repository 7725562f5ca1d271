"""Mistakes in tables that used to pass in silence: each is read as it is meant, asked about, or
refused with a remedy."""

from __future__ import annotations

import tomllib
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pytest
import torch
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold import Logistic, Model, load_model
from dpscaffold.cli import app
from dpscaffold.data import federation_of, load, load_federation, prepare
from dpscaffold.data.drafts.profile import look
from dpscaffold.data.tables.cells import days, same_values
from dpscaffold.data.tables.codec import Coding
from dpscaffold.deployment.protocol.agreement import SchemaSettings
from dpscaffold.deployment.site.reading import read_records
from dpscaffold.errors import BadInput
from dpscaffold.models import evaluate_files, predict_files

SPELLINGS = {"ready": {"yes": ["Yes", "ys", "ja"], "no": ["nein"]}, "ward": {"A": ["a", "Aa"]}}
KEYS: dict[str, Any] = {
    "source": "csv",
    "label": "ready",
    "user": "site",
    "categories": ["ward"],
    "preprocess": [],
}


def table(path: Path, spelled: bool, rows: int = 60) -> Path:
    """A table of two sites; ``spelled``: with several spellings of each value."""
    yes, no = (["yes", "Yes", "ys", " ja "], ["no", "nein"]) if spelled else (["yes"], ["no"])
    wards = ["A", "a", "Aa", "B"] if spelled else ["A", "A", "A", "B"]
    lines = []
    for i in range(rows):
        ready = yes[i // 2 % len(yes)] if i % 5 < 3 else no[i // 2 % len(no)]
        lines.append(f"{'ns'[i % 2]},{i % 13},{wards[i % 4]},{ready}")
    path.write_text("\n".join(["site,age,ward,ready", *lines]) + "\n")
    return path


def init(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    """What init answers in a folder: its status and all that it says."""
    monkeypatch.chdir(folder)
    answer = CliRunner().invoke(app, ["init", *words])
    said = str(answer.exception) if isinstance(answer.exception, BadInput) else answer.output
    return 2 if isinstance(answer.exception, BadInput) else answer.exit_code, " ".join(said.split())


def drafted(folder: Path, name: str = "t.toml") -> dict[str, Any]:
    return tomllib.loads((folder / name).read_text())["data"]


@pytest.mark.parametrize("how", ["file", "stream", "frame"])
def test_spellings_of_one_value_are_one_class_and_one_category(tmp_path: Path, how: str) -> None:
    """As if somebody had written every value alike."""
    plain = load_federation({**KEYS, "path": str(table(tmp_path / "plain.csv", False))})
    path = table(tmp_path / "spelled.csv", True)
    assert len(load_federation({**KEYS, "path": str(path)}).target.classes) == 6
    if how == "file":
        read = load_federation({**KEYS, "path": str(path), "values": SPELLINGS})
    elif how == "stream":
        settings = {**KEYS, "path": str(path), "values": SPELLINGS}
        read = load(prepare(settings, tmp_path / "kept"))
    else:
        keys = {k: v for k, v in KEYS.items() if k not in ("source", "label", "user")}
        read = federation_of(pyarrow.csv.read_csv(path), "ready", "site", values=SPELLINGS, **keys)
    assert read.target == plain.target and read.target.classes == ("no", "yes")
    for a, b in ((read.train, plain.train), (read.test, plain.test)):
        assert torch.equal(a.features, b.features) and torch.equal(a.labels, b.labels)


def test_new_rows_are_read_with_the_spellings_of_the_training(tmp_path: Path) -> None:
    path = table(tmp_path / "spelled.csv", True)
    data = load_federation({**KEYS, "path": str(path), "values": SPELLINGS})
    params = torch.linspace(-1, 1, Logistic(data.dimension, 2).parameters)
    model = load_model(Model.of(data, Logistic(data.dimension, 2), params).save(tmp_path / "m"))
    new = table(tmp_path / "new.csv", False, 20)
    again = table(tmp_path / "again.csv", True, 20)
    said = [predict_files(model, one, tmp_path / f"{one.stem}.out.csv") for one in (new, again)]
    assert [(one.rows, one.incomplete) for one in said] == [(20, 0)] * 2
    both = [(tmp_path / f"{n}.out.csv").read_text() for n in ("new", "again")]
    assert both[0] == both[1]
    found = [evaluate_files(model, one, "ready").whole for one in (new, again)]
    assert found[0].metrics == found[1].metrics and found[0].confusion == found[1].confusion
    rows = [{"age": 3, "ward": ward} for ward in ("A", "a", " Aa ")]
    assert model.scores(rows).unique(dim=0).shape[0] == 1
    with refuses("bad-labels"):
        wrong = tmp_path / "wrong.csv"
        wrong.write_text("site,age,ward,ready\nn,1,A,perhaps\n")
        evaluate_files(model, wrong, "ready")


def test_exported_models_know_the_spellings(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript, which is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime, not installed")
    from dpscaffold.models.export import export

    path = table(tmp_path / "spelled.csv", True)
    data = load_federation({**KEYS, "path": str(path), "values": SPELLINGS})
    params = torch.linspace(-1, 1, Logistic(data.dimension, 2).parameters)
    model = Model.of(data, Logistic(data.dimension, 2), params)
    session = runtime.InferenceSession(str(export(model, "onnx", tmp_path / "m.onnx")))
    given = {"numbers": np.float32([[3], [3], [3]]), "ward": np.array([["A"], ["a"], ["Aa"]])}
    (scores,) = session.run(None, given)
    assert len(np.unique(scores, axis=0)) == 1


def test_deployed_sites_read_spellings_alike(tmp_path: Path) -> None:
    rows = SchemaSettings(
        features=("age", "ward"),
        categories={"ward": ("A", "B")},
        label="ready",
        classes=("no", "yes"),
        values=SPELLINGS,
    )
    found = []
    for spelled in (False, True):
        table(tmp_path / "d.csv", spelled)
        found.append(read_records({"source": "csv", "path": "d.csv"}, tmp_path, rows))
    assert torch.equal(found[0].features, found[1].features)
    assert torch.equal(found[0].labels, found[1].labels)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"values": {"ready": ["ja"]}}, "not-a-table"),
        ({"values": {"ready": {"yes": "ja"}}}, "not-a-list: values.ready.yes is 'ja'"),
        ({"values": {"ready": {"yes": [1]}}}, "not-a-list"),
        ({"values": {"ready": {"yes": ["ja"], "no": ["ja"]}}}, "value-named-twice: 'ja' … 'no'"),
        (
            {"values": {"ready": {"yes": ["no"], "no": []}}},
            "value-named-twice: 'no' … 'yes' … 'no'",
        ),
        ({"values": {"ready": {"yes": [" "]}}}, "empty-text"),
        ({"values": {"age": {"1": ["one"]}}}, "unknown-column: 'age'"),
        (
            {"values": {"ready": {"ja": ["yes"]}}, "classes": ["no", "yes"]},
            "unknown-category: 'ja'",
        ),
        (
            {"values": {"ready": {"yes": ["ja"]}}, "classes": ["no", "yes", "ja"]},
            "value-named-twice: 'ja'",
        ),
        (
            {"values": {"ready": {"yes": ["ja"]}}, "na_values": ["ja"]},
            "value-named-twice: values.ready … na_values … 'ja'",
        ),
        (
            {
                "values": {"ready": {"1": ["ja"]}},
                "target": {"kind": "number", "low": 0, "high": 1},
            },
            "unknown-column",
        ),
    ],
)
def test_spellings_that_cannot_be_meant_are_refused(
    tmp_path: Path, keys: dict[str, Any], said: str
) -> None:
    with refuses(said) as caught:
        load_federation({**KEYS, "path": str(tmp_path / "nowhere.csv"), **keys})
    assert "\n" not in str(caught.value)


def test_init_lists_the_values_of_a_label_and_joins_yes_and_no(tmp_path, monkeypatch) -> None:
    """Four sites answered in four ways: eight classes were drafted without a word."""
    folder = tmp_path / "sites"
    folder.mkdir()
    answers = (("ja", "nein"), ("oui", "non"), ("yes", "no"), ("Ja", "Nein"))
    for site, (yes, no) in zip("abcd", answers, strict=True):
        rows = [f"{i % 17},{yes if i % 3 else no}" for i in range(40)]
        (folder / f"{site}.csv").write_text("\n".join(["age,ready", *rows]))
    code, said = init(tmp_path, monkeypatch, "sites", "--label", "ready", "--out", "t.toml")
    assert code == 0 and "8 values: 'ja' (26 rows)" in said, said
    assert "read as one: 'oui', 'yes', 'Ja' as 'ja', 'non', 'no', 'Nein' as 'nein'" in said
    keys = drafted(tmp_path)
    assert keys["values"] == {"ready": {"ja": ["oui", "yes", "Ja"], "nein": ["non", "no", "Nein"]}}
    assert load_federation(keys).target.classes == ("ja", "nein")
    del keys["values"]
    notes: list[str] = []
    assert len(load_federation(keys, notes.append).target.classes) == 8
    assert any('add values.ready = { Ja = ["ja", "oui", "yes"]' in note for note in notes), notes


def test_values_that_differ_in_more_than_their_writing_stay_apart() -> None:
    assert same_values({"low": 5, "slow": 5, "grade 1": 5, "grade 2": 5, "n/a": 1}) == {}


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        (["n,1,yes"] * 40, ["--label", "ready"], "holds a single value, 'yes'"),
        (["n,1,yes", "s,2,Yes"] * 20, ["--label", "ready"], "holds a single value"),
        (["n,1,yes", "n,2,no"] * 20, ["--label", "ready", "--user", "site"], "names 1 site, of"),
        (["n,1,yes", "s,2,no"] * 5, ["--label", "ready", "--user", "site"], "0 have 10 records"),
        (["n,1,yes", "n,2,no"] * 5, ["--label", "ready"], "holds 10 records, and two sites need"),
        (["n,1,yes", "s,2,no"] * 20, ["--label", "ready", "--user", "ready"], "both 'ready'; name"),
        (["n,1,yes", "s,2,no"] * 20, ["--label", "site,ready", "--user", "site"], "both 'site'"),
    ],
)
def test_init_refuses_what_train_would_refuse(rows, words, said, tmp_path, monkeypatch) -> None:
    (tmp_path / "t.csv").write_text("\n".join(["site,age,ready", *rows]) + "\n")
    code, told = init(tmp_path, monkeypatch, "t.csv", *words)
    assert code == 2 and said in told, told
    assert not list(tmp_path.glob("*.toml"))


def test_init_refuses_a_folder_of_one_site(tmp_path, monkeypatch) -> None:
    (tmp_path / "sites").mkdir()
    (tmp_path / "sites" / "a.csv").write_text("age,ready\n" + "1,yes\n2,no\n" * 20)
    code, told = init(tmp_path, monkeypatch, "sites")
    assert code == 2 and "holds 1 file, of which 1 has 10 records or more" in told
    assert not list(tmp_path.glob("*.toml"))


def test_init_says_what_to_write_for_arrays(tmp_path, monkeypatch) -> None:
    np.savez(tmp_path / "a.npz", features=np.ones((30, 2)), labels=np.arange(30) % 2)
    code, told = init(tmp_path, monkeypatch, "a.npz")
    assert code == 2 and "source = 'npz' and path = 'a.npz' under [data]" in told, told
    assert not list(tmp_path.glob("*.toml"))


def test_few_records_go_to_as_many_sites_as_training_keeps(tmp_path, monkeypatch) -> None:
    """Ten sites of five records each were drafted, and refused by train."""
    (tmp_path / "t.csv").write_text("age,dose,ready\n" + "1,2,yes\n2,3,no\n" * 25)
    assert init(tmp_path, monkeypatch, "t.csv")[0] == 0
    assert drafted(tmp_path)["users"] == 5
    assert load_federation(drafted(tmp_path)).users == 5


def sites(folder: Path, **more: str) -> Path:
    """A folder of three sites, and texts of these names."""
    folder.mkdir()
    for site in ("aachen", "bonn", "celle"):
        rows = [f"{i % 17},{i % 5}.5,{'yes' if i % 3 else 'no'}" for i in range(30)]
        (folder / f"{site}.csv").write_text("\n".join(["age,dose,ready", *rows]) + "\n")
    for name, text in more.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_texts_about_tables_are_left_aside_with_a_note(tmp_path, monkeypatch) -> None:
    """A README.txt was the first table of the folder, and the others were blamed for it."""
    sites(tmp_path / "sites", README="data as of january\n\nask us\n", phone="Anna: 1\nBert: 2\n")
    code, said = init(tmp_path, monkeypatch, "sites", "--out", "t.toml")
    assert code == 0 and "skipped: README.txt" in said and "skipped: phone.txt" in said
    notes: list[str] = []
    data = load_federation(drafted(tmp_path), notes.append)
    assert data.names == ("aachen", "bonn", "celle")
    assert sum("skipped" in note for note in notes) == 2
    model = Model.of(data, Logistic(data.dimension, 2), torch.zeros(2 * (data.dimension + 1)))
    model.save(tmp_path / "m")
    for command in ("predict", "evaluate"):
        words = [command, "m", "sites", *(["--label", "ready"] if command == "evaluate" else [])]
        answer = CliRunner().invoke(
            app, [*words, "--json", *(["--out", "p.csv"] if command == "predict" else [])]
        )
        assert answer.exit_code == 0, (answer.output, answer.exception)
        assert "README.txt" in answer.output and "phone.txt" in answer.output


def test_a_text_with_the_columns_of_the_tables_is_one(tmp_path: Path) -> None:
    folder = sites(tmp_path / "sites")
    (folder / "celle.csv").rename(folder / "celle.txt")
    assert look(folder).users == 3


def test_a_column_that_a_site_lacks_is_refused_with_a_remedy_that_works(tmp_path, monkeypatch):
    folder = sites(tmp_path / "sites")
    lines = (folder / "bonn.csv").read_text().splitlines()
    (folder / "bonn.csv").write_text(
        "\n".join(",".join(line.split(",")[::2]) for line in lines) + "\n"
    )
    keys = {**KEYS, "path": str(folder), "user": None, "categories": []}
    with refuses("columns-differ: bonn.csv … 'dose' … aachen.csv … absent = [\"dose\"]"):
        load_federation(keys)
    without = load_federation({**keys, "exclude": ["dose"]})
    assert without.dimension == 1 and without.users == 3
    with refuses("missing-value: 'dose'"):
        load_federation({**keys, "absent": ["dose"]})
    filled = {**keys, "absent": ["dose"], "missing": {"dose": "indicator"}}
    read = load_federation(filled)
    stored = load(prepare(filled, tmp_path / "kept"))
    empty = tmp_path / "empty"
    sites(empty)
    head, *rows = (folder / "bonn.csv").read_text().splitlines()
    text = [head.replace(",", ",dose,"), *(row.replace(",", ",,") for row in rows)]
    (empty / "bonn.csv").write_text("\n".join(text) + "\n")
    wanted = load_federation({**filled, "path": str(empty), "absent": []})
    for one in (read, stored):
        assert torch.equal(one.train.features, wanted.train.features)
        assert torch.equal(one.test.labels, wanted.test.labels)
    model = Model.of(read, Logistic(3, 2), torch.linspace(-1, 1, 8)).save(tmp_path / "m")
    loaded = load_model(model)
    same = [
        predict_files(loaded, f / "bonn.csv", tmp_path / f"{f.name}.csv") for f in (folder, empty)
    ]
    assert same[0] == same[1] and same[0].incomplete == 0
    assert (tmp_path / "sites.csv").read_text() == (tmp_path / "empty.csv").read_text()
    code, said = init(tmp_path, monkeypatch, "sites", "--out", "t.toml")
    assert code == 0 and "bonn.csv lacks it, so its values are missing there" in said
    assert drafted(tmp_path)["absent"] == ["dose"]
    assert load_federation(drafted(tmp_path)).users == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"absent": ["ready"]}, "column-needed: 'ready'"),
        ({"absent": ["dosis"]}, "unknown-column: 'dose'"),
    ],
)
def test_columns_that_cannot_be_absent(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    folder = sites(tmp_path / "sites")
    with refuses(said):
        load_federation({**KEYS, "path": str(folder), "user": None, "categories": [], **keys})


def test_a_site_without_the_label_is_refused(tmp_path, monkeypatch) -> None:
    folder = sites(tmp_path / "sites")
    text = (folder / "bonn.csv").read_text().replace("ready", "redy")
    (folder / "bonn.csv").write_text(text)
    keys = {**KEYS, "path": str(folder), "user": None, "categories": []}
    with refuses("columns-differ: 'ready' … 'redy'"):
        load_federation(keys)
    code, said = init(tmp_path, monkeypatch, "sites", "--label", "ready")
    assert code == 2 and "which every record needs; add it there" in said


def test_a_deployed_site_may_lack_a_column_that_the_schema_says_it_may(tmp_path: Path) -> None:
    rows = {"features": ("a", "b"), "classes": ("n", "y")}
    (tmp_path / "d.csv").write_text("a,label\n1,y\n2,n\n")
    table_ = {"source": "csv", "path": "d.csv"}
    found = read_records(table_, tmp_path, SchemaSettings(**rows, absent=("b",), missing=7.0))
    assert found.features.tolist() == [[1, 7], [2, 7]]
    with refuses("data-unfit: 'b'"):
        read_records(table_, tmp_path, SchemaSettings(**rows))


def test_dates_of_several_forms_are_found_and_read(tmp_path, monkeypatch) -> None:
    forms = ("%d.%m.%Y", "%Y-%m-%d", "%m/%d/%Y")
    stamps = [date(2023, 1, 1) + timedelta(days=7 * i) for i in range(90)]
    cells = [stamp.strftime(forms[i % 3]) if i % 8 else "k. A." for i, stamp in enumerate(stamps)]
    rows = [f"{'ns'[i % 2]},{cell},{'yes' if i % 3 else 'no'}" for i, cell in enumerate(cells)]
    (tmp_path / "t.csv").write_text("\n".join(["site,admitted,ready", *rows]) + "\n")
    code, said = init(tmp_path, monkeypatch, "t.csv", "--label", "ready")
    assert code == 0 and "dates in the format" in said and "'k. A.'" in said
    keys = drafted(tmp_path)
    assert set(keys["dates"]["admitted"]) == set(forms)
    keys |= {"preprocess": [], "test_ratio": 0.2}
    read = load_federation(keys)
    wanted = sorted((stamp - date(1970, 1, 1)).days for i, stamp in enumerate(stamps) if i % 8)
    found = torch.cat([read.train.features, read.test.features])
    assert sorted(found[found[:, 1] == 0, 0].tolist()) == wanted
    coding = Coding(("d",), dates=(("d", forms),))
    assert coding(np.array([["02.01.1970"], ["1970-01-03"]], object)).tolist() == [[1.0], [2.0]]
    with refuses("not-a-date"):
        days("born", ["1/2"], ("%d.%m.%Y", "%Y-%m-%d"))


def test_forms_that_read_a_day_in_two_ways_are_refused(tmp_path, monkeypatch) -> None:
    both = {"admitted": ["%d/%m/%Y", "%m/%d/%Y"]}
    with refuses("ambiguous-date: 2003"):
        load_federation({**KEYS, "path": "nowhere.csv", "dates": both})
    with refuses("empty-list: dates.admitted"):
        load_federation({**KEYS, "path": "nowhere.csv", "dates": {"admitted": []}})
    cells = ["31/01/2024" if i % 2 else "01/31/2024" for i in range(40)]
    rows = [
        f"{'ns'[i % 4 > 1]},{cell},{'yes' if i % 3 else 'no'},{i}" for i, cell in enumerate(cells)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["site,admitted,ready,age", *rows]) + "\n")
    init(tmp_path, monkeypatch, "t.csv", "--label", "ready")
    assert "dates" not in drafted(tmp_path)


@pytest.mark.parametrize("decimal", [",", "auto"])
def test_points_between_thousands_are_read_beside_decimal_commas(tmp_path, decimal) -> None:
    numbers = [981.5, 1137.79, 1234567.25, -2500.0, 3.0]
    texts = ["981,50", "1.137,79", "1.234.567,25", "-2.500,00", "3"]
    rows = [f"{'ns'[i // 5 % 2]};{texts[i % 5]};{'yes' if i % 3 else 'no'}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["site;cost;ready", *rows]) + "\n")
    keys = {**KEYS, "path": str(tmp_path / "t.csv"), "categories": [], "delimiter": ";"}
    data = load_federation({**keys, "decimal": decimal})
    found = set(torch.cat([data.train.features, data.test.features]).flatten().tolist())
    assert found == {float(np.float32(number)) for number in numbers}
    cost = next(
        column for column in look(tmp_path / "t.csv", "ready").columns if column.name == "cost"
    )
    assert cost.role == "number"
    model = Model.of(data, Logistic(1, 2), torch.tensor([0.0, 0, 1e-6, 0]))
    again = model.scores(tmp_path / "t.csv")[:5, 1].tolist()
    assert again == pytest.approx([number * 1e-6 for number in numbers])


def test_a_point_that_may_be_either_is_refused(tmp_path: Path) -> None:
    rows = [
        f"{'ns'[i % 2]};{'1.137' if i == 7 else '3,5'};{'yes' if i % 3 else 'no'}"
        for i in range(40)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["site;cost;ready", *rows]) + "\n")
    keys = {**KEYS, "path": str(tmp_path / "t.csv"), "categories": [], "delimiter": ";"}
    with refuses("not-numbers: '1.137' … 1137 … 137"):
        load_federation({**keys, "decimal": ","})


def test_free_text_is_asked_about(tmp_path, monkeypatch) -> None:
    """Six recurring sentences were a category."""
    told = [
        "patient is stable today",
        "no complaints at all",
        "see in two weeks",
        "wound looks clean",
    ]
    rows = [
        f"{'ns'[i % 2]},{i % 17},{told[i % 4]},{'ab'[i % 2]},{'yes' if i % 3 else 'no'}"
        for i in range(60)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["site,age,notes,kind,ready", *rows]) + "\n")
    code, said = init(tmp_path, monkeypatch, "t.csv", "--label", "ready")
    assert code == 0 and "notes: left out (free text, it seems, which may name people; if" in said
    keys = drafted(tmp_path)
    assert keys["exclude"] == ["notes"] and keys["categories"] == ["kind"]
