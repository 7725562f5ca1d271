"""What other implementations were found to get wrong, one section each, and that we do not.

Every test holds for every algorithm it can be stated for, on both engines.
"""

from __future__ import annotations

import copy
import itertools
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm
from small import (
    ENGINES,
    EQUAL,
    TASKS,
    UNEQUAL,
    Scripted,
    federation,
    final,
    module,
    setting,
    silent,
    uploads,
)
from stated import over_draw
from torch.func import grad, vmap
from toys import Linear, Quadratic, quadratics, vectors

from dpscaffold.algorithms import ALGORITHMS, ITERATIVE, Server
from dpscaffold.algorithms.registry import ONE_PASS
from dpscaffold.config import Run
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.privacy import Ledger, no_guarantee
from dpscaffold.randomness.streams import Randomness
from dpscaffold.tasks import Batch, ModuleTask, Task

ENGINE_NAMES = ("loop", "simulator")
WITH_MEMORY = [name for name, make in ALGORITHMS.items() if make().memory]
#: Those whose correction is c − c_i as it stands.
UNBALANCED = [name for name in WITH_MEMORY if ALGORITHMS[name]().keeps.keys() == {"control"}]

each_engine = pytest.mark.parametrize("engine", ENGINE_NAMES)
each_algorithm = pytest.mark.parametrize("algorithm", ITERATIVE)


def one_round(
    engine: str, run: Run, control=None, memory=None, params=None, randomness=None
) -> torch.Tensor:
    """x after one round with everybody, from a state of the test's making."""
    made = ENGINES[engine](run, randomness)
    server, there = made.state.server, made.engine.device
    slots = dict(server.slots) if control is None else {"control": control.to(there, copy=True)}
    server = Server(server.params if params is None else params.to(there, copy=True), slots)
    made.state = replace(made.state, server=server)
    if memory is not None:
        made.engine.memories.keep(range(run.users), {"control": memory.to(there)})
    return made.round_of(range(run.users)).state.params.cpu()


# --- FL4Health, Fed-BioMed: the correction is added before the private step, which overwrites it
# ---


@each_engine
@pytest.mark.parametrize("algorithm", UNBALANCED)
@pytest.mark.parametrize("privacy", [None, "fixed", "user-poisson"])
def test_changing_c_moves_the_step_by_exactly_minus_the_rate_times_the_change(
    algorithm, privacy, engine
):
    """One local step: Δx = −η_l·Δc and +η_l·mean(Δc_i).

    Guards against FL4Health's and Fed-BioMed's no-op.
    """
    run = setting(algorithm, "logistic", privacy, local_steps=1, user_ratio=1.0, warm_rounds=0)
    size, eta = run.task.parameters, run.plan.step_size
    change, own = torch.linspace(-1, 2, size), torch.randn(run.users, size)
    base = one_round(engine, run)
    torch.testing.assert_close(
        one_round(engine, run, control=change) - base, -eta * change, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        one_round(engine, run, memory=own) - base, eta * own.mean(0), rtol=1e-4, atol=1e-5
    )


@each_engine
def test_the_correction_acts_in_every_one_of_the_k_steps(engine):
    """With gradients that do not depend on the model, K steps move by −Kη_l·Δc, clipping and noise
    or not."""
    data = vectors([torch.randn(n, 5) for n in EQUAL])
    run = setting(
        "scaffold", Linear(5), "fixed", data, local_steps=4, user_ratio=1.0, regularisation=0.0
    )
    change = torch.tensor([3.0, -1.0, 0.5, 10.0, 0.0])
    moved = one_round(engine, run, control=change) - one_round(engine, run)
    torch.testing.assert_close(moved, -4 * run.plan.step_size * change, rtol=1e-4, atol=1e-4)


# --- a fork of FL-bench, NVFlare: Δc is built from, or travels as, numbers without noise ---


