"""A run's log names what takes a slower path, in its folder and where logging goes anyway."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch import nn

from dpscaffold import Gaussian, Logistic, ModuleTask, Plan, fedavg, synthetic, train
from dpscaffold.engines.fast.worker import Worker

DATA = synthetic(users=4, records=30)
PLAN = Plan(rounds=2, local_steps=2, user_ratio=1.0)
NOISE = Gaussian(clip=1.0, noise=1.0)


class Scaled(nn.Module):
    """A layer without a rule: a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(40))

    def forward(self, x):
        return x * self.scale


def slow_module():
    return ModuleTask(nn.Sequential(Scaled(), nn.Linear(40, 10)))


def test_a_layer_without_a_rule_is_named_in_the_runs_log(tmp_path):
    train(DATA, slow_module(), fedavg(), PLAN, NOISE, out=tmp_path / "run")
    lines = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert len(lines) == 1 and "no rule" in lines[0] and "0 (Scaled)" in lines[0]
    assert "torch.func, which is slower" in lines[0]


def test_a_run_without_warnings_has_no_log(tmp_path):
    train(DATA, Logistic(40, 10), fedavg(), PLAN, NOISE, out=tmp_path / "run")
    assert not (tmp_path / "run" / "run.log").exists()


def test_a_halved_chunk_is_in_the_log_too(tmp_path, monkeypatch):
    real = Worker.participate

    def short(self, phase, rows, *more):
        if len(rows) > 2:
            raise MemoryError
        return real(self, phase, rows, *more)

    monkeypatch.setattr(Worker, "participate", short)
    train(DATA, Logistic(40, 10), fedavg(), PLAN, NOISE, out=tmp_path / "run")
    assert "2 users at a time" in (tmp_path / "run" / "run.log").read_text()


def test_warnings_still_reach_the_error_output(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(logging.lastResort, "_stderr", None, raising=False)
    train(DATA, slow_module(), fedavg(), PLAN, NOISE, out=tmp_path / "run")
    assert "torch.func" in capsys.readouterr().err


@pytest.mark.parametrize("ends", [True, False])
def test_the_log_ends_with_its_run(tmp_path, ends):
    def on_round(row):
        if not ends:
            raise RuntimeError("stop")

    with contextlib.suppress(RuntimeError):
        train(DATA, Logistic(40, 10), fedavg(), PLAN, NOISE, out=tmp_path / "r", on_round=on_round)
    logging.getLogger("dpscaffold.any").warning("nobody's")
    assert not logging.getLogger("dpscaffold").handlers
    assert not (tmp_path / "r" / "run.log").exists()
