"""Models of their own for users, trained from noised gradients: against the optimum of their
objective, and against the other engine."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses
from small import (
    EVERY,
    Driven,
    assert_agree,
    assert_identical,
    federation,
    final,
    setting,
    simulator,
)
from typed import done_here

from dpscaffold import (
    Federation,
    Gaussian,
    Linear,
    Logistic,
    Plan,
    fedavg,
    load_model,
    ridge,
    run,
    train,
)
from dpscaffold.algorithms import Broadcast, Cohort, Known, Local, Participant, Server
from dpscaffold.algorithms.base import tell_nothing
from dpscaffold.algorithms.mean_regularised import (
    AnnouncePull,
    given_out,
    mean_regularised,
    pulled_by_noise,
)
from dpscaffold.models.personal import NOT_COVERED, SERVERS_EPSILON, coverage, stored_models
from dpscaffold.tasks.losses import LOSSES

BASES = ("fedavg", "scaffold", "scaffold-balanced")
each_base = pytest.mark.parametrize("base", BASES)
each_strength = pytest.mark.parametrize("strength", [0.5, "auto"])


def personal(base, strength):
    return mean_regularised(EVERY[base](), strength)


@each_base
@each_strength
@pytest.mark.parametrize("privacy", ["none", "fixed", "poisson"])
def test_the_simulator_agrees_with_the_loop(base, strength, privacy):
    trial = setting(personal(base, strength), "logistic", privacy, weighting="records")
    assert_agree(final("simulator", trial), final("loop", trial))


@each_base
@each_strength
def test_chunks_and_stacks_change_nothing(base, strength):
    trials = [setting(personal(base, strength), "logistic", "fixed", seed=k) for k in (0, 1)]
    alone = [final("simulator", trial) for trial in trials]
    together = Driven(simulator(trials)).drive().all_reached
    for one, other in zip(alone, together, strict=True):
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
    data, strength = squares(), 0.7
    plan = Plan(
        rounds=300,
        local_steps=3,
        user_ratio=1.0,
        data_ratio=1.0,
        learning_rate=0.6,
        regularisation=0.0,
        evaluate_every=300,
    )
    task = Linear(2, 1, LOSSES["squared"])
    result = train(data, task, personal(base, strength), plan)
    size = 3
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
    np.testing.assert_allclose(result.params, best[3], atol=2e-3)
    for k in range(3):
        np.testing.assert_allclose(result.personal(k).params, best[k], atol=2e-3)


@each_base
def test_the_first_round_moves_the_common_model_as_the_base_does(base):
    one = setting(base, "logistic", "fixed", rounds=1)
    other = setting(personal(base, 0.5), "logistic", "fixed", rounds=1)
    torch.testing.assert_close(
        final("loop", one).state.params, final("loop", other).state.params, atol=0.02, rtol=0.02
    )


def test_the_pull_is_outside_clipping_and_noise():
    """Its size does not depend on the clip, and the direction is exactly linear in it."""
    x, y, gradient = torch.zeros(1, 3), torch.full((1, 3), 100.0), torch.full((1, 3), 0.25)
    at = Participant(Broadcast(2, x), {"joined": torch.ones(1, 1)}, Known(4, 0.1, 0.2))
    assert personal("fedavg", 0.5).direction(gradient, y, at).tolist() == [[50.25] * 3]


@pytest.mark.parametrize("privacy", ["fixed", "poisson", "user"])
def test_epsilon_is_that_of_the_same_steps_without_it(privacy):
    """The base with memory is what it is compared with: users keep a state between rounds."""
    for strength in (0.0, 0.5, "auto"):
        found = setting(personal("fedavg", strength), "logistic", privacy).mechanism
        assert found == setting(personal("fedavg", 3.0), "logistic", privacy).mechanism
        other = setting("scaffold", "logistic", privacy).mechanism
        assert (found.memory, found.noise, found.unproved_hooks) == (True, other.noise, ())
        assert not found.one_sum


def test_the_statement_has_the_epsilon_of_scaffold():
    data = federation()
    plan = Plan(rounds=3, local_steps=2, user_ratio=0.5, data_ratio=0.5)
    said = [
        train(data, Logistic(4, 3), algorithm, plan, Gaussian(clip=1.0, noise=5.0)).privacy
        for algorithm in (EVERY["scaffold"](), personal("fedavg", 0.5))
    ]
    assert said[0].towards("server").epsilon == said[1].towards("server").epsilon
    assert said[0].towards("third_party").epsilon == said[1].towards("third_party").epsilon


def spread(square: float, noise: float, centre: float, count: float) -> float:
    """v/(v + ζ²) as it is announced after a first round of these means."""
    slots = {
        "first_square": torch.tensor([square * count]),
        "first_noise": torch.tensor([noise * count]),
        "first_spread": torch.tensor([noise * count]),
        "first_count": torch.tensor([count]),
        "first_centre": torch.tensor([centre]),
    }
    cohort = Cohort((), torch.zeros(0), Known(1, 0.1), {}, torch.zeros(0))
    return float(AnnouncePull(tell_nothing)(Server(torch.zeros(2), slots), cohort)["pull"])


def test_the_automatic_strength_is_noise_over_heterogeneity():
    assert spread(10.0, 2.0, 3.0, 0.5) == pytest.approx(2 / 7)
    assert spread(4.0, 2.0, 3.0, 1.0) == 1.0  # all of the spread is noise
    assert spread(4.0, 0.0, 3.0, 1.0) == 0.0  # no noise: no reason to pull
    assert spread(0.0, 0.0, 0.0, 0.0) == 0.0  # before the first round


def share(ratio: float) -> float:
    """v/(v + ζ²) of v/ζ², which is announced: a site takes no infinite number."""
    return 1.0 if np.isinf(ratio) else ratio / (1 + ratio)


def pull_of(ratio: float, known: Known, usual: float) -> float:
    """λ of a user where v/ζ² is ``ratio`` for noise of the deviation ``usual``."""
    shared = {"pull": torch.tensor([share(ratio)]), "pull_noise": torch.tensor([usual])}
    return float(
        pulled_by_noise(Participant(Broadcast(5, torch.zeros(1, 2), shared), {}, known)).pull
    )


def test_users_are_pulled_by_their_own_noise():
    """λ_i is in proportion to σ_i², from public numbers; the schedule of η_l does not matter."""
    for size in (0.1, 0.02):
        quiet = pull_of(0.2, Known(4, size, 0.2), 0.4)
        assert quiet == pytest.approx(0.2 / (size * 4))
        assert pull_of(0.2, Known(4, size, 0.6), 0.4) == pytest.approx(9 * 0.2 / (size * 4))
        assert pull_of(0.2, Known(4, size, 0.1), 0.4) == pytest.approx(0.05 / (size * 4))
    assert pull_of(0.2, Known(4, 0.1, 6.0), 0.4) == pytest.approx(2 / (0.1 * 4))  # capped
    assert pull_of(0.0, Known(4, 0.1, 6.0), 0.0) == 0.0  # before the first round


OWN_NOISES = Gaussian(0.7, (0.8, 2.4, 1.1, 0.9, 3.0, 0.8))


@each_base
@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_engines_agree_on_users_with_noise_of_their_own(base, schedule):
    given = {"user_ratio": 1.0, "schedule": schedule}
    trial = setting(personal(base, "auto"), "logistic", OWN_NOISES, **given)
    assert_agree(final("simulator", trial), final("loop", trial))


def test_the_pull_of_a_run_is_that_of_each_users_own_noise():
    data, noises = federation((20,) * 6), (0.04, 0.12, 0.05, 0.05, 0.15, 0.04)
    quiet = Gaussian(0.7, noises)
    trial = setting(personal("fedavg", "auto"), "logistic", quiet, data, user_ratio=1.0)
    slots = final("simulator", trial, rounds=1).state.server.slots
    users = list(range(6))
    known = trial.known(users, 2)
    cohort = Cohort((), torch.zeros(0), known, {}, torch.zeros(0))
    shared = AnnouncePull(tell_nothing)(Server(torch.zeros(2), slots), cohort)
    at = Participant(Broadcast(2, torch.zeros(6, 2), shared), {}, known)
    spread = known.spread.double()
    torch.testing.assert_close(
        shared["pull_noise"].double(), (spread.square().mean() * known.steps).sqrt()[None]
    )
    ratio = float(shared["pull"] / (1 - shared["pull"]))
    own = (ratio * spread.square() / spread.square().mean()).clamp_max(2.0)
    wanted = (own / known.steps).clamp_max(1.0) / known.step_size
    torch.testing.assert_close(pulled_by_noise(at).pull.double(), wanted)
    assert float(wanted.max()) > 2 * float(wanted.min())


def test_the_automatic_strength_is_capped_and_never_goes_beyond_x():
    def pull(ratio: float, steps: int) -> float:
        return pull_of(ratio, Known(steps, 0.1, 0.2), 0.2 * steps**0.5)

    assert pull(0.5, 4) == pytest.approx(0.5 / (0.1 * 4))
    assert pull(7.0, 4) == pull(np.inf, 4) == pytest.approx(2 / (0.1 * 4))
    assert pull(np.inf, 1) == pytest.approx(1 / 0.1)  # the step ends at x


@pytest.mark.parametrize("ratio", [0.0, 0.7, np.inf], ids=["free", "pulled", "held"])
def test_the_known_noise_is_the_variance_of_pure_noise(ratio):
    """Three rounds of steps whose gradients are noise alone, over many coordinates."""
    algorithm, size = personal("fedavg", "auto"), 20000
    stream, known = torch.Generator().manual_seed(0), Known(4, 0.1, 2.0)
    x = torch.zeros(1, size)
    memory = {
        name: torch.zeros(1, size if kind == "vector" else 1)
        for name, kind in algorithm.remembers.items()
    }
    for round in (2, 3, 4):
        shared = {"pull": torch.tensor([share(ratio)]), "pull_noise": torch.tensor([4.0])}
        at = Participant(Broadcast(round, x, shared), memory, known)
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
    torch.testing.assert_close(given_out(own, common), torch.tensor(expected))
    own["own_noise"] *= 10  # more than all of the spread
    torch.testing.assert_close(given_out(own, common), common.expand(3, 2))


def test_like_users_are_pulled_more_than_unlike_ones():
    def announced(data: Federation) -> float:
        trial = setting(personal("fedavg", "auto"), "logistic", "fixed", data, user_ratio=1.0)
        slots = final("simulator", trial, rounds=1).state.server.slots
        cohort = Cohort((), torch.zeros(0), Known(1, 0.1), {}, torch.zeros(0))
        server = Server(torch.zeros(2), slots)
        return float(AnnouncePull(tell_nothing)(server, cohort)["pull"])

    unlike = federation((30,) * 6)
    rows = [unlike.train.of(0)] * 6
    assert announced(Federation.from_arrays(rows, rows, classes=3)) > 2 * announced(unlike)


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


@pytest.mark.parametrize("strength", [pytest.param(0.3, marks=pytest.mark.slow), "auto"])
def test_a_resumed_run_ends_at_the_same_models(tmp_path, strength):
    plan = {**TABLES["plan"], "learning_rate": 0.5}
    personal = {"kind": "mean-regularised", "strength": strength}
    tables = {**TABLES, "plan": plan, "personal": personal}
    whole = run(tables)
    short = {**tables, "plan": {**plan, "rounds": 3}}
    run(short, out=tmp_path / "run")
    more = run(short, {"plan.rounds": 6}, out=tmp_path / "run", resume=True)
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


def test_what_was_not_proved_is_refused():
    for base in (EVERY["fedprox"](), EVERY["scaffold-warm"](), ridge()):
        with refuses("not-applicable: mean-regularised"):
            mean_regularised(base)
    with refuses("not-applicable: mean-regularised"):
        mean_regularised(personal("fedavg", 0.5))
    with refuses("out-of-range: -0.1"):
        mean_regularised(fedavg(), -0.1)
    with refuses("secure-not-proved"):
        run(
            {
                **TABLES,
                "algorithm": {"name": "fedavg"},
                "secure": {"colluders": 1},
                "plan": {"rounds": 2, "local_steps": 1, "user_ratio": 1.0, "data_ratio": 1.0},
            }
        )


def test_a_seed_repeats_every_model():
    trial = setting(personal("fedavg", "auto"), "logistic", "fixed")
    assert_identical(final("simulator", trial), final("simulator", trial))
