"""``init --release``: a draft that ``train --release`` accepts once its blanks are filled."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses
from stated import written
from typer.testing import CliRunner

from dpscaffold import Gaussian, Logistic, Model, Plan, fedavg, load_model, train
from dpscaffold.cli import app
from dpscaffold.data import load, load_federation, prepare
from dpscaffold.data.loading import one_scale
from dpscaffold.data.prepared import Ranges, UnitNorm
from dpscaffold.errors import BadInput
from dpscaffold.models import predict_files
from dpscaffold.privacy import Statement

SHORT = ["--set", "plan.rounds=2", "--set", "plan.learning_rate=0.1", "-q"]


def command(*words: Any) -> tuple[int, str]:
    """The status of a command, and what it says."""
    answer = CliRunner().invoke(app, list(map(str, words)))
    refused = isinstance(answer.exception, BadInput)
    return (2, str(answer.exception)) if refused else (answer.exit_code, answer.output)


def clinics(path: Path, number: bool = False) -> Path:
    """A table with numbers, a category, a date, missing values and two classes, or a number to
    predict."""
    rng = np.random.default_rng(0)
    lines = ["site,age,stay,ward,admitted,ready"]
    for i in range(160):
        age, stay = rng.integers(20, 90), rng.gamma(2, 3)
        ready = f"{age / 2 + stay:.1f}" if number else "no" if age > 50 else "yes"
        gap = "" if i % 11 == 0 else f"{stay:.1f}"
        lines.append(f"{'nsew'[i % 4]},{age},{gap},{'AB'[i % 2]},2024-01-{i % 28 + 1:02d},{ready}")
    path.write_text("\n".join(lines) + "\n")
    return path


def filled(path: Path, **values: str) -> None:
    """Write values in place of the blanks of a draft, by the last part of their keys."""
    lines = path.read_text().splitlines()
    for k, line in enumerate(lines):
        key = line.partition(" =")[0].rpartition(".")[2]
        if '"FILL IN"' in line and key in values:
            lines[k] = f"{line.partition(' =')[0]} = {values.pop(key)}"
    assert not values, values
    path.write_text("\n".join(lines) + "\n")


FILLED = {
    "classes": '["no", "yes"]',
    "ward": '["A", "B", "C"]',
    "age": "[0, 120]",
    "stay": "[0, 60]",
    "admitted": '["2020-01-01", "2029-12-31"]',
}


def test_a_filled_draft_is_released_as_it_is(tmp_path: Path, monkeypatch) -> None:
    """And nothing of its preparation is outside the guarantee."""
    monkeypatch.chdir(tmp_path)
    clinics(Path("t.csv"))
    code, said = command("init", "t.csv", "--label", "ready", "--release")
    assert code == 0, said
    assert "fill in data.classes, data.categories.ward, data.ranges.age" in " ".join(said.split())
    code, said = command("train", "t.toml", "--set", "privacy.release=true", "--out", "r")
    assert code == 2 and said.startswith("the configuration has 5 blanks (data.classes, data.cat")
    assert "\n" not in said and not Path("r").exists()
    filled(Path("t.toml"), **FILLED)
    code, said = command("train", "t.toml", "--set", "privacy.release=true", "--out", "r", *SHORT)
    assert code == 0, said
    stated = written(Path("r"))
    assert stated.guarantee and not stated.seeded
    outside = [words for _, words in stated.outside]
    assert not any("read from the data" in line or "without prot" in line for line in outside)
    assert any("drafted from the records" in line for line in outside)
    assert load_model("r").unprotected == ()
    words = ["export", "r", "--to", "safetensors", "--out", "m", "--only-protected"]
    assert command(*words)[0] == 0


def test_a_release_of_files_that_differ_asks_how_they_are_written(
    tmp_path: Path, monkeypatch
) -> None:
    """What is found is said file by file; nothing is left to be guessed from records."""
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    for name, encoding, sign in (("a", "utf-8", ","), ("b", "cp1252", ";")):
        lines = clinics(Path("t.csv")).read_text().replace("A", "Köln").splitlines()
        text = "\n".join(line.partition(",")[2] for line in lines).replace(",", sign)
        Path(f"sites/{name}.csv").write_bytes(text.encode(encoding))
    assert command("init", "sites", "--label", "ready", "--release")[0] == 0
    text = Path("sites.toml").read_text()
    assert '"auto"' not in text
    assert 'The files differ: "utf-8" in a.csv; "cp1252" in b.csv.' in text
    assert 'encoding = "FILL IN"' in text and 'delimiter = "FILL IN"' in text
    assert 'decimal = "."' in text


def test_a_release_of_a_file_with_titles_trains(tmp_path: Path, monkeypatch) -> None:
    """Its header is found by the names of its columns, not by its records."""
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("# of March\n" + clinics(Path("t.csv")).read_text())
    assert command("init", "t.csv", "--label", "ready", "--release")[0] == 0
    filled(Path("t.toml"), **FILLED)
    code, said = command("train", "t.toml", "--set", "privacy.release=true", "--out", "r", *SHORT)
    assert code == 0, said


def names_the_draft(run: str) -> set[bool]:
    """Whether the statement, both forms of the report and the short answer name the draft."""
    sentence = "The configuration was drafted from the records"
    assert command("report", run, "--out", "page.html")[0] == 0
    told = Statement.from_json(json.loads(command("privacy", run, "--json")[1]), run)
    return {
        *(
            sentence in " ".join(words for _, words in said.outside)
            for said in (told, load_model(run).privacy)
        ),
        sentence in " ".join(Path("page.md").read_text().split()),
        sentence in " ".join(Path("page.html").read_text().split()),
        sentence in " ".join(command("privacy", run)[1].split()),
    }


def test_what_is_told_of_a_run_names_that_its_configuration_was_drafted(
    tmp_path: Path, monkeypatch
) -> None:
    """``init`` looks at raw records, and no epsilon covers that."""
    monkeypatch.chdir(tmp_path)
    clinics(Path("t.csv"))
    assert command("init", "t.csv", "--label", "ready")[0] == 0
    code, said = command("train", "t.toml", "--out", "r", *SHORT[:-1])
    assert code == 0, said
    assert "the drafted configuration" in " ".join(said.split())
    assert names_the_draft("r") == {True}

    own = [line for line in Path("t.toml").read_text().splitlines() if line[:7] != "drafted"]
    Path("own.toml").write_text("\n".join(own))
    assert command("train", "own.toml", "--out", "o", *SHORT)[0] == 0
    assert names_the_draft("o") == {False}


def test_prepared_data_and_runs_without_a_folder_remember_the_draft(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    clinics(Path("t.csv"))
    assert command("init", "t.csv", "--label", "ready")[0] == 0
    data = tomllib.loads(Path("t.toml").read_text())["data"]
    prepare(data, tmp_path / "stored")
    plan = Plan(rounds=1, local_steps=1, user_ratio=1.0)
    for made in (load(tmp_path / "stored"), load_federation(data)):
        said = train(
            made,
            Logistic(made.dimension, made.classes),
            fedavg(),
            plan,
            Gaussian(noise=9.0),
        ).privacy
        assert any("drafted from the records" in line for _, line in said.outside)


def test_a_filled_draft_of_a_number_is_released(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    clinics(Path("t.csv"), number=True)
    assert command("init", "t.csv", "--label", "ready", "--release")[0] == 0
    text = Path("t.toml").read_text()
    assert 'target = { kind = "number", low = "FILL IN", high = "FILL IN" }' in text
    text = text.replace('low = "FILL IN", high = "FILL IN"', "low = 0, high = 100")
    Path("t.toml").write_text(text)
    filled(Path("t.toml"), **{k: v for k, v in FILLED.items() if k != "classes"})
    code, said = command("train", "t.toml", "--out", "r", *SHORT)  # the file itself says release
    assert code == 0, said
    assert not written(Path("r")).seeded


def test_a_release_refuses_all_at_once_and_says_what_to_write(tmp_path: Path, monkeypatch) -> None:
    """Four commands, each of which read the data, named four reasons one by one."""
    monkeypatch.chdir(tmp_path)
    clinics(Path("t.csv"))
    assert command("init", "t.csv", "--label", "ready")[0] == 0
    words = ["train", "t.toml", "--set", "privacy.release=true", "--out", "r", *SHORT]
    code, said = command(*words, "--set", "plan.seed=3")
    lines = said.splitlines()
    assert code == 2 and not Path("r").exists()
    assert lines[0].startswith("privacy.release is set, and 5 things are refused (or overrule")
    assert [line.split(".")[0] for line in lines[1:]] == [f"  {k}" for k in range(1, 6)]
    for part in (
        "leave plan.seed out",
        "Write categories = { ward = […] }",
        'Write classes = ["…", "…"]',
        'Write missing = { COLUMN = "indicator", "*" = 0.0 }',
        "Write ranges = { age = [low, high], stay = [low, high], admitted = [low, high] }",
    ):
        assert part in said, said
    words += ["--set", 'privacy.release=["unprotected-preprocessing"]', "--set", "plan.seed=3"]
    allowed = command(*words)[1]
    assert "it is refused: plan.seed is 3" in allowed and "\n" not in allowed


def test_blanks_are_named_wherever_they_are(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[plan]\nrounds = "FILL IN"\n')
    code, said = command("train", tmp_path / "c.toml")
    assert code == 2 and 'has 1 blank (plan.rounds); write in place of each "FILL IN"' in said


def test_records_without_a_label_are_pointed_out(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = clinics(Path("t.csv")).read_text().splitlines()
    Path("t.csv").write_text("\n".join([*text, "n,40,2.0,A,2024-01-03,"]) + "\n")
    command("init", "t.csv", "--label", "ready", "--release")
    assert "# Take records without ready out of the files first." in Path("t.toml").read_text()


KEYS: dict[str, Any] = {
    "source": "csv",
    "label": "ready",
    "user": "site",
    "categories": {"ward": ["A", "B"]},
    "dates": {"admitted": "%Y-%m-%d"},
    "ranges": {"age": [20, 60], "admitted": ["2024-01-01", "2024-01-31"]},
    "missing": {"stay": "indicator"},
    "preprocess": [],
}


def test_ranges_are_what_scaling_by_hand_does(tmp_path: Path) -> None:
    """In memory, streamed, in new rows and in the exported module; other columns stay."""
    keys = {**KEYS, "path": str(clinics(tmp_path / "t.csv"))}
    plain = load_federation({**keys, "ranges": {}})
    mapped = load_federation(keys)
    # age, stay, admitted, whether stay is missing, ward A, ward B
    wanted = plain.train.features.clone()
    wanted[:, 0] = ((wanted[:, 0] - 40) / 20).clip(-1, 1)
    day = 19723.0  # 2024-01-01
    wanted[:, 2] = ((wanted[:, 2] - (day + 15)) / 15).clip(-1, 1)
    torch.testing.assert_close(mapped.train.features, wanted)
    assert load(prepare(keys, tmp_path / "kept")).digest().value == mapped.digest().value
    step = next(step for step in mapped.preparation if isinstance(step, Ranges))
    assert step.protection == "public" and "'age', 'admitted'" in step.sentence
    params = torch.linspace(-1, 1, 14)
    model = load_model(Model.of(mapped, Logistic(6, 2), params).save(tmp_path / "m"))
    assert model.preparation[1] == step
    assert predict_files(model, tmp_path / "t.csv", tmp_path / "p.csv").incomplete == 0
    columns = {"age": [70, 40], "stay": [3, 3], "ward": ["A", "B"]}
    days = {"admitted": ["2024-01-01", "2024-01-16"]}
    scores = model.scores({**columns, **days})
    coded = {
        "age": [70.0, 40.0],
        "stay": [3.0, 3.0],
        "ward": [0.0, 1.0],
        "admitted": [day, day + 15],
    }
    rows = torch.tensor([coded[name] for name in model.columns]).T
    torch.testing.assert_close(model.to_module()(rows), scores)
    features = torch.tensor([[1.0, 3, -1, 0, 1, 0], [0.0, 3, 0, 0, 0, 1]])
    torch.testing.assert_close(model.scores(features, prepared=True), scores)


def test_a_missing_number_beside_its_indicator_is_the_middle_of_its_range(tmp_path: Path) -> None:
    keys = {**KEYS, "path": str(clinics(tmp_path / "t.csv")), "ranges": {"stay": [10, 30]}}
    rows = load_federation(keys).train.features
    gone = rows[:, 3] == 1
    assert bool(gone.any()) and set(rows[gone, 1].tolist()) == {0.0}


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ({"age": 3}, "bad-range: ranges.age is 3"),
        ({"age": [3]}, "bad-range"),
        ({"age": [3, 3]}, "bad-range"),
        ({"age": [3, None]}, "bad-range"),
        ({"age": [3, float("nan")]}, "bad-range"),
        ({"admitted": ["2024", "2025"]}, "bad-range: 2024"),
        ({"ward": [0, 1]}, "unknown-column: 'ward'"),
        ({"agee": [0, 1]}, "unknown-column: 'age'"),
    ],
)
def test_ranges_that_are_none_are_refused(tmp_path: Path, ranges: Any, said: str) -> None:
    keys = {**KEYS, "path": str(clinics(tmp_path / "t.csv")), "ranges": ranges}
    with refuses(said):
        load_federation(keys)


def test_columns_have_one_scale_or_not() -> None:
    rng = np.random.default_rng(0)
    many, few = rng.random((60, 100)), rng.uniform(-1, 1, (60, 7))
    pixels = rng.integers(0, 256, (60, 25)).astype(np.uint8)
    components = rng.normal(size=(60, 60)) * np.geomspace(9, 1, 60)
    assert all(map(one_scale, (many, many / 100, few, few * 2, pixels, components)))
    assert not one_scale(many * np.geomspace(1, 1e4, 100))


def test_the_default_of_arrays_reads_no_record_and_warns_of_scales(tmp_path) -> None:
    rng = np.random.default_rng(0)
    for factor, warned in ((np.ones(30), False), (np.geomspace(1, 1e4, 30), True)):
        rows = rng.normal(size=(60, 30)) * factor
        np.savez(tmp_path / "a.npz", features=rows, labels=np.arange(60) % 2)
        said: list[str] = []
        settings = {"source": "npz", "path": str(tmp_path / "a.npz"), "users": 3}
        federation = load_federation(settings, said.append)
        assert any("different scales" in note for note in said) == warned
        assert federation.preparation[-1] == UnitNorm()
        said.clear()
        load_federation({**settings, "preprocess": ["unit-norm"]}, said.append)
        assert not any("different scales" in note for note in said)
