"""``train --seeds``: one simulation with several seeds; ``compare`` gives mean ± deviation."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
from stated import summary_of
from typed import done_here as typed

from dpscaffold.runs.folder import RunFolder

TABLES = """
[data]
users = 6
records = 60
features = 4
classes = 3

[plan]
rounds = 4
local_steps = 2
user_ratio = 0.5
evaluate_every = 2

[privacy]
noise = 4.0
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TABLES)
    return path


def test_the_mean_and_the_deviation_are_those_of_the_runs(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "three"
    answer = typed("train", str(config), "--seeds", "3", "--out", str(out), "--json")
    assert answer.returncode == 0, answer.stderr
    (row,) = json.loads(answer.stdout)["runs"]
    alone = [summary_of(out / f"seed-{k}") for k in range(3)]
    values = [summary["late_test_accuracy"] for summary in alone]
    assert len(set(values)) > 1, "the seeds made no difference"
    assert row["seeds"] == 3
    assert row["test_accuracy"] == pytest.approx(fmean(values))
    assert row["test_accuracy_deviation"] == pytest.approx(stdev(values))
    figure = tmp_path / "both.svg"
    both = typed("compare", str(out), str(out / "seed-1"), "--out", str(figure))
    assert both.returncode == 0 and figure.stat().st_size > 1000
    assert "±" in both.stdout and both.stdout.count("±") >= 2


def test_a_seed_alone_is_the_same_run(config: Path, tmp_path: Path) -> None:
    several, alone = tmp_path / "several", tmp_path / "alone"
    typed("train", str(config), "--seeds", "2", "--set", "plan.seed=5", "--out", str(several), "-q")
    typed("train", str(config), "--set", "plan.seed=6", "--out", str(alone), "-q")
    assert RunFolder(several / "seed-6").metrics() == RunFolder(alone).metrics()
    more = typed("train", str(config), "--seeds", "3", "--set", "plan.seed=5", "--out",
                 str(several), "--resume", "-q")  # fmt: skip
    assert more.returncode == 0, more.stderr
    assert sorted(path.name for path in several.iterdir()) == ["seed-5", "seed-6", "seed-7"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--seeds", "1"], "--seeds is 1; give 2 or more"),
        (["--seeds", "2", "--set", "privacy.secret=true"], "whose epsilons add"),
        (["--seeds", "2", "--set", "privacy.release=true"], "whose epsilons add"),
        (["--seeds", "2", "--track", "tensorboard"], "--track is about one run"),
    ],
)
def test_bad_input_is_one_sentence(
    config: Path, tmp_path: Path, given: list[str], said: str
) -> None:
    out = tmp_path / "none"
    answer = typed("train", str(config), "--out", str(out), *given)
    assert answer.returncode == 2 and said in " ".join(answer.stderr.split())
    assert not out.exists()
