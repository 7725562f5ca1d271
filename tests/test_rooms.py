"""How far a run walks before its first local step, by the script that prints the walk."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "rooms.py"


def test_a_run_changes_rooms_a_limited_number_of_times(tmp_path: Path) -> None:
    """A setting is made once, and each of the two tables is looked through once."""
    assert importlib.util.find_spec("dpscaffold") is not None
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    counts = [int(line.split()[0]) for line in done.stdout.splitlines()]
    changes, settings, validations, plans = counts
    assert 20 < changes <= 110, done.stdout
    assert (settings, validations, plans) == (1, 2, 1), done.stdout
