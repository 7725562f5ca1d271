"""Nobody is left out silently, whatever the source and however a user is called."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from refusals import refuses
from stated import page_of
from stated import written as statement_in
from typed import typed
from typer.testing import CliRunner

from dpscaffold import Gaussian, Logistic, Plan, cli, fedavg, train
from dpscaffold.data import federation_of, load_federation, parse_data
from dpscaffold.data.allocation import PARTITIONED_BY_LABEL
from dpscaffold.data.loading import read_pool
from dpscaffold.data.tables.source import LEFT_OUT
from dpscaffold.privacy.preparation import COUNTED, sentence_of

RELEASE = ("--set", "privacy.release=true")

ODD = 'Sankt "Jürgen" [bold] 100 %s {0}, Süd'
USERS = [*["north", "south"] * 12, ODD]
AGES = [float(i % 7) for i in range(25)]
ILL = [i * 3 % 5 % 2 for i in range(25)]


def written(kind: str, folder: Path) -> dict[str, Any]:
    """Twenty-five records of three users, one of whom has a single one."""
    if kind == "npz":
        features = np.array(AGES)[:, None]
        np.savez(folder / "a.npz", features=features, labels=np.array(ILL), users=np.array(USERS))
        return {"source": "npz", "path": "a.npz", "partition": "natural"}
    table = pa.table({"site": USERS, "age": AGES, "ill": [str(label) for label in ILL]})
    pa.parquet.write_table(table, folder / "a.parquet")
    return {"source": "parquet", "path": "a.parquet", "label": "ill", "user": "site"}


@pytest.mark.parametrize("kind", ["npz", "parquet"])
def test_who_is_left_out_is_named_everywhere(
    kind: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**written(kind, tmp_path), "preprocess": []}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    plan = "[plan]\nrounds = 1\nlocal_steps = 1\nuser_ratio = 0.5\n[privacy]\nnoise = 4.0\n"
    (tmp_path / "c.toml").write_text(f"[data]\n{lines}\n{plan}")

    def command(*words: str) -> str:
        code, out, err = typed(monkeypatch, capsys, *words)
        assert code == 0, err
        return " ".join((out + err).split())

    assert ODD in command("data", "describe", "c.toml")
    assert ODD in " ".join(json.loads(command("data", "describe", "c.toml", "--json"))["notes"])
    assert f"Left out for too few records: {ODD}" in command("train", "c.toml", "--out", "run")
    text = json.dumps(statement_in(tmp_path / "run").to_json(), ensure_ascii=False)
    assert json.dumps(ODD, ensure_ascii=False)[1:-1] in text
    assert ODD in page_of(tmp_path / "run")
    command("train", "c.toml", "--out", "hidden", "--set", "privacy.unit=user", "-q")
    command("report", "hidden", "--out", "hidden/page.html")
    command("export", "hidden", "--to", "safetensors", "--out", "hidden/exported")
    written_down = [path for path in (tmp_path / "hidden").rglob("*") if path.is_file()]
    assert tmp_path / "hidden" / "model" / "model.json" in written_down
    for path in written_down:
        assert b"Sankt" not in path.read_bytes(), path.name
    assert "fewer than 2 records" in page_of(tmp_path / "hidden")


def test_so_it_is_from_python() -> None:
    table = pa.table({"site": USERS, "age": AGES, "ill": [str(label) for label in ILL]})
    notes: list[str] = []
    found = federation_of(table, "ill", "site", preprocess=[], notify=notes.append)
    assert any(ODD in note for note in notes) and ODD not in found.names
    said = [sentence_of(step, "record") for step in found.preparation]
    assert any(ODD in sentence for sentence in said)
    assert not any(ODD in sentence_of(step, "user") for step in found.preparation)


def test_nobody_is_named_who_stays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []
    settings = {**written("npz", tmp_path), "preprocess": []}
    load_federation(settings, notes.append)
    (warning,) = [note for note in notes if note.startswith("warning: Left out")]
    assert "north" not in warning and "(1 of 2)" in warning


def test_which_records_are_complete_is_outside_the_guarantee(tmp_path: Path, monkeypatch) -> None:
    """Dropping a record changes R_i: two tables that differ in one record alone train on different
    numbers of records, so the statement names it, and a release refuses it unless overruled."""
    monkeypatch.chdir(tmp_path)

    def table(first: str) -> str:
        rows = [f"{user},{i % 7},{i * 3 % 5 % 2}" for i, user in enumerate(USERS[:24])]
        return "site,age,ill\n" + "\n".join([f"north,{first},1", *rows[1:]]) + "\n"

    sizes = []
    for first in ("3", ""):
        (tmp_path / "a.csv").write_text(table(first))
        data = {"source": "csv", "path": "a.csv", "label": "ill", "user": "site"}
        loaded = load_federation({**data, "missing": "drop", "preprocess": []})
        sizes.append(loaded.train.sizes.tolist() + loaded.test.sizes.tolist())
        step = next(s for s in loaded.preparation if s.sentence == LEFT_OUT)
        assert step.protection == "unprotected"
    assert sizes[0] != sizes[1]
    kept = load_federation({**data, "missing": 0.0, "preprocess": []})
    assert LEFT_OUT not in kept.preprocessing
    plan = "[plan]\nrounds = 1\nlocal_steps = 1\nuser_ratio = 1.0\n[privacy]\nnoise = 4.0\n"
    given = "\n".join(f'{key} = "{value}"' for key, value in data.items())
    more = 'classes = ["0", "1"]\npreprocess = []\n'
    (tmp_path / "c.toml").write_text(f'[data]\n{given}\n{more}missing = "drop"\n{plan}')
    refused = CliRunner().invoke(cli.app, ["train", "c.toml", "--out", "run", *RELEASE])
    assert "Records with missing values were left out" in str(refused.exception)
    assert "privacy.release = ['unprotected-preprocessing']" in str(refused.exception)
    assert not (tmp_path / "run").exists()
    words = ["train", "c.toml", "--out", "run", *RELEASE, "-q"]
    words += ["--set", 'privacy.release=["unprotected-preprocessing"]']
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert LEFT_OUT in [words for _, words in statement_in(tmp_path / "run").outside]
    kept_all = [*words[:3], "kept", *words[4:], "--set", "data.missing=0.0"]
    assert CliRunner().invoke(cli.app, kept_all).exit_code == 0


PLAN = "[plan]\nrounds = 1\nlocal_steps = 1\nuser_ratio = 1.0\n[privacy]\nnoise = 4.0\n"
TABLE = """[data]
source = "csv"
path = "a.csv"
label = "ill"
user = "site"
classes = ["0", "1"]
preprocess = []
exclude = ["note"]
categories = { ward = ["Köln", "Ulm"] }
unseen = "zero"
"""


def wards(note: bytes, first: bytes = b"north") -> bytes:
    """A table of 24 records; the first one's excluded note and its site are given."""
    rows = [f"{user},{i % 7},{i * 3 % 5 % 2},Köln,x" for i, user in enumerate(USERS[:24])]
    text = "\n".join(["site,age,ill,ward,note", *rows]).encode()
    return text.replace(b",x", b"," + note, 1).replace(b"north", first, 1)


