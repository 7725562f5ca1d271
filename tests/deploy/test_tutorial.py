"""The commands of docs/deploy.md, as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def commands() -> str:
    """The shell blocks of the tutorial, one after the other, but for the installation."""
    text = PAGE.read_text(encoding="utf-8")
    part = text.split("## Three sites on one machine", 1)[1].split("\n## ", 1)[0]
    blocks = re.findall(r"```sh\n(.*?)```", part, flags=re.DOTALL)
    return "\n".join(block for block in blocks if "pip install" not in block)


def test_the_tutorial_is_there():
    said = commands()
    assert said.count("dpscaffold ") >= 9 and "server run plan.toml" in said


@pytest.mark.slow
@pytest.mark.processes
def test_the_tutorial_runs_as_printed(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, call in (("dpscaffold", "-m dpscaffold"), ("python", "")):
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {call} "$@"\n')
        (tools / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["FLWR_HOME"] = str(tmp_path / "flwr")
    # Whatever fails, every background process is ended.
    script = "trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n" + commands()
    result = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    logs = "\n".join(path.read_text() for path in (tmp_path / "tutorial").glob("*.log"))
    assert "completed after round 10" in result.stdout, result.stdout + result.stderr + logs
    assert "10 of 12 participations" in result.stdout
    assert '"accuracy"' in result.stdout
