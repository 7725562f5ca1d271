"""Answers for machines and for old consoles: JSON wherever something is reported, ASCII for every
command; a run's own files found again; archives that were packed again; budgets beyond sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from refusals import refuses
from stated import over_draw, written
from typed import SMALL, typed

from dpscaffold.checks import number
from dpscaffold.errors import BadInput
from dpscaffold.privacy import describe, round_up, solve_noise
from dpscaffold.privacy.mechanism import LEAST_STATED
from dpscaffold.runs.folder import RunFolder


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(SMALL)

    return partial(typed, monkeypatch, capsys)


def test_provision_and_reproduce_answer_in_json(command, tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("flwr", reason="needs the extra [flower]")
    from dpscaffold.paper import reproduce as paper

    (tmp_path / "f.toml").write_text(
        'name = "f"\naddress = "localhost:9092"\nsites = ["north", "south"]\n'
    )
    code, out, err = command("provision", "f.toml", "--out", "kit", "--json")
    if code == 0:
        assert set(json.loads(out)["invitations"]) == {"north", "south"}
    else:  # the file's form is tested elsewhere
        assert code == 2 and err.count("error:") == 1
    monkeypatch.setattr(paper, "reproduce", lambda *a, **k: ["results.parquet"])
    code, out, err = command("reproduce", "table1", "--out", "there", "--json")
    assert code == 0, err
    assert json.loads(out) == {
        "folders": {"table1": "there/table1"},
        "files": {"table1": ["results.parquet"]},
    }


#: What needs nothing but a run, a configuration and a table.
LINES = (
    "train c.toml --out new -v",
    "train --resume run --set plan.rounds=3",
    "compare run --out f.svg",
    "report run",
    "evaluate run",
    "privacy run",
    "privacy c.toml",
    "privacy c.toml --epsilon 2",
    "privacy b.jsonl --epsilon 3 --delta 1e-5",
    "privacy b.jsonl",
    "data describe c.toml",
    "data prepare c.toml --out stored",
    "data list",
    "train c.toml --dry-run",
    "init table.csv",
    "plan --help",
    "audit --help",
    "tune --help",
    "demo --rounds 0",
    "export run --to klingon",
    "server status nowhere",
    "site ledger nowhere",
)


def test_no_command_fails_on_an_ascii_console(command, tmp_path: Path) -> None:
    """A console without a Greek letter, as LC_ALL=C gives one: the same ends."""
    rows = "\n".join(f"{i % 9},{'né'[i % 2]},{'yn'[i % 2]}" for i in range(60))
    (tmp_path / "table.csv").write_text(f"âge,site,ill\n{rows}\n", encoding="utf-8")
    assert command("train", "c.toml", "--out", "run", "-q")[0] == 0
    script = (
        "import sys\nfrom dpscaffold import cli\n"
        "for line in sys.stdin.read().split('\\n'):\n"
        "    sys.argv = ['dpscaffold', *line.split()]\n"
        "    try:\n        cli.main(); code = 0\n"
        "    except SystemExit as left:\n        code = left.code or 0\n"
        "    print(f'## {code} {line}')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="\n".join(LINES).encode(),
        cwd=tmp_path,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    ended = [
        line.split()[1]
        for line in done.stdout.decode(errors="replace").splitlines()
        if line[:3] == "## "
    ]
    assert len(ended) == len(LINES) and set(ended) <= {"0", "2"}, done.stderr[-2000:]
    assert ended.count("2") <= 5


OWN = """
from torch import nn
from dpscaffold.algorithms import fedavg

