"""80 columns never wrap, no two names are cut to the same, and 40 columns still show ε."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dpscaffold import synthetic
from dpscaffold.cli.data import label_table
from dpscaffold.data import describe
from dpscaffold.privacy import describe as describe_run
from dpscaffold.privacy import statement
from dpscaffold.privacy.statement_types import ViewGuarantee
from dpscaffold.report.fitting import TextColumn, fitted, shortened
from dpscaffold.report.runs import RunRecord, comparison_table
from dpscaffold.report.tuning import tuning_table
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.summary import Summary
from dpscaffold.training.progress import Progress


def shown(table: Any, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table)
    return console.file.getvalue().rstrip("\n").split("\n")  # type: ignore[attr-defined]


def record(folder: str, epsilon: float | None = 0.8765, ended: str = "completed") -> RunRecord:
    run = describe_run(rounds=4, local_steps=2, users=8, cohort_size=4, records=50, batch_sizes=5,
                   noise=4.0)  # fmt: skip
    privacy = replace(statement(run), server=ViewGuarantee(epsilon), quoted=None)
    metrics = {"log10_gap": -2.5, "gradient_dissimilarity": 1.0, "test_accuracy": 0.9}
    final = {"round": 400, "log10_gap": -2.5, "gradient_dissimilarity": 1.0}
    summary = {
        "algorithm": "DP-SCAFFOLD-balanced-warm with momentum 0.9",
        "data": "hospitals of the northern regions, 10 % similar",
        "ended": ended,
        "late_test_accuracy": 0.91234,
        "late_train_loss": 0.4321,
        "seconds": 7384.0,
        "final": final,
        "optimum_test_accuracy": 0.95,
        "optimum_loss": 0.2,
    }
    return RunRecord(Path(folder), Summary.from_json(summary), [HistoryRow(400, metrics)], privacy)


FOLDERS = [f"experiments-of-november/clipped-at-one-and-a-half-{k}-steps-a-round" for k in (1, 2)]


@pytest.mark.parametrize("width", [80, 60, 40])
def test_compare_fits_and_keeps_names_apart(width: int) -> None:
    runs = [record(FOLDERS[0]), record(FOLDERS[1]), record("a/same"), record("b/same", 3.0)]
    lines = shown(comparison_table(runs, width), width)
    assert all(len(line) <= width for line in lines)
    body = [line for line in lines if "0.877" in line or "3.00" in line or "0.88" in line]
    assert len(body) == len(runs), "one line a run: nothing wraps, and ε is shown"
    names = [line.split("  ")[0] for line in body]
    assert len(set(names)) == len(runs), names
    assert ("accuracy" in " ".join(lines)) == (width >= 60)


def test_a_run_that_has_not_ended_says_so() -> None:
    """Rich's markup would swallow what stands in brackets."""
    lines = shown(comparison_table([record("short", ended="interrupted")], 120), 120)
    assert "[interrupted]" in "\n".join(lines)


def test_tune_fits() -> None:
    keys = ("plan.learning_rate", "plan.regularisation", "algorithm.mu", "privacy.clip")
    scores = [
        SimpleNamespace(values=dict.fromkeys(keys, 0.1 * k), diverged=0, mean=0.5, deviation=0.01)
        for k in range(3)
    ]
    grid = SimpleNamespace(grid=keys, used_folds=5, folds=5, output="the average")
    title = "a long title of the data that are tuned on, with their partition, and more of it"
    tuned = SimpleNamespace(
        tune=grid,
        output="the average",
        metric=SimpleNamespace(title="balanced accuracy"),
        title=title,
        scores=scores,
        best=scores[0],
    )
    for width in (80, 60):
        lines = shown(tuning_table(tuned, width), width)  # type: ignore[arg-type]
        assert all(len(line) <= width for line in lines) and len(lines) == 3 + 3
        assert sum("best" in line for line in lines) == 1
        heads = lines[1].split()
        assert len(set(heads)) == len(heads)


@pytest.mark.parametrize("width", [80, 40])
def test_users_are_named_beside_their_labels(width: int) -> None:
    """A long heading once left the columns before it no room at all."""
    federation = synthetic(alpha=1, beta=1, users=12, records=40)
    lines = shown(label_table(describe(federation)), width)
    assert all(len(line) <= width for line in lines)
    named = [line.strip("│ ").split()[0] for line in lines if line.startswith("│")]
    assert named == [str(user) for user in range(12)]
    assert sum(" train " in line for line in lines) == 1


@pytest.mark.parametrize("width", [80, 40, 24])
def test_the_live_line_fits_and_shows_epsilon(width: int) -> None:
    pytest.importorskip("torch")
    line = Progress("DP-SCAFFOLD-balanced-warm (simulated)", 4000)
    line._first = (0, 0.0)
    metrics = {"test_accuracy": 0.9, "train_loss": 0.4, "epsilon_server": 0.8765}
    line._last = HistoryRow(1, metrics)
    text = line.line(1234, 3000.0, width)
    assert len(text) <= width and "ε" in text and "0.8" in text
    assert ("round 1234/4000" in text) == (width >= 40)
    assert "left" in line.line(1234, 3000.0), "without a width all is said"


@given(st.lists(st.text("ab /-", min_size=1, max_size=60), min_size=2, max_size=6, unique=True))
def test_no_two_names_are_cut_to_the_same(names: list[str]) -> None:
    for width in (8, 12, 24):
        cut = shortened(names, width)
        assert len(set(cut)) == len(names) and max(map(len, cut)) <= width


@given(st.integers(30, 100), st.integers(1, 50), st.integers(0, 6))
def test_a_table_fits_or_keeps_only_what_must_stay(width: int, long: int, more: int) -> None:
    cells = tuple(f"{'x' * long}{k}" for k in range(3))
    columns = [TextColumn("run", cells, None, True, "left"), TextColumn("ε", ("0.10",) * 3)]
    columns += [TextColumn(f"column {k}", ("1234.5",) * 3, k) for k in range(more)]
    lines = shown(fitted(columns, width), width)
    assert all(len(line) <= width for line in lines) and sum("0.10" in line for line in lines) == 3
