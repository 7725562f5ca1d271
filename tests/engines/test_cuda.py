"""The simulator on a GPU: it draws for itself, and steps as the CPU does with the same draws."""

from __future__ import annotations

import pytest
import torch

from dpscaffold import Gaussian, Logistic, Mlp, ModuleTask, Plan, synthetic, train
from dpscaffold.algorithms import ALGORITHMS, ITERATIVE
from dpscaffold.config import make_run
from dpscaffold.engines import Hardware, Simulator, State
from dpscaffold.engines.fast import devices
from dpscaffold.engines.fast.graphs import Graphs
from dpscaffold.engines.participation import participate
from dpscaffold.engines.rounds import plain_draws, rounds

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
    real = devices.draws_on
    there_too = torch.device("cuda")
    monkeypatch.setattr(participate, "draws_on", lambda device, rows: real(there_too, rows))
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
@pytest.mark.parametrize("privacy", PRIVACY)
def test_no_round_waits_for_the_device(privacy, task, algorithm):
    """Neither recorded rounds nor those that follow; PyTorch raises where one does."""
    data = synthetic(alpha=2, beta=2, users=12, records=80, seed=5)
    plan = Plan(rounds=20, local_steps=4, user_ratio=0.5, data_ratio=0.2)
    run = make_run(data.roster, TASKS[task](), ALGORITHMS[algorithm](), plan, PRIVACY[privacy])
    device = torch.device("cuda")
    engine = Simulator([run], [data], Hardware(device))
    start = State.initial(run, device)
    left = rounds(run, engine, plain_draws(run, engine.randomness[0]), start)
    for _ in range(12):  # recorded, and every user has been seen, so that no table has to grow
        next(left)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            done = next(left)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(done.state.params.isfinite().all()) and not engine.cut_short()


@pytest.mark.parametrize("task", TASKS)
def test_poisson_batches_that_do_not_fit_come_again(task, monkeypatch):
    meant = outcome("cuda", task, "scaffold", "poisson").params
    monkeypatch.setattr(devices, "poisson_width", lambda records, batch: batch + 1)
    seen, real = [], Simulator.cut_short
    monkeypatch.setattr(Simulator, "cut_short", lambda self: seen.append(real(self)) or seen[-1])
    found = outcome("cuda", task, "scaffold", "poisson").params
    assert any(seen)
    torch.testing.assert_close(found, meant, rtol=1e-3, atol=1e-4)
