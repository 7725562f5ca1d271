"""Models of the sites' own in a deployment: trained during the run, or fitted at the site."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import torch
from deploy.test_deployed import deployment
from deploy.test_site_model import SITE
from deploy.test_sites import FIXED, POISSON, assert_parity, simulated
from deploy.world import World
from refusals import refuses
from small import federation
from typer.testing import CliRunner

from dpscaffold import Gaussian, load_model
from dpscaffold.cli import app
from dpscaffold.config.personal import PersonalSettings
from dpscaffold.deployment.server.config import load_served
from dpscaffold.deployment.site.ledger import SiteLedger
from dpscaffold.deployment.site.memory import RunMemory
from dpscaffold.deployment.site.model import stored_model
from dpscaffold.deployment.site.personal import SEEN, STAYS
from dpscaffold.errors import BadInput
from dpscaffold.models.personal import COMPOSED_EPSILON, NOT_COVERED, SERVERS_EPSILON
from dpscaffold.tasks.near import SiteRows, fit_near

#: Noise of the operating system, with a guarantee.
SECRET = Gaussian(clip=0.7, noise=4.0, secret=True)

MEAN_REGULARISED = [
    PersonalSettings(kind="mean-regularised", strength=strength) for strength in (0.5, "auto")
]
strengths = pytest.mark.parametrize("personal", MEAN_REGULARISED, ids=["number", "auto"])


def own(world):
    """What the sites' disks have of their own models, (M, P); NaN where nothing is."""
    size = world.setting.task.parameters
    none = np.full(size, np.nan, "<f4")
    slots = [world.memory(name).acknowledged().slots for name in world.names]
    return torch.from_numpy(np.stack([one.get("personal", none) for one in slots]))


def acknowledge(world):
    """Every site learns that its last upload arrived."""
    world.engine.settle(False, {}, None)


