"""A small part of the fault campaign (``make torture`` runs all of it)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CAMPAIGN = Path(__file__).parent / "campaign.py"


def play(*options):
    """The campaign in a process of its own, which forks."""
    answer = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--seed", "7", "--minutes", "2", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_a_dozen_kills_and_damages():
    """Training, seeded and secret, killed at random moments, and a bit flipped in every file."""
    said = play("--only", "train", "--kills", "6", "--disks", "0", "--damages", "7")
    assert said.count("killed: ") == 6 and " 0 losses" in said


def test_the_campaign_can_fail(tmp_path):
    """A journal that is written after the uploads were used is noticed."""
    broken = tmp_path / "sitecustomize.py"
    broken.write_text(
        "import dpscaffold.books.journal as journal\n"
        "import dpscaffold.books.accounts as accounts\n"
        "def forgetful(self, line, real=journal.Journal.append):\n"
        "    if line.get('round') != 3:\n"
        "        real(self, line)\n"
        "journal.Journal.append = forgetful\n"
    )
    answer = subprocess.run(
        [sys.executable, str(CAMPAIGN), "--only", "train secret", "--kills", "1", "--disks", "0",
         "--damages", "0", "--minutes", "1"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1",
             "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert answer.returncode != 0
