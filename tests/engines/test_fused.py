"""A GPU's own program next to what it represents: the same steps, the same bounds.

They run on a GPU, or without one under Triton's interpreter where Triton is installed:
``TRITON_INTERPRET=1 python -m pytest tests/engines/test_fused.py``. What needs neither runs always.
"""

from __future__ import annotations

import logging
import math
import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import EVERY, Driven, federation, setting

from dpscaffold.engines import Hardware, Simulator
from dpscaffold.engines.fast import devices, fused, kernels
from dpscaffold.engines.fast.kernels.linear import LinearModel, Steps, run_steps
from dpscaffold.engines.participation import participate
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
    used = []
    real = fused.run_steps
    monkeypatch.setattr(fused, "run_steps", lambda *given: used.append(1) or real(*given))
    there = devices.draws_on
    monkeypatch.setattr(
        participate, "draws_on", lambda device, rows: there(torch.device("cuda"), rows)
    )
    return used


def reached(*runs):
    """Where some runs end, on a GPU if there is one."""
    hardware = Hardware(DEVICE)
    streams = {run.plan.seed: run.randomness() for run in runs}  # equal seeds draw together
    engine = Simulator(
        runs, [run.federation for run in runs], hardware, [streams[r.plan.seed] for r in runs]
    )
    return [state.params for state in Driven(engine).drive().all_reached]


@with_programs
@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson"])
@pytest.mark.parametrize("algorithm", [name for name in EVERY if name not in ("feddyn", "fedsgd")])
def test_runs_end_where_plain_steps_take_them(programs_used, algorithm, privacy):
    run = setting(algorithm, "logistic", privacy)
    (there,) = reached(run)
    assert programs_used
    with kernels.switched_off():
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


def one_step(loss, weights, row, label, clip, records=1):
    """Σ clip(g_j) of equal records by the program, in float64: a step without noise. The places of
    weights that are not finite are left out, as 0·y of the regularisation is NaN there."""
    outputs = 3 if loss == "softmax" else 1
    features = torch.tensor([*row, 1.0]).expand(records, -1).contiguous().to(DEVICE)
    params = torch.tensor(weights[: 4 * outputs])[None].to(DEVICE)
    kind = torch.int64 if loss in ("softmax", "logistic") else torch.float32
    given = Steps(
        features=features,
        labels=torch.full((records,), label, dtype=kind, device=DEVICE),
        squares=features.double().square().sum(1).float(),
        index=torch.arange(records, device=DEVICE)[None, None].contiguous(),
        weight=None,
        places=None,
        starts=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        noise=None,
        numbers=torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]], device=DEVICE),
        bound=torch.tensor([clip], dtype=torch.float64, device=DEVICE),
        params=params,
        moves=False,
    )
    found = run_steps(LinearModel(4, outputs, loss, 2.0), given)
    assert found is not None and not kernels._refused
    return found[1][0][params[0].isfinite()].double().cpu()


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
    task = Linear(3, 3 if loss == "softmax" else 1, huber(2.0) if loss == "huber" else LOSSES[loss])
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


def test_only_models_that_the_programs_know_are_theirs():
    class Doubled(Linear):
        def scores(self, params, features):
            return 2 * super().scores(params, features)

    assert fused.model_of(Logistic(40, 10)) == LinearModel(41, 10, "softmax")
    assert fused.model_of(Linear(4, 1, huber(0.5))) == LinearModel(5, 1, "huber", 0.5)
    assert fused.model_of(Doubled(4, 3)) is None
    assert fused.model_of(Linear(4, 3, weighted(LOSSES["softmax"], [1, 2, 3]))) is None
    own = LOSSES["softmax"].__class__("softmax", LOSSES["softmax"].values, abs, True, "class", None)
    assert fused.model_of(Linear(4, 3, own)) is None


def test_what_has_no_program_takes_plain_steps(programs_used, monkeypatch):
    """Clips computed from the batch, rescaled means, and records that are not all tame."""
    monkeypatch.setattr(fused, "fits", lambda model, device: True)
    wild = federation()
    wild.train.features[0] = 1e9
    for run in (
        setting("fedavg", "logistic", "median"),
        setting("fedavg", "logistic", "user-poisson"),
        setting("fedavg", "mlp", "fixed"),
    ):
        reached(run)
    reached(setting("fedavg", "logistic", "fixed", wild))
    assert not programs_used


def test_a_program_that_does_not_run_is_named_once_and_passed_over(caplog, monkeypatch):
    monkeypatch.setattr(kernels, "_refused", set())

    def broken():
        raise ValueError("no such instruction\nand more")

    with caplog.at_level(logging.WARNING):
        assert kernels.tried("broken", broken) is None
        assert kernels.tried("broken", lambda: 7) is None
    assert [record.message for record in caplog.records] == [
        "the program broken does not run here (no such instruction); the slower way is taken"
    ]


def test_no_room_and_a_lost_device_are_no_fault_of_a_program(monkeypatch):
    class Lost(RuntimeError):
        pass

    monkeypatch.setattr(torch, "AcceleratorError", Lost, raising=False)
    for error in (torch.cuda.OutOfMemoryError("out of memory"), Lost("unspecified failure")):

        def broken(error=error):
            raise error

        with pytest.raises(type(error)):
            kernels.tried("other", broken)
    assert "other" not in kernels._refused
