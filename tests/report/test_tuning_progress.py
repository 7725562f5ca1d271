"""The bar that is shown while a plan is made."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from dpscaffold.report import tuning_progress
from dpscaffold.report.tuning_progress import Rounds
from dpscaffold.training.events import RoundDone, StackBegun, StopRequested


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize(("terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_a_bar_shows_the_rounds_of_the_stack_within_the_terminal(
    monkeypatch, width, terminal, quiet
):
    written = io.StringIO()
    monkeypatch.setattr(
        tuning_progress,
        "Console",
        lambda **how: Console(file=written, force_terminal=terminal, width=width),
    )
    caught: list[str] = []
    with Rounds(caught, quiet, "planning") as watcher:
        for stack in (1, 2):
            watcher(StackBegun("planning", stack, 2, 400, 1.0))
            watcher(RoundDone(120, 400))
            watcher.bars.refresh()
        caught.append("SIGINT")
        with pytest.raises(StopRequested, match="SIGINT"):
            watcher(RoundDone(121, 400))
    lines = (
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue()).replace("\r", "\n").split("\n")
    )
    shown = [line for line in lines if "planning 2" in line and "120/400" in line]
    assert bool(shown) is (terminal and not quiet)
    assert all(len(line) <= width for line in lines)
