"""Commands on several processes: what each prints, leaves behind and exits with."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import environment, held_port, launched, on_ranks, values

import dpscaffold
import dpscaffold.engines.ranks as engine
from dpscaffold import cli
from dpscaffold.models.noised import released
from dpscaffold.models.personal import JOINING, stored_models
from dpscaffold.training import distributed
from dpscaffold.training.noised import STATEMENT

SMALL = "[data]\nusers = 4\nrecords = 20\n[plan]\nrounds = 2\nlocal_steps = 2\nuser_ratio = 1.0\n"
PRIVATE = "[privacy]\nnoise = 5.0\n"
FINE_TUNED = SMALL + PRIVATE + '[personal]\nkind = "fine-tune"\nnoised = true\nepsilon = 1.0\n'
REGULARISED = SMALL + PRIVATE + '[personal]\nkind = "mean-regularised"\nstrength = 0.5\n'
FILES = {
    "run.toml": SMALL,
    "fine.toml": FINE_TUNED,
    "regularised.toml": REGULARISED,
}

#: The command, what rank 1 adds to it, and what the sentence names.
REFUSED = {
    "world size": ("train run.toml --set data.users=1", "", "2 ranks were started for 1 users"),
    "configuration": ("train run.toml", "--set plan.rounds=3", "configuration of rank 0"),
    "data": ("train run.toml", "--set data.seed=1", "data of rank 0"),
    "version": ("train run.toml", "", "dpscaffold of rank 0 (1.0 and 1.1)"),
    "backend": ("train run.toml --device cuda", "", "backend nccl for device 'cuda'"),
    "backend, one rank": ("train run.toml", "--device cuda", "rank 1 on"),
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


def be_patient() -> None:
    """In a process of its own: wait for the other rank, however busy the machine is."""
    cli._WAIT = engine._HEARD = 120.0


def own_store(name: str) -> Any:
    """A store in which no command before has said anything; a process runs one command."""
    whole = dist.distributed_c10d._get_default_store()
    made = dist.PrefixStore(f"command {name}", whole)
    return patch.object(engine, "_any_store", lambda seconds: made)


def refused(rank: int, folder: Path) -> dict[str, tuple[Any, str, list[str]]]:
    """What each mistake comes to on this rank, and what is in the folder then."""
    os.chdir(folder)
    be_patient()
    found = {}
    for name, (command, more, _) in REFUSED.items():
        words = command.split() + (more.split() if rank == 1 else [])
        version = patch.object(dpscaffold, "__version__", f"1.{rank}")
        backend = patch("torch.distributed.is_nccl_available", return_value=False)
        with version if "version" in name else nullcontext(), backend, own_store(name):
            code, out, errors = said(words)
        found[name] = code, out + errors, sorted(path.name for path in folder.iterdir())
    return found


def succeeds(rank: int, folder: Path) -> list[tuple[Any, str, str]]:
    """What commands that work come to on this rank."""
    os.chdir(folder)
    return [said(words.split()) for words in WORKING]


#: Commands that work, each with a folder that it writes.
WORKING = [
    "train fine.toml --out several/fine",
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
def test_a_mistake_is_one_sentence_of_rank_0_and_exit_2_everywhere(mistake, answers):
    (code, printed, left), (other, silent, _) = (found[mistake] for found in answers[0])
    assert (code, other, silent) == (2, 2, ""), printed
    assert REFUSED[mistake][2] in printed
    assert printed.startswith("error: ") and printed.count("\n") == 1
    assert left == sorted(FILES)


def test_rank_0_prints_and_exits_0_with_all(answers):
    for (code, printed, _), (other, *silent) in zip(*answers[1], strict=True):
        assert (code, other, silent) == (0, 0, ["", ""]) and printed


#: Rank 1 is late at a place, or one rank alone refuses its command: whether the launcher has the
#: store, what each rank adds to the command, and what the sentence of rank 0 names.
APART = {
    "late at the start": (True, ["--rounds 2"] * 2, "--set KEY=VALUE"),
    "late at the check": (True, ["--set data.users=1"] * 2, "2 ranks were started for 1 users"),
    "late at the note": (False, ["--set plan.rounds=0", ""], "plan.rounds"),
    "rank 0 alone": (True, ["--rounds 2", ""], "--set KEY=VALUE"),
    "rank 1 alone": (True, ["", "--rounds 2"], "error: rank 1 on"),
    "rank 1 alone, rank 0 has the store": (False, ["", "--rounds 2"], "error: rank 1 on"),
}


def apart(rank: int, folder: Path, case: str, more: list[str]) -> None:
    """A command at one rank, which waits where its case says so."""
    os.chdir(folder)
    be_patient()
    if rank == 1:
        for where, owner, name in (
            ("late at the start", cli, "main"),
            ("late at the check", distributed, "check_same"),
            ("late at the note", engine._Notes, "told"),
        ):
            if case == where:
                setattr(owner, name, delayed(getattr(owner, name)))
    with patch.object(sys, "argv", ["dpscaffold", "train", "run.toml", *more[rank].split()]):
        cli.main()


def delayed(function: Any) -> Any:
    """The same function, two seconds later."""

    def waiting(*given: Any) -> Any:
        time.sleep(2)
        return function(*given)

    return waiting


@pytest.mark.parametrize("case", APART)
def test_a_rank_that_is_late_or_refuses_alone_ends_with_the_other(case, folder, tmp_path):
    agent, more, sentence = APART[case]
    (code, printed), (other, silent) = launched(tmp_path, agent, apart, folder, case, more)
    assert (code, other, silent) == (2, 2, ""), printed
    assert sentence in printed and printed.count("\n") == 1


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


def test_rank_0_alone_makes_noised_personal_models(answers, folder):
    """Made by every rank, they would be several releases."""
    places = (one_process(folder, "fine", f"train {folder / 'fine.toml'}"), folder / "several/fine")
    assert [len(released(place)) for place in places] == [1, 1]
    mine, theirs = (json.loads((place / STATEMENT).read_text()) for place in places)
    assert mine == theirs


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
    assert errors.startswith(f"error: rank {rank} of 2 did not meet the others at 127.0.0.1:")
    assert errors.count("\n") == 1
    assert not list(tmp_path.iterdir())


#: A command that waits for the other rank, however busy the machine is; rank 1 begins late.
LATE = """
import os, time
time.sleep(2.0 * int(os.environ["RANK"]))
from dpscaffold import cli
cli._WAIT = 120.0
cli.main()
"""


@pytest.mark.slow
def test_torchrun_shows_exit_2_of_every_rank(folder, tmp_path):
    program = tmp_path / "late.py"
    program.write_text(LATE)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # a free port
    launcher += ["--nproc-per-node", "2", str(program)]
    for words, sentence in (
        ("train run.toml --set data.users=1", "2 ranks were started for 1 users"),
        ("train run.toml --rounds 2", "--set KEY=VALUE"),
        ("train run.toml --device cuda:77", "cuda:77"),
    ):
        command = [*launcher, *words.split(), "--out", str(tmp_path / "run")]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.stderr.count("error: ") == 1 and sentence in done.stderr
        assert re.findall(r"exitcode +: (\S+)", done.stderr) == ["2", "2"]
        assert not (tmp_path / "run").exists()
