"""The simulator on a GPU: it draws for itself, and steps as the CPU does with the same draws."""

from __future__ import annotations

import pytest
import torch
from small import draw_as_a_gpu

from dpscaffold import Gaussian, Logistic, Mlp, ModuleTask, Plan, synthetic, train
from dpscaffold.algorithms import ALGORITHMS, ITERATIVE
from dpscaffold.config import make_run
from dpscaffold.engine import Draw, Engine, State, work
from dpscaffold.engine.gpu import Graphs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PRIVACY = {
    "none": None,
    "fixed": Gaussian(clip=0.5, noise=1.0),
    "poisson": Gaussian(clip=0.5, noise=1.0, sampling="poisson"),
    "user": Gaussian(clip=0.5, noise=0.1, unit="user", sampling="poisson"),
}


def module():
    torch.manual_seed(0)
    return ModuleTask(
        torch.nn.Sequential(torch.nn.Linear(40, 6), torch.nn.Tanh(), torch.nn.Linear(6, 10))
    )


TASKS = {
    "logistic": lambda: Logistic(40, 10),
    "mlp": lambda: Mlp(40, 10, hidden=12),
    "module": module,
}


def outcome(device, task, algorithm, privacy, chunk=None):
    federation = synthetic(alpha=2, beta=2, users=12, records=80, size_spread=0.4, seed=5)
    steps = 5 if algorithm == "fedsgd" else 4
    weighting = "uniform" if privacy == "user" else "records"
    plan = Plan(
        rounds=6,
        local_steps=steps,
        user_ratio=0.5,
        data_ratio=0.2,
        warm_rounds=2,
        weighting=weighting,
    )
    return train(
        federation,
        TASKS[task](),
        ALGORITHMS[algorithm](),
        plan,
        PRIVACY[privacy],
        device=device,
        chunk=chunk,
    )


@pytest.mark.parametrize("privacy", PRIVACY)
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("algorithm", ITERATIVE)
def test_cuda_agrees_with_cpu(algorithm, task, privacy, monkeypatch):
    """The CPU made to draw as the device does: the parameters differ by rounding only."""
    draw_as_a_gpu(monkeypatch)
    here, there = (outcome(device, task, algorithm, privacy) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there.params, here.params, rtol=2e-3, atol=2e-4)
    assert there.final["train_loss"] == pytest.approx(here.final["train_loss"], rel=1e-3)


@pytest.mark.parametrize("task", TASKS)
def test_cuda_repeats_itself_bit_for_bit(task):
    one, two = (outcome("cuda", task, "scaffold", "fixed") for _ in range(2))
    assert torch.equal(one.params, two.params)


def test_cuda_chunks_agree():
    whole, parts = (outcome("cuda", "mlp", "scaffold", "poisson", chunk) for chunk in (None, 2))
    torch.testing.assert_close(parts.params, whole.params, rtol=2e-3, atol=2e-4)


def test_a_recording_that_fails_leaves_the_current_stream_alone(caplog):
    before, held = torch.cuda.current_stream(), Graphs()

    def looking(given):
        return {"y": given["x"] * float(given["x"].sum())}

    made = held.run("looking", looking, {"x": torch.ones(3, device="cuda")})
    assert "could not be recorded" in caplog.text
    assert torch.cuda.current_stream() == before
    assert made["y"].tolist() == [3.0, 3.0, 3.0]


@pytest.mark.parametrize("algorithm", ["scaffold", "scaffold-balanced"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("privacy", ["none", "fixed", "user-fixed"])
def test_no_round_waits_for_the_device(privacy, task, algorithm):
    """PyTorch raises where one does. Only a Poisson batch is looked at: it may not have fitted."""
    data = synthetic(alpha=2, beta=2, users=12, records=80, seed=5)
    plan = Plan(rounds=20, local_steps=4, user_ratio=0.5, data_ratio=0.2)
    private = PRIVACY.get(privacy, Gaussian(clip=0.5, noise=0.1, unit="user"))
    run = make_run(data.roster, TASKS[task](), ALGORITHMS[algorithm](), plan, private)
    device = torch.device("cuda")
    engine, state = Engine([run], [data], device), State.initial(run, device)

    def next_round(state):
        draw = Draw.all(run.randomness().cohort(state.round + 1, run.users, run.cohort_size))
        return engine.round(state, [draw]).state

    for _ in range(4):  # recorded
        state = next_round(state)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            state = next_round(state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(state.params.isfinite().all())


@pytest.mark.parametrize("task", TASKS)
def test_poisson_batches_that_do_not_fit_come_again(task, monkeypatch):
    meant = outcome("cuda", task, "scaffold", "poisson").params
    monkeypatch.setattr(work, "poisson_width", lambda records, batch: batch + 1)
    whole, real = [], work.Work._drawn
    monkeypatch.setattr(
        work.Work, "_drawn", lambda self, *given: whole.append(self.whole) or real(self, *given)
    )
    found = outcome("cuda", task, "scaffold", "poisson").params
    assert any(whole)
    torch.testing.assert_close(found, meant, rtol=1e-3, atol=1e-4)


def test_three_recorded_rounds_are_those_that_run_kernel_by_kernel():
    """Also for an algorithm that calculates with the round's number."""
    data = synthetic(alpha=2, beta=2, users=12, records=80, seed=5)
    plan = Plan(rounds=3, local_steps=4, user_ratio=0.5, data_ratio=0.2)
    slower = ALGORITHMS["fedavg"]().replace(
        name="slower", direction=lambda gradient, y, at: gradient / at.broadcast.round
    )
    run = make_run(data.roster, TASKS["mlp"](), slower, plan, PRIVACY["fixed"])
    device, ends = torch.device("cuda"), []
    for capture in (None, lambda work, given: [][0]):
        engine, state = Engine([run], [data], device), State.initial(run, device)
        engine.graphs = Graphs(capture)
        for number in (1, 2, 3):
            draw = Draw.all(run.randomness().cohort(number, run.users, run.cohort_size))
            state = engine.round(state, [draw]).state
        ends.append(state.params)
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
