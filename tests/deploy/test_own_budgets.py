"""Sites with budgets of their own: each adds its own noise, and no server overrules a policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from deploy.sums import SumWorld
from deploy.test_deployed import deployment
from deploy.test_sites import simulated
from deploy.test_sums_deployed import served_by
from deploy.world import World
from refusals import refuses
from stated import at_most

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.secure import Secure
from dpscaffold.deployment.protocol.agreement import offer_of, read_offer
from dpscaffold.deployment.protocol.enrolment import EnrolledRun, NotEnrolled
from dpscaffold.deployment.protocol.messages import Refused
from dpscaffold.deployment.server.agreed import setting_of
from dpscaffold.deployment.server.config import load_served
from dpscaffold.deployment.site.work import opener
from dpscaffold.privacy import describe
from dpscaffold.runs.written import to_toml

NOISES = (0.8, 2.5, 1.2)
OWN = Gaussian(clip=0.7, noise=NOISES)
SECRET = Gaussian(clip=0.7, noise=(20.0, 60.0, 30.0), secret=True)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold-balanced"])
@pytest.mark.parametrize("weighting", ["uniform", "noise"])
def test_a_rehearsal_ends_where_the_simulator_does(tmp_path, algorithm, weighting):
    world = World(tmp_path / "sites", algorithm, privacy=OWN, weighting=weighting, rounds=3)
    served = deployment(world, tmp_path / "run").run(world.names, resume=False)
    assert torch.equal(served.state.params, simulated(world).reached.params)


def test_statement_and_ledgers_have_each_sites_own_epsilon(tmp_path):
    world = World(tmp_path / "sites", "fedavg", privacy=SECRET, rounds=3, user_ratio=1.0)
    served = deployment(world, tmp_path / "run").run(world.names, resume=False)
    assert served.statement.towards("server").epsilon == max(served.statement.by_group)
    granted = []
    for name, noise in zip(world.names, (20.0, 60.0, 30.0), strict=True):
        (entry,) = world.ledger(name).runs.values()
        assert entry.account["mechanism"]["noise"] == noise
        assert isinstance(entry.account["mechanism"]["noise"], float)
        granted.append(entry.grant.epsilon)
        size, batch = entry.account["records"], entry.account["batch"]
        run = describe(
            rounds=entry.grant.participations,
            local_steps=3,
            users=1,
            cohort_size=1,
            records=size,
            batch_sizes=batch,
            noise=noise,
            delta=entry.grant.delta,
        )
        assert entry.grant.epsilon == pytest.approx(at_most(run))
    assert granted[1] < granted[2] < granted[0]


def test_no_server_overrules_a_sites_budget(tmp_path):
    """A site that allows little takes part with much noise, and refuses everybody's noise."""
    loose = World(tmp_path / "loose", "fedavg", privacy=SECRET, rounds=3)
    loose.enrol()
    second = loose.names[1]
    (entry,) = loose.ledger(second).runs.values()
    strict = {"epsilon": 1.2 * entry.grant.epsilon, "delta": 1e-3, "max_runs": 1}
    for name, noises, takes_part in (
        ("own", (20.0, 60.0, 30.0), True),
        ("equal", 20.0, False),
        ("swapped", (60.0, 20.0, 30.0), False),
    ):
        mechanism = SECRET.changed(noise=noises)
        world = World(tmp_path / name, "fedavg", privacy=mechanism, rounds=3)
        world.policies[second] = world.policies[second].model_copy(update=strict)
        if takes_part:
            world.enrol()
            continue
        with pytest.raises(NotEnrolled) as no:
            world.enrol()
        assert "policy-epsilon" in str(no.value) and not world.ledger(second).runs


def test_a_site_that_the_offer_gives_no_noise_refuses(tmp_path):
    world = World(tmp_path, "fedavg", privacy=SECRET)
    raw = dict(world.enrolled.offer)
    raw["noises"] = {name: n for name, n in raw["noises"].items() if name != world.names[1]}
    opened = opener(world.file(world.names[1]), tmp_path / world.names[1], torch.device("cpu"), str)
    with refuses(f"bad-offer: {world.names[1]}"):
        opened(raw, world.policies[world.names[1]])


@pytest.mark.parametrize(
    "change",
    [
        {"noises": {}},
        {"noises": {"north": 0.0, "east": 20.0, "west": 30.0}},
        {"noises": {"north": 25.0, "east": 60.0, "west": 30.0}},
        {"noises": {"north": "20", "east": 60.0, "west": 30.0}},
        {"noises": {"north": True, "east": 60.0, "west": 30.0}},
        {"privacy": SECRET.stored()},
    ],
    ids=str,
)
def test_an_offer_whose_noises_make_no_sense_is_refused(tmp_path, change):
    world = World(tmp_path, "fedavg", privacy=SECRET)
    assert read_offer(world.enrolled.offer).noises is not None
    with pytest.raises(Refused) as no:
        read_offer({**world.enrolled.offer, **change})
    assert no.value.code == "bad-offer"


