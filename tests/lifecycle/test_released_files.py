"""Site ledgers and budget files that version 0.1.0 wrote: every grant in them still counts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from refusals import refuses

from dpscaffold.deployment.site.file import Policy
from dpscaffold.deployment.site.ledger import RecoveryEntry, SiteLedger
from dpscaffold.runs.budget_file import BudgetFile, BudgetGrant, BudgetRound

FILES = Path(__file__).parent / "files-0.1.0"


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


def test_a_budget_file_keeps_its_grants_and_goes_on(folder):
    budget = BudgetFile(folder / "budget.jsonl")
    contents = budget.read()
    assert contents.left == (pytest.approx(0.4), pytest.approx(8e-6))
    assert contents.participations == {"a": 2}
    budget.participate(BudgetRound("a", 2), after=2)
    with refuses("budget-too-small"):
        budget.reserve(BudgetGrant("b", 0.5, 1e-6, 10, "record", "replace-one"))


@pytest.mark.parametrize("name", ["site-ledger.jsonl", "budget.jsonl"])
def test_what_cannot_be_read_is_refused_and_not_replaced(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes().replace(b'"event": "grant"', b'"event": "other"', 1))
    before = path.read_bytes()
    with refuses("ledger-damaged"):
        SiteLedger(path, "north") if name.startswith("site") else BudgetFile(path).read()
    assert path.read_bytes() == before
