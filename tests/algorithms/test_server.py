"""Server optimisers wrap any algorithm and are pure post-processing of the mean upload."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from refusals import refuses
from small import ENGINES, EVERY, final, setting

from dpscaffold.algorithms import Server, Upload, fedavg, scaffold_warm, with_adam, with_momentum

each_engine = pytest.mark.parametrize("engine", ENGINES)


@each_engine
@pytest.mark.parametrize("algorithm", EVERY)
def test_momentum_of_zero_is_the_base_bit_for_bit(algorithm, engine):
    """v = Δx where β = 0, whatever is wrapped; with β > 0 the run is another one."""
    run = setting(algorithm, "logistic", "fixed")
    still, moved = (
        final(engine, replace(run, algorithm=with_momentum(run.algorithm, beta)))
        for beta in (0.0, 0.9)
    )
    base = final(engine, run)
    assert torch.equal(still.params, base.params) and torch.equal(still.output, base.output)
    assert all(torch.equal(still.memories[k], v) for k, v in base.memories.items())
    assert not torch.allclose(moved.params, base.params)


def driven(made, moves, rate) -> list[Server]:
    """The server after each of these mean uploads, from zero."""
    servers = [Server(torch.zeros(1), dict.fromkeys(made.keeps, torch.zeros(1)))]
    for move in moves:
        servers.append(made.update(servers[-1], Upload(torch.tensor([move])), rate))
    return servers[1:]


def test_momentum_sums_a_geometric_series():
    """Moves 1, 1, 1 at β = ½ and η_g = 2 give x = 2(1 + 1.5 + 1.75)."""
    last = driven(with_momentum(fedavg(), 0.5), (1.0, 1.0, 1.0), 2.0)[-1]
    assert float(last.params) == 8.5 and float(last.slots["velocity"]) == 1.75


def test_adam_does_what_is_written():
    """Three rounds of the recursion in plain floats; the first step is η_g·Δ/(|Δ| + τ)."""
    beta, beta2, tau, rate, moves = 0.8, 0.9, 0.01, 0.1, (0.5, -0.2, 0.3)
    found = driven(with_adam(fedavg(), beta, beta2, tau), moves, rate)
    assert float(found[0].params) == pytest.approx(rate * 0.5 / (0.5 + tau))
    x = first = second = 0.0
    for n, (move, server) in enumerate(zip(moves, found, strict=True), 1):
        first = beta * first + (1 - beta) * move
        second = beta2 * second + (1 - beta2) * move**2
        x += rate * (first / (1 - beta**n)) / (math.sqrt(second / (1 - beta2**n)) + tau)
        assert float(server.params) == pytest.approx(x, rel=1e-5)
        assert float(server.slots["adam_rounds"]) == n


@each_engine
@pytest.mark.parametrize("wrap", [with_momentum, with_adam])
def test_they_leave_warm_starts_and_accounts_alone(engine, wrap):
    """No slot moves while a warm start measures, x stays, and the accountant sees the same run."""
    run = setting(wrap(scaffold_warm()), "logistic", "fixed", warm_rounds=2)
    reached = final(engine, run, rounds=2)
    kept = {k: v for k, v in reached.state.server.slots.items() if k != "control"}
    assert kept and all(not bool(value.any()) for value in kept.values())
    assert torch.equal(reached.params, run.task.initial(run.plan.public_seed))
    assert run.describe() == replace(run, algorithm=scaffold_warm()).describe()


def test_numbers_name_and_equality():
    """Equal numbers make equal algorithms; labels and stored numbers name the optimiser."""
    assert with_adam(fedavg(), tau=0.1) == with_adam(fedavg(), tau=0.1) != with_adam(fedavg())
    run = setting(with_momentum(fedavg()), "logistic", "fixed")
    assert run.label == "DP-FedAvg with momentum"
    assert dict(run.algorithm.numbers) == {"server": "momentum", "beta": 0.9}


@pytest.mark.parametrize(
    ("wrap", "numbers", "said"),
    [
        (with_momentum, {"beta": 1.0}, "out-of-range: algorithm.beta is 1.0"),
        (with_momentum, {"beta": "much"}, "not-a-number: algorithm.beta is 'much'"),
        (with_adam, {"beta2": -0.1}, "out-of-range: algorithm.beta2 … 0.1"),
        (with_adam, {"tau": 0}, "out-of-range: algorithm.tau is 0"),
        (with_adam, {"tau": math.nan}, "not-a-number: algorithm.tau is nan"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(wrap, numbers, said):
    with refuses(said):
        wrap(fedavg(), **numbers)
