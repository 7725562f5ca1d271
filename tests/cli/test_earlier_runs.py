"""A run folder that an earlier version wrote, before chained journals and named settings, is still
compared, stated and reported; it is not resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.errors import BadInput

FOLDER = Path(__file__).parent / "earlier-run"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, as the commands write beside what they read."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(FOLDER, tmp_path / "earlier"))


def call(*words: object) -> str:
    """What a command prints; it must succeed."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


def test_it_is_compared(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    shown = call("compare", folder)
    assert "DP-SCAFFOLD" in shown and f"{summary['late_test_accuracy']:.4f}" in shown


def test_its_epsilon_is_stated_from_its_ledger(folder: Path) -> None:
    """The same ledger gives the ε that the earlier version wrote, whose mechanism named its cohort
    size ``participants``."""
    then = json.loads((folder / "privacy.json").read_text())
    now = json.loads(call("privacy", folder, "--json"))
    bounds = [{row["name"]: row["epsilon"] for row in said["bounds"]} for said in (then, now)]
    assert bounds[1]["random_participation"] == pytest.approx(bounds[0]["random_participation"])
    assert now["run"]["participants"] == then["run"]["participants"] == 3
    assert now["ledger"]["epsilon"] == pytest.approx(then["ledger"]["epsilon"])
    outside = " ".join(now["outside"])
    assert "standardised with the pooled mean" in outside


def test_it_is_reported(folder: Path) -> None:
    call("report", folder, "--out", folder.parent / "page.html")
    page = (folder.parent / "page.html").read_text()
    assert "DP-SCAFFOLD" in page and "standardised with the pooled mean" in page


def test_it_is_refused_to_resume_in_one_sentence(folder: Path) -> None:
    """It lacks the digest of its data and its setting, and names a number that SCAFFOLD has not."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = CliRunner().invoke(app, ["train", str(folder), "--resume"])
    assert done.exit_code != 0 and isinstance(done.exception, BadInput | SystemExit)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
