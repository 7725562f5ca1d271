"""A row of a run's history as a typed object, and as a line of ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow


def test_a_line_that_is_no_row_ends_the_history(tmp_path: Path) -> None:
    good = '{"round": 1, "train_loss": 0.5, "test_auc": null}\n'
    for bad in ("[]", '{"train_loss": 1}', '{"round": "2"}', '{"round": 2, "x": "y"}', "{"):
        (tmp_path / "metrics.jsonl").write_text(f"{good}{bad}\n{good}")
        expected = [HistoryRow(1, {"train_loss": 0.5, "test_auc": None})]
        assert RunFolder(tmp_path).metrics() == expected, bad
