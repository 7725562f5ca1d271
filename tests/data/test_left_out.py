"""Nobody is left out silently, whatever the source and however a user is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from dpscaffold import cli
from dpscaffold.data import federation_of, load_federation
from dpscaffold.privacy.preparation import told

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
    if kind == "leaf":
        rows = {
            user: [i for i, name in enumerate(USERS) if name == user]
            for user in dict.fromkeys(USERS)
        }
        data = {
            user: {"x": [[AGES[i]] for i in mine], "y": [ILL[i] for i in mine]}
            for user, mine in rows.items()
        }
        (folder / "a.json").write_text(
            json.dumps({"users": list(data), "num_samples": [], "user_data": data})
        )
        return {"source": "leaf", "path": "a.json"}
    table = pa.table({"site": USERS, "age": AGES, "ill": [str(label) for label in ILL]})
    pa.parquet.write_table(table, folder / "a.parquet")
    return {"source": "parquet", "path": "a.parquet", "label": "ill", "user": "site"}


@pytest.mark.parametrize("kind", ["npz", "leaf", "parquet"])
def test_who_is_left_out_is_named_everywhere(
    kind: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**written(kind, tmp_path), "preprocess": []}
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    plan = "[plan]\nrounds = 1\nlocal_steps = 1\nuser_ratio = 0.5\n[privacy]\nnoise = 4.0\n"
    (tmp_path / "c.toml").write_text(f"[data]\n{lines}\n{plan}")

    def command(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["dpscaffold", *words])
        capsys.readouterr()
        try:
            cli.main()
        except SystemExit as left:
            assert not left.code, capsys.readouterr().err
        printed = capsys.readouterr()
        return " ".join((printed.out + printed.err).split())

    assert ODD in command("data", "describe", "c.toml")
    assert ODD in " ".join(json.loads(command("data", "describe", "c.toml", "--json"))["notes"])
    assert f"Left out for too few records: {ODD}" in command("train", "c.toml", "--out", "run")
    for name in ("privacy.json", "preprocessing.json"):
        text = json.dumps(json.loads((tmp_path / "run" / name).read_text()), ensure_ascii=False)
        assert json.dumps(ODD, ensure_ascii=False)[1:-1] in text, name
    assert ODD in (tmp_path / "run" / "privacy.md").read_text(encoding="utf-8")
    command("train", "c.toml", "--out", "hidden", "--set", "privacy.unit=user", "-q")
    for path in (tmp_path / "hidden").glob("*.*"):
        if path.suffix in (".json", ".md"):
            assert "Sankt" not in path.read_text(encoding="utf-8"), path.name
    assert "fewer than 2 records" in (tmp_path / "hidden" / "privacy.md").read_text()


def test_so_it_is_from_python() -> None:
    table = pa.table({"site": USERS, "age": AGES, "ill": [str(label) for label in ILL]})
    notes: list[str] = []
    found = federation_of(table, "ill", "site", preprocess=[], notify=notes.append)
    assert any(ODD in note for note in notes) and ODD not in found.names
    said = [told(step, "record") for step in found.preparation]
    assert any(ODD in sentence for sentence in said)
    assert not any(ODD in told(step, "user") for step in found.preparation)


def test_nobody_is_named_who_stays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes: list[str] = []
    settings = {**written("npz", tmp_path), "preprocess": []}
    load_federation(settings, notes.append)
    (warning,) = [note for note in notes if note.startswith("warning: Left out")]
    assert "north" not in warning and "(1 of 2)" in warning