@each_engine
@each_algorithm
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_everything_that_leaves_a_user_is_a_function_of_noised_gradients(
    algorithm, sampling, engine
):
    """Change the records, and the noise so that each H̃ stays the same: no upload and no memory may
    move.

    If any un-noised number left the user, or were kept and used later, it would show. Guards
    against Δc from un-noised differences (a fork of FL-bench) and against a Δc that escapes the
    noise (NVFlare).
    """
    size, users, clip, sigma = 6, 4, 1.0, 0.7
    records, other = torch.randn(users, 3, size), torch.randn(users, 3, size)
    records, other = (x / x.norm(dim=-1, keepdim=True).clamp_min(1.0) for x in (records, other))
    full = algorithm in ONE_PASS
    runs = [
        setting(
            algorithm,
            Linear(size),
            Gaussian(clip=clip, noise=sigma, sampling=sampling),
            vectors(list(table)),
            data_ratio=1.0,
            local_steps=1 if full else 3,
            rounds=4,
        )
        for table in (records, other)
    ]
    draws = np.random.default_rng(0).standard_normal((10, users, 9, size)).astype(np.float32)
    shift = ((records.sum(1) - other.sum(1)) / (2 * clip * sigma)).numpy()
    scripts = [
        Scripted(0, lambda round, user, step: draws[round, user, step]),
        Scripted(0, lambda round, user, step: draws[round, user, step] + shift[user]),
    ]
    one, two = (uploads(engine, run, 4, script) for run, script in zip(runs, scripts, strict=True))
    plain = uploads(engine, runs[1], 4, scripts[0])
    for a, b, c in zip(one, two, plain, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-4)
        # The records do matter: without the compensation the uploads differ.
        assert any(not torch.allclose(a[key], c[key], atol=1e-2) for key in a)


#: Every task, and every privacy; the other pairs with ``make test-all``.
PAIRS = [
    pytest.param(
        task, privacy, marks=[pytest.mark.slow] * (task != "logistic" and privacy != "fixed")
    )
    for task in TASKS
    for privacy in ("fixed", "poisson", "user")
]


@each_engine
@each_algorithm
@pytest.mark.parametrize(("task", "privacy"), PAIRS)
def test_every_uploaded_number_changes_when_the_noise_does(algorithm, task, privacy, engine):
    """Same batches, other noise: each coordinate of Δy, Δc and c_i is another number (a warm
    round's Δy is 0). What stays the same is public: other records of equal number leave it so."""
    run = setting(algorithm, task, privacy, warm_rounds=1)
    others = setting(algorithm, task, privacy, federation(seed=5), warm_rounds=1)

    def script(seed: int) -> Scripted:
        return Scripted(
            0, lambda *key: np.random.default_rng([seed, *key]).standard_normal(run.task.parameters)
        )

    one, two = (uploads(engine, run, 2, script(seed)) for seed in (1, 2))
    elsewhere = uploads(engine, others, 2, script(1))
    for round, (a, b, c) in enumerate(zip(one, two, elsewhere, strict=True), start=1):
        warm = round <= run.warm_rounds
        for key in a:
            if warm and key == "move":
                assert not a[key].any() and not b[key].any()
            elif a[key].shape[1] > 1 or not torch.equal(a[key], c[key]):
                assert bool((a[key] != b[key]).all()), (
                    f"round {round}: part of {key} carries no noise"
                )


@each_engine
@each_algorithm
def test_huge_noise_drowns_everything_that_is_uploaded(algorithm, engine):
    """With σ_g = 10⁶ every coordinate of every upload is of the noise's size: none bypasses it."""
    run = setting(algorithm, "logistic", Gaussian(clip=1.0, noise=1e6), warm_rounds=0)
    everything = Scripted(
        0, lambda *key: np.sign(np.random.default_rng(key).standard_normal(run.task.parameters))
    )
    (sent,) = uploads(
        engine, replace(run, plan=run.plan.changed(local_steps=1, data_ratio=1.0)), 1, everything
    )
    for key, value in sent.items():
        if key.removeprefix("memory ") != "weight":  # how much the user counts is public
            assert float(value.abs().min()) > 1e4, key


# --- declearn: clips each tensor to C, and adds σC to the mean instead of 2Cσ_g/b ---


@pytest.mark.parametrize("task", TASKS)
@given(
    clip=st.floats(1e-3, 10.0),
    size=st.floats(0.01, 100.0),
    weights=st.floats(0.0, 3.0),
    seed=st.integers(0, 10**6),
)
def test_no_example_contributes_more_than_c_over_the_whole_vector(task, clip, size, weights, seed):
    """‖one example's contribution‖ ≤ C jointly over all tensors.

    Declearn allows C per tensor, C·√tensors jointly.
    """
    made: Task = TASKS[task](4, 3)
    generator = torch.Generator().manual_seed(seed)
    x = made.prepare(size * torch.randn(8, 1, 4, generator=generator))
    y = torch.randint(0, 3, (8, 1), generator=generator)
    params = weights * torch.randn(8, made.parameters, generator=generator)
    total = made.clipped_sum(params, Batch(x, y), torch.full((8,), clip)).total
    assert float(total.norm(dim=1).max()) <= clip * (1 + 1e-4)


