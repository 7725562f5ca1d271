"""A GPU's own program next to what it represents: the same steps, the same bounds.

It runs on a GPU, or without one under Triton's interpreter where Triton is installed:
``TRITON_INTERPRET=1 python -m pytest tests/engine/test_programs.py``. What needs neither runs
always.
"""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import CPU, EVERY, Driven, draw_as_a_gpu, federation, setting

from dpscaffold.algorithms import Broadcast, Participant
from dpscaffold.algorithms.base import Affine
from dpscaffold.engine import Engine, device, gpu, work
from dpscaffold.engine.draws import DeviceBatches, DrawnSteps
from dpscaffold.engine.query import Numbers
from dpscaffold.engine.records import Records
from dpscaffold.tasks import Linear, Logistic
from dpscaffold.tasks.losses import LOSSES, huber, weighted

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
with_programs = pytest.mark.skipif(
    not (DEVICE.type == "cuda" or INTERPRETED), reason="needs a GPU, or Triton's interpreter"
)
few = settings(
    max_examples=100 if DEVICE.type == "cuda" else 15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
HUGE = float(np.finfo(np.float32).max)


@pytest.fixture
def programs_used(monkeypatch):
    """How often K steps were taken by a program."""
    used, real = [], gpu._launched
    monkeypatch.setattr(gpu, "_launched", lambda *given: used.append(1) or real(*given))
    draw_as_a_gpu(monkeypatch)
    return used


def reached(*runs):
    """Where some runs end, on a GPU if there is one."""
    streams = {run.plan.seed: run.randomness() for run in runs}  # equal seeds draw together
    shared = [streams[run.plan.seed] for run in runs]
    engine = Engine(runs, [run.federation for run in runs], DEVICE, streams=shared)
    return [state.params for state in Driven(engine).drive().all_reached]


@with_programs
@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson"])
@pytest.mark.parametrize("algorithm", [name for name in EVERY if name not in ("feddyn", "fedsgd")])
def test_runs_end_where_plain_steps_take_them(programs_used, monkeypatch, algorithm, privacy):
    run = setting(algorithm, "logistic", privacy)
    (there,) = reached(run)
    assert programs_used
    monkeypatch.setattr(work, "linear_steps", lambda *given: None)
    (here,) = reached(run)
    assert float((there - here).norm() / here.norm()) < 1e-5


@with_programs
def test_stacked_runs_that_share_draws_end_where_they_do_alone(programs_used):
    run = setting("scaffold", "logistic", "fixed")
    other = setting("scaffold", "logistic", "fixed", seed=5)
    alone, together = reached(run), reached(run, other, run)
    assert programs_used
    torch.testing.assert_close(together[0], alone[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(together[2], alone[0], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(together[1], alone[0], rtol=1e-3, atol=1e-3)


# --- one step of one record, over all floats ---

LABELS = {"softmax": 2, "logistic": 1, "squared": 1, "huber": 1}
edges = st.sampled_from([0.0, 1.0, 1e-45, 1e-20, 1e10, 1e19, 1e30, -HUGE, HUGE, math.inf, math.nan])
anything = st.one_of(edges, st.floats(width=32), st.floats(-3, 3, width=32))


def model(loss: str) -> Linear:
    return Linear(3, 3 if loss == "softmax" else 1, huber(2.0) if loss == "huber" else LOSSES[loss])


def one_step(loss, weights, row, label, clip, records=1):
    """Σ clip(g_j) of equal records by the program, in float64: a step without noise. The places of
    weights that are not finite are left out, as 0·y of the regularisation is NaN there."""
    task = model(loss)
    features = torch.tensor([*row, 1.0]).expand(records, -1).contiguous().to(DEVICE)
    params = torch.tensor(weights[: task.parameters])[None].to(DEVICE)
    kind = torch.int64 if loss in ("softmax", "logistic") else torch.float32
    labels = torch.full((records,), label, dtype=kind, device=DEVICE)
    table = Records(features, features.double().square().sum(1).float(), labels, True)
    index = torch.arange(records, device=DEVICE)[None, None].contiguous()
    starts = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    drawn = DrawnSteps(None, DeviceBatches(index, None), None, starts, None)
    one = torch.ones(1, 1, device=DEVICE)
    numbers = Numbers(one, 0 * one, one, one, clip * one, one, one, 1)
    number = {"softmax": 0, "logistic": 1, "squared": 2, "huber": 3}[loss]
    at = Participant(Broadcast(1, params), {}, None)
    still = Affine(moves=False)
    local = gpu._launched(task, (number, 2.0), still, False, at, numbers, table, drawn)
    return local.mean_gradient[0][params[0].isfinite()].double().cpu()


@with_programs
@few
@given(
    loss=st.sampled_from(sorted(LABELS)),
    weights=st.lists(anything, min_size=12, max_size=12),
    row=st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3),
    target=anything,
    clip=st.sampled_from([1e-20, 1e-6, 1.0, 1e6, 1e30]),
    records=st.sampled_from([1, 3, 70]),
)
def test_no_record_adds_more_than_c_whatever_the_parameters_are(
    loss, weights, row, target, clip, records
):
    label = target if loss in ("squared", "huber") else LABELS[loss]
    total = one_step(loss, weights, row, label, clip, records)
    assert total.isfinite().all()
    assert float(total.norm()) <= records * clip * (1 + 1e-6)


@with_programs
@pytest.mark.parametrize("loss", LABELS)
def test_a_gradient_that_is_not_finite_adds_exactly_zero_and_others_are_exact(loss):
    gone = one_step(loss, [math.nan, *[0.5] * 11], [1.0, 2.0, 3.0], LABELS[loss], 1.0)
    assert len(gone)
    assert torch.equal(gone, torch.zeros_like(gone))
    task = model(loss)
    weights = torch.linspace(-1, 1, 12)[: task.parameters].double().requires_grad_()
    kind = torch.int64 if loss in ("softmax", "logistic") else torch.float64
    row = torch.tensor([[1.0, -2.0, 3.0, 1.0]], dtype=torch.float64)
    value = task.losses(weights, row, torch.tensor([LABELS[loss]], dtype=kind)).sum()
    gradient = torch.autograd.grad(value, weights)[0]
    for clip in (0.05, 50.0):
        meant = gradient * min(1.0, clip / float(gradient.norm()))
        found = one_step(loss, weights.tolist(), [1.0, -2.0, 3.0], LABELS[loss], clip)
        torch.testing.assert_close(found, meant, rtol=1e-5, atol=1e-7)


# --- what needs no device ---


def test_only_models_that_the_program_knows_are_its():
    class Doubled(Linear):
        def scores(self, params, features):
            return 2 * super().scores(params, features)

    class Halved(type(huber(0.5).errors)):
        def __call__(self, *given):
            return super().__call__(*given) / 2

    assert gpu._loss_of(Logistic(40, 10)) == (0, 0.0)
    assert gpu._loss_of(Linear(4, 1, huber(0.5))) == (3, 0.5)
    assert gpu._loss_of(Logistic(400, 10))[0] is None
    assert gpu._loss_of(Doubled(4, 3))[0] is None
    assert gpu._loss_of(Linear(4, 3, weighted(LOSSES["softmax"], [1, 2, 3])))[0] is None
    own = replace(huber(0.5), errors=Halved(0.5))
    assert gpu._loss_of(Linear(4, 1, own))[0] is None


def test_what_has_no_program_takes_plain_steps(programs_used, monkeypatch):
    """Clips computed from the batch, rescaled means, unequal steps, and records that are not all
    tame; a plain run is offered."""
    monkeypatch.setattr(gpu, "tried", lambda name, *given: programs_used.append(name))
    wild = federation()
    wild.train.features[0] = 1e9
    for run in (
        setting("fedavg", "logistic", "median"),
        setting("fedavg", "logistic", "user-poisson"),
        setting("fedavg", "mlp", "fixed"),
        setting("fednova", "logistic", "fixed", steps_by_user=(3, 2, 1, 3, 2, 1)),
        setting("fedavg", "logistic", "fixed", wild),
    ):
        reached(run)
    assert not programs_used
    reached(setting("fedavg", "logistic", "fixed"))
    assert programs_used


@pytest.fixture
def programs_allowed(monkeypatch):
    """As on a machine with Triton."""
    monkeypatch.setattr(device, "_refused", set())
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_a_program_that_does_not_run_is_named_once_and_passed_over(programs_allowed, caplog):
    def broken():
        raise ValueError("no such instruction\nand more")

    with caplog.at_level(logging.WARNING, "dpscaffold"):
        assert device.tried("a program", CPU, broken) is None
        assert device.tried("a program", CPU, lambda: 7) is None
        assert device.tried("another", CPU, lambda: 7) == 7
    assert [record.message for record in caplog.records] == [
        "the program for a program does not run here (no such instruction); the slower way is taken"
    ]


def test_no_room_and_a_lost_device_are_no_fault_of_a_program(programs_allowed):
    for error in (
        torch.cuda.OutOfMemoryError("out of memory"),
        RuntimeError("CUDA error: unspecified launch failure"),
    ):

        def broken(error=error):
            raise error

        with pytest.raises(type(error)):
            device.tried("a program", CPU, broken)
    assert not device._refused
