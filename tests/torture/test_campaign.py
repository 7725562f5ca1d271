"""A small part of the fault campaign (``make torture`` runs all of it)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parent / "campaign.py"


def played(*options, path=""):
    """The campaign in a process of its own, which forks."""
    where = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH", ""))))
    return subprocess.run(
        [sys.executable, str(CAMPAIGN), "--seed", "7", "--minutes", "3", *options],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": where},
    )


def play(*options):
    answer = played(*options)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_a_dozen_kills_and_damages():
    """Training, seeded and secret, killed at random moments, and a bit flipped in every file."""
    said = play(
        "--only", "train", "--kills", "4", "--disks", "0", "--damages", "5", "--endings", "1"
    )
    assert said.count("killed: ") == 4 and said.count("killed thrice: ") == 3
    assert " 0 losses" in said


def test_a_kill_and_a_power_cut_between_file_operations():
    """Some points of a run and of commands that replace files; ``slow`` takes every one."""
    said = play("--grid", "29", "--only", "train.,report.,site init")
    assert " 0 losses" in said and "power cut at point 30" in said


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train.", "train secret", "train booked"])
def test_every_point_between_the_file_operations_of_a_run(command):
    said = play("--grid", "1", "--minutes", "12", "--only", command)
    assert " 0 losses" in said and "to go" not in said


@pytest.mark.slow
def test_every_command_that_writes_at_some_points():
    said = play("--grid", "5", "--minutes", "12")
    assert " 0 losses" in said and "to go" not in said


def test_the_list_of_commands_is_whole():
    """A command that is not killed here writes nothing, or is named with the reason."""
    from dpscaffold.cli import COMMANDS

    reading = {"privacy": "plots are in the list", "calibrate": "prints", "config": "prints"}
    text = (CAMPAIGN.parent / "commands.py").read_text()
    missing = [name for name in COMMANDS if f'"{name}"' not in text and name not in reading]
    assert missing == []


BROKEN = {
    "a journal that forgets a round": """
import dpscaffold.books.journal as journal
import dpscaffold.books.accounts as accounts
def forgetful(self, line, real=journal.Journal.append):
    if line.get('round') != 3:
        real(self, line)
journal.Journal.append = forgetful
""",
    "a configuration that is written first": """
import dpscaffold.books.runfolder as runfolder
def early(self, config, identity, setting, real=runfolder.RunFolder.begin):
    self.path.mkdir(parents=True, exist_ok=True)
    real(self, config, identity, setting)
    text = self.file("setting.json").read_text()
    self.file("setting.json").unlink()
    self.write_text("setting.json", text)
runfolder.RunFolder.begin = early
""",
}


@pytest.mark.parametrize(
    "mistake",
    [pytest.param(name, marks=[pytest.mark.slow] * (k > 0)) for k, name in enumerate(BROKEN)],
)
def test_the_campaign_can_fail(tmp_path, mistake):
    """A journal with a hole, and files in a wrong order, are noticed."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN[mistake])
    answer = played("--only", "train secret", "--grid", "7", path=tmp_path)
    assert answer.returncode != 0, answer.stdout