def test_offers_of_equal_noise_are_as_before(tmp_path):
    world = World(tmp_path, "fedavg", privacy=SECRET.changed(noise=20.0))
    offer = world.enrolled.offer
    assert "noises" not in offer and offer["privacy"]["noise"] == 20.0


@pytest.mark.parametrize("weighting", ["uniform", "noise"])
def test_secure_sums_of_sites_with_own_noise(tmp_path, weighting):
    own = Gaussian(0.7, (0.8, 2.5, 1.2, 0.9), "poisson")
    world = SumWorld(tmp_path / "sites", privacy=own, weighting=weighting)
    served = served_by(world, tmp_path / "run").run(world.names, resume=False)
    assert torch.equal(served.state.params, simulated(world).reached.params)


SERVED = """
[schema]
features = 4
classes = 2
[algorithm]
name = "fedavg"
[plan]
rounds = 6
local_steps = 1
user_ratio = 1.0
weighting = "noise"
[privacy]
sampling = "poisson"
delta = 1e-5
epsilon = { default = 4.0, east = 1.0 }
[deploy]
records = { north = 400, east = 250, west = 400 }
"""


@pytest.mark.parametrize("secure", [False, True])
def test_a_server_solves_for_the_table_of_its_plan(tmp_path, secure):
    path = tmp_path / "server.toml"
    path.write_text(SERVED + ("[secure]\ncolluders = 1\n" if secure else ""))
    served = load_served(path)
    offer = served.offer()
    assert set(offer.noises) == {"north", "east", "west"}
    assert min(offer.noises.values()) == offer.privacy.noise
    if not secure:
        assert offer.noises["east"] > offer.noises["north"] == offer.noises["west"]
    # Sites may come in another order, and each keeps its own noise.
    names, sizes = ("east", "north", "west"), (250, 400, 400)
    enrolled = EnrolledRun("", {}, names, "", sizes, declared=True)
    setting = setting_of(offer, enrolled, served.privacy)
    assert setting.privacy.noise_of(0) == offer.noises["east"]
    assert setting.sums is not None if secure else setting.sums is None
    # The server chose the step size for these sizes, and the sites see the number.
    free = replace(setting, plan=setting.plan.changed(learning_rate=None))
    assert offer.plan.learning_rate == free.settled.learning_rate
    again = tmp_path / "again.toml"
    again.write_text(to_toml(served.resolved()))
    assert load_served(again).offer().to_dict() == offer.to_dict()
    assert np.isfinite(setting.weights.numpy()).all()


def test_a_server_that_knows_no_sizes_has_to_give_the_step_size(tmp_path):
    path = tmp_path / "server.toml"
    table = "epsilon = { default = 4.0, east = 1.0 }"
    path.write_text(SERVED.partition("[deploy]")[0].replace(table, "noise = 9.0"))
    with refuses("learning-rate-without-sizes: plan.learning_rate … deploy.records"):
        load_served(path).offer()


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("east = 1.0", "south = 1.0", "unknown-user: south"),
        ("default = 4.0, ", "", "missing-key: default"),
        ("east = 1.0", "east = 0", "out-of-range: privacy.epsilon.east is 0"),
        ("records = {", "# {", "epsilon-without-sizes"),
        ("epsilon = {", "noise = 3.0 # {", ""),
        (
            "epsilon = { default = 4.0, east = 1.0 }",
            "noise = [3.0, 4.0]",
            "count-differs",
        ),
    ],
)
def test_bad_tables_are_refused_before_anybody_is_asked(tmp_path, old, new, code):
    path = tmp_path / "server.toml"
    path.write_text(SERVED.replace(old, new))
    if not code:
        assert load_served(path).offer().noises is None
        return
    with refuses(code):
        load_served(path).offer()


def test_an_offer_names_every_site_once(tmp_path):
    world = World(tmp_path, "fedavg", privacy=SECRET)
    given = (world.rows, world.learns, world.algorithm, world.setting.plan, SECRET)
    with refuses("count-differs"):
        offer_of(*given, Secure(1), world.names[:2])


def test_a_policy_that_allows_less_than_the_plan_refuses(tmp_path):
    """The site's own file counts, before anything is reserved."""
    world = World(tmp_path, "fedavg", privacy=SECRET, rounds=3)
    second = world.names[1]
    world.policies[second] = world.policies[second].model_copy(update={"epsilon": 1e-3})
    with refuses(f"not-enrolled: {second}: policy-epsilon"):
        world.enrol()
    assert not world.ledger(second).runs
