"""Early stopping: it stops, and everything that is stated counts the planned rounds."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from refusals import refuses
from stated import written
from typer.testing import CliRunner

from dpscaffold import Federation, Gaussian, Logistic, Model, Plan, run, scaffold, synthetic, train
from dpscaffold.cli import app
from dpscaffold.runs.history import HistoryRow
from dpscaffold.runs.ledger import read_account
from dpscaffold.training.stopping import Stopping

PLAN = Plan(rounds=40, local_steps=3, user_ratio=0.5, evaluate_every=1)
NOISY = Gaussian(clip=1.0, noise=8.0)


def public(path: Path) -> Path:
    """Public rows with a column of what is true."""
    rows = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).tolist()
    lines = ["label,0,1,2,3", *(f"{k % 3}," + ",".join(map(str, r)) for k, r in enumerate(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


def parts(folder: Path):
    data = synthetic(users=8, records=60, dimension=4, classes=3)
    return data, Stopping(public(folder / "public.csv"), patience=3)


@pytest.mark.parametrize("kept", [False, True])
def test_a_stopped_run_states_its_planned_rounds(tmp_path: Path, kept: bool) -> None:
    data, stopping = parts(tmp_path)
    out = tmp_path / "run" if kept else None
    whole = train(data, Logistic(4, 3), scaffold(), PLAN, NOISY)
    short = train(data, Logistic(4, 3), scaffold(), PLAN, NOISY, stopping=stopping, out=out)
    assert short.rounds < 40 and short.message == f"stopped early after round {short.rounds} of 40"
    for view in ("server", "third_party", "participant"):
        assert short.privacy.towards(view).epsilon == whole.privacy.towards(view).epsilon
    assert short.privacy.rounds == 40
    assert short.privacy.towards("server").given == whole.privacy.towards("server").given
    # The model is the one of the round where it stopped, as a run without stopping had it.
    seen: list[torch.Tensor] = []

    def params(model: Model, federation: Federation) -> float:
        seen.append(model.params.clone())
        return 0.0

    again = train(data, Logistic(4, 3), scaffold(), PLAN, NOISY, metrics=[params])
    at = [row.round for row in again.history].index(short.rounds)
    assert again.rounds == 40 and torch.equal(short.params, seen[at])
    assert all(r["epsilon_server"] == whole.final["epsilon_server"] for r in short.history)
    if kept:
        assert read_account(tmp_path / "run").statement().rounds == 40


def test_a_killed_run_states_its_planned_rounds_too(tmp_path: Path) -> None:
    data, stopping = parts(tmp_path)

    class Killed(Exception):
        pass

    def kill(row: HistoryRow) -> None:
        if row.round == 2:
            raise Killed

    with pytest.raises(Killed):
        train(
            data,
            Logistic(4, 3),
            scaffold(),
            PLAN,
            NOISY,
            stopping=stopping,
            out=tmp_path / "run",
            on_round=kill,
        )
    assert read_account(tmp_path / "run").statement().rounds == 40


def test_bad_public_rows(tmp_path: Path) -> None:
    with refuses("out-of-range: patience"):
        Stopping("public.csv", patience=0)
    data, stopping = parts(tmp_path)
    Path(stopping.path).write_text("label,0,1,2,3\nseven,0,0,0,0\n")
    with refuses("bad-labels: 'seven'"):
        train(data, Logistic(4, 3), scaffold(), PLAN, NOISY, stopping=stopping)


TABLES = """
[data]
users = 8
records = 60
features = 4
classes = 3
[plan]
rounds = 40
local_steps = 3
user_ratio = 0.5
evaluate_every = 1
[privacy]
clip = 1.0
noise = 8.0
"""


def test_a_configuration_and_the_command_line_stop_early_too(tmp_path: Path) -> None:
    """[stopping] and --set stopping.path: the same round, and ε of the planned T in every file."""
    rows = public(tmp_path / "public.csv")
    config = tmp_path / "c.toml"
    config.write_text(TABLES + f"[stopping]\npath = '{rows}'\n")
    whole = run(config, ["stopping=false"], out=tmp_path / "whole")
    short = run(config, out=tmp_path / "short")
    assert whole.rounds == 40 and short.rounds < 40
    assert short.message == f"stopped early after round {short.rounds} of 40"
    plain = tmp_path / "plain.toml"
    plain.write_text(TABLES)
    asked = ["--json", "--set", f"stopping.path={rows}", "--out", f"{tmp_path}/typed"]
    typed = CliRunner().invoke(app, ["train", str(plain), *asked])
    assert typed.exit_code == 0, typed.output
    assert json.loads(typed.output)["final"]["round"] == short.rounds
    for name in ("short", "typed"):
        said = written(tmp_path / name)
        assert said.rounds == 40 and said.towards("server") == whole.privacy.towards("server")
        kept = tomllib.loads((tmp_path / name / "config.toml").read_text())
        assert kept["stopping"] == {"path": str(rows)}
    # A stopped run that is read back, from its own configuration, promises the same.
    said = read_account(tmp_path / "short").statement()
    assert said.towards("server") == whole.privacy.towards("server")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"path": "nowhere.csv"}, "file-unreadable: nowhere.csv"),
        ({"path": "public.txt.gz"}, "wrong-file-type"),
        ({"paht": "public.csv"}, "unknown-key: stopping.paht … 'path'"),
    ],
)
def test_wrong_stopping_is_refused_before_anything_is_released(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    public(tmp_path / "public.csv")
    (tmp_path / "public.txt.gz").touch()
    change = {k: f"{tmp_path}/{v}" if k == "path" else v for k, v in change.items()}
    tables = tomllib.loads(TABLES)
    tables["stopping"] = {"path": f"{tmp_path}/public.csv", **change}
    with refuses(said):
        run(tables, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
