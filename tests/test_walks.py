"""How often training, prediction and a deployed round change packages, as a script counts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "walks.py"

#: With slack: a new call between packages is no mistake, a dozen of them are worth a look.
MOST = {"train": 80, "predict": 40, "deployed": 150}


def test_call_paths_change_packages_a_limited_number_of_times(tmp_path: Path) -> None:
    """A setting is made once, and each of the two tables is validated once."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    changes = {words[-1]: int(words[0]) for words in lines if "package:" in words}
    assert changes.keys() == MOST.keys()
    assert all(10 < changes[name] <= most for name, most in MOST.items()), done.stdout
    assert [int(words[0]) for words in lines if "×" in words] == [1, 2, 1], done.stdout
