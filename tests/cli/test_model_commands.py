"""From a CSV of sites to predictions for new rows, as a user types it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from refusals import refuses
from sklearn import metrics as oracle
from stated import summary_of
from test_model import clinic
from typed import Done, done_here

from dpscaffold import Gaussian, Logistic, Model, Plan, fedavg, load_model, synthetic, train
from dpscaffold.config import load
from dpscaffold.config.task import own_module
from dpscaffold.data.loading import load_federation
from dpscaffold.models import predict_files
from dpscaffold.models.export import export
from dpscaffold.models.predict import PredictionCounts


def command(*arguments: Any, check: bool = True) -> Done:
    done = done_here(*arguments)
    assert not check or done.returncode == 0, done.stderr
    return done


def elsewhere(*arguments: Any) -> None:
    """The same in a process of its own, so that nothing is imported into this one."""
    words = [sys.executable, "-m", "dpscaffold", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder next to the table that it was trained on, made by the command alone."""
    place = tmp_path_factory.mktemp("run")
    clinic(place / "clinic.csv")
    (place / "clinic.toml").write_text(
        f"""
        [data]
        source = "csv"
        path = "{place / "clinic.csv"}"
        label = "outcome"
        user = "site"
        categories = ["ward"]
        [plan]
        rounds = 20
        local_steps = 5
        user_ratio = 1.0
        data_ratio = 0.5
        learning_rate = 1.0
        [privacy]
        noise = 1.0
        """
    )
    command("train", place / "clinic.toml", "--out", place / "run")
    return place


def test_predictions_are_those_of_the_model(run: Path) -> None:
    printed = command("predict", run / "run", run / "clinic.csv", "--keep", "site").stdout
    rows = list(csv.DictReader(printed.splitlines()))
    model = load_model(run / "run")
    assert [row["prediction"] for row in rows] == model.named(run / "clinic.csv")
    assert [row["site"] for row in rows[:4]] == ["s0", "s1", "s2", "s3"]
    found = [[float(row[f"probability_{name}"]) for name in ("ill", "well")] for row in rows]
    wanted = model.probabilities(run / "clinic.csv").numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert list(rows[0]) == ["site", "prediction", "probability_ill", "probability_well"]
    assert all(
        row["prediction"] == ("ill" if ill > well else "well")
        for row, (ill, well) in zip(rows, found, strict=True)
    )


def test_parquet_out_holds_every_probability(run: Path) -> None:
    out = run / "said.parquet"
    command("predict", run / "run", run / "clinic.csv", "--out", out)
    table = pyarrow.parquet.read_table(out)
    assert table.column_names == ["prediction", "probability_ill", "probability_well"]
    wanted = load_model(run / "run").probabilities(run / "clinic.csv").numpy()
    np.testing.assert_array_equal(table["probability_well"].to_numpy(), wanted[:, 1])
    command("predict", run / "run", run / "clinic.csv", "--out", out, "--no-probabilities")
    assert pyarrow.parquet.read_table(out).column_names == ["prediction"]


