"""Preparation that is fitted at deployed sites by noised sums, plain and secure."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from deploy.sums import SumWorld
from deploy.test_deployed import Killed, deployment
from deploy.test_ridge_deployed import gaussian_delta
from deploy.world import LOOSE, World, uploads_of
from in_memory import Crash
from refusals import refuses
from small import CPU, Driven, Trial, federation, simulator

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import ONE_ROUND
from dpscaffold.config.secure import Secure
from dpscaffold.data.prepared import applied, prepare
from dpscaffold.deployment.protocol.agreement import (
    SchemaSettings,
    offer_of,
    read_offer,
)
from dpscaffold.deployment.protocol.enrolment import EnrolledRun, NotEnrolled
from dpscaffold.deployment.server.agreed import setting_of, trial_of
from dpscaffold.deployment.server.config import load_served
from dpscaffold.deployment.server.prepare import fitted_step
from dpscaffold.deployment.server.run import DeployedRun
from dpscaffold.deployment.site.operation import _run_line
from dpscaffold.engine import State
from dpscaffold.models.loading import load_model

POISSON = Gaussian(clip=0.7, noise=0.8, sampling="poisson")
SECRET = POISSON.changed(noise=20.0, secret=True)
SECURE = Secure(colluders=1, least=3, voids=4)
CENTRE = {"step": "centre", "fit": "private", "norm_bound": 4.0, "noise": 2.0}
STANDARDISE = CENTRE | {"step": "standardise"}
PCA = CENTRE | {"step": "pca", "norm_bound": 3.0, "components": 2}
PIPELINES = {
    "centre": [CENTRE],
    "standardise": [STANDARDISE, "unit-norm"],
    "pca": [{"step": "clip-norm", "norm": 5.0}, CENTRE, PCA],
}
POLICY = LOOSE | {"preparation": True}


def world_of(folder, steps, privacy=POISSON, secure=False, **given):
    data = federation((9, 12, 7, 10))
    given = {"data": data, "rounds": 2, "local_steps": 1, "user_ratio": 1.0, **given}
    given = {"policy": POLICY, **given}
    if secure:
        world = SumWorld(folder, privacy, SECURE, **given)
    else:
        world = World(folder, "fedavg", privacy=privacy, **given)
    world.rows = SchemaSettings(features=4, classes=3, prepare=tuple(steps))
    parts = (world.rows, world.learns, world.algorithm, world.setting.plan, privacy)
    offer = offer_of(*parts, SECURE if secure else None)
    world.enrolled = EnrolledRun("", offer.to_dict(), world.names, "")
    return world


def served(world, out, resume=False, **given):
    made = deployment(world, out, **given)
    made.scorer = None
    made.records = dict(zip(world.names, world.data.roster.sizes, strict=True))
    return made, made.run(world.names, resume)


def simulated_steps(world):
    """What the simulator fits, step by step, on the same users."""
    offer = read_offer(world.enrolled.offer)
    roster = EnrolledRun("", {}, world.names, "", world.data.roster.sizes, declared=False)
    while (place := offer.rows.unfitted) is not None:
        given = setting_of(offer.fitting(place), roster)
        data = applied(world.data, offer.fitting(place).rows.steps)
        trial = Trial.of(data, given.task, given.algorithm, given.plan, given.privacy)
        driven = Driven(simulator(replace(trial, secure=given.secure), chunk=1)).drive()
        step = fitted_step(offer.rows.prepare[place], given, driven.reached.params)
        offer = offer.fitted(place, step)
    return offer.rows.steps


#: Each pipeline, each sampling and each kind of sum; the other combinations with make test-all.
FAST = {
    ("centre", "poisson", "secure"),
    ("standardise", "fixed", "plain"),
    ("pca", "poisson", "plain"),
    ("pca", "fixed", "secure"),
}
COMBINATIONS = [
    pytest.param(*names, marks=[] if names in FAST else pytest.mark.slow)
    for names in itertools.product(PIPELINES, ("fixed", "poisson"), ("plain", "secure"))
]


@pytest.mark.parametrize(("name", "sampling", "sums"), COMBINATIONS)
def test_a_rehearsal_fits_and_trains_bit_for_bit_as_the_simulator(tmp_path, name, sampling, sums):
    privacy = POISSON.changed(sampling=sampling)
    world = world_of(tmp_path / "sites", PIPELINES[name], privacy, sums == "secure")
    _, result = served(world, tmp_path / "run")
    assert result.ended == "completed"
    steps = simulated_steps(world)
    data = applied(world.data, steps)
    setting = result.setting
    trial = Trial.of(data, setting.task, setting.algorithm, setting.plan, setting.privacy)
    wanted = Driven(simulator(replace(trial, secure=setting.secure), chunk=1)).drive()
    assert torch.equal(result.state.params, wanted.reached.params)
    model = load_model(tmp_path / "run")
    raw = world.data.train.of(1)[0]
    prepared = torch.from_numpy(prepare(raw.numpy(), steps))
    scores = setting.task.scores(model.params, setting.task.prepare(prepared))
    assert torch.allclose(model.scores(raw), scores, atol=1e-6)


def test_noise_that_hides_nothing_is_refused_before_anybody_is_asked(tmp_path):
    world = world_of(tmp_path, [{**CENTRE, "noise": 1e-3}])
    with refuses("noise-out-of-range: mean … give at least 0.05"):
        trial_of(read_offer(world.enrolled.offer), world.data.roster.sizes)


@pytest.mark.slow  # the accountant's grids are large where there is next to no noise
@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_with_little_noise_the_fit_is_that_of_all_records(tmp_path, sampling):
    """NumPy on the pooled rows, cut to the public norm, is the oracle."""
    quiet = [{**STANDARDISE, "noise": 0.1}, {**PCA, "noise": 0.1, "norm_bound": 1.5}]
    many = federation((2000, 1500, 2500, 2000))
    world = world_of(tmp_path / "sites", quiet, POISSON.changed(sampling=sampling), data=many)
    made, result = served(world, tmp_path / "run")
    rows = world.data.train.features.double().numpy()
    cut = rows / np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True) / 4.0)
    deviation = np.sqrt((cut**2).mean(0) - cut.mean(0) ** 2)
    shift, project = made.offer.rows.steps
    np.testing.assert_allclose(shift.mean, cut.mean(0), atol=2e-3)
    np.testing.assert_allclose(1 / shift.factor, deviation, rtol=1e-2)
    rows = (rows - cut.mean(0)) / deviation
    cut = rows / np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True) / 1.5)
    _, vectors = np.linalg.eigh(cut.T @ cut)
    overlap = np.abs(np.linalg.svd(vectors[:, -2:].T @ project.basis)[1])
    np.testing.assert_allclose(overlap, 1.0, atol=2e-2)
    assert result.setting.task.features == 2


def lines_of(world, name="east"):
    return [_run_line(booked) for booked in world.ledger(name).runs.values()]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_each_step_has_its_own_line_of_the_ledger(tmp_path, secure):
    """A step is one Gaussian of the stated noise: zero-out neighbours have twice its multiplier,
    and in a sum of four sites three honest ones add noise."""
    privacy = SECRET.changed(sampling="poisson")
    world = world_of(tmp_path / "sites", PIPELINES["pca"], privacy, secure)
    served(world, tmp_path / "run")
    *fits, training = lines_of(world)
    assert [line["query"] for line in (*fits, training)] == ["sums", "sums", "gradients"]
    assert [line["participations"] for line in fits] == [1, 1]
    for line in fits:
        multiplier = 4.0 * (3**0.5 if secure else 1)
        delta = pytest.approx(line["delta"], rel=0.03)
        assert gaussian_delta(line["epsilon_spent"], multiplier) == delta
        if secure:
            assert gaussian_delta(line["epsilon_alone_spent"], 4.0) == delta
    left = world.ledger("east").left(world.policies["east"])
    booked = [b.grant.epsilon for b in world.ledger("east").runs.values()]
    assert left.epsilon == pytest.approx(1e6 - sum(booked)) and min(booked) > 0


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_the_statement_of_the_run_includes_the_preparation(tmp_path, secure):
    """Two steps and ridge regression are three Gaussians, and so one: 1/z² = Σ 1/z_i². In secure
    sums both attempts at a step count, and both attempts that are permitted at the training."""
    privacy = SECRET.changed(noise=3.0, sampling="poisson")
    steps = [CENTRE, {**PCA, "noise": 5.0}]
    world = ridge_world(tmp_path / "sites", steps, privacy, secure)
    _, result = served(world, tmp_path / "run")
    times, honest = (2, 3**0.5) if secure else (1, 1.0)
    alone = 1 / math.sqrt(times / 4**2 + times / 10**2 + (1 + SECURE.voids * secure) / 6**2)
    said, delta = result.statement, pytest.approx(result.statement.delta, rel=0.03)
    assert gaussian_delta(said.towards("server").epsilon, honest * alone) == delta
    if secure:
        assert gaussian_delta(said.towards("alone").epsilon, alone) == delta
    model = load_model(tmp_path / "run")
    assert [step.protection for step in model.preparation[1:]] == ["private", "private"]


def ridge_world(folder, steps, privacy, secure):
    given = {**ONE_ROUND, "warm_rounds": None}
    world = world_of(folder, steps, privacy, secure, **given)
    offer = dict(world.enrolled.offer, algorithm={"name": "ridge"})
    world.enrolled = replace(world.enrolled, offer=offer)
    return world


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize(
    ("code", "policy"),
    [
        ("preparation", {"preparation": False}),
        ("policy-epsilon", {"epsilon": 2.0}),
        ("policy-model", {"max_parameters": 3}),
    ],
)
def test_a_site_refuses_by_its_policy(tmp_path, code, policy, secure):
    world = world_of(tmp_path / "sites", [CENTRE], SECRET, secure, policy=POLICY | policy)
    with pytest.raises(NotEnrolled, match=code):
        served(world, tmp_path / "run")
    assert not world.ledger("east").runs


def test_a_policy_that_allows_no_preparation_any_more_counts_at_once(tmp_path):
    world = world_of(tmp_path / "sites", [CENTRE], SECRET)
    world.enrolled = EnrolledRun.fresh(changed_offer(world), world.names)
    sized = replace(world.enrolled, sizes=world.data.roster.sizes)
    world.setting = setting_of(read_offer(world.enrolled.offer), sized)
    world.post = world.correspondence()
    world.state = State.initial(world.setting, CPU)
    world.enrol()
    strict = world.policies["north"].model_copy(update={"preparation": False})
    world.policies["north"] = strict
    before = world.count("north")
    assert world.reason("north", world.task("north", 1)) == "preparation"
    assert world.count("north") == before and world.reason("east", world.task("east", 1)) == ""


def changed_offer(world, **plan):
    offer = read_offer(world.enrolled.offer).fitting(0).to_dict()
    offer["plan"] |= plan
    return offer


@pytest.mark.parametrize("plan", [{"rounds": 2}, {"data_ratio": 0.5}, {"local_steps": 3}])
def test_a_hostile_plan_of_a_preparation_is_refused(tmp_path, plan):
    world = world_of(tmp_path / "sites", [CENTRE], SECRET)
    world.enrolled = EnrolledRun.fresh(changed_offer(world, **plan), world.names)
    world.post = world.correspondence()
    with pytest.raises(NotEnrolled, match="bad-offer"):
        world.enrol()


def test_a_training_whose_steps_are_not_fitted_is_refused(tmp_path):
    world = world_of(tmp_path / "sites", [CENTRE], SECRET)
    world.enrolled = EnrolledRun.fresh(world.enrolled.offer, world.names)
    world.post = world.correspondence()
    with pytest.raises(NotEnrolled, match="preparation"):
        world.enrol()


@pytest.mark.parametrize(
    ("secure", "step"),
    [
        (True, "counted"),
        *[
            pytest.param(secure, step, marks=pytest.mark.slow)
            for secure in (False, True)
            for step in ("counted", "computed", "stored")
            if (secure, step) != (True, "counted")
        ],
    ],
)
def test_a_site_that_dies_in_the_preparation_spends_no_less_than_what_left(tmp_path, step, secure):
    world = world_of(tmp_path / "sites", PIPELINES["pca"], SECRET, secure)
    deaths = ["north"]

    def die(name, reached):
        if reached == step and name in deaths:
            deaths.remove(name)
            raise Crash

    world.steps, world.exchange.attempts = die, 3
    _, result = served(world, tmp_path / "run")
    assert not deaths and result.ended == "completed"
    left = [name for name, _ in uploads_of(world.exchange.answered)]
    for name in world.names:
        assert left.count(name) <= world.ledger(name).total <= 6
    first = next(iter(world.ledger("north").runs.values()))
    if not secure:  # the statement has what was spent, not what was planned
        times = first.participations
        assert times == (1 if step == "stored" else 2)
        spent = result.setting.roster.schema.preparation[1].cost
        assert spent.noise == pytest.approx(2.0 / math.sqrt(times))


@pytest.mark.parametrize(
    ("secure", "at"),
    [
        (False, "memory"),
        pytest.param(True, "memory", marks=pytest.mark.slow),
        pytest.param(False, "_finish", marks=pytest.mark.slow),
        pytest.param(True, "_finish", marks=pytest.mark.slow),
    ],
)
def test_a_server_killed_in_the_preparation_resumes_to_the_same_end(
    tmp_path, monkeypatch, secure, at
):
    """It dies in the round of each step, and in the training."""
    whole = world_of(tmp_path / "whole", PIPELINES["pca"], POISSON, secure)
    wanted = served(whole, tmp_path / "at once")[1].state.params
    world = world_of(tmp_path / "sites", PIPELINES["pca"], POISSON, secure)
    for kill in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(DeployedRun, at, dying(getattr(DeployedRun, at), kill))
            with pytest.raises(Killed):
                served(world, tmp_path / "run", resume=kill > 0)
    result = served(world, tmp_path / "run", resume=True)[1]
    assert result.ended == "completed" and torch.equal(result.state.params, wanted)
    counts = [booked.participations for booked in world.ledger("east").runs.values()]
    assert counts == [1, 1, 2]


def dying(real, runs):
    """Die in the run after so many others."""

    def die(self, *given):
        if len([*self.out.path.parent.glob("run*")]) == runs + 1:
            raise Killed
        return real(self, *given)

    return die


# --- the server's file


PLAN = """
[schema]
features = 4
classes = 2
prepare = [
  { step = "standardise", fit = "private", norm_bound = 4.0, noise = 20.0 },
  { step = "pca", fit = "private", norm_bound = 2.0, noise = 20.0, components = 2 },
]
[algorithm]
name = "fedavg"
[plan]
rounds = 5
local_steps = 1
user_ratio = 1.0
[privacy]
epsilon = 1.0
[deploy]
records = { east = 60, north = 60, south = 60, west = 60 }
"""


def offered(tmp_path, text):
    (tmp_path / "plan.toml").write_text(text)
    return load_served(tmp_path / "plan.toml").offer()


def test_noise_is_solved_together_with_the_preparation(tmp_path):
    """Of ε = 1 the two steps take their part, less of it in secure sums."""
    steps = PLAN[PLAN.index("prepare") : PLAN.index("[algorithm]")]
    secure = PLAN + "[secure]\nvoids = 0\n"
    ratios = {}
    for name, text in {"plain": PLAN, "secure": secure}.items():
        with_steps, without = offered(tmp_path, text), offered(tmp_path, text.replace(steps, ""))
        ratios[name] = with_steps.privacy.noise / without.privacy.noise
        assert with_steps.rows.dimension == 2 and len(with_steps.parts) == 3
    assert 1.001 < ratios["secure"] < ratios["plain"] < 1.2


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("norm_bound = 4.0, ", "", "missing-key: norm_bound"),
        (", noise = 20.0 }", " }", "noise-or-epsilon"),
        ('fit = "private", norm_bound = 4.0', "norm_bound = 4.0", "not-applicable: norm_bound"),
        ("components = 2", "norm = 1.0", "unknown-key: norm"),
        ("components = 2", "components = 5", "too-many-components: 5"),
        ('{ step = "standardise", fit = "private", norm_bound = 4.0, noise = 20.0 },', "",
         "pca-not-centred"),
        ("epsilon = 1.0", 'epsilon = 1.0\nunit = "user"', "not-applicable: unit"),
        ("[privacy]\nepsilon = 1.0", "", "not-applicable: privacy"),
        ('fit = "private", norm_bound = 4.0', 'fit = "unprotected", norm_bound = 4.0',
         "not-applicable"),
        ('fit = "private", norm_bound = 4.0, noise = 20.0', 'fit = "public", mean = 0.0',
         "not-applicable: deviation"),
        ('{ step = "pca", fit = "private", norm_bound = 2.0, noise = 20.0, components = 2 }',
         '{ step = "fitted", mean = [0.0] }', "not-applicable: 'fitted'"),
        ("noise = 20.0, components", "epsilon = 1.0, components", "missing-key: pca … noise"),
    ],
)  # fmt: skip
def test_a_preparation_that_cannot_be_fitted_is_refused(tmp_path, old, new, code):
    assert old in PLAN
    text = PLAN.replace(old, new)
    if 'unit = "user"' in new:
        text = text.replace("= 60", "= 1")
    with refuses(code):
        offered(tmp_path, text)
