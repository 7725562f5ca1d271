"""Users with noise of their own, on every engine: the same run, and the noise that was solved
for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses
from small import (
    EVERY,
    TASKS,
    UNEQUAL,
    Driven,
    assert_agree,
    assert_identical,
    draw_as_a_gpu,
    federation,
    final,
    setting,
    simulator,
    uploads,
)

from dpscaffold import Gaussian, train
from dpscaffold.config import Secure

NOISES = (0.8, 2.4, 1.1, 0.9, 3.0, 0.8)
KINDS = {
    "fixed": Gaussian(0.7, NOISES),
    "poisson": Gaussian(0.7, NOISES, "poisson"),
    "median": Gaussian("median", NOISES),
    "user": Gaussian(0.7, tuple(n / 4 for n in NOISES), unit="user"),
}


@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighting", ["uniform", "noise"])
def test_the_simulator_agrees_with_the_loop(algorithm, kind, weighting):
    if kind == "median" and weighting == "noise":
        pytest.skip("weights by noise need noise that is known")
    run = setting(algorithm, "logistic", KINDS[kind], weighting=weighting)
    atol = 1e-3 if algorithm == "fedadam" else 1e-5
    assert_agree(final("simulator", run), final("loop", run), atol=atol)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("way", ["two users at a time", "mapped", "stacked"])
def test_so_do_networks_in_every_way(task, way):
    run = setting("scaffold-balanced", task, KINDS["poisson"], weighting="noise")
    assert_agree(final(way, run), final("loop", run))


@pytest.mark.parametrize("engine", ["loop", "simulator", "device"])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("kind", ["fixed", "user"])
def test_every_user_adds_the_noise_that_is_accounted(engine, task, kind, monkeypatch):
    """The same draws at σ near 0, at one σ for all and at σ_i: what is added scales by σ_i/σ. A
    device draws for itself."""
    if engine == "device":
        draw_as_a_gpu(monkeypatch)
        engine = "simulator"
    privacy = KINDS[kind]
    plan = {"local_steps": 1, "user_ratio": 1.0, "rounds": 1, "warm_rounds": 0}
    clean, equal, own = (
        uploads(engine, setting("fedavg", task, one, **plan))[0]["move"].double()
        for one in (
            privacy.changed(noise=1e-9),
            privacy.changed(noise=1.0),
            privacy,
        )
    )
    run = setting("fedavg", task, privacy, **plan)
    # Uploads are in the order of the draw.
    drawn = run.randomness().cohort(1, run.users, run.cohort_size).tolist()
    for row, user in enumerate(drawn):
        scale = (own[row] - clean[row]).norm() / (equal[row] - clean[row]).norm()
        assert float(scale) == pytest.approx(privacy.noise_by_user[user], rel=1e-3)
        group = run.mechanism.groups[run.mechanism.place(user)]
        assert run.mechanism.noise * group.louder == pytest.approx(privacy.noise_by_user[user])


def test_the_mean_and_the_balanced_controls_weigh_by_noise():
    """w_i ∝ 1/(v_i + τ²), v_i = (2Cσ_i/b_i)²/K, by hand."""
    run = setting("fedavg", "logistic", KINDS["fixed"], weighting="noise", user_ratio=1.0)
    tau = 0.7**2
    batches = [size // 3 for size in UNEQUAL]
    each = [(2 * 0.7 * s / b) ** 2 / 3 + tau for s, b in zip(NOISES, batches, strict=True)]
    weights = np.array([1 / v for v in each])
    assert run.weights.numpy() == pytest.approx(tau * weights)
    known = run.known(range(6))
    assert known.weight[:, 0].numpy() == pytest.approx(tau * weights)
    spread = [2 * 0.7 * s / b for s, b in zip(NOISES, batches, strict=True)]
    assert known.spread[:, 0].numpy() == pytest.approx(spread)
    sent = uploads("simulator", replace(run, plan=run.plan.changed(rounds=1)))[0]["move"]
    order = run.randomness().cohort(1, 6, 6).tolist()
    want = sum(w * sent[order.index(u)] for u, w in enumerate(weights / weights.sum()))
    moved = final("simulator", run, rounds=1).params
    start = Driven(simulator(run)).state.params
    torch.testing.assert_close(moved - start, want.float(), rtol=1e-4, atol=1e-6)
    balanced = final("loop", setting("scaffold-balanced", "logistic", KINDS["fixed"]))
    seen = balanced.memories["weight"][:, 0] > 0
    want = torch.tensor([(s**2) / 3 for s in spread])[seen]
    torch.testing.assert_close(balanced.memories["noise"][seen, 0], want)


def test_a_stack_is_each_of_its_runs():
    """Runs with unequal noise, equal noise and weights by noise share a stack."""
    ones = [
        setting("scaffold-balanced", "logistic", KINDS["fixed"], weighting="noise"),
        setting("scaffold-balanced", "logistic", KINDS["fixed"]),
        setting("scaffold-balanced", "logistic", Gaussian(0.7, 2.0)),
    ]
    together = Driven(simulator(ones)).drive().all_reached
    for run, found in zip(ones, together, strict=True):
        assert_identical(found, final("simulator", run))


@pytest.mark.parametrize("weighting", ["uniform", "records", "noise"])
@pytest.mark.parametrize("least", [None, 3])
def test_secure_sums_agree_between_engines(weighting, least):
    """Every member adds its own noise to the sum, in shorter lists more of it."""
    plan = {"local_steps": 1, "user_ratio": 1.0, "weighting": weighting, "rounds": 2}
    run = replace(setting("fedavg", "logistic", KINDS["fixed"], **plan), secure=Secure(1, least))
    reached = [final(engine, run).params for engine in ("loop", "simulator")]
    torch.testing.assert_close(*reached, rtol=1e-3, atol=1e-4)
    more = run.privacy_of(4, 5 if least else 6).noise
    assert more == pytest.approx(NOISES[4] * (np.sqrt(5 / 4) if least else 1))


@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_a_run_is_resumed_with_the_same_noise(tmp_path, engine):
    data = federation(UNEQUAL)
    privacy = Gaussian(0.7, epsilon={"default": 8.0, data.roster.names[1]: 2.0})
    run = setting("scaffold-balanced", "logistic", "fixed", data)
    plan = run.plan.changed(weighting="noise", checkpoint_every=1, evaluate_every=2)

    def go(folder, **more):
        given = (data, run.task, run.algorithm, plan, privacy)
        return train(*given, engine=engine, out=tmp_path / folder, **more)

    def stop(row):
        if row.round == 2:
            raise KeyError("stopped")

    whole = go("a")
    with pytest.raises(KeyError):
        go("b", on_round=stop)
    resumed = go("b", resume=True)
    assert np.array_equal(whole.params, resumed.params)
    assert (
        whole.privacy.towards("server").epsilon == resumed.privacy.towards("server").epsilon <= 8.0
    )
    with refuses("configuration-changed: noise"):
        changed = Gaussian(0.7, epsilon={"default": 8.0, data.roster.names[1]: 1.0})
        train(data, run.task, run.algorithm, plan, changed, out=tmp_path / "b", resume=True)
