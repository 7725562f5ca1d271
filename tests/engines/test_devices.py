"""A GPU's own draws, which a CPU can make too: the same run in any chunks and stacks."""

from __future__ import annotations

import pytest
import torch
from small import Driven, federation, setting, simulator

from dpscaffold.engines.fast import devices
from dpscaffold.engines.machine import full_precision
from dpscaffold.engines.participation import participate
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.randomness.streams import Randomness


@pytest.fixture
def drawing_on_the_device(monkeypatch):
    """Let a CPU draw as a GPU does, where a GPU would; a GPU does so anyway."""
    real = devices.draws_on
    monkeypatch.setattr(
        participate, "draws_on", lambda device, rows: real(torch.device("cuda"), rows)
    )


@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson", "user-poisson"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold-balanced"])
def test_chunks_and_stacks_draw_alike(drawing_on_the_device, algorithm, privacy):
    run = setting(algorithm, "logistic", privacy)
    whole = Driven(simulator(run)).drive().reached.params
    chunks = Driven(simulator(run, chunk=1)).drive().reached.params
    torch.testing.assert_close(whole, chunks, rtol=1e-4, atol=1e-5)
    stack = Driven(simulator([run, setting(algorithm, "logistic", privacy, seed=5), run])).drive()
    reached = stack.all_reached
    torch.testing.assert_close(reached[0].params, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(reached[2].params, whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(reached[1].params, whole, rtol=1e-3, atol=1e-3)


def test_the_device_draws_another_run_than_the_cpu(drawing_on_the_device, monkeypatch):
    run = setting("fedavg", "logistic", "fixed")
    device = Driven(simulator(run)).drive().reached.params
    monkeypatch.setattr(participate, "draws_on", lambda device, rows: False)
    assert not torch.allclose(device, Driven(simulator(run)).drive().reached.params, atol=1e-3)


def test_secret_runs_and_declared_sizes_never_draw_there():
    run = setting("fedavg", "logistic", "fixed", federation())
    cuda = torch.device("cuda")

    def row(randomness: Randomness, declared: int | None = None) -> Row:
        return Row(0, 9, 3, run.plan, run.privacy, randomness, 0.1, 0, declared)

    class Scripted(Randomness):
        pass

    assert devices.draws_on(cuda, [row(Randomness(0))])
    assert not devices.draws_on(torch.device("cpu"), [row(Randomness(0))])
    for other in (row(Randomness(0, secret=True)), row(Scripted(0)), row(Randomness(0), 9)):
        assert not devices.draws_on(cuda, [row(Randomness(0)), other])


def test_a_gpus_products_are_not_in_tf32():
    flags = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.allow_tf32 for one in flags]
    try:
        for one in flags:
            one.allow_tf32 = True
        full_precision()
        assert not any(one.allow_tf32 for one in flags)
    finally:
        for one, was in zip(flags, before, strict=True):
            one.allow_tf32 = was
