"""The command line as people type it: fast help, versions, resuming by folder, keys left out."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from refusals import refuses
from typed import SMALL, typed

from dpscaffold import __version__
from dpscaffold.cli import COMMANDS, SUMMARIES
from dpscaffold.cli.train import requested

#: Four rounds, so that a run can be cut between two checkpoints.
LONGER = SMALL.replace("rounds = 2", "rounds = 4\ncheckpoint_every = 2\nevaluate_every = 2")


def run(*arguments, cwd, **variables):
    """The command line in its own process."""
    command = [sys.executable, "-m", "dpscaffold", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, timeout=120)


def here(monkeypatch, capsys, folder, *arguments):
    """The command line in this process: exit status, stdout, stderr."""
    monkeypatch.chdir(folder)
    return typed(monkeypatch, capsys, *arguments)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("front")
    (folder / "small.toml").write_text(LONGER)
    done = run("train", "small.toml", "--out", "run", "-q", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"" and done.stderr == b"", "-q prints nothing"
    return folder


def test_no_help_imports_torch(tmp_path):
    """For the whole and for every command, in one process."""
    code = (
        "import sys; from dpscaffold.cli import main\n"
        "for words in (['--help'], *([name, '--help'] for name in sys.argv[1:])):\n"
        "    sys.argv = ['dpscaffold', *words]\n"
        "    try: main()\n"
        "    except SystemExit as left: assert not left.code, words\n"
        "    assert 'torch' not in sys.modules, words\n"
    )
    command = [sys.executable, "-c", code, *COMMANDS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage:") == 1 + len(COMMANDS)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["train", "--help"],
        *(pytest.param([c, "--help"], marks=pytest.mark.slow) for c in COMMANDS if c != "train"),
    ],
    ids=" ".join,
)
def test_help_is_quick(tmp_path, words):
    """Under half a second of CPU each."""
    for patience in (2, 1, 0):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(*words, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if spent < 0.7:  # 0.4 at most on an idle machine
            break
        assert patience, f"{words} took {spent:.2f} s of CPU"


def test_keys_are_explained_without_torch(tmp_path):
    """The models that declare and explain the keys do not import PyTorch."""
    code = (
        "import sys; from dpscaffold.config.reference import keys\n"
        "assert len(keys()) > 50\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()


def test_every_command_has_a_line_of_its_own(monkeypatch, capsys, tmp_path):
    shown = here(monkeypatch, capsys, tmp_path, "--help")[1]
    assert set(SUMMARIES) == set(COMMANDS)
    for name, line in SUMMARIES.items():
        assert len(line) <= 66 and line in shown, name


def test_version_and_words_in_brackets(monkeypatch, capsys, tmp_path):
    assert here(monkeypatch, capsys, tmp_path, "--version")[1] == f"dpscaffold {__version__}\n"
    shown = here(monkeypatch, capsys, tmp_path, "data", "describe", "--help")[1]
    assert "Configuration file (TOML) with a [data] table." in " ".join(shown.split())
    shown = here(monkeypatch, capsys, tmp_path, "data", "list", "--help")[1]
    assert "[data]" in shown, "Rich's markup would swallow it"


def test_a_run_is_resumed_by_its_folder_or_by_its_configuration(finished, monkeypatch, capsys):
    before = (finished / "run" / "metrics.jsonl").read_text()
    for words in (["--resume", "run"], ["run/config.toml", "--resume"]):
        code, out, err = here(monkeypatch, capsys, finished, "train", *words, "--json")
        assert code == 0, err
        assert json.loads(out)["folder"] == "run"
    assert (finished / "run" / "metrics.jsonl").read_text() == before
    assert not (finished / "runs").exists(), "another run was started"


def test_which_run_is_meant(finished, monkeypatch):
    monkeypatch.chdir(finished)
    assert requested(Path("small.toml"), None, True).folder == Path("runs/small")
    assert requested(Path("run/config.toml"), None, False).folder == Path("runs/config")
    assert requested(Path("run/config.toml"), Path("other"), True).folder == Path("other")
    with refuses("run-exists: --resume"):
        requested(Path("run"), None, False)
    with refuses("not-a-run"):
        requested(Path("."), None, True)


def test_set_without_a_configuration_starts_from_plain_defaults(tmp_path, monkeypatch, capsys):
    """The demo's noise and rounds must not leak into another source's run."""
    words = ["--set", "data.source=digits", "--set", "data.users=4", "--set", "plan.rounds=2"]
    words += ["--set", "plan.local_steps=1", "--set", "plan.user_ratio=0.5", "--out", "run"]
    code, _, err = here(monkeypatch, capsys, tmp_path, "train", *words, "-v")
    assert code == 0, err
    assert "no privacy" in err and "2 rounds of 2 of 4 users" in err
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "[privacy]" not in text and "optimum" not in text


#: Prints the configuration and does nothing.
DRY = ["train", "--dry-run"]


def test_keys_can_be_unset(finished, monkeypatch, capsys):
    words = ["--set", "privacy.noise=", "--set", "privacy.epsilon=1", "--json"]
    code, out, err = here(monkeypatch, capsys, finished, *DRY, "small.toml", *words)
    assert code == 0, err
    assert json.loads(out)["privacy"]["epsilon"] == 1
    assert "noise" not in json.loads(out)["privacy"]
    asked = [*DRY, "small.toml", "--set", "privacy=false", "--json"]
    assert "privacy" not in json.loads(here(monkeypatch, capsys, finished, *asked)[1])
    assert here(monkeypatch, capsys, finished, *DRY, "--set", "privacy=")[0] == 2


def test_leaving_out_what_is_no_key_is_refused(finished, monkeypatch, capsys):
    words = ["--set", "privacy.nosie="]
    for command in (["train", "small.toml", "--out", "not-begun"], DRY):
        code, _, err = here(monkeypatch, capsys, finished, *command, *words)
        assert code == 2 and "did you mean 'privacy.noise'?" in err
    assert not (finished / "not-begun").exists()


def test_what_stands_in_the_file_can_be_left_out_whatever_it_is(tmp_path, monkeypatch, capsys):
    (tmp_path / "own.py").write_text("from dpscaffold import fedavg\ndef own(): return fedavg()\n")
    (tmp_path / "c.toml").write_text('[algorithm]\nname = "own:own"\nalpha = 0.5\n')
    asked = [*DRY, "c.toml", "--json", "--set", "algorithm.alpha="]
    code, out, err = here(monkeypatch, capsys, tmp_path, *asked)
    assert code == 0 and "alpha" not in json.loads(out)["algorithm"], err


def test_resuming_what_is_no_run_says_so(finished, monkeypatch, capsys):
    code, _, err = here(monkeypatch, capsys, finished, "train", "--resume", "nowhere")
    assert code == 2 and "nowhere holds no run to continue" in err


def test_compare_as_json_writes_a_figure_only_when_asked(finished, monkeypatch, capsys):
    code, out, err = here(monkeypatch, capsys, finished, "compare", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["figure"] is None and not (finished / "comparison.png").exists()
    here(monkeypatch, capsys, finished, "compare", "run", "--json", "--out", "asked.svg")
    assert (finished / "asked.svg").exists()


def test_tracking_says_that_epsilon_does_not_cover_what_it_hands_on(tmp_path, monkeypatch, capsys):
    """Even where nothing else is printed: a tracker may be a server of somebody else's."""
    (tmp_path / "c.toml").write_text(SMALL)
    monkeypatch.setattr("dpscaffold.training.tracking.tracker", lambda *given: Mock())
    words = ("train", "c.toml", "--out", "run", "-q", "--track", "mlflow")
    code, out, err = here(monkeypatch, capsys, tmp_path, *words)
    assert code == 0 and not out
    assert err.startswith("warning: --track mlflow") and "epsilon does not cover" in err
