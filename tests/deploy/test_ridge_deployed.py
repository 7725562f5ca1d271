"""Ridge regression in a deployed federation: one round of bounded sums, plain and secure."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from deploy.sums import SumWorld
from deploy.test_deployed import deployment
from deploy.test_sites import simulated
from deploy.world import LOOSE, World, uploads_of
from in_memory import Crash
from small import federation
from stated import written
from tasks.test_ridge import numbers
from typer.testing import CliRunner

from dpscaffold.cli import app
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.plan import ONE_ROUND
from dpscaffold.config.secure import Secure
from dpscaffold.deployment.protocol.enrolment import NotEnrolled
from dpscaffold.deployment.site.operation import _run_line
from dpscaffold.models.loading import load_model

FIXED = Gaussian(clip=1.3, noise=0.8)
POISSON = FIXED.changed(sampling="poisson")
SECRET = POISSON.changed(noise=5.0, secret=True)
SECURE = Secure(colluders=1, least=3, voids=2)
POLICY = LOOSE | {"tasks": ("logistic", "linear")}


def world_of(folder, privacy=POISSON, number=False, secure=False, **changes):
    data = numbers() if number else federation((30, 20, 50, 40))
    given = {"task": "linear" if number else "logistic", "data": data, "policy": POLICY}
    given |= {**ONE_ROUND, "warm_rounds": None, **changes}
    if secure:
        return SumWorld(folder, privacy, SECURE, algorithm="ridge", **given)
    return World(folder, "ridge", privacy=privacy, **given)


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
@pytest.mark.parametrize("number", [False, True], ids=["classes", "number"])
@pytest.mark.parametrize("privacy", [FIXED, POISSON], ids=["fixed", "poisson"])
def test_it_ends_bit_for_bit_where_the_simulator_does(tmp_path, privacy, number, secure):
    world = world_of(tmp_path, privacy, number, secure)
    world.enrol()
    world.drive()
    assert world.state.params.abs().sum() > 0
    assert torch.equal(world.state.params, simulated(world).reached.params)
    for name in world.names:
        assert world.sites[name]._works[world.enrolled.run].task.name == "ridge-sums"


def test_without_privacy_too(tmp_path):
    world = world_of(tmp_path, privacy=None)
    world.enrol()
    assert torch.equal(world.drive().state.params, simulated(world).reached.params)


def gaussian_delta(epsilon: float, multiplier: float) -> float:
    """δ(ε) of one Gaussian mechanism (Balle and Wang 2018, Theorem 8)."""
    phi = torch.distributions.Normal(0.0, 1.0).cdf
    half, scaled = 1 / (2 * multiplier), epsilon * multiplier
    values = [float(phi(torch.tensor(v).double())) for v in (half - scaled, -half - scaled)]
    return values[0] - math.exp(epsilon) * values[1]


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_the_ledger_has_the_epsilon_of_one_bounded_sum(tmp_path, secure):
    """Add-remove: a record moves the sum by C, and noise has 2Cσ_g. In a sum of four sites, one of
    whom colludes, three add noise."""
    world = world_of(tmp_path, SECRET.changed(sampling="poisson"), secure=secure)
    world.enrol()
    world.drive()
    reserved = world.ledger("east").runs[world.enrolled.run]
    assert reserved.participations == 1
    assert reserved.account["terms"]["query"] == "sums"
    line, delta = _run_line(reserved), reserved.grant.delta
    assert line["neighbours"].endswith("(add-remove)")
    assert gaussian_delta(line["epsilon_spent"], 10.0 * (3**0.5 if secure else 1)) == pytest.approx(
        delta, rel=0.03
    )
    if secure:
        assert gaussian_delta(line["epsilon_alone_spent"], 10.0) == pytest.approx(delta, rel=0.03)


REFUSED = [
    ("policy-algorithm", {"policy": POLICY | {"algorithms": ("fedavg",)}}),
    ("policy-model", {"policy": POLICY | {"tasks": ("mlp",)}}),
    ("policy-model", {"policy": POLICY | {"max_parameters": 29}}),
    ("policy-epsilon", {"policy": POLICY | {"epsilon": 0.1}}),
    ("policy-unit", {"privacy": SECRET.changed(unit="user", sampling="fixed")}),
]


@pytest.mark.parametrize(("code", "given"), REFUSED)
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_a_site_refuses_by_its_policy(tmp_path, code, given, secure):
    if secure and code == "policy-unit":
        pytest.skip("the server's own plan refuses it")
    world = world_of(tmp_path, **{"privacy": SECRET, "secure": secure, **given})
    with pytest.raises(NotEnrolled, match=code):
        world.enrol()
    assert not world.ledger("east").runs


@pytest.mark.parametrize(
    "changes", [{"rounds": 2}, {"local_steps": 2}, {"data_ratio": 0.5}, {"learning_rate": 0.5}]
)
def test_a_site_takes_a_sum_once_and_over_all_records(tmp_path, changes):
    """A server that asks for anything else is hostile: its own setting refuses it."""
    world = world_of(tmp_path, SECRET)
    world.enrolled.offer["plan"].update(changes)
    with pytest.raises(NotEnrolled, match="bad-offer"):
        world.enrol()


def test_one_participation_fits_a_policy_that_allows_no_second(tmp_path):
    world = world_of(tmp_path, SECRET, policy=POLICY | {"epsilon": 0.25 * POLICY["max_runs"]})
    world.enrol()
    world.drive()
    reserved = world.ledger("east").runs[world.enrolled.run]
    assert reserved.grant.participations == reserved.participations == 1
    assert 0.15 < reserved.grant.epsilon <= 0.25


@pytest.mark.parametrize("step", ["checked", "settled", "counted", "computed", "stored"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_a_site_that_dies_spends_no_less_than_what_left(tmp_path, step, secure):
    world = world_of(tmp_path, SECRET, secure=secure)
    deaths = ["north"]

    def die(name, reached):
        if reached == step and name in deaths:
            deaths.remove(name)
            raise Crash

    world.steps, world.exchange.attempts = die, 3
    world.enrol()
    world.drive()
    assert not deaths
    left = [name for name, _ in uploads_of(world.exchange.answered)]
    for name in world.names:
        assert 1 <= left.count(name) <= world.count(name) <= 2
    if step in ("counted", "computed") and not secure:  # counted, and nothing left
        assert world.count("north") == 2 and left.count("north") == 1


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_the_run_folder_predicts_and_reports(tmp_path, secure):
    world = world_of(tmp_path / "sites", secure=secure)
    served = deployment(world, tmp_path / "run")
    if secure:
        served.records = world.sizes
    result = served.run(world.names, resume=False)
    assert result.ended == "completed" and result.history[-1]["test_accuracy"] > 0.3
    features, labels = world.data.train.of(0)
    model = load_model(tmp_path / "run")
    assert model.params.shape == (15,)  # four features, a constant, three classes
    _, weights = world.setting.task.trained(simulated(world).reached.params)
    assert torch.equal(model.params, weights)
    rows = tmp_path / "rows.csv"
    header = ",".join([*map(str, range(4)), "label"])
    np.savetxt(rows, np.column_stack([features, labels]), "%g", ",", header=header, comments="")
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    for command in (
        ["predict", run, str(rows), "--out", f"{out}.csv"],
        ["evaluate", run, str(rows)],
        ["export", run, "--to", "torch", "--out", f"{out}.pt2"],
        ["report", run, "--out", f"{out}.html"],
        ["privacy", run],
    ):
        said = CliRunner().invoke(app, command)
        assert said.exit_code == 0, (command, said.output)
    known = written(tmp_path / "run").to_json()
    assert known["parts"][0]["mechanism"]["query"] == "sums"


def test_a_site_gets_a_model_that_predicts(tmp_path):
    """The sums stay with the server, and the linear model goes to the sites."""
    world = world_of(tmp_path / "sites")
    deployment(world, tmp_path / "run").run(world.names, resume=False)
    kept = world.model("east").params
    assert kept.tolist() == load_model(tmp_path / "run").params.tolist()


def test_the_largest_honest_sum_is_used(tmp_path):
    """Replace-one: two records are 2C apart, and one by itself may be longer than C."""
    world = world_of(tmp_path, FIXED.changed(noise=1e-4))
    for name, size in zip(world.names, world.data.roster.sizes, strict=True):
        features = np.full((size, 4), 50.0, np.float32)
        labels = np.zeros(size, np.int64)
        np.savez(world.folder / name / "data.npz", features=features, labels=labels)
    world.enrol()
    assert len(world.round().arrived) == 4
    assert world.state.params.norm() > 1.3 * 1.2