def outside_of(run: str = "run", *more: str) -> list[str]:
    """What the statement of a run says it does not cover."""
    words = ["train", "c.toml", "--out", run, "-q", *more]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    return [words for _, words in statement_in(Path(run)).outside]


@pytest.mark.parametrize("key", ["encoding", "delimiter", "decimal"])
def test_what_is_guessed_from_records_is_outside_the_guarantee(
    key: str, tmp_path: Path, monkeypatch
) -> None:
    """One byte of one excluded cell changes how all records of a file are read, so a release
    refuses to guess, says what it found, and any other run names it."""
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_bytes(wards(b"x"))
    Path("c.toml").write_text(f'{TABLE}{key} = "auto"\n{PLAN}', encoding="utf-8")
    refused = CliRunner().invoke(cli.app, ["train", "c.toml", "--out", "run", *RELEASE])
    found = {"encoding": '"utf-8"', "delimiter": '","', "decimal": '"."'}
    assert f"data.{key} = 'auto'" in str(refused.exception)
    assert f"Write data.{key} = {found[key]}" in str(refused.exception)
    assert "\n" not in str(refused.exception) and not Path("run").exists()
    assert any(f"(data.{key} = 'auto')" in said for said in outside_of())
    Path("c.toml").write_text(f"{TABLE}{PLAN}", encoding="utf-8")
    assert not any("guessed" in said for said in outside_of("declared", *RELEASE))


