"""Laws that every algorithm obeys, with and without privacy, on both engines.

Adding an entry to ``ALGORITHMS`` adds it to every test here.
"""

from __future__ import annotations

import pytest
import torch
from toys import Quadratic, quadratics
from world import (
    ENGINES,
    EVERY,
    PRIVACIES,
    TASKS,
    Draws,
    Drive,
    Upload,
    assert_agree,
    assert_identical,
    changed,
    federation,
    final,
    server_at_start,
    setting,
    step_size,
    uploads,
)

from dpscaffold import Gaussian, fedavg, fedprox, scaffold, scaffold_balanced

each_engine = pytest.mark.parametrize("engine", ENGINES)
each_algorithm = pytest.mark.parametrize("algorithm", EVERY)
#: Algorithms whose server keeps the mean of what users remember, and the slots of which that holds.
MIRRORS = {
    name: sorted(set(make().keeps) & set(make().remembers))
    for name, make in EVERY.items()
    if set(make().keeps) & set(make().remembers)
}


#: Server functions that move x by η_g times the mean of Δy_i, and by nothing else.
MOVES = (fedavg().update, scaffold().update, scaffold_balanced().update)

#: Names of what is uploaded to be summed, over all algorithms.
TOTALS = {name for make in EVERY.values() for name in make().keeps}


def test_the_table_is_named_after_its_algorithms():
    """Each entry makes an algorithm of its own name, and two calls make equal ones."""
    for name, make in EVERY.items():
        assert make().name == name
        assert make() == make()


@each_engine
@each_algorithm
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("unit", ["record", "user"])
def test_no_noise_and_no_clip_is_the_classical_algorithm(algorithm, task, unit, engine):
    """σ_g = 0 and C = ∞ recovers the algorithm without privacy."""
    silent = setting(algorithm, task, Gaussian(clip=float("inf"), noise=0.0, unit=unit))
    # Adam divides by small second moments, which magnifies the last bits.
    rtol, atol = (1e-4, 1e-4) if algorithm == "fedadam" else (1e-5, 1e-6)
    assert_agree(
        final(engine, silent), final(engine, changed(silent, privacy=None)), rtol=rtol, atol=atol
    )


