"""Commands on several processes: what each prints, leaves behind and exits with."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import environment, held_port, on_ranks, values

import dpscaffold
from dpscaffold import cli
from dpscaffold.models.personal import JOINING, stored_models

SMALL = "[data]\nusers = 4\nrecords = 20\n[plan]\nrounds = 2\nlocal_steps = 2\nuser_ratio = 1.0\n"
PRIVATE = "[privacy]\nnoise = 5.0\n"
REGULARISED = SMALL + PRIVATE + '[personal]\nkind = "mean-regularised"\nstrength = 0.5\n'
FILES = {
    "run.toml": SMALL,
    "regularised.toml": REGULARISED,
}

#: The command, what rank 1 adds to it, and what the sentence names.
REFUSED = {
    "world size": ("train run.toml --set data.users=1", "", "2 ranks were started for 1 users"),
    "configuration": ("train run.toml", "--set plan.rounds=3", "configuration of rank 0"),
    "data": ("train run.toml", "--set data.seed=1", "data of rank 0"),
    "version": ("train run.toml", "", "dpscaffold of rank 0 (1.0 and 1.1)"),
    "device": ("train run.toml --device cuda:99", "", "device is 'cuda:99'"),
    "usage": ("train run.toml --rounds 2", "", "--set KEY=VALUE"),
    "seeds": ("train run.toml --seeds 2", "", "leave --seeds out"),
    "other command": ("audit runs/x", "", "start it without torchrun"),
}


def said(words: list[str]) -> tuple[Any, str, str]:
    """The exit status of a command in this process, and what it prints."""
    out, errors = io.StringIO(), io.StringIO()
    code: Any = 0
    typed = patch.object(sys, "argv", ["dpscaffold", *words])
    with typed, redirect_stdout(out), redirect_stderr(errors):
        try:
            cli.main()
        except SystemExit as left:
            code = left.code
    return code, out.getvalue(), errors.getvalue()


def refused(rank: int, folder: Path) -> dict[str, tuple[Any, str, list[str]]]:
    """What each mistake comes to on this rank, and what is in the folder then."""
    os.chdir(folder)
    found = {}
    for name, (command, more, _) in REFUSED.items():
        words = command.split() + (more.split() if rank == 1 else [])
        version = patch.object(dpscaffold, "__version__", f"1.{rank}")
        with version if "version" in name else nullcontext():
            code, out, errors = said(words)
        found[name] = code, out + errors, sorted(path.name for path in folder.iterdir())
    return found


def succeeds(rank: int, folder: Path) -> list[tuple[Any, str, str]]:
    """What commands that work come to on this rank."""
    os.chdir(folder)
    return [said(words.split()) for words in WORKING]


#: Commands that work, each with a folder that it writes.
WORKING = [
    "train regularised.toml --out several/regularised",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("torchrun")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


@pytest.fixture(scope="module")
def answers(folder, tmp_path_factory):
    """What two ranks come to in one session: mistakes, then commands that work."""
    place = tmp_path_factory.mktemp("answers")
    found = on_ranks(2, place, (refused, folder), (succeeds, folder))
    return [values(one) for one in found]


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_of_all_is_one_sentence_of_each_rank_and_exit_2(mistake, answers):
    for rank, found in enumerate(answers[0]):
        code, printed, left = found[mistake]
        assert code == 2, printed
        assert REFUSED[mistake][2] in printed
        assert printed.startswith(f"rank {rank}: error: ") and printed.count("\n") == 1
        assert left == sorted(FILES)


def test_rank_0_prints_and_exits_0_with_all(answers):
    for (code, printed, _), (other, *silent) in zip(*answers[1], strict=True):
        assert (code, other, silent) == (0, 0, ["", ""]) and printed


def one_process(folder: Path, name: str, words: str) -> Path:
    code, _, errors = said([*words.split(), "--out", str(folder / "one" / name)])
    assert code == 0, errors
    return folder / "one" / name


def test_ranks_train_personal_models_as_one_process_does(answers, folder):
    one = one_process(folder, "regularised", f"train {folder / 'regularised.toml'}")
    several = folder / "several" / "regularised"
    common = torch.zeros(410)
    mine, theirs = stored_models(one, 4, common), stored_models(several, 4, common)
    assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    joined = [json.loads((place / JOINING).read_text()) for place in (one, several)]
    assert joined[0].keys() == joined[1].keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_meet_are_refused(rank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with held_port() as port:
        for name, value in environment(rank, 2, port).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("LOCAL_RANK", "0")  # each is the first of its machine
        monkeypatch.setenv("DPSCAFFOLD_RANK_TIMEOUT", "1")
        code, out, errors = said(["train"])
    assert code == 2 and not out
    assert errors.startswith(f"rank {rank}: error: rank {rank} of 2 did not meet the others at ")
    assert errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_torchrun_ends_all_ranks_with_one(folder, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # a free port
    launcher += ["--nproc-per-node", "2", "-m", "dpscaffold"]
    for words, sentence in (
        ("train run.toml --set data.users=1", "2 ranks were started for 1 users"),
        ("train run.toml --rounds 2", "--set KEY=VALUE"),
        ("train run.toml --device cuda:77", "cuda:77"),
    ):
        command = [*launcher, *words.split(), "--out", str(tmp_path / "run")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 1 and sentence in done.stderr
        assert "exitcode  : 2" in done.stderr
        assert not (tmp_path / "run").exists()
