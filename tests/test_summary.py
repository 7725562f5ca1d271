"""How a run ended: what is written is read back, and what is no summary is refused."""

from __future__ import annotations

import pytest
from refusals import refuses

from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.summary import Summary

TRAINED = Summary(
    algorithm="SCAFFOLD",
    ended="completed",
    rounds=3,
    seconds=1.5,
    final={"round": 3, "test_accuracy": 0.5, "log10_gap": None},
    metric="test_accuracy",
    metrics={"late_test_accuracy": 0.4},
)
DEPLOYED = Summary(ended="stalled", message="nobody answered", run="ab12", refusals={"east": 2})


@pytest.mark.parametrize("summary", [Summary(), TRAINED, DEPLOYED])
def test_a_summary_is_read_as_it_was_written(tmp_path, summary):
    folder = RunFolder(tmp_path)
    folder.write_summary(summary)
    assert folder.summary() == summary


def test_a_run_without_a_summary_has_not_ended(tmp_path):
    assert RunFolder(tmp_path).summary() == Summary() and Summary().ended == "unfinished"


def test_what_is_no_summary_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"ended": 3}\n')
    with refuses("run-damaged: metrics.jsonl … ended"):
        RunFolder(tmp_path).summary()