def test_clipping_is_joint_where_it_bites():
    """A network of six tensors whose gradients are all long: the contribution has norm C, not
    C·√6."""
    task = ModuleTask(module(4, 3))
    x, y = 50 * torch.ones(1, 1, 4), torch.zeros(1, 1, dtype=torch.int64)
    params = 2 * task.initial(0)[None]
    total = task.clipped_sum(params, Batch(x, y), torch.tensor([0.01])).total[0]
    assert float(total.norm()) == pytest.approx(0.01, rel=1e-4)


# The scale of the noise, and that it rejects σC and a scale per tensor, is in
# statistical/test_noise.py.


# --- pfl-research: the sign of the control variate is inverted ---


#: The simulator for every algorithm, the loop (which it agrees with) for one.
REACHING = [
    pytest.param(algorithm, *case, marks=[] if case == fast else pytest.mark.slow)
    for algorithm in WITH_MEMORY
    for case in itertools.product(("loop", "simulator"), (1.0, 0.5))
    for fast in [("loop", 1.0) if algorithm == "scaffold" else ("simulator", 0.5)]
]


@pytest.mark.parametrize(("algorithm", "engine", "user_ratio"), REACHING)
def test_scaffold_reaches_the_exact_optimum_of_heterogeneous_quadratics(
    algorithm, user_ratio, engine
):
    """Curvatures and centres differ, K > 1: SCAFFOLD ends at Σh_i·a_i/Σh_i.

    A wrong sign diverges or stays away.
    """
    data, optimum = quadratics(users=6, dimension=3)
    rounds = 120 if user_ratio == 1.0 else 300
    plan = {
        "rounds": rounds,
        "user_ratio": user_ratio,
        "data_ratio": 1.0,
        "local_steps": 4,
        "learning_rate": 0.4,
        "regularisation": 0.0,
    }
    run = setting(algorithm, Quadratic(3), None, data, warm_rounds=2, **plan)
    reached = final(engine, run).params
    torch.testing.assert_close(reached, optimum, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "engine"),
    [
        ("fedavg", "loop"),
        ("fedprox", "simulator"),
        pytest.param("fedavg", "simulator", marks=pytest.mark.slow),
        pytest.param("fedprox", "loop", marks=pytest.mark.slow),
    ],
)
def test_fedavg_with_several_steps_stays_away_from_it(algorithm, engine):
    """The same quadratics: FedAvg's fixed point with K > 1 is elsewhere, and with K = 1 it is the
    optimum."""
    data, optimum = quadratics(users=6, dimension=3)
    plan = {
        "rounds": 80,
        "user_ratio": 1.0,
        "data_ratio": 1.0,
        "learning_rate": 0.4,
        "regularisation": 0.0,
    }
    away = final(engine, setting(algorithm, Quadratic(3), None, data, local_steps=4, **plan)).params
    assert float((away - optimum).norm()) > 0.05
    exact = final(
        engine, setting(algorithm, Quadratic(3), None, data, local_steps=1, **plan)
    ).params
    torch.testing.assert_close(exact, optimum, rtol=1e-3, atol=1e-3)


# --- the paper's own code: shared noise, a median per tensor, an idle warm start, no ℓ2, two
# softmaxes ---


@each_engine
@each_algorithm
def test_no_two_users_share_noise_or_batches(algorithm, engine):
    """Users with the same records in the same round upload different numbers, with and without
    noise."""
    table = torch.randn(12, 40)
    data = vectors([table, table, table, table])
    for privacy in ("none", "fixed", "poisson"):
        run = setting(algorithm, Linear(40), privacy, data, user_ratio=1.0, warm_rounds=0)
        moves = uploads(engine, run)[0]["move"]
        assert len(moves) == 4
        assert float(torch.pdist(moves).min()) > 1e-4


