"""Laws that every algorithm obeys, with and without privacy, on both engines.

Adding an entry to ``ALGORITHMS`` adds it to every test here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small import (
    CPU,
    ENGINES,
    PRIVACIES,
    TASKS,
    assert_agree,
    federation,
    final,
    parts,
    setting,
    uploads,
)
from toys import Quadratic, quadratics

from dpscaffold.algorithms import ALGORITHMS, Memory, Upload, fedavg, fedprox, scaffold
from dpscaffold.engines import Draw, State
from dpscaffold.local import Gaussian

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
WITH_MEMORY = [name for name, make in ALGORITHMS.items() if make().memory]


def test_the_table_is_named_after_its_algorithms():
    """Each entry makes an algorithm of its own name, and two calls make equal ones."""
    for name, make in ALGORITHMS.items():
        assert make().name == name
        assert make() == make()


@each_engine
@each_algorithm
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("unit", ["record", "user"])
def test_no_noise_and_no_clip_is_the_classical_algorithm(algorithm, task, unit, engine):
    """σ_g = 0 and C = ∞ recovers the algorithm without privacy."""
    silent = setting(algorithm, task, Gaussian(clip=float("inf"), noise=0.0, unit=unit))
    assert_agree(
        final(engine, silent), final(engine, replace(silent, privacy=None)), rtol=1e-5, atol=1e-6
    )


@each_engine
@pytest.mark.parametrize("privacy", PRIVACIES)
@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_scaffold_without_control_variates_is_fedavg(task, privacy, engine):
    """c and c_i held at zero: SCAFFOLD is FedAvg, and DP-SCAFFOLD is DP-FedAvg."""

    def forget(local, broadcast, memory):
        move = local.params - broadcast.params
        return Upload(move, torch.zeros_like(move)), Memory(torch.zeros_like(move))

    run = setting(scaffold().replace(finish=forget), task, privacy)
    plain = replace(run, algorithm=fedavg())
    torch.testing.assert_close(
        final(engine, run).params, final(engine, plain).params, rtol=1e-5, atol=1e-6
    )
    # The controls matter: with them the run is another one.
    assert not torch.allclose(
        final(engine, setting("scaffold", task, privacy)).params, final(engine, plain).params
    )


@each_engine
def test_fedprox_without_a_pull_is_fedavg_and_a_strong_pull_holds_back(engine):
    """μ = 0 is FedAvg; the larger μ, the shorter the users' moves."""
    run = setting(fedprox(0.0), "logistic", None, local_steps=8)
    assert_agree(
        final(engine, run), final(engine, replace(run, algorithm=fedavg())), rtol=1e-6, atol=1e-7
    )
    lengths = [
        float(uploads(engine, replace(run, algorithm=fedprox(mu)))[0]["move"].norm())
        for mu in (0.0, 1.0, 4.0)
    ]
    assert lengths[0] > 1.05 * lengths[1] > 1.05 * lengths[2]


@each_engine
def test_fedprox_takes_the_proximal_step(engine):
    """On one quadratic the second step follows h(y − a) + μ(y − x), worked out by hand."""
    data, _ = quadratics(users=1, dimension=3)
    h, a = data.train.features[0].chunk(2)
    run = setting(
        fedprox(0.7), Quadratic(3), None, data,
        rounds=1, local_steps=2, user_ratio=1.0, data_ratio=1.0, regularisation=0.1,
    )  # fmt: skip
    eta, x = run.plan.step_size, torch.zeros(3)
    first = x - eta * (h * (x - a) + 0.1 * x)
    second = first - eta * (h * (first - a) + 0.1 * first + 0.7 * (first - x))
    torch.testing.assert_close(final(engine, run).params, second)


@each_engine
@pytest.mark.parametrize("algorithm", WITH_MEMORY)
@pytest.mark.parametrize("privacy", PRIVACIES)
@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_c_is_always_the_mean_of_all_c_i(algorithm, privacy, weighting, engine):
    """c = (1/M)Σc_i after every round, under either weighting, in warm rounds too."""
    run = setting(algorithm, "logistic", privacy, weighting=weighting)
    for rounds in (1, 2, 4):
        state = final(engine, run, rounds=rounds)
        torch.testing.assert_close(state.control, state.memory.mean(0), rtol=1e-3, atol=1e-4)
    assert float(state.control.norm()) > 1e-3


