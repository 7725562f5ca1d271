"""A row of a run's history as a typed object, and as a line of ``metrics.jsonl``."""

from __future__ import annotations

import json
from pathlib import Path

from stated import summary_of

from dpscaffold import Logistic, Plan, fedavg, synthetic, train
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.history import HistoryRow


def test_rows_are_the_lines_of_the_file(tmp_path: Path) -> None:
    data = synthetic(users=4, records=30, dimension=3, classes=2)
    plan = Plan(rounds=4, local_steps=1, user_ratio=0.5, evaluate_every=2)
    result = train(data, Logistic(3, 2), fedavg(), plan, out=tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    *rows, ending = [json.loads(line) for line in lines]
    assert rows == [row.to_json() for row in result.history] and ending["ended"] == "completed"
    assert RunFolder(tmp_path / "run").metrics() == result.history
    assert [row.round for row in result.history] == [2, 4] and result.final == result.history[-1]
    final = result.final
    assert final["train_loss"] == final.metrics["train_loss"] == final.get("train_loss") > 0
    assert next(iter(final)) == "round" and "train_loss" in final and "absent" not in final
    assert summary_of(tmp_path / "run")["final"] == dict(final)


def test_a_line_that_is_no_row_ends_the_history(tmp_path: Path) -> None:
    good = '{"round": 1, "train_loss": 0.5, "test_auc": null}\n'
    for bad in ("[]", '{"train_loss": 1}', '{"round": "2"}', '{"round": 2, "x": "y"}', "{"):
        (tmp_path / "metrics.jsonl").write_text(f"{good}{bad}\n{good}")
        expected = [HistoryRow(1, {"train_loss": 0.5, "test_auc": None})]
        assert RunFolder(tmp_path).metrics() == expected, bad