def test_evaluation_agrees_with_another_library(run: Path) -> None:
    found = json.loads(command("evaluate", run / "run", run / "clinic.csv", "--json").stdout)
    with (run / "clinic.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    model = load_model(run / "run")
    truth = np.array([model.classes.index(row["outcome"]) for row in rows])
    said = model.predict(rows).numpy()
    chance = model.probabilities(rows).double().numpy()
    assert found["rows"] == len(rows) and found["note"].startswith("These numbers")
    assert found["confusion"] == oracle.confusion_matrix(truth, said).tolist()
    assert found["metrics"]["test_auc"] == pytest.approx(oracle.roc_auc_score(truth, chance[:, 1]))
    assert found["metrics"]["test_f1"] == pytest.approx(oracle.f1_score(truth, said))
    sites = np.array([row["site"] for row in rows])
    for entry in found["sites"]:
        mine = sites == entry["site"]
        assert entry["rows"] == mine.sum()
        assert entry["accuracy"] == pytest.approx((truth == said)[mine].mean())
    scores = oracle.precision_recall_fscore_support(truth, said)
    for k, entry in enumerate(found["by_class"]):
        values = (entry["precision"], entry["recall"], entry["f1"], entry["rows"])
        assert values == pytest.approx([column[k] for column in scores])
    assert sum(b["rows"] for b in found["calibration"]) == len(rows)
    for entry in found["calibration"]:
        inside = (chance[:, 1] * 10).astype(int).clip(max=9) == int(entry["predicted"] * 10)
        assert entry["observed"] == pytest.approx(truth[inside].mean())


def test_held_out_records_score_exactly_what_was_reported(run: Path) -> None:
    found = json.loads(command("evaluate", run / "run", "--json").stdout)
    summary = summary_of(run / "run")
    assert found["metrics"]["test_accuracy"] == summary["final"]["test_accuracy"]
    federation = load_federation(load(run / "run" / "config.toml").data)
    assert found["rows"] == len(federation.test)


def test_tables_and_figure(run: Path) -> None:
    figure = run / "judged.png"
    printed = command("evaluate", run / "run", run / "clinic.csv", "--figure", figure).stdout
    for word in ("accuracy", "baseline", "confusion", "sites", "ε does not cover"):
        assert word in printed
    assert figure.stat().st_size > 5000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("ward", "wing", 1), "unknown-column: 'ward'"),
        (lambda text: text.replace(",a,", ",z,", 1), "missing-value: 'z' … 'ward'"),
        (lambda text: text.replace(",a,", ",,", 1), "missing-value: 'ward'"),
        (lambda text: text.replace("pressure", "pressure,x", 1), "row-length-differs: row has 5"),
        (lambda text: "pressure,rate,ward\nhigh,1,a\n", "missing-value: 'high' … 'pressure'"),
        (lambda text: "pressure,rate,ward\ninf,1,a\n", "missing-value"),
        (lambda text: "", "empty-file"),
    ],
)
def test_bad_rows_are_one_sentence(run: Path, tmp_path: Path, change: Any, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(change((run / "clinic.csv").read_text()))
    with refuses(said) as caught:
        load_model(run / "run").predict(path)
    assert "\n" not in str(caught.value)


def test_a_failed_prediction_leaves_no_file(run: Path, tmp_path: Path) -> None:
    text = (run / "clinic.csv").read_text().splitlines()
    (tmp_path / "rows.csv").write_text("\n".join([*text, text[1] + ",more"]) + "\n")
    out = tmp_path / "out.csv"
    done = command("predict", run / "run", tmp_path / "rows.csv", "--out", out, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.csv"]


@pytest.mark.parametrize("rows", ["nowhere.csv", "without.csv", "folder"])
def test_a_refused_file_is_answered_by_one_sentence_alone(rows, run: Path, tmp_path: Path) -> None:
    (tmp_path / "without.csv").write_text("site,more\nnorth,1\n")
    (tmp_path / "folder").mkdir()
    done = command("predict", run / "run", tmp_path / rows, check=False)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "convert" not in done.stderr


def test_what_is_written_is_told_as_json(run: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out.csv", tmp_path / "page.html"
    said = command("predict", run / "run", run / "clinic.csv", "--out", out, "--json").stdout
    assert json.loads(said) == {
        "file": str(out),
        "rows": 240,
        "without_prediction": 0,
        "why": "",
        "columns": ["prediction", "probability_ill", "probability_well"],
        "files": [{"file": "clinic.csv", "rows": 240, "without_prediction": 0, "why": ""}],
        "skipped": [],
        "notes": [],
    }
    said = command("export", run / "run", "--to", "safetensors", "--out", tmp_path / "m", "--json")
    told = json.loads(said.stdout)
    assert told["model"] == str(tmp_path / "m") and told["leaves_unprotected"]
    said = command("report", run / "run", "--out", page, "--json").stdout
    card = page.with_suffix(".md")
    assert json.loads(said) == {"report": str(page), "markdown": str(card)}
    assert page.exists() and card.exists()
    asked = command("predict", run / "run", run / "clinic.csv", "--json", check=False)
    assert asked.returncode == 2 and asked.stdout == "" and "--out" in asked.stderr


def test_incomplete_rows_are_marked_where_the_training_left_them_out(tmp_path: Path) -> None:
    options, _ = clinic(tmp_path / "clinic.csv")
    text = (tmp_path / "clinic.csv").read_text().replace(",a,", ",,", 3)
    (tmp_path / "clinic.csv").write_text(text)
    data = load_federation({**options, "missing": "drop"})
    model = Model.of(data, Logistic(data.dimension, 2), torch.ones(2 * (data.dimension + 1)))
    out = tmp_path / "out.csv"
    found = predict_files(model, tmp_path / "clinic.csv", out)
    first = [row["ward"] for row in csv.DictReader(text.splitlines())].index("")
    why = f"row {first} lacks a value of column 'ward'"
    assert found.files[0].predicted == PredictionCounts(240, 3, why)
    rows = list(csv.DictReader(out.read_text().splitlines()))
    gone = [row["ward"] == "" for row in csv.DictReader(text.splitlines())]
    assert [row["prediction"] == "" for row in rows] == gone and sum(gone) == 3


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_rows_that_training_would_refuse_are_marked_and_the_first_is_named(
    run: Path, tmp_path: Path, kind: str
) -> None:
    """One strange row of many costs its own prediction, and no other."""
    model = load_model(run / "run")
    rows = list(csv.DictReader((run / "clinic.csv").read_text().splitlines()))
    said = model.predict(run / "clinic.csv").tolist()
    changes = [(7, "ward", "z"), (9, "pressure", ""), (30, "rate", "-inf")]
    changes += [(44, "pressure", "> 200")] * (kind == "csv")
    for row, column, value in changes:
        rows[row] = {**rows[row], column: value}
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    else:
        number = {"pressure", "rate"}
        columns = {
            name: [float(r[name]) if name in number and r[name] else r[name] or None for r in rows]
            for name in rows[0]
        }
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    done = command("predict", run / "run", path, "--out", tmp_path / "out.csv")
    assert f"{len(changes)} of 240 rows have no prediction" in done.stderr
    assert "(row 7 holds 'z' in column 'ward', which the training never saw" in done.stderr
    found = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    names = [model.classes[k] for k in said]
    wrong = {row for row, _, _ in changes}
    marked = ["" if k in wrong else name for k, name in enumerate(names)]
    assert [row["prediction"] for row in found] == marked
    judged = json.loads(command("evaluate", run / "run", path, "--json").stdout)
    assert (judged["rows"], judged["left_out"]) == (240 - len(wrong), len(wrong))
    assert "row 7" in judged["reason"]


def test_a_text_among_numbers_late_in_a_long_file_costs_its_own_row_alone(
    run: Path, tmp_path: Path
) -> None:
    """Numbers are read as texts from there on, and batches before it are not read twice."""
    lines = (run / "clinic.csv").read_text().splitlines()
    body = (lines[1:] * 800)[:150_000]
    (tmp_path / "clean.csv").write_text("\n".join([lines[0], *body]) + "\n")
    at = lines[0].split(",").index("pressure")
    for row, text in ((140_001, "over"), (149_999, "1.2.3"), (140_007, " 1e1 ")):
        cells = body[row].split(",")
        cells[at] = text
        body[row] = ",".join(cells)
    (tmp_path / "rows.csv").write_text("\n".join([lines[0], *body]) + "\n")
    model = load_model(run / "run")
    for name in ("clean", "rows"):
        found = predict_files(model, tmp_path / f"{name}.csv", tmp_path / f"{name}.out.csv")
        assert found.rows == 150_000
    assert found.incomplete == 2
    assert found.reason == "row 140001 holds 'over' in column 'pressure', and a number is expected"
    clean, marked = (
        (tmp_path / f"{name}.out.csv").read_text().splitlines() for name in ("clean", "rows")
    )
    different = {k - 1 for k, (a, b) in enumerate(zip(clean, marked, strict=True)) if a != b}
    assert different <= {140_001, 140_007, 149_999} and {140_001, 149_999} <= different


def test_decimal_commas_and_dates_that_cannot_be_read_cost_their_own_rows(tmp_path: Path) -> None:
    """The same rows with points and without a wrong cell are the oracle."""
    rng = np.random.default_rng(3)
    table = [
        (
            round(float(rng.normal(5, 2)), 2),
            f"{1 + k % 28:02d}.03.2024",
            "ab"[k % 2],
            "yn"[k % 3 > 0],
        )
        for k in range(120)
    ]
    text = "weight;seen;site;ill\n" + "".join(
        f"{w:.2f};{d};{s};{i}\n".replace(".", ",", 1) for w, d, s, i in table
    )
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "c.toml").write_text(
        f"""
        [data]
        source = "csv"
        path = "{tmp_path / "t.csv"}"
        label = "ill"
        user = "site"
        delimiter = ";"
        decimal = ","
        dates = {{ seen = "%d.%m.%Y" }}
        [plan]
        rounds = 3
        local_steps = 1
        user_ratio = 1.0
        """
    )
    command("train", tmp_path / "c.toml", "--out", tmp_path / "run")
    model = load_model(tmp_path / "run")
    rows = text.splitlines()
    wrong = {3: "x5,00", 5: "12.34,5", 8: "4;31.02.2024", 11: "4;2024"}
    for row, start in wrong.items():
        rest = rows[row + 1].split(";")
        rows[row + 1] = ";".join([*start.split(";"), *rest[len(start.split(";")) :]])
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    for keep in ((), ("weight",)):
        found = predict_files(model, tmp_path / "rows.csv", tmp_path / "out.csv", keep)
        assert found.incomplete == 4
        assert found.reason == "row 3 holds 'x5,00' in column 'weight', and a number is expected"
        said = [r["prediction"] for r in csv.DictReader((tmp_path / "out.csv").open())]
        clean = model.named(tmp_path / "t.csv")
        assert said == ["" if k in wrong else name for k, name in enumerate(clean)]


def test_unseen_categories_are_none_of_the_known_where_the_training_took_them_so(
    tmp_path: Path,
) -> None:
    """data.unseen = "zero": training, files, rows and exports code such a value alike."""
    options, _ = clinic(tmp_path / "clinic.csv")
    options = {**options, "categories": {"ward": ["a", "b"]}}  # the file holds others, too
    with refuses("unknown-category: 'ward' … 'c' … unseen = 'zero'"):
        load_federation(options)
    data = load_federation({**options, "unseen": "zero", "missing": {"ward": "category"}})
    coded = next(step for step in data.preparation if hasattr(step, "unseen"))
    assert coded.unseen == "zero" and coded.features == 5  # two numbers, a, b and absence
    params = torch.linspace(-1, 1, 2 * (data.dimension + 1))
    model = Model.of(data, Logistic(data.dimension, 2), params)
    model = load_model(model.save(tmp_path / "model"))
    held = torch.cat([data.train.features, data.test.features])
    raw = model.scores(tmp_path / "clinic.csv")  # as the training coded the very same rows
    trained = model.scores(held, prepared=True)
    torch.testing.assert_close(raw.sort(0).values, trained.sort(0).values)
    rows = [{"pressure": 1.0, "rate": 2.0, "ward": ward} for ward in ("a", "new", None)]
    path = tmp_path / "new.csv"
    path.write_text("pressure,rate,ward\n1,2,a\n1,2,new\n1,2,\n")
    torch.testing.assert_close(model.scores(path), model.scores(rows))
    assert len({tuple(row) for row in model.scores(rows).tolist()}) == 3


def test_unprotected_statistics_are_named_and_refused_on_request(run: Path, tmp_path: Path) -> None:
    done = command("export", run / "run", "--to", "safetensors", "--out", tmp_path / "model")
    assert "leaves with the model, unprotected" in done.stderr
    assert load_model(tmp_path / "model").columns == ("pressure", "ward", "rate")
    arguments = ("--to", "safetensors", "--out", tmp_path / "other", "--only-protected")
    refused = command("export", run / "run", *arguments, check=False)
    assert refused.returncode == 2 and "no guarantee covers" in refused.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"secret": False}, "comes from a simulation"),
        ({"clip": "median"}, "without a guarantee"),
        (None, "without a guarantee"),
        ({}, ""),
    ],
)
def test_only_what_keeps_a_promise_is_exported_as_protected(tmp_path: Path, changes, said) -> None:
    data = replace(synthetic(users=4, records=30, dimension=3, classes=2), preparation=())
    plan = Plan(rounds=1, local_steps=1, user_ratio=0.5)
    privacy = None if changes is None else Gaussian(**{"noise": 8.0, "secret": True, **changes})
    model = train(data, Logistic(3, 2), fedavg(), plan, privacy).model
    if not said:
        assert export(model, "safetensors", tmp_path / "model", only_protected=True).is_dir()
        return
    with refuses(f"not-protected: {said}"):
        export(model, "safetensors", tmp_path / "model", only_protected=True)
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_onnx_agrees_on_raw_rows(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs the extra [onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra [onnx]")
    model = load_model(run / "run")
    path = export(model, "onnx", tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(path))
    with (run / "clinic.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    fed = {
        "numbers": np.array([[row["pressure"], row["rate"]] for row in rows], dtype=np.float32),
        "ward": np.array([[row["ward"]] for row in rows], dtype=object),
    }
    scores = session.run(None, fed)[0]
    np.testing.assert_allclose(scores, model.scores(rows).numpy(), rtol=1e-4, atol=1e-4)
    fed["ward"][0, 0], fed["ward"][1, 0] = "zz", ""
    strange = session.run(None, fed)[0]
    assert np.isnan(strange[:2]).all() and np.isfinite(strange[2:]).all()


@pytest.mark.slow
def test_an_exported_program_agrees(run: Path, tmp_path: Path) -> None:
    model = load_model(run / "run")
    path = export(model, "torch", tmp_path / "model.pt2")
    program, whole = torch.export.load(path).module(), model.to_module()
    rows = torch.tensor([[10_050.0, 1.0, 0.0], [9_900.0, 2.0, -0.001]])
    torch.testing.assert_close(program(rows), whole(rows))


NET = """
import torch
def net():
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
def other():
    return torch.nn.Linear(5, 2)
def late():
    raise RuntimeError("no")
"""


def test_models_of_ones_own_module_are_used_by_every_command(tmp_path: Path) -> None:
    """The code is named, found where the run's configuration lay, and not run unless it is."""
    clinic(tmp_path / "clinic.csv")
    (tmp_path / "own_net.py").write_text(NET + f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n")
    (tmp_path / "own.toml").write_text(
        f"""
        [data]
        source = "csv"
        path = "{tmp_path / "clinic.csv"}"
        label = "outcome"
        user = "site"
        categories = ["ward"]
        [task]
        kind = "module"
        module = "own_net:net"
        [plan]
        rounds = 2
        local_steps = 2
        user_ratio = 1.0
        [privacy]
        noise = 1.0
        """
    )
    run, rows = tmp_path / "run", tmp_path / "clinic.csv"
    elsewhere("train", tmp_path / "own.toml", "--out", run)
    elsewhere("train", "--resume", run, "--set", "plan.rounds=3")  # from another folder
    (tmp_path / "ran").unlink()
    for words in (("predict", run, rows), ("evaluate", run), ("export", run, "--to", "torch")):
        refused = command(*words, check=False)
        assert refused.returncode == 2 and "--module my_file:factory" in refused.stderr
        assert not (tmp_path / "ran").exists()
    named = ("--module", "own_net:net")
    out = command("predict", run, rows, *named).stdout
    model = load_model(run, module=own_module("own_net:net", tmp_path))
    said = [row["prediction"] for row in csv.DictReader(out.splitlines())]
    assert said == model.named(rows) and (tmp_path / "ran").exists()
    held = json.loads(command("evaluate", run, *named, "--json").stdout)
    whole = json.loads(command("evaluate", run, rows, *named, "--json").stdout)
    assert 0 < held["rows"] < whole["rows"] == 240
    exported = tmp_path / "model.pt2"
    command("export", run, "--to", "torch", "--out", exported, *named)
    assert exported.stat().st_size > 0
    for name, sentence in (
        ("own_net:other", "does not fit the stored model"),
        ("own_net:late", "--module is 'own_net:late', whose factory failed with RuntimeError: no"),
        ("own_net:gone", "has no function 'gone'"),
        ("nowhere:net", "no file nowhere.py"),
        ("net", "name a function of your own as 'my_file:factory'"),
    ):
        wrong = command("predict", run, rows, "--module", name, check=False)
        assert wrong.returncode == 2 and sentence in wrong.stderr, wrong.stderr