@each_engine
@each_algorithm
@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_the_server_moves_by_its_rate_times_the_mean_move(algorithm, weighting, engine):
    """x ← x + η_g·Σw_iΔy_i with w_i = 1/m, or R_i/ΣR_j over the participants."""
    run = setting(
        algorithm, "logistic", "fixed", weighting=weighting, server_rate=0.6, warm_rounds=0
    )
    (sent,) = uploads(engine, run)
    chosen = run.randomness().participants(1, run.users, run.participants)
    sizes = run.federation.train.sizes[chosen].float()
    weights = torch.full((3,), 1 / 3) if weighting == "uniform" else sizes / sizes.sum()
    moved = final(engine, run, rounds=1).params - run.task.initial(0)
    torch.testing.assert_close(moved, 0.6 * weights @ sent["move"], rtol=1e-4, atol=1e-6)


@each_engine
@each_algorithm
@pytest.mark.parametrize(
    ("averaging", "taken"), [("none", []), ("uniform", [2, 3, 4, 5, 6]), ("tail", [5, 6])]
)
def test_the_output_is_the_average_that_was_asked_for(algorithm, averaging, taken, engine):
    """none: x^T.

    Uniform: the mean of x^t over the real rounds; tail: over the last ⌈0.4·5⌉ or ⌈0.4·6⌉ of them.
    """
    run = setting(
        algorithm, "logistic", "fixed", averaging=averaging, tail=0.4, rounds=6, warm_rounds=1
    )
    if not run.warm_rounds and averaging == "uniform":
        taken = [1, *taken]
    if not run.warm_rounds and averaging == "tail":
        taken = [4, *taken]
    iterates = {t: final(engine, run, rounds=t).params for t in range(1, 7)}
    expected = torch.stack([iterates[t] for t in taken]).mean(0) if taken else iterates[6]
    torch.testing.assert_close(final(engine, run).output, expected, rtol=1e-5, atol=1e-6)


@each_engine
@each_algorithm
def test_users_who_are_not_drawn_are_left_alone(algorithm, engine):
    """A round changes the memory of its participants only."""
    run = setting(algorithm, "logistic", "fixed")
    made = ENGINES[engine](run)
    if made.state.memory is None:
        assert not run.algorithm.memory
        return
    made.state.memory += 7.0
    chosen = np.array([1, 4])
    made.round(1, Draw(chosen, chosen))
    untouched = [i for i in range(run.users) if i not in chosen]
    assert bool((made.state.memory[untouched] == 7.0).all())
    assert bool((made.state.memory[chosen] != 7.0).any(dim=1).all())


@each_engine
@each_algorithm
def test_a_state_survives_a_checkpoint(algorithm, engine):
    """Two rounds, a checkpoint, two more: bit for bit the four rounds in one go."""
    run = setting(algorithm, "mlp", "poisson", averaging="uniform")
    made = ENGINES[engine](run)
    randomness = run.randomness()

    def rounds(engine, first, last):
        for t in range(first, last + 1):
            drawn = randomness.participants(t, run.users, run.participants)
            engine.round(t, Draw(drawn, drawn))

    rounds(made, 1, 2)
    saved = {
        key: value.clone() if torch.is_tensor(value) else value
        for key, value in made.state.to_dict().items()
    }
    resumed = ENGINES[engine](run)
    resumed.state = State.from_dict(saved, CPU)
    rounds(resumed, 3, 4)
    whole = final(engine, run)
    for key, value in parts(whole).items():
        assert torch.equal(value, parts(resumed.state)[key]), key


@each_engine
@each_algorithm
def test_the_report_names_the_participants_and_the_largest_drift(algorithm, engine):
    """largest_drift is max_i ‖y_i^K − x‖ over the round's participants."""
    run = setting(algorithm, "logistic", "fixed", data=federation(), warm_rounds=0)
    made = ENGINES[engine](run)
    chosen = np.array([0, 3, 5])
    report = made.round(1, Draw(chosen, chosen))
    assert report.round == 1 and report.participants == (0, 3, 5)
    drawn = run.randomness().participants(1, run.users, run.participants)
    (sent,) = uploads(engine, run)
    again = ENGINES[engine](run).round(1, Draw(drawn, drawn))
    assert again.metrics["largest_drift"] == pytest.approx(
        float(sent["move"].norm(dim=1).max()), rel=1e-5
    )