@pytest.mark.parametrize("task", TASKS)
def test_the_median_clip_is_over_the_whole_vector(task):
    """C = median of ‖∇f_j‖ over all parameters together, not a median of each tensor on its own."""
    made: Task = TASKS[task](4, 3)
    generator = torch.Generator().manual_seed(1)
    x, y = (
        made.prepare(torch.randn(2, 7, 4, generator=generator)),
        torch.randint(0, 3, (2, 7), generator=generator),
    )
    params = torch.randn(2, made.parameters, generator=generator)
    found = made.clipped_sum(params, Batch(x, y), "median").bound
    one = vmap(grad(lambda p, a, b: made.losses(p, a[None], b[None])[0]), in_dims=(None, 0, 0))
    for u in range(2):
        norms = one(params[u], x[u], y[u]).norm(dim=1)
        assert float(found[u]) == pytest.approx(float(norms.sort().values[3]), rel=1e-5)


def test_the_default_clip_never_looks_at_data():
    """A mechanism that nobody configured has a fixed clip.

    The median is asked for by name and gives no guarantee.
    """
    assert isinstance(Gaussian(noise=1.0).clip, float)
    assert no_guarantee(setting("fedavg", "logistic", "fixed").describe()) is None
    assert "median" in no_guarantee(setting("fedavg", "logistic", "median").describe())


@each_engine
@pytest.mark.parametrize("privacy", [None, "fixed", "poisson", "median"])
def test_the_warm_start_sets_the_controls_and_leaves_the_model(privacy, engine):
    """After the warm rounds c_i ≠ 0 for all who took part, c = (1/M)Σc_i ≠ 0, and x is x⁰ to the
    bit."""
    run = setting("scaffold-warm", "mlp", privacy, warm_rounds=2, rounds=4)
    start = run.task.initial(run.plan.public_seed)
    state = final(engine, run, rounds=2)
    chosen = {
        int(i) for t in (1, 2) for i in run.randomness().cohort(t, run.users, run.cohort_size)
    }
    for user in range(run.users):
        assert bool(state.memory[user].any()) == (user in chosen)
    assert torch.equal(state.params, start)
    torch.testing.assert_close(state.control, state.memory.mean(0), rtol=1e-4, atol=1e-5)
    assert float(state.control.norm()) > 1e-3
    assert not torch.equal(final(engine, run, rounds=3).params, start)


