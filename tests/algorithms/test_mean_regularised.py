"""Models of their own for users, trained from noised gradients: against the optimum of their
objective, and against the other engine."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses
from small import EVERY, Driven, assert_agree, federation, final, setting, simulator
from torch.testing import assert_close
from typed import done_here

from dpscaffold import Federation, Gaussian, Linear, Plan, load_model, ridge, run, train
from dpscaffold.algorithms import Broadcast, Cohort, Known, Local, Participant, Server
from dpscaffold.algorithms.mean_regularised import given_out, mean_regularised, pulled_by_noise
from dpscaffold.models.personal import NOT_COVERED, SERVERS_EPSILON, coverage, stored_models
from dpscaffold.tasks.losses import LOSSES

BASES = ("fedavg", "scaffold", "scaffold-balanced")
OWN_NOISES = Gaussian(0.7, (0.8, 2.4, 1.1, 0.9, 3.0, 0.8))
each_base = pytest.mark.parametrize("base", BASES)
each_strength = pytest.mark.parametrize("strength", [0.5, "auto"])


def personal(base, strength):
    return mean_regularised(EVERY[base](), strength)


@each_base
@each_strength
@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson", OWN_NOISES], ids=str)
def test_engines_chunks_and_stacks_agree(base, strength, privacy):
    """Users with noise of their own, and step sizes that change, too."""
    plan = {"weighting": "records", "schedule": "linear" if privacy is OWN_NOISES else "constant"}
    trials = [
        setting(personal(base, strength), "logistic", privacy, seed=k, **plan) for k in (0, 1)
    ]
    alone = [final("loop", trial) for trial in trials]
    for one, other in zip(alone, Driven(simulator(trials)).drive().all_reached, strict=True):
        assert_agree(one, other)
    assert_agree(alone[0], Driven(simulator(trials[0], chunk=1)).drive().reached)


def squares(users: int = 3) -> Federation:
    stream = np.random.default_rng(0)
    parts = []
    for k in range(users):
        x = stream.standard_normal((12, 2)).astype(np.float32)
        parts.append((x, (x @ [1.0, k] + k).astype(np.float32)))
    return Federation.from_arrays(parts, parts, target="number")


@each_base
def test_without_noise_it_reaches_the_optimum_of_its_objective(base):
    """min Σ F_i(w_i) + (λ/2)‖w_i − x‖² over w_1, …, w_M and x: one linear system."""
    data, strength, size = squares(), 0.7, 3
    plan = Plan(
        rounds=300,
        local_steps=3,
        user_ratio=1.0,
        data_ratio=1.0,
        learning_rate=0.6,
        regularisation=0.0,
        evaluate_every=300,
    )
    result = train(data, Linear(2, 1, LOSSES["squared"]), personal(base, strength), plan)
    whole, right = np.zeros((4 * size, 4 * size)), np.zeros(4 * size)
    for k in range(3):
        x, y = data.train.of(k)
        rows = np.c_[x.double().numpy(), np.ones(len(y))]
        own, common = slice(k * size, (k + 1) * size), slice(3 * size, None)
        whole[own, own] = rows.T @ rows / len(y) + strength * np.eye(size)
        whole[own, common] = whole[common, own] = -strength * np.eye(size)
        whole[common, common] += strength * np.eye(size)
        right[own] = rows.T @ y.double().numpy() / len(y)
    best = np.linalg.solve(whole, right).reshape(4, size)
    found = [*(result.personal(k).params for k in range(3)), result.params]
    np.testing.assert_allclose(torch.stack(found), best, atol=2e-3)


@each_base
def test_the_first_round_moves_the_common_model_as_the_base_does(base):
    one, other = (
        final("loop", setting(algorithm, "logistic", "fixed", rounds=1)).params
        for algorithm in (base, personal(base, 0.5))
    )
    assert_close(one, other, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("privacy", ["fixed", "poisson", "user"])
@pytest.mark.parametrize("strength", [0.0, 0.5, "auto"])
def test_epsilon_is_that_of_the_same_steps_without_it(privacy, strength):
    """The base with memory is what it is compared with: users keep a state between rounds."""
    found = setting(personal("fedavg", strength), "logistic", privacy).mechanism
    assert found == setting("scaffold", "logistic", privacy).mechanism
    assert found.memory and not found.one_sum and not found.unproved_hooks


def announced(slots, size: int = 2) -> dict[str, torch.Tensor]:
    """What a server with these slots tells its participants."""
    cohort = Cohort((), torch.zeros(0), Known(1, 0.1), {}, torch.zeros(0))
    return personal("fedavg", "auto").announce(Server(torch.zeros(size), slots), cohort)


@pytest.mark.parametrize(
    ("square", "noise", "centre", "count", "pull"),
    [
        (10.0, 2.0, 3.0, 0.5, 2 / 7),
        (4.0, 2.0, 3.0, 1.0, 1.0),  # all of the spread is noise
        (4.0, 0.0, 3.0, 1.0, 0.0),  # no noise: no reason to pull
        (0.0, 0.0, 0.0, 0.0, 0.0),  # before the first round
    ],
)
def test_the_automatic_strength_is_noise_over_heterogeneity(square, noise, centre, count, pull):
    """v/(v + ζ²) as it is announced after a first round of these means."""
    sums = {"square": square * count, "noise": noise * count, "spread": noise * count}
    sums |= {"count": count, "centre": centre}
    told = announced({f"first_{name}": torch.tensor([value]) for name, value in sums.items()})
    assert float(told["pull"]) == pytest.approx(pull)
    assert float(told["pull_noise"]) == pytest.approx(noise**0.5 if count else 0.0)


def shared(ratio: float, usual: float) -> dict[str, torch.Tensor]:
    """What is announced where v/ζ² is ``ratio`` for noise of the deviation ``usual``: v/(v + ζ²),
    as a site takes no infinite number."""
    share = 1.0 if np.isinf(ratio) else ratio / (1 + ratio)
    return {"pull": torch.tensor([share]), "pull_noise": torch.tensor([usual])}


def pull_of(ratio: float, known: Known, usual: float) -> float:
    """λ of a user."""
    at = Participant(Broadcast(5, torch.zeros(1, 2), shared(ratio, usual)), {}, known)
    return float(pulled_by_noise(at).pull)


@pytest.mark.parametrize("size", [0.1, 0.02])
def test_users_are_pulled_by_their_own_noise(size):
    """λ_i is in proportion to σ_i², from public numbers; the schedule of η_l does not matter. It is
    capped, and a step never goes beyond x."""
    for spread, strength in ((0.2, 0.2), (0.6, 9 * 0.2), (0.1, 0.05), (6.0, 2.0)):
        pull = pull_of(0.2, Known(4, size, spread), 0.4)
        assert pull == pytest.approx(strength / (size * 4))
    assert pull_of(0.0, Known(4, size, 6.0), 0.0) == 0.0  # before the first round
    assert pull_of(np.inf, Known(4, size, 0.2), 0.4) == pytest.approx(2 / (size * 4))
    assert pull_of(np.inf, Known(1, size, 0.2), 0.2) == pytest.approx(1 / size)


def test_the_pull_of_a_run_is_that_of_each_users_own_noise():
    noises = Gaussian(0.7, (0.04, 0.12, 0.05, 0.05, 0.15, 0.04))
    data = federation((20,) * 6)
    trial = setting(personal("fedavg", "auto"), "logistic", noises, data, user_ratio=1.0)
    told = announced(final("simulator", trial, rounds=1).state.server.slots)
    known = trial.known(list(range(6)), 2)
    at = Participant(Broadcast(2, torch.zeros(6, 2), told), {}, known)
    spread = known.spread.double()
    usual = spread.square().mean()
    assert_close(told["pull_noise"].double(), (usual * known.steps).sqrt()[None])
    ratio = float(told["pull"] / (1 - told["pull"]))
    own = (ratio * spread.square() / usual).clamp_max(2.0)
    wanted = (own / known.steps).clamp_max(1.0) / known.step_size
    assert_close(pulled_by_noise(at).pull.double(), wanted)
    assert float(wanted.max()) > 2 * float(wanted.min())


@pytest.mark.parametrize("ratio", [0.0, 0.7, np.inf], ids=["free", "pulled", "held"])
def test_the_known_noise_is_the_variance_of_pure_noise(ratio):
    """Three rounds of steps whose gradients are noise alone, over many coordinates."""
    algorithm, size = personal("fedavg", "auto"), 20000
    stream, known = torch.Generator().manual_seed(0), Known(4, 0.1, 2.0)
    x, sizes = torch.zeros(1, size), algorithm.remembers.items()
    memory = {name: torch.zeros(1, size if kind == "vector" else 1) for name, kind in sizes}
    for round in (2, 3, 4):
        at = Participant(Broadcast(round, x, shared(ratio, 4.0)), memory, known)
        y, total = algorithm.begin_at(at), torch.zeros_like(x)
        for _ in range(4):
            gradient = 2.0 * torch.randn(1, size, generator=stream)
            total += gradient
            y = y - 0.1 * algorithm.direction(gradient, y, at)
        _, memory = algorithm.finish(Local(y, total / 4), at)
    variance = float(memory["personal"].square().mean())
    assert variance == pytest.approx(float(memory["own_noise"]), rel=0.04)  # 4 standard errors
    assert float(given_out(memory, x).abs().max()) < 0.3 * variance**0.5


def test_what_is_given_out_lies_between_the_common_model_and_the_users_own():
    own = {
        "personal": torch.tensor([[3.0, 4.0], [3.0, 4.0], [9.0, 9.0]]),
        "joined": torch.tensor([[1.0], [2.0], [0.0]]),
        "own_noise": torch.tensor([[2.5], [5.0], [99.0]]),
    }
    # w − x = (3, 3) for two users, so that a coordinate's square is 9; weights are 1/v².
    signal = ((9 - 2.5) / 2.5**2 + (9 - 5.0) / 5.0**2) / (1 / 2.5**2 + 1 / 5.0**2)
    shares = [signal / (signal + 2.5), signal / (signal + 5.0)]
    expected = [[3 * share, 1 + 3 * share] for share in shares] + [[0.0, 1.0]]
    common = torch.tensor([0.0, 1.0])
    assert_close(given_out(own, common), torch.tensor(expected))
    own["own_noise"] *= 10  # more than all of the spread
    assert_close(given_out(own, common), common.expand(3, 2))


def test_like_users_are_pulled_more_than_unlike_ones():
    unlike = federation((30,) * 6)
    rows = [unlike.train.of(0)] * 6
    pulls = []
    for data in (Federation.from_arrays(rows, rows, classes=3), unlike):
        trial = setting(personal("fedavg", "auto"), "logistic", "fixed", data, user_ratio=1.0)
        slots = final("simulator", trial, rounds=1).state.server.slots
        pulls.append(float(announced(slots)["pull"]))
    assert pulls[0] > 2 * pulls[1]


TABLES = {
    "data": {"users": 6, "records": 40, "features": 4, "classes": 3},
    "algorithm": {"name": "scaffold-balanced"},
    "plan": {
        "rounds": 6,
        "local_steps": 2,
        "user_ratio": 0.5,
        "learning_rate": 0.5,
        "checkpoint_every": 1,
    },
    "privacy": {"noise": 3.0},
    "personal": {"kind": "mean-regularised"},
}


def test_a_run_that_goes_on_ends_at_the_same_models(tmp_path):
    whole = run(TABLES)
    short = {**TABLES, "plan": {**TABLES["plan"], "rounds": 3}}
    run(short, out=tmp_path / "run")
    more = run(short, ["plan.rounds=6"], out=tmp_path / "run", resume=True)
    assert whole.own is not None and more.own is not None
    assert torch.equal(whole.own, more.own) and torch.equal(whole.params, more.params)
    assert not torch.equal(whole.own, whole.params.expand_as(whole.own))


def test_a_personal_model_of_the_run_is_covered_by_its_epsilon(tmp_path):
    result = run(TABLES, out=tmp_path / "run")
    model = result.personal(2)
    assert model.privacy is result.privacy or model.privacy.guarantee
    assert model.unprotected == result.model.unprotected and model.origin.personal == "2"
    assert coverage(load_model(model.save(tmp_path / "two"))) == SERVERS_EPSILON
    assert coverage(replace(model, privacy=None)) == NOT_COVERED
    torch.testing.assert_close(stored_models(tmp_path / "run", 6, result.params), result.own)
    said = json.loads(done_here("evaluate", tmp_path / "run", "--json").stdout)
    assert said["joining"]["mean"] == pytest.approx(result.joining.to_dict()["mean"])
    assert result.joining is not None and len(result.joining.sites) == 6
    with refuses("not-applicable: strength is 0.5"):
        result.personal(2, strength=0.5)


@pytest.mark.parametrize(
    ("base", "strength", "said"),
    [
        *((EVERY[name](), "auto", "not-applicable: mean") for name in ("fedprox", "scaffold-warm")),
        (ridge(), "auto", "not-applicable: mean-regularised"),
        (personal("fedavg", 0.5), "auto", "not-applicable: mean-regularised"),
    ],
)
def test_what_was_not_proved_is_refused(base, strength, said):
    with refuses(said):
        mean_regularised(base, strength)


def test_it_is_no_secure_sum():
    plan = {"rounds": 2, "local_steps": 1, "user_ratio": 1.0, "data_ratio": 1.0}
    changed = {"algorithm": {"name": "fedavg"}, "secure": {"colluders": 1}, "plan": plan}
    with refuses("secure-not-proved"):
        run({**TABLES, **changed})
