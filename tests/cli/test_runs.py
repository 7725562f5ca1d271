"""The commands that train and compare, end to end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
from stated import page_of, read, summary_of, written
from typed import done_here

from dpscaffold.privacy import round_up
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.ledger import read_account

SMALL = """
[data]
source = "synthetic"
alpha = 2.0
beta = 2.0
users = 10
records = 100
[task]
metrics = ["optimum"]
[algorithm]
name = "scaffold"
[plan]
rounds = 12
local_steps = 4
evaluate_every = 3
checkpoint_every = 4
[privacy]
clip = 1.0
noise = 4.0
"""

EXAMPLES = Path(__file__).parents[2] / "examples"


def dpscaffold(*arguments, folder):
    """The command line in this folder, with solved optima in it and a wide terminal."""
    with pytest.MonkeyPatch.context() as patch, chdir(folder):
        patch.setenv("COLUMNS", "200")
        return done_here(*arguments)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """A finished run folder."""
    folder = tmp_path_factory.mktemp("finished")
    done = dpscaffold("train", config, "--out", "run", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run", json.loads(done.stdout)


def test_train_writes_a_whole_run_folder(finished):
    run, printed = finished
    rows = RunFolder(run).metrics()
    assert [row["round"] for row in rows] == [3, 6, 9, 12]
    assert {"test_accuracy", "train_loss", "log10_gap", "gradient_dissimilarity"} <= set(rows[0])
    summary = summary_of(run)
    assert (
        summary["final"] == rows[-1] == printed["final"]
        and 0 < summary["optimum_test_accuracy"] <= 1
    )
    with (run / "config.toml").open("rb") as stream:
        resolved = tomllib.load(stream)
    assert (
        resolved["plan"]["seed"] == 0
        and resolved["data"]["users"] == 10
        and resolved["privacy"]["noise"] == 4.0
    )
    said = written(run)
    assert said.towards("server").theorem == "1"
    assert round_up(said.epsilon) in page_of(run)


def test_a_resolved_configuration_gives_the_same_run(finished, tmp_path):
    """config.toml of a run folder is itself a configuration."""
    run, _ = finished
    done = dpscaffold("train", run / "config.toml", "--out", tmp_path / "again", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert RunFolder(tmp_path / "again").metrics() == RunFolder(run).metrics()
    again, first = (
        tomllib.loads((folder / "config.toml").read_text()) for folder in (tmp_path / "again", run)
    )
    assert again["run"].pop("data") != first["run"].pop("data")  # each has a key of its own
    assert again == first


def test_progress_is_plain_lines_without_a_terminal(config, tmp_path):
    done = dpscaffold("train", config, "--out", "run", folder=tmp_path)
    assert (
        "round 12/12" in done.stderr and "ε(server)" in done.stderr and "\x1b[" not in done.stderr
    )
    assert "accuracy" in done.stdout and "against the server" in done.stdout
    assert len(done.stdout.splitlines()) <= 6


def test_epsilon_in_place_of_noise(config, tmp_path):
    """The noise is solved for, and the run spends at most what was asked and at least 98 % of
    it."""
    done = dpscaffold(
        "train",
        config,
        "--set",
        "privacy={clip=1.0, epsilon=0.8}",
        "--out",
        "run",
        "--json",
        folder=tmp_path,
    )
    assert done.returncode == 2 and "table.key=value" in done.stderr
    text = SMALL.replace("noise = 4.0", "epsilon = 0.8")
    (tmp_path / "epsilon.toml").write_text(text)
    done = dpscaffold("train", "epsilon.toml", "--out", "run", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    spent = read(json.loads(done.stdout)["privacy"]).epsilon
    assert 0.98 * 0.8 <= spent <= 0.8


def test_compare_prints_a_table_and_writes_a_figure(finished, config, tmp_path):
    run, _ = finished
    other = dpscaffold(
        "train",
        config,
        "--set",
        "privacy=false",
        "--set",
        "algorithm.name=fedavg",
        "--out",
        "plain",
        folder=tmp_path,
    )
    assert other.returncode == 0, other.stderr
    done = dpscaffold("compare", run, "plain", "--out", "both.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        "DP-SCAFFOLD" in done.stdout
        and "FedAvg" in done.stdout
        and "not private" in done.stdout
        and "central optimum" in done.stdout
    )
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads(
        dpscaffold("compare", run, "plain", "--out", "both.svg", "--json", folder=tmp_path).stdout
    )["runs"]
    assert rows[0]["epsilon_server"] > 0 and rows[1]["epsilon_server"] is None


def test_the_privacy_command_reads_a_run_folder(finished, tmp_path):
    run, printed = finished
    done = dpscaffold("privacy", run, "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = read(json.loads(done.stdout))
    assert said.epsilon == pytest.approx(read(printed["privacy"]).epsilon)
    assert said.towards("server").given > 0


@pytest.mark.slow
def test_demo_compares_four_runs_and_goes_on_where_it_was(tmp_path):
    done = dpscaffold("demo", "--rounds", "2", "--out", "demo", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for label in ("DP-SCAFFOLD", "DP-FedAvg", "DP-FedSGD", "central optimum"):
        assert label in done.stdout
    assert (tmp_path / "demo" / "comparison.png").exists()
    again = dpscaffold("demo", "--rounds", "2", "--out", "demo", folder=tmp_path)
    assert again.returncode == 0 and "round 1/2" not in again.stderr


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_configuration_is_valid(example):
    """Every table of every example parses; [tune] belongs to the command of that name, and a plan
    with [deploy] to a server."""
    from dpscaffold.config import parse
    from dpscaffold.deployment.server.config import load_served

    tables = tomllib.loads(example.read_text(encoding="utf-8"))
    if "deploy" in tables:
        load_served(example)
    else:
        parse({name: table for name, table in tables.items() if name != "tune"}, example.parent)


@pytest.mark.slow
def test_the_python_example_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "own_arrays.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "against the server" in done.stdout, done.stderr


#: A longer run whose every round is in its metrics, with a checkpoint every four.
LONG = tuple(
    f"--set=plan.{key}"
    for key in ("rounds=120", "local_steps=10", "evaluate_every=1", "checkpoint_every=4")
)


def start(config, folder):
    """A longer run in the background."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "dpscaffold", "train", str(config), "--out", "run", *LONG],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path, process, seconds=60):
    """Until a file exists."""
    limit = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < limit, f"{path} did not appear"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    """The longer run, left alone."""
    folder = tmp_path_factory.mktemp("whole")
    done = dpscaffold("train", config, "--out", "whole", *LONG, folder=folder)
    assert done.returncode == 0, done.stderr
    return RunFolder(folder / "whole")


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_resumes_to_the_uninterrupted_end(config, whole, tmp_path, sent, code):
    """Killed at a random moment or asked to stop, then resumed: exactly the metrics of a run left
    alone, but that rounds which are run again count all that had been released by then."""
    process = start(config, tmp_path)
    wait_for(tmp_path / "run" / "checkpoint.pt", process)
    time.sleep(random.random() * 0.5)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, (out, err)
    if sent != signal.SIGKILL:
        assert "--resume" in out
    run = RunFolder(tmp_path / "run")
    stored, released = run.load_checkpoint().state.round, read_account(run.path).rounds
    assert stored <= released and (sent == signal.SIGKILL or stored == released)
    resumed = dpscaffold("train", config, "--out", "run", "--resume", *LONG, folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    expected = whole.metrics()
    spent = expected[released - 1]["epsilon_server"]
    for place in range(stored, released):
        row = expected[place]
        expected[place] = replace(row, metrics={**row.metrics, "epsilon_server": spent})
    assert run.metrics() == expected and len(expected) == 120
    assert run.summary().final == whole.summary().final


BAD = [
    (["--set", "plan.rouds=3"], "unknown key plan.rouds (did you mean 'rounds'?)"),
    (["--set", "plan.user_ratio=0"], "plan.user_ratio is 0"),
    (
        ["--set", "plan.user_ratio=1.5"],
        "plan.user_ratio is 1.5; give a number less than or equal to 1",
    ),
    (["--set", "plan.user_ratio=0.01"], "selects no one of 10 users"),
    (["--set", "plan.data_ratio=0.001"], "an empty batch"),
    (["--set", "plan.learning_rate=-1"], "plan.learning_rate is -1"),
    (["--set", "plan.learning_rate=nan"], "plan.learning_rate is nan"),
    (["--set", "plan.rounds=many"], "plan.rounds is 'many'"),
    (["--set", "algorithm.name=sgd"], "algorithm.name is 'sgd'"),
    (["--set", "algorithm.name=fedsgd"], "use 5"),
    (["--set", "privacy.noise=-2"], "privacy.noise is -2"),
    (["--set", "privacy.clip=0"], "privacy.clip is 0"),
    (["--set", "privacy.epsilon=1"], "both are given; leave one out (--set privacy.noise="),
    (["--set", "privacy.delta=2"], "privacy.delta is 2"),
    (["--set", "data.source=synthetc"], "did you mean 'synthetic'"),
    (["--set", "data.userz=3"], "did you mean 'users'"),
    (["--set", "task.kind=mlp"], "is not convex"),
    (["--set", "rounds=3"], "--set is 'rounds=3'; write plan.rounds=3"),
    (["--set", "planets=3"], "table.key=value"),
    (["--set", "planet.rounds=3"], "did you mean 'plan'"),
    (["--device", "cuda:7"], "device is 'cuda:7'"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    BAD,
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    config, tmp_path, monkeypatch, capsys, arguments, sentence
):
    """Non-zero exit, the sentence, no traceback, no run folder."""
    from dpscaffold import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["dpscaffold", "train", str(config), "--out", "run", *arguments]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    printed = capsys.readouterr()
    assert left.value.code == 2, printed
    assert sentence in " ".join(printed.err.split())
    assert printed.err.count("error:") == 1 and "Traceback" not in printed.err
    assert not (tmp_path / "run").exists()


def test_files_that_cannot_be_read(config, tmp_path, finished, monkeypatch):
    run, _ = finished
    (tmp_path / "broken.toml").write_text("plan = [")
    cases = [
        (["train", "nowhere.toml"], "cannot be read"),
        (["train", "broken.toml"], "not valid TOML"),
        (["train", config, "--out", run], "already holds a run"),
        (
            ["train", config, "--out", run, "--resume", "--set", "plan.rounds=11"],
            "plan.rounds = 12, not 11",
        ),
        (["compare", tmp_path], "holds no run"),
        (["compare", run, "--out", "figure.doc"], ".png, .svg or .pdf"),
    ]
    monkeypatch.chdir(tmp_path)
    for arguments, sentence in cases:
        done = done_here(*arguments)
        assert (
            done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr
        ), (
            arguments,
            done.stderr,
        )


def test_a_diverging_run_exits_with_its_own_status(config, tmp_path):
    done = dpscaffold(
        "train",
        config,
        "--set",
        "plan.learning_rate=1e30",
        "--set",
        "plan.regularisation=1",
        "--set",
        "privacy=false",
        "--set",
        "algorithm.name=fedavg",
        "--out",
        "run",
        folder=tmp_path,
    )
    assert (
        done.returncode == 3
        and "diverged at round" in done.stderr
        and "plan.learning_rate" in done.stderr
    )


def test_calibrate_leaves_room_for_private_preprocessing(tmp_path):
    """The same budget needs more noise where part of it went into private statistics."""
    text = """
[data]
source = "digits"
users = 5
preprocess = [STEPS"unit-norm"]
[plan]
rounds = 5
local_steps = 2
user_ratio = 0.4
[privacy]
noise = 4.0
"""
    private = '{step = "centre", fit = "private", norm_bound = 10.0, noise = 3.0}, '
    noise = []
    for name, steps in (("plain", ""), ("paid", private)):
        (tmp_path / f"{name}.toml").write_text(text.replace("STEPS", steps))
        done = dpscaffold("privacy", f"{name}.toml", "--epsilon", "1.5", "--json", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["guarantees"][0]["epsilon"] <= 1.5
        noise.append(answer["noise"])
    assert noise[1] > 1.1 * noise[0]
