"""Files that earlier versions wrote: they count, or are refused by their version."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold import load_model, state
from dpscaffold.cli import app
from dpscaffold.deployment.site.file import Policy
from dpscaffold.deployment.site.ledger import RecoveryEntry, SiteLedger
from dpscaffold.report.runs import read_run
from dpscaffold.runs.budget_file import BudgetFile, BudgetGrant
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.ledger import read_account

FILES = Path(__file__).parent / "files-0.1.0"
LAST = Path(__file__).parent / "files-0.2.0"


def command(*words):
    CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FILES, tmp_path / "files"))


def test_a_site_ledger_keeps_its_grants_and_goes_on(folder):
    path = folder / "site-ledger.jsonl"
    ledger = SiteLedger(path, "north")
    run = ledger.runs["aa"]
    assert (run.remaining, run.last_round, run.began, ledger.total) == (0, 7, True, 9)
    left = ledger.left(Policy(epsilon=1.0, delta=1e-6, max_runs=3))
    assert left.epsilon == pytest.approx(1 - 0.3 - 0.25)
    before = path.read_bytes()
    ledger.recover([], RecoveryEntry(1, 0.1, 1e-8, ""))
    assert path.read_bytes().startswith(before)
    assert SiteLedger(path, "north").left(Policy(epsilon=1.0, delta=1e-6)).epsilon < left.epsilon


def test_a_site_ledger_that_cannot_be_read_is_refused_and_not_replaced(folder):
    path = folder / "site-ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"event": "grant"', b'"event": "other"', 1))
    before = path.read_bytes()
    with refuses("ledger-damaged"):
        SiteLedger(path, "north")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "read",
    [
        read_account,
        lambda run: RunFolder(run).check_free(),
        lambda run: read_run(run),
        load_model,
        lambda run: load_model(run / "model"),
        state,
        lambda run: BudgetFile(run.parent / "budget.jsonl").read(),
        lambda run: command("train", run, "--resume"),
        lambda run: command("privacy", run),
        lambda run: command("report", run),
        lambda run: command("audit", run),
        lambda run: command("evaluate", run, run / "rows.csv"),
        lambda run: command("compare", run, run),
    ],
)
def test_what_0_2_0_wrote_is_refused_by_its_version(tmp_path, read):
    """It is not damaged, and nothing of it is changed; the sentence says what to do."""
    folder = Path(shutil.copytree(LAST, tmp_path / "old"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with refuses("wrong-version: dpscaffold 0.2 … --already-spent EPSILON DELTA"):
        read(folder / "run")
    now = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert {path: now[path] for path in before} == before


def test_a_budget_file_counts_what_other_software_spent(tmp_path):
    budget = BudgetFile.open(tmp_path / "b.jsonl", 1.0, 1e-5, already=(0.6, 2e-6))
    assert budget.read().left == (pytest.approx(0.4), pytest.approx(8e-6))
    with refuses("budget-too-small"):
        budget.reserve(BudgetGrant("b", 0.5, 1e-6, 10, "record", "replace-one"))
    budget.reserve(BudgetGrant("b", 0.3, 1e-6, 10, "record", "replace-one"))
    assert BudgetFile(tmp_path / "b.jsonl").read().spent == pytest.approx((0.9, 3e-6))
