"""The command line as it is typed, in the test's own process, and small configurations for it."""

from __future__ import annotations

import sys

import pytest

from dpscaffold import cli

#: An artificial federation, two rounds, with privacy.
SMALL = """
[data]
users = 5
records = 40
dimension = 4
classes = 3
[plan]
rounds = 2
local_steps = 2
user_ratio = 0.4
[privacy]
noise = 4.0
"""

#: A table of people, as ``table.csv`` beside the configuration, two rounds, without privacy.
TABLE = """
[data]
source = "csv"
path = "table.csv"
label = "ill"
user = "site"
[plan]
rounds = 2
local_steps = 1
user_ratio = 0.5
"""


def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[int, str, str]:
    """``dpscaffold words…``: its exit status, and what it printed and said on the way."""
    monkeypatch.setattr(sys, "argv", ["dpscaffold", *map(str, words)])
    capsys.readouterr()
    try:
        cli.main()
        code = 0
    except SystemExit as left:
        code = int(left.code or 0)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return code, printed.out, printed.err