def test_one_byte_of_an_excluded_cell_changes_what_is_guessed(tmp_path: Path) -> None:
    """Why the statement speaks: one byte of one record decides whether the others are read at
    all."""
    (tmp_path / "a.csv").write_bytes(wards(b"x"))
    data = {**tomllib.loads(TABLE)["data"], "path": str(tmp_path / "a.csv"), "encoding": "auto"}
    assert len(load_federation(data).train.features)
    (tmp_path / "a.csv").write_bytes(wards(b"\xff"))
    with refuses("wrong-encoding: line 2"):
        load_federation(data)


def test_a_record_that_looks_like_a_comment_is_a_record(tmp_path: Path, monkeypatch) -> None:
    """Left out, it would change R_i."""
    monkeypatch.chdir(tmp_path)
    sizes = []
    for first in (b"north", b"#north"):
        Path("a.csv").write_bytes(wards(b"x", first))
        sizes.append(len(read_pool(parse_data(tomllib.loads(TABLE)["data"]))))
    assert sizes == [24, 24]


@pytest.mark.parametrize(
    ("partition", "looks"),
    [
        ({"partition": "similarity", "similarity": 0}, True),
        ({"partition": "similarity", "similarity": 100}, False),
        ({"partition": "dirichlet", "alpha": 0.5}, True),
    ],
    ids=str,
)
def test_records_partitioned_by_their_labels_are_named(
    partition: dict, looks: bool, tmp_path
) -> None:
    """Where the statement is silent, another label of one record changes nothing but that record;
    where it speaks, it may change what several users hold."""
    rows = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    held = []
    for first in (0, 2):
        labels = np.arange(60) % 3
        labels[0] = first
        np.savez(tmp_path / "a.npz", features=rows, labels=labels)
        settings = {"source": "npz", "path": tmp_path / "a.npz", "users": 5, "preprocess": []}
        held.append(load_federation({**settings, **partition}))
        named = [s.protection for s in held[-1].preparation if s.sentence == PARTITIONED_BY_LABEL]
        assert named == ["unprotected"] * looks
    changed = sum(not torch.equal(held[0].train.of(u)[0], held[1].train.of(u)[0]) for u in range(5))
    assert (changed > 1) == looks


@pytest.mark.parametrize("declared", [10, None])
def test_one_record_more_deals_all_of_them_anew(declared: int | None, tmp_path: Path) -> None:
    """So under add/remove who holds what is outside; under zero-out the number is the same."""
    rng, made = np.random.default_rng(0), []
    rows, labels = rng.normal(size=(61, 3)).astype(np.float32), np.arange(61) % 3
    for count in (60, 61):
        np.savez(tmp_path / "a.npz", features=rows[:count], labels=labels[:count])
        keys = {"users": 5, "similarity": 100, "preprocess": [], "declared_sizes": declared}
        made.append(load_federation({"source": "npz", "path": tmp_path / "a.npz", **keys}))
    same = [torch.equal(made[0].train.of(u)[0], made[1].train.of(u)[0]) for u in range(5)]
    assert not any(same)
    privacy = Gaussian(noise=4.0, sampling="poisson")
    plan = Plan(rounds=1, local_steps=1, user_ratio=0.4, data_ratio=0.5)
    said = train(made[0], Logistic(3, 3), fedavg(), plan, privacy).privacy
    assert (COUNTED in [words for _, words in said.outside]) == (declared is not None)
