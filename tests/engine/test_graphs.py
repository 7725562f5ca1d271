"""Rounds with a GPU's own draws: the same in any chunk and stack, and when they are recorded.

On a CPU the work is recorded by ``make_fx``, which freezes every Python number as a CUDA graph does
and refuses work that looks at a number on its way: the two ways in which a recording goes wrong.
"""

from __future__ import annotations

import logging

import pytest
import torch
from small import EQUAL, UNEQUAL, Driven, draw_as_a_gpu, federation, final, loop, setting, simulator
from torch.fx.experimental.proxy_tensor import make_fx

from dpscaffold.algorithms import fedavg
from dpscaffold.engine import draws as device_draws
from dpscaffold.engine import gpu, work
from dpscaffold.engine.gpu import Graphs
from dpscaffold.tasks import clipping

traced_on_a_cpu = pytest.mark.cpu_only(
    "rounds are recorded by make_fx, which cannot trace a GPU's own programs; "
    "tests/engine/test_cuda.py records them as CUDA graphs"
)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Let the CPU draw and clip as a GPU does."""
    draw_as_a_gpu(monkeypatch)
    monkeypatch.setattr(clipping, "_may_look", lambda values: False)


def traced(work, given):
    """Record by tracing; a replay fills the same tensors."""
    frozen = make_fx(lambda inputs: work(inputs))(given)
    made = frozen(given)

    def replay() -> None:
        for name, value in frozen(given).items():
            made[name].copy_(value)

    return replay, made


def driven(run, capture, **more):
    engine = simulator(run, **more)
    engine.graphs = Graphs(capture)
    return Driven(engine).drive()


def unrecorded(work, given):
    raise RuntimeError("nothing is recorded here")


@traced_on_a_cpu
@pytest.mark.parametrize(
    ("algorithm", "task", "privacy", "sizes", "chunk"),
    [
        ("fedprox", "logistic", "none", UNEQUAL, None),
        ("fedprox", "logistic", "poisson", EQUAL, None),
        ("scaffold-warm", "logistic", "fixed", EQUAL, None),
        ("scaffold-balanced", "logistic", "fixed", UNEQUAL, None),
        ("scaffold-balanced", "logistic", "user-poisson", UNEQUAL, None),
        ("scaffold", "mlp", "poisson", UNEQUAL, 2),
    ],
)
def test_a_recorded_run_is_the_run(caplog, algorithm, task, privacy, sizes, chunk):
    run = setting(algorithm, task, privacy, federation(sizes))
    plain = driven(run, unrecorded, chunk=chunk).reached
    caplog.clear()
    with caplog.at_level(logging.WARNING, "dpscaffold"):
        recorded = driven(run, traced, chunk=chunk)
    assert "could not be recorded" not in caplog.text
    held = recorded.engine.graphs._held
    assert 0 < len(held) <= 4 and all(held.values())
    torch.testing.assert_close(recorded.reached.params, plain.params, rtol=1e-6, atol=1e-7)


@traced_on_a_cpu
def test_a_recorded_stack_is_the_stack():
    one = setting("scaffold-balanced", "logistic", "fixed", federation(EQUAL))
    runs = [one, setting("scaffold-balanced", "logistic", "fixed", one.data, seed=5), one]
    plain, recorded = (driven(runs, capture).all_reached for capture in (unrecorded, traced))
    for found, meant in zip(recorded, plain, strict=True):
        torch.testing.assert_close(found.params, meant.params, rtol=1e-6, atol=1e-7)


@traced_on_a_cpu
def test_rounds_of_one_shape_are_recorded_once():
    captured = []

    def counting(work, given):
        captured.append(given)
        return traced(work, given)

    driven(setting("scaffold", "logistic", "fixed", federation(EQUAL), rounds=5), counting)
    assert len(captured) == 1


def by_round(gradient, y, at):
    """A direction that depends on the number of the round."""
    return gradient / at.broadcast.round


@traced_on_a_cpu
def test_an_algorithm_may_calculate_with_the_round(caplog):
    """A recorded number of the round would be that of the first round for ever."""
    algorithm = fedavg().replace(name="slower", direction=by_round)
    data = federation(EQUAL)
    run = setting(algorithm, "logistic", "fixed", data, rounds=3)
    plain = driven(run, unrecorded).reached.params
    caplog.clear()
    recorded = driven(run, traced)
    assert "could not be recorded" not in caplog.text and len(recorded.engine.graphs._held) == 1
    torch.testing.assert_close(recorded.reached.params, plain, rtol=1e-6, atol=1e-7)
    other = driven(setting("fedavg", "logistic", "fixed", data, rounds=3), traced).reached.params
    assert not torch.allclose(plain, other, atol=1e-3)


@traced_on_a_cpu
def test_an_algorithm_that_looks_runs_unrecorded(caplog):
    def looking(gradient, y, at):
        return gradient if float(gradient.norm()) > 1 else 2 * gradient

    run = setting(fedavg().replace(name="looking", direction=looking), "logistic", "fixed")
    plain = driven(run, unrecorded).reached.params
    with caplog.at_level(logging.WARNING):
        recorded = driven(run, traced).reached.params
    assert "could not be recorded" in caplog.text
    assert torch.equal(recorded, plain)


def test_few_graphs_are_kept_and_what_they_make_is_the_callers():
    held = Graphs(traced)
    first = held.run(0, lambda given: {"y": given["x"] + 1}, {"x": torch.zeros(1)})["y"]
    again = held.run(0, lambda given: {"y": given["x"] + 1}, {"x": torch.ones(1)})["y"]
    assert (first.item(), again.item()) == (1.0, 2.0)
    for key in range(1, 9):
        held.run(key, lambda given: {"y": given["x"]}, {"x": torch.zeros(1)})
    assert [key for key, _ in held._held] == list(range(9 - gpu._KEPT, 9))


@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson", "user-poisson"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold-balanced"])
def test_chunks_draw_alike(algorithm, privacy):
    run = setting(algorithm, "logistic", privacy)
    whole = Driven(simulator(run)).drive().reached.params
    chunks = Driven(simulator(run, chunk=1)).drive().reached.params
    torch.testing.assert_close(whole, chunks, rtol=1e-4, atol=1e-5)


def test_the_device_draws_another_run_than_the_cpu():
    run = setting("fedavg", "logistic", "fixed")
    assert not torch.allclose(final("simulator", run).params, final("loop", run).params, atol=1e-3)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_poisson_batch_that_does_not_fit_is_drawn_again(monkeypatch, stacked):
    """The round is computed once more with room for every record: it is the round that was meant,
    in the server and in the users' memories."""
    runs = [setting("scaffold", "logistic", "poisson", user_ratio=1.0, data_ratio=0.5)]
    runs += [setting("scaffold", "logistic", "poisson", user_ratio=1.0, data_ratio=0.5, seed=1)]
    runs = runs[: 1 + stacked]
    meant = Driven(simulator(runs)).drive().all_reached
    whole = []
    real = work.Work._drawn

    def drawn(self, *given):
        whole.append(self.whole)
        return real(self, *given)

    monkeypatch.setattr(work.Work, "_drawn", drawn)
    monkeypatch.setattr(work, "poisson_width", lambda records, batch: batch + 1)
    monkeypatch.setattr(work, "rounded_up", lambda count: count)
    found = Driven(simulator(runs)).drive().all_reached
    assert True in whole and False in whole
    for one, other in zip(found, meant, strict=True):
        torch.testing.assert_close(one.params, other.params, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one.memory, other.memory, rtol=1e-5, atol=1e-6)


def test_rounding_up_never_loses_and_adds_at_most_a_quarter():
    for count in range(1, 5000):
        assert count <= device_draws.rounded_up(count) <= 1.25 * count + 1
    assert len({device_draws.rounded_up(count) for count in range(1, 5000)}) < 60


@pytest.mark.cpu_only("a GPU has streams of its own")
@pytest.mark.parametrize("privacy", ["none", "fixed"])
def test_the_oracle_reads_the_round_too(monkeypatch, privacy):
    """Three rounds of an own algorithm, with the streams of the CPU."""
    monkeypatch.undo()
    run = setting(fedavg().replace(name="slower", direction=by_round), "logistic", privacy)
    meant = Driven(loop(run)).drive(3).reached.params
    torch.testing.assert_close(final("simulator", run, rounds=3).params, meant)