@each_engine
@pytest.mark.parametrize("privacy", PRIVACIES)
@pytest.mark.parametrize("task", ["logistic", "mlp"])
def test_scaffold_without_control_variates_is_fedavg(task, privacy, engine):
    """c and c_i held at zero: SCAFFOLD is FedAvg, and DP-SCAFFOLD is DP-FedAvg."""

    def forget(local, at):
        move = local.params - at.broadcast.params
        nothing = {"control": torch.zeros_like(move)}
        return Upload(move, nothing), nothing

    run = setting(scaffold().replace(finish=forget), task, privacy)
    plain = changed(run, algorithm=fedavg())
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
        final(engine, run), final(engine, changed(run, algorithm=fedavg())), rtol=1e-6, atol=1e-7
    )
    lengths = [
        float(uploads(engine, changed(run, algorithm=fedprox(mu)))[0]["move"].norm())
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
    eta, x = step_size(run), torch.zeros(3)
    first = x - eta * (h * (x - a) + 0.1 * x)
    second = first - eta * (h * (first - a) + 0.1 * first + 0.7 * (first - x))
    torch.testing.assert_close(final(engine, run).params, second)


@each_engine
@pytest.mark.parametrize("algorithm", MIRRORS)
@pytest.mark.parametrize("privacy", PRIVACIES)
@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_the_server_keeps_the_mean_of_what_users_remember(algorithm, privacy, weighting, engine):
    """c = (1/M)Σc_i after every round, under either weighting, in warm rounds too."""
    run = setting(algorithm, "logistic", privacy, weighting=weighting)
    for rounds in (1, 2, 4):
        reached = final(engine, run, rounds=rounds)
        for name in MIRRORS[algorithm]:
            kept, mean = reached.slots[name], reached.memories[name].mean(0)
            torch.testing.assert_close(kept, mean, rtol=1e-3, atol=1e-4)
        kept = [reached.slots[name] for name in MIRRORS[algorithm]]
        assert max(float(slot.norm()) for slot in kept) > 1e-3


@each_engine
@each_algorithm
@pytest.mark.parametrize("weighting", ["uniform", "records"])
def test_the_server_moves_by_the_mean_upload(algorithm, weighting, engine):
    """``update`` gets Σw_iΔy_i with w_i = 1/m, or R_i/ΣR_j over the participants, totals divided by
    M, and η_g; FedAvg and SCAFFOLD then move by η_g times that mean."""
    data = federation()
    run = setting(
        algorithm, "logistic", "fixed", data, weighting=weighting, server_rate=0.6, warm_rounds=0
    )
    (sent,) = uploads(engine, run)
    sizes = data.train.sizes[Draws(run).members(1)].float()
    weights = torch.full((3,), 1 / 3) if weighting == "uniform" else sizes / sizes.sum()
    totals = {name: value.sum(0) / data.users for name, value in sent.items() if name in TOTALS}
    start, update = server_at_start(run), EVERY[algorithm]().update
    moved = update(start, Upload(weights @ sent["move"], totals), 0.6)
    reached = final(engine, run, rounds=1)
    torch.testing.assert_close(reached.params, moved.params, rtol=1e-4, atol=1e-6)
    for name, value in moved.slots.items():
        torch.testing.assert_close(reached.slots[name], value, rtol=1e-4, atol=1e-6)
    if update in MOVES:
        expected = start.params + 0.6 * weights @ sent["move"]
        torch.testing.assert_close(reached.params, expected, rtol=1e-4, atol=1e-6)


@each_engine
@each_algorithm
@pytest.mark.parametrize(
    ("averaging", "taken"), [("none", []), ("uniform", [2, 3, 4, 5, 6]), (0.4, [5, 6])]
)
def test_the_output_is_the_average_that_was_asked_for(algorithm, averaging, taken, engine):
    """none: x^T.

    Uniform: the mean of x^t over the real rounds; 0.4: over the last ⌈0.4·5⌉ or ⌈0.4·6⌉ of them.
    """
    run = setting(algorithm, "logistic", "fixed", averaging=averaging, rounds=6, warm_rounds=1)
    cold = EVERY[algorithm]().warm_up is None
    if cold and averaging == "uniform":
        taken = [1, *taken]
    if cold and averaging == 0.4:
        taken = [4, *taken]
    iterates = {t: final(engine, run, rounds=t).params for t in range(1, 7)}
    expected = torch.stack([iterates[t] for t in taken]).mean(0) if taken else iterates[6]
    torch.testing.assert_close(final(engine, run).output, expected, rtol=1e-5, atol=1e-6)


@each_engine
@each_algorithm
def test_users_who_are_not_drawn_are_left_alone(algorithm, engine):
    """A round changes the memory of its participants only."""
    data = federation()
    made = Drive(engine, setting(algorithm, "logistic", "fixed", data))
    made.remember(7.0)
    chosen = [1, 4]
    made.round_of(chosen)
    untouched = [i for i in range(data.users) if i not in chosen]
    assert made.reached.memories.keys() == EVERY[algorithm]().remembers.keys()
    for table in made.reached.memories.values():
        assert bool((table[untouched] == 7.0).all())
        assert bool((table[chosen] != 7.0).any(dim=1).all())


@each_engine
@each_algorithm
def test_a_state_survives_a_checkpoint(algorithm, engine):
    """Two rounds, a checkpoint, two more: bit for bit the four rounds in one go."""
    run = setting(algorithm, "mlp", "poisson", averaging="uniform")
    made = Drive(engine, run).drive(2)
    saved = made.checkpoint()
    made.drive()
    resumed = Drive(engine, run)
    resumed.restore(saved)
    assert_identical(resumed.drive().reached, made.reached)
    assert_identical(resumed.reached, final(engine, run))


@each_engine
@each_algorithm
def test_the_report_names_the_participants_and_the_largest_drift(algorithm, engine):
    """largest_drift is max_i ‖y_i^K − x‖ over the round's participants."""
    run = setting(algorithm, "logistic", "fixed", data=federation(), warm_rounds=0)
    done = Drive(engine, run).round_of([0, 3, 5])
    assert done.number == 1 and done.arrived == (0, 3, 5)
    (sent,) = uploads(engine, run)
    again = Drive(engine, run).round_of(Draws(run).members(1))
    assert again.largest_drift == pytest.approx(float(sent["move"].norm(dim=1).max()), rel=1e-5)