def net(): return nn.Linear(4, 3)
def mine(): return fedavg()
"""


@pytest.mark.parametrize("width", [40, pytest.param(80, marks=pytest.mark.slow)])
def test_tables_are_whole_on_narrow_consoles(command, tmp_path, width) -> None:
    """No line is longer than the console, no cell is cut, and every epsilon is there."""
    (tmp_path / "c.toml").write_text(SMALL)
    for name, seed in (("first-run-of-two", "1"), ("second-run-of-two", "2")):
        command("train", "c.toml", "--out", name, "--set", f"plan.seed={seed}", "-q")
    command("privacy", "b.jsonl", "--epsilon", "9", "--delta", "1e-2")
    command("train", "c.toml", "--out", "third", "--set", "privacy.budget_file=b.jsonl", "-q")
    epsilon = round_up(written(Path("first-run-of-two")).epsilon)
    calls = ["privacy first-run-of-two", "privacy first-run-of-two second-run-of-two"]
    calls += ["compare first-run-of-two second-run-of-two", "privacy b.jsonl"]
    calls += ["evaluate first-run-of-two", "audit c.toml --trials 100 --minutes 0.01"]
    script = "import sys\nfrom dpscaffold import cli\nfor line in sys.argv[1:]:\n"
    script += "    sys.argv = ['dpscaffold', *line.split()]\n    print('== ' + line)\n"
    script += "    try:\n        cli.main()\n    except SystemExit as left:\n"
    script += "        assert left.code in (0, None), left.code\n"
    environment = {**os.environ, "COLUMNS": str(width), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", script, *calls], capture_output=True, env=environment
    )
    assert done.returncode == 0, done.stderr.decode()
    parts = done.stdout.decode().split("== ")[1:]
    assert len(parts) == len(calls)
    for part in parts:
        call, _, shown = part.partition("\n")
        # A digest of 64 letters has no place to be broken at.
        lines = [line for line in shown.splitlines() if "/" not in line and len(line.split()) > 1]
        if not call.startswith("privacy"):  # a page of Markdown, whose lines a terminal folds
            assert max(map(len, lines)) <= width, (call, max(lines, key=len))
        assert "…" not in shown.replace(", …", "") or "compare" in call, shown
        if call.startswith(("privacy first", "compare")):
            assert epsilon in shown, shown


def test_a_resumed_run_finds_its_own_files(command, tmp_path: Path, monkeypatch) -> None:
    """Next to the configuration that it began with, from any working folder."""
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "own.py").write_text(OWN)
    text = SMALL + '[task]\nkind = "module"\nmodule = "own:net"\n[algorithm]\nname = "own:mine"\n'
    (tmp_path / "project" / "c.toml").write_text(text)
    assert command("train", "project/c.toml", "--out", "run", "-q")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = command("train", "--resume", "../run", "--set", "plan.rounds=3", "-q")
    assert code == 0, err
    (tmp_path / "project" / "own.py").rename(tmp_path / "project" / "gone.py")
    code, _, err = command("train", "--resume", "../run", "--set", "plan.rounds=4")
    assert code == 2 and "own" in err and err.count("error:") == 1
    command("train", tmp_path / "c.toml", "--out", "plain", "-q")
    assert "home" not in RunFolder("plain").described


@pytest.mark.parametrize(
    ("epsilon", "sampling"),
    [
        (1e7, "poisson"),
        pytest.param(1e7, "fixed", marks=pytest.mark.slow),
        pytest.param(1e4, "poisson", marks=pytest.mark.slow),
        pytest.param(1e4, "fixed", marks=pytest.mark.slow),
    ],
)
def test_huge_budgets_are_solved(epsilon: float, sampling: Any) -> None:
    """At once, and never above the budget: one that any noise would keep is refused."""
    run = describe(
        rounds=400, local_steps=50, users=100, cohort_size=20, records=4000, batch_sizes=800,
        noise=1.0, sampling=sampling,
    )  # fmt: skip
    try:
        noise = solve_noise(run, epsilon)
    except BadInput as refused:
        assert refused.code == "goal-too-weak"
        assert over_draw(replace(run, noise=LEAST_STATED)) <= epsilon
    else:
        assert over_draw(replace(run, noise=noise)) <= epsilon


def test_numbers_beyond_every_float_are_refused() -> None:
    with refuses("not-a-number"):
        number("plan.averaging", 10**400)
