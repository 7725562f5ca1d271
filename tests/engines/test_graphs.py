"""Recorded rounds: the same numbers as kernel by kernel, and nothing of one round in the next.

On a CPU the work is recorded by ``make_fx``, which freezes every Python number as a CUDA graph does
and refuses work that looks at a number on its way: the two ways in which a recording goes wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from small import EQUAL, UNEQUAL, Driven, fedavg, federation, setting, simulator
from torch.fx.experimental.proxy_tensor import make_fx

from dpscaffold.engines.fast import devices, graphs
from dpscaffold.engines.fast.graphs import Graphs
from dpscaffold.engines.participation import participate
from dpscaffold.tasks import clipping

recorded_by_tracing = pytest.mark.cpu_only(
    "rounds are recorded by make_fx, which cannot trace a GPU's own programs; "
    "tests/engines/test_cuda.py records them as CUDA graphs"
)


def traced(work, given):
    """Record by tracing; a replay fills the same tensors."""
    frozen = make_fx(lambda inputs: work(inputs))(given)
    made = frozen(given)

    def replay() -> None:
        for name, value in frozen(given).items():
            made[name].copy_(value)

    return replay, made


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let the CPU draw and clip as a GPU does."""
    real = devices.draws_on
    monkeypatch.setattr(
        participate, "draws_on", lambda device, rows: real(torch.device("cuda"), rows)
    )
    monkeypatch.setattr(clipping, "_may_look", lambda values: False)


def ours(caplog):
    """What our own code had to say."""
    return [record for record in caplog.records if record.name.startswith("dpscaffold")]


def driven(run, capture=None, **more):
    engine = simulator(run, **more)
    engine.worker.graphs = None if capture is None else Graphs(capture)
    return Driven(engine).drive(), engine.worker.graphs


@recorded_by_tracing
@pytest.mark.parametrize(
    ("algorithm", "privacy", "sizes"),
    [
        ("fedprox", "none", UNEQUAL),
        ("fedprox", "poisson", EQUAL),
        ("scaffold-warm", "fixed", EQUAL),
        ("scaffold-balanced", "fixed", UNEQUAL),
        ("scaffold-balanced", "user-poisson", UNEQUAL),
    ],
)
def test_a_recorded_run_is_the_run(as_on_a_gpu, caplog, algorithm, privacy, sizes):
    run = setting(algorithm, "logistic", privacy, federation(sizes))
    plain, _ = driven(run)
    with caplog.at_level(logging.WARNING):
        recorded, held = driven(run, traced)
    assert not ours(caplog)
    assert len(held._held) <= 4 and all(held._held.values())
    torch.testing.assert_close(recorded.reached.params, plain.reached.params, rtol=0, atol=0)


@recorded_by_tracing
@pytest.mark.parametrize("task", ["mlp"])
def test_networks_are_recorded_too(as_on_a_gpu, caplog, task):
    run = setting("scaffold", task, "poisson")
    with caplog.at_level(logging.WARNING):
        recorded, _ = driven(run, traced, chunk=2)
    assert not ours(caplog)
    torch.testing.assert_close(recorded.reached.params, driven(run)[0].reached.params)


@recorded_by_tracing
def test_rounds_of_one_shape_are_recorded_once(as_on_a_gpu):
    captured = []

    def counting(work, given):
        captured.append(given)
        return traced(work, given)

    driven(setting("scaffold", "logistic", "fixed", federation(EQUAL), rounds=5), counting)
    assert len(captured) == 1


@recorded_by_tracing
def test_an_algorithm_that_reads_the_round_runs_unrecorded(as_on_a_gpu, caplog):
    """A recorded number of the round would be that of the first round for ever."""

    def slower(gradient, y, at):
        return gradient / at.broadcast.round

    run = setting(fedavg().replace(name="slower", direction=slower), "logistic", "fixed")
    plain, _ = driven(run)
    with caplog.at_level(logging.WARNING):
        recorded, _ = driven(run, traced)
    assert "could not be recorded" in caplog.text
    torch.testing.assert_close(recorded.reached.params, plain.reached.params, rtol=0, atol=0)


@recorded_by_tracing
def test_an_algorithm_that_looks_runs_unrecorded(as_on_a_gpu, caplog):
    def looking(gradient, y, at):
        return gradient if float(gradient.norm()) > 1 else 2 * gradient

    run = setting(fedavg().replace(name="looking", direction=looking), "logistic", "fixed")
    plain, _ = driven(run)
    with caplog.at_level(logging.WARNING):
        recorded, _ = driven(run, traced)
    assert "could not be recorded" in caplog.text
    torch.testing.assert_close(recorded.reached.params, plain.reached.params, rtol=0, atol=0)


def test_few_graphs_are_kept_and_what_they_make_is_the_callers():
    held = Graphs(traced)
    first = held.run(0, lambda given: {"y": given["x"] + 1}, {"x": torch.zeros(1)})["y"]
    again = held.run(0, lambda given: {"y": given["x"] + 1}, {"x": torch.ones(1)})["y"]
    assert (first.item(), again.item()) == (1.0, 2.0)
    for key in range(1, 9):
        held.run(key, lambda given: {"y": given["x"]}, {"x": torch.zeros(1)})
    assert list(held._held) == list(range(9 - graphs._KEPT, 9))


def test_rounding_up_never_loses_and_adds_at_most_a_quarter():
    for count in range(1, 5000):
        assert count <= devices.rounded_up(count) <= 1.25 * count + 1
    assert len({devices.rounded_up(count) for count in range(1, 5000)}) < 60


def test_workers_record_one_after_the_other():
    """A recording begins by waiting for the whole device, which would spoil another's."""
    inside, most, together = [], [], threading.Barrier(2, timeout=20)

    def capture(work, given):
        inside.append(1)
        time.sleep(0.05)  # long enough for the other to come in, were it let in
        most.append(len(inside))
        inside.pop()
        return traced(work, given)

    def worker(number: int) -> float:
        together.wait()
        made = Graphs(capture).run("twice", lambda x: {"y": 2 * x["x"]}, {"x": torch.ones(1)})
        return float(made["y"]) * number

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(worker, [1, 2])) == [2.0, 4.0]
    assert most == [1, 1]
