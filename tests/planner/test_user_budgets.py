"""Plans of federations whose users have budgets of their own."""

from __future__ import annotations

import json
import math

import pytest
from small import federation, setting
from typer.testing import CliRunner

from dpscaffold import Gaussian
from dpscaffold.cli import app
from dpscaffold.config import load
from dpscaffold.planning.surrogate import SurrogateSetting


def test_the_command_plans_for_the_usual_budget_and_keeps_the_table(tmp_path):
    path = tmp_path / "facts.toml"
    path.write_text(
        "[facts]\nusers = 6\nrecords = 60\nfeatures = 3\nclasses = 2\n"
        '[algorithm]\nname = "fedavg"\n[plan]\nrounds = 4\nlocal_steps = 1\n'
        "[privacy]\nepsilon = { default = 4.0, north = 0.5 }\n"
    )
    command = ["plan", "--config", str(path), "--out", str(tmp_path / "plan"), "--json"]
    answer = CliRunner().invoke(app, command)
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.stdout)
    table = {"default": 4.0, "north": 0.5}
    assert found["recommended"]["privacy"]["epsilon"] == table
    assert found["epsilon"]["value"] == 4.0
    written = load(tmp_path / "plan" / "plan.toml")
    assert written.privacy is not None and written.privacy.epsilon == table


def test_a_step_size_is_planned_for_unequal_noise():
    """A surrogate has one noise, that of the mean."""
    data = federation((60,) * 6)
    privacy = Gaussian(0.7, (2.0, 4.0, 6.0, 2.0, 2.0, 2.0))
    run = setting("fedavg", "logistic", privacy, data, user_ratio=1.0)
    alike = math.sqrt(sum(n**2 for n in privacy.noise_by_user) / 6)
    one = setting("fedavg", "logistic", Gaussian(0.7, alike), data, user_ratio=1.0)
    noises = [SurrogateSetting.of(each).privacy.noise for each in (run, one)]
    assert noises[0] == pytest.approx(noises[1])
