"""The command line as it is typed, in the test's own process, and small configurations for it."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from dpscaffold import cli

#: An artificial federation, two rounds, with privacy.
SMALL = """
[data]
users = 5
records = 40
features = 4
classes = 3
[plan]
rounds = 2
local_steps = 2
user_ratio = 0.4
[privacy]
noise = 4.0
"""

#: A table of people, as ``table.csv`` next to the configuration, two rounds, without privacy.
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

#: Patients of several hospitals, as ``h.csv`` next to the configuration; a test adds the rest.
HOSPITALS = """
[data]
source = "csv"
path = "h.csv"
label = "readmitted"
user = "site"
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


@dataclass(frozen=True)
class Done:
    """A command that has ended, as a process of its own tells it."""

    returncode: int
    stdout: str
    stderr: str


def done_here(*words: object) -> Done:
    """``dpscaffold words…`` in this process, which spares the start of another. Logging and the
    current folder are this process's, so what is about those wants a process of its own."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["dpscaffold", *map(str, words)])
        try:
            cli.main()
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    assert "Traceback" not in texts[1]
    return Done(code, *texts)
