"""A disk that is full: every command that writes says so in one sentence, and nothing is lost."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typed import TABLE

from dpscaffold.training.train import run

WITH_NOISE = TABLE + "[privacy]\nnoise = 4.0\n"
LINES = (
    "train c.toml --out new -q",
    "train --resume run --set plan.rounds=3 -q",
    "init table.csv",
    "compare run --out f.svg",
    "report run --out page.html",
    "predict run table.csv --out said.csv",
    "predict run tab*.csv --out said.csv",
    "evaluate run table.csv --label ill --figure f.svg",
    "export run --to safetensors --out exported",
    "privacy b.jsonl --epsilon 3 --delta 1e-5",
    "data describe c.toml --out f.svg",
    "data prepare c.toml --out stored",
)
#: Every command in one process that can write this many bytes to a file, as on a disk without room.
SCRIPT = """
import resource, signal, sys
from dpscaffold import cli
import dpscaffold.report.runs, matplotlib.pyplot
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for line in sys.stdin.read().split("\\n"):
    room, _, line = line.partition(" ")
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(room), resource.RLIM_INFINITY))
    print(f"## {line}", file=sys.stderr, flush=True)
    sys.argv = ["dpscaffold", *line.split()]
    try:
        cli.main(); code = 0
    except SystemExit as left:
        code = left.code or 0
    print(f"-> {code}", file=sys.stderr, flush=True)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch) -> Path:
    rows = "\n".join(f"{i % 9},{'ns'[i % 2]},{'yn'[i * 7 % 4 < 2]}" for i in range(80))
    (tmp_path / "table.csv").write_text(f"age,site,ill\n{rows}\n")
    (tmp_path / "c.toml").write_text(WITH_NOISE)
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "c.toml", out=tmp_path / "run")
    return tmp_path


def held(home: Path) -> dict[str, str]:
    """Every file that holds something, but locks, by its digest."""
    return {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file()
        and path.stat().st_size
        and not any(part.startswith(".") for part in path.relative_to(home).parts)
    }


def answers_with(home: Path, lines: list[str]) -> list[str]:
    """What each line said, that begins with the bytes that a file may have."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input="\n".join(lines).encode(),
        cwd=home,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MPLCONFIGDIR": str(home / ".mpl")},
        capture_output=True,
        timeout=240,
    )
    said = done.stderr.decode(errors="replace")
    assert done.returncode == 0 and "Traceback" not in said, said[-3000:]
    answers = said.split("## ")[1:]
    assert len(answers) == len(lines)
    return answers


def test_a_full_disk_is_one_sentence_for_every_command(home: Path) -> None:
    before = held(home)
    answers = answers_with(home, [f"0 {line}" for line in LINES])
    for line, answer in zip(LINES, answers, strict=True):
        assert "-> 2" in answer and answer.count("error:") == 1, (line, answer)
    after = held(home)
    assert not {name for name in before if after.get(name) != before[name]}
    assert not set(after) - set(before), "nothing half-written is left"
    resumed = run(home / "run" / "config.toml", out=home / "run", resume=True)
    assert resumed.rounds == 2 and (home / "run" / "model" / "privacy.json").exists()


def test_a_disk_that_fills_up_in_the_middle_of_a_file_is_one_sentence(home: Path) -> None:
    """PyTorch writes archives by itself, and complains of its own positions where one is cut."""
    whole = (home / "run" / "checkpoint.pt").stat().st_size
    config = (home / "run" / "config.toml").stat().st_size
    rooms = [whole - 1, (whole + config) // 2, config + 1]
    lines = [f"{room} train c.toml --out new{room} -q" for room in rooms]
    lines += ["3000 export run --to torch --out model.pt2"]
    for line, answer in zip(lines, answers_with(home, lines), strict=True):
        assert "-> 2" in answer and answer.count("error:") == 1, (line, answer)
        assert "File too large" in answer and ".partial" not in answer, (line, answer)
    left = [path for path in home.rglob("*") if path.suffix in (".pt", ".pt2")]
    assert left == [home / "run" / "checkpoint.pt"]
    for room in rooms:
        folder = home / f"new{room}"
        run(folder / "config.toml", out=folder, resume=True)
        assert (folder / "model").exists()


def test_no_part_of_a_key_is_left_where_the_disk_fills_up(home: Path) -> None:
    lines = [f"{room} train c.toml --out new --data-key records.key -q" for room in (0, 1, 40, 64)]
    for answer in answers_with(home, lines):
        assert "-> 2" in answer and "File too large" in answer, answer
        assert "records.key" in answer.partition("error:")[2], answer
    assert not (home / "records.key").exists()