@strengths
@pytest.mark.parametrize("privacy", [FIXED, POISSON], ids=["fixed", "poisson"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold-balanced"])
def test_it_ends_where_the_simulator_does(tmp_path, algorithm, privacy, personal):
    world = World(tmp_path, algorithm, privacy=privacy, rounds=5, personal=personal)
    world.enrol()
    assert_parity(world.drive())
    acknowledge(world)
    driven = simulated(world)
    assert torch.equal(own(world), driven.reached.memories["personal"])


def test_users_with_noise_of_their_own_end_where_the_simulator_does(tmp_path):
    own_noises = replace(FIXED, noise=0.8, noise_by_user=(0.8, 2.5, 1.2))
    world = World(tmp_path, "fedavg", privacy=own_noises, rounds=4, personal=MEAN_REGULARISED[1])
    world.enrol()
    assert_parity(world.drive())
    assert not world.post.refusals
    acknowledge(world)
    assert torch.equal(own(world), simulated(world).reached.memories["personal"])


@strengths
def test_it_goes_on_after_deaths_as_if_nothing_had_happened(tmp_path, personal):
    given = {"privacy": FIXED, "rounds": 6, "user_ratio": 1.0, "personal": personal}
    world = World(tmp_path / "died", "fedavg", **given)
    world.enrol()
    world.drive(until=2)
    for name in world.names:
        world.restart(name)
    world.round(save=False)  # uploaded, and not in the checkpoint
    world.resume()
    world.drive()
    acknowledge(world)
    assert_parity(world)
    assert torch.equal(own(world), simulated(world).reached.memories["personal"])


@strengths
def test_it_is_in_no_message_and_not_at_the_server(tmp_path, personal):
    world = World(tmp_path, "fedavg", privacy=FIXED, rounds=3, user_ratio=1.0, personal=personal)
    sent = []
    for site in world.sites.values():
        site.share_slots = True
        answer = site.answer
        site.answer = lambda message, answer=answer: sent.append(answer(message)) or sent[-1]
    world.enrol()
    world.drive()
    acknowledge(world)
    names = {name for message in sent for name in message.vectors}
    assert not names & {"slot.personal", "totals.personal", "kept.personal", "totals.joined"}
    vectors = [v for message in sent for v in message.vectors.values()]
    for model in own(world).numpy():
        assert not any(len(v) == len(model) and np.allclose(v, model) for v in vectors)
    assert not {"personal", "joined", "own_noise"} & set(world.engine.memories.recall([0]))


def test_a_server_cannot_ask_for_fine_tuning(tmp_path):
    served = tmp_path / "served.toml"
    served.write_text(
        "[schema]\nfeatures = 2\nclasses = 2\n[personal]\nkind = 'fine-tune'\n"
        "[privacy]\nnoise = 20.0\n"
    )
    with refuses("not-applicable: site personalise"):
        load_served(served)


def said(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def _run(*words):
    done = said(*words)
    if isinstance(done.exception, BadInput):
        raise done.exception
    assert done.exit_code == 0, done.output


def gaussian_delta(epsilon, noise):
    """δ(ε) of one Gaussian (Balle and Wang 2018), in closed form."""
    normal = NormalDist().cdf
    away = epsilon * noise
    return normal(0.5 / noise - away) - math.exp(epsilon) * normal(-0.5 / noise - away)


def finished(folder, personal=None, policy=SITE, privacy=SECRET, **given):
    """A finished run and north's ``site.toml``."""
    world = World(folder / "sites", "fedavg", privacy=privacy, data=federation((30, 40, 35)),
                  rounds=2, user_ratio=1.0, personal=personal, **given)  # fmt: skip
    deployment(world, folder / "run").run(world.names, resume=False)
    world.enrolled = world.sites["north"].state.runs()[0].enrolment()
    site = folder / "sites" / "north" / "site.toml"
    site.write_text(policy.format(zeros=64 * "0"))
    for name in world.names:
        world.close(name)
    return world, site


@pytest.fixture(scope="module")
def fine(tmp_path_factory):
    return finished(tmp_path_factory.mktemp("fine"))


def test_a_site_fits_its_own_model_and_nothing_says_that_it_is_covered(fine, tmp_path):
    world, site = fine
    done = said("site", "personalise", site, "--out", tmp_path / "own", "--strength", "0.1")
    assert done.exit_code == 0 and NOT_COVERED in done.output
    model, common = load_model(tmp_path / "own"), stored_model(site, None)
    rows = SiteRows(*world.data.train.of(1))
    oracle = fit_near(common.task, rows, common.params, 0.1)
    torch.testing.assert_close(model.params, oracle.params)
    assert model.origin.personal == "north" and not model.privacy.guarantee
    (row,) = [tmp_path / "rows.csv"]
    features, labels = world.data.test.of(1)
    table = np.column_stack([features.numpy(), labels.numpy()])
    header = ",".join([*map(str, range(features.shape[1])), "label"])
    np.savetxt(row, table, "%.9g", ",", header=header, comments="")
    assert NOT_COVERED in said("predict", tmp_path / "own", row).output
    compared = json.loads(said("site", "evaluate", site, row, "--personal", "--json").output)
    (one,) = compared["sites"]
    assert one["site"] == "north" and one["rows"] == len(labels) and STAYS in compared["note"]
    held = json.loads(said("site", "evaluate", site, "--personal", "--json").output)
    assert held["sites"][0]["rows"] == 8 and SEEN in held["note"]


@strengths
def test_a_model_that_the_run_trained_is_the_sites(tmp_path, personal):
    world, site = finished(tmp_path, personal)
    done = said("site", "personalise", site, "--out", tmp_path / "own")
    assert done.exit_code == 0 and SERVERS_EPSILON in done.output
    model = load_model(tmp_path / "own")
    slots = RunMemory(next((site.parent / "state" / "runs").iterdir())).acknowledged().slots
    common = stored_model(site, None).params
    if personal.strength == 0.5:
        np.testing.assert_array_equal(model.params.numpy(), slots["personal"])
    else:  # on the line from x to w
        whole, part = torch.from_numpy(slots["personal"]) - common, model.params - common
        share = float(part @ whole / (whole @ whole))
        assert 0 <= share <= 1
        torch.testing.assert_close(part, share * whole, rtol=1e-4, atol=1e-6)
    entry = SiteLedger(site.parent / "state" / "ledger.jsonl", "north").runs[world.enrolled.run]
    assert model.privacy.server.epsilon == pytest.approx(entry.grant.epsilon, rel=1e-6)
    with refuses("not-applicable"):
        _run("site", "personalise", site, "--strength", "1")


def test_noised_steps_are_in_the_ledger_and_in_epsilon(tmp_path):
    world, site = finished(tmp_path)
    path = site.parent / "state" / "ledger.jsonl"
    before = SiteLedger(path, "north")
    granted = before.runs[world.enrolled.run].grant
    words = ("site", "personalise", site, "--noised", "--epsilon", "2", "--steps", "5")
    done = said(*words, "--out", tmp_path / "own")
    assert done.exit_code == 0, done.output
    model, after = load_model(tmp_path / "own"), SiteLedger(path, "north")
    (new,) = set(after.runs) - set(before.runs)
    grant = after.runs[new].grant
    assert after.runs[new].participations == 1 and grant.participations == 1
    assert 1.9 < grant.epsilon <= 2
    # An oracle of one line: K full-batch steps are a Gaussian of multiplier σ/√K.
    noise = after.runs[new].account["mechanism"]["noise"] / 5**0.5
    assert gaussian_delta(grant.epsilon, noise) <= grant.delta * 1.001
    assert model.privacy.server.epsilon == pytest.approx(granted.epsilon + grant.epsilon)
    assert model.privacy.delta == pytest.approx(granted.delta + grant.delta)
    assert COMPOSED_EPSILON in done.output and model.privacy.guarantee
    again = said(*words, "--out", tmp_path / "again")
    assert again.exit_code == 0
    twice = load_model(tmp_path / "again").privacy.server.epsilon
    assert twice == pytest.approx(granted.epsilon + 2 * grant.epsilon)
    lines = said("site", "ledger", site).output
    assert lines.count("noised fine-tuning") == 2


def test_noised_steps_beyond_the_policy_spend_nothing(tmp_path):
    _, site = finished(tmp_path)
    path = site.parent / "state" / "ledger.jsonl"
    was = path.read_bytes()
    site.write_text(SITE.format(zeros=64 * "0").replace("epsilon = 1e6", "epsilon = 3.0"))
    out = tmp_path / "own"
    with refuses("budget-too-small"):
        _run("site", "personalise", site, "--noised", "--epsilon", "40", "--out", out)
    with refuses("missing-argument: --epsilon"):
        _run("site", "personalise", site, "--noised", "--out", out)
    with refuses("out-of-range"):
        _run("site", "personalise", site, "--noised", "--epsilon", "-1", "--out", out)
    assert path.read_bytes() == was and not out.exists()


def test_noise_on_top_of_a_rehearsal_is_refused(tmp_path):
    _, site = finished(tmp_path, privacy=FIXED)
    with refuses("no-privacy"):
        _run("site", "personalise", site, "--noised", "--epsilon", "1")