@each_engine
@each_algorithm
@pytest.mark.parametrize("privacy", ["none", "fixed"])
def test_the_regularisation_is_applied_outside_clipping_and_noise(algorithm, privacy, engine):
    """One step on records without gradient moves x by −η_l·λx exactly, even where λ‖x‖ is far above
    C."""
    data = vectors([torch.zeros(3, 5) for _ in range(4)])
    x = torch.tensor([100.0, -40.0, 3.0, 0.0, 7.0])
    run = setting(
        algorithm,
        Linear(5),
        privacy,
        data,
        local_steps=1,
        data_ratio=1.0,
        user_ratio=1.0,
        warm_rounds=0,
        regularisation=0.3,
    )
    moved = one_round(engine, run, params=x, randomness=silent()) - x
    torch.testing.assert_close(moved, -run.plan.step_size * 0.3 * x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_the_loss_takes_one_softmax_of_logits(task):
    """losses = −log softmax(scores)_y by hand, not log_softmax and then CrossEntropyLoss again.

    A linear or final layer's raw output must be unbounded and not normalised: scores are logits.
    """
    made: Task = TASKS[task](4, 3)
    generator = torch.Generator().manual_seed(2)
    x, y = (
        made.prepare(torch.randn(9, 4, generator=generator)),
        torch.randint(0, 3, (9,), generator=generator),
    )
    params = torch.randn(made.parameters, generator=generator)
    logits = made.scores(params, x).double().numpy()
    assert not np.allclose(np.exp(logits).sum(1), 1, atol=1e-3)
    by_hand = np.log(np.exp(logits).sum(1)) - logits[np.arange(9), y.numpy()]
    np.testing.assert_allclose(made.losses(params, x, y).numpy(), by_hand, rtol=1e-4, atol=1e-5)


# --- FL4Health's accountant: user and record rates multiplied, composed per step ---


def test_sampling_rates_are_not_multiplied():
    """One round of K full-batch steps: δ(ε) = l·δ_Gauss(ε; 2σ_g/√K) since one draw covers all K
    steps.

    ε must not be below that truth; a rate of l·s per step, composed K times, is.
    """
    from dp_accounting import pld

    sigma, steps, delta, ratio = 4.0, 25, 1e-4, 0.1
    data = vectors([torch.zeros(10, 2) for _ in range(10)])
    run = setting(
        "fedavg",
        Linear(2),
        Gaussian(clip=1.0, noise=sigma, sampling="poisson"),
        data,
        rounds=1,
        local_steps=steps,
        data_ratio=1.0,
        user_ratio=ratio,
    )
    mu = np.sqrt(steps) / (2 * sigma)  # add/remove: the sum moves by C and the noise is 2Cσ_g

    def excess(epsilon: float) -> float:
        profile = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(
            -mu / 2 - epsilon / mu
        )
        return ratio * profile - delta

    truth = brentq(excess, 1e-6, 50)
    step = pld.privacy_loss_distribution.from_gaussian_mechanism(2 * sigma, sampling_prob=ratio)
    multiplied = step.self_compose(steps).get_epsilon_for_delta(delta)
    stated = over_draw(run.describe(delta=delta))
    assert multiplied < 0.7 * truth
    assert truth * (1 - 1e-6) <= stated <= 1.02 * truth


# --- Opacus clients on Flower: a new accountant each round ---


def test_what_is_spent_adds_up_over_rounds():
    """Each participation adds to the user's ε, and a round costs the same run more: nothing
    restarts."""
    run = setting("scaffold", "logistic", Gaussian(clip=1.0, noise=3.0), rounds=5).describe()
    ledger, spent = Ledger(run), [0.0]
    for round in range(1, 6):
        ledger.record(round, [0, 1, 2])
        spent.append(ledger.of(0))
    assert all(after > before for before, after in itertools.pairwise(spent))
    assert ledger.of(3) == 0
    planned = [over_draw(run, rounds=t) for t in (1, 2, 4)]
    assert planned[0] < planned[1] < planned[2]


# --- Poisson batches: an empty batch skips its noise ---


@each_engine
@each_algorithm
@pytest.mark.parametrize("unit", ["record", "user"])
def test_an_empty_poisson_batch_still_yields_noise(algorithm, unit, engine):
    """A step whose batch is empty moves by exactly its noise.

    Skipping it would reveal that nothing was drawn.
    """
    users, size = 40, 7
    privacy = Gaussian(clip=1.0, noise=0.5, sampling="poisson", unit=unit)
    full = algorithm in ONE_PASS
    data = vectors([torch.ones(8, size) for _ in range(users)])
    plan = {
        "data_ratio": 1 / 8,
        "user_ratio": 1.0,
        "local_steps": 8 if full else 1,
        "regularisation": 0.0,
        "warm_rounds": 0,
    }
    run = setting(algorithm, Linear(size), privacy, data, **plan)
    noise = Scripted(0, lambda round, user, step: 1.0 + user + step)
    moves = uploads(engine, run, 1, noise)[0]["move"]
    counts = np.stack(
        [noise.batches(1, u, 8, 1, run.plan.local_steps, "poisson").count for u in range(users)]
    )
    assert 0.2 < (counts == 0).mean() < 0.6
    # Each of a step's records adds 1/√P to every coordinate; towards users the mean is held to norm
    # C.
    means = (counts if unit == "record" else np.minimum(counts, 1)) / np.sqrt(size)
    normals = 1.0 + np.arange(users)[:, None] + np.arange(run.plan.local_steps)
    queries = (means + privacy.scale(1.0, 1) * normals).sum(axis=1, keepdims=True)
    expected = torch.from_numpy(-run.plan.step_size * queries).float().expand(-1, size)
    torch.testing.assert_close(moves, expected, rtol=1e-4, atol=1e-4)


# --- local epochs instead of a fixed K: unequal users take unequal numbers of steps ---


@each_engine
@each_algorithm
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_unequal_users_take_exactly_k_steps(algorithm, sampling, engine):
    """Users with 4 and with 15 records alike take K steps: their noise-only moves have K equal
    parts."""
    data = vectors([torch.zeros(n, 3) for n in UNEQUAL])
    privacy = Gaussian(clip=1.0, noise=1.0, unit="user", sampling=sampling)
    run = setting(
        algorithm, Linear(3), privacy, data, user_ratio=1.0, regularisation=0.0, warm_rounds=0
    )
    run = replace(
        run,
        algorithm=run.algorithm.replace(direction=lambda gradient, y, at: gradient),
    )
    moves = uploads(engine, run, 1, Scripted(0, lambda round, user, step: 10.0**step))[0]["move"]
    taken = -moves / (run.plan.step_size * 2)
    expected = sum(10.0**k for k in range(run.plan.local_steps))
    torch.testing.assert_close(taken, torch.full_like(taken, expected), rtol=1e-4, atol=1e-4)


@each_engine
@pytest.mark.parametrize("algorithm", WITH_MEMORY)
@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson", "median"])
@pytest.mark.parametrize("warm", [0, 1])
def test_c_i_is_the_mean_of_the_k_noised_gradients(algorithm, privacy, warm, engine):
    """c_i = (1/K)Σ(H̃ + λy) for users of any size, in real rounds and in warm ones."""
    run = setting(
        algorithm, "mlp", privacy, user_ratio=1.0, warm_rounds=warm, regularisation=0.5, rounds=3
    )
    seen: list[torch.Tensor] = []

    def watched(made):
        def direction(gradient, y, at):
            if at.broadcast.round == 2 - (made.name == "warm-up"):
                seen.append(gradient.clone().cpu())
            return made.direction(gradient, y, at)

        return made.replace(direction=direction, warm_up=made.warm_up and watched(made.warm_up))

    rounds = 1 if warm and run.algorithm.warm_up else 2
    state = final(engine, replace(run, algorithm=watched(run.algorithm)), rounds=rounds)
    steps = run.plan.local_steps
    gradients = (
        torch.stack(seen).view(run.users, steps, -1)
        if engine == "loop"
        else torch.stack(seen, dim=1)
    )
    assert gradients.shape[:2] == (run.users, steps)
    torch.testing.assert_close(state.memory, gradients.mean(1), rtol=1e-3, atol=1e-3)


# --- everyone: the seed of the noise sits in a configuration or a log ---


def test_secret_noise_cannot_be_regenerated():
    """Two secret runs of one seed differ in noise and batches, and neither equals the seeded
    run."""
    made = [Randomness(3, secret=True), Randomness(3, secret=True), Randomness(3)]
    noise = [r.normals(1, 0).standard_normal(8) for r in made]
    index = [r.batches(1, 0, 1000, 500, 2, "fixed").index for r in made]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not np.any(noise[i] == noise[j])
        assert not np.array_equal(np.sort(index[i]), np.sort(index[j]))
    # The participants are public, and the same for all: the server draws them.
    assert all(np.array_equal(r.cohort(1, 50, 10), made[2].cohort(1, 50, 10)) for r in made)
    # A round that is asked for again gets other noise: two answers must not cancel it.
    assert not np.any(made[0].normals(1, 0).standard_normal(8) == noise[0])


def test_secret_streams_are_not_derived_from_the_global_generators():
    """Seeding numpy, torch and random beforehand gives no hold on the key."""
    import random

    drawn = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)  # noqa: NPY002
        drawn.append(Randomness(0, secret=True).normals(1, 1).standard_normal(4))
    assert not np.any(drawn[0] == drawn[1])


def test_a_secret_is_never_written():
    """Not in ``repr`` or ``str``, not in a traceback's arguments, not by pickle or copy."""
    secret = Randomness(3, secret=True)
    stream = secret.normals(1, 0)
    assert repr(secret) == "Randomness(seed=3, secret=True)" and repr(stream) == "CipherStream()"
    for holder in (secret, stream):
        assert not any(isinstance(value, bytes) for value in vars(holder).values())
        for write in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="never pickled"):
                write(holder)


@each_engine
def test_a_secret_run_leaves_no_key_in_its_state(engine):
    """What a checkpoint would hold of a secret run are tensors and counts; the key is in none of
    them."""
    run = setting("scaffold", "logistic", Gaussian(clip=1.0, noise=1.0, secret=True))
    one, two = (ENGINES[engine](run).drive() for _ in range(2))
    assert not torch.equal(one.reached.params, two.reached.params)
    saved = one.state.to_dict()
    assert set(saved) == {"round", "params", "slots", "average", "averaged"}
    assert set(saved["slots"]) == {"control"}
    kept = one.engine.memories.to_dict()
    assert set(kept) == {"users", "slots"} and set(kept["slots"]) == {"control"}
