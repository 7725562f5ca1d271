"""Models of the sites' own in a deployment: trained during the run, or fitted at the site."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deploy.test_deployed import deployment
from deploy.test_sites import FIXED, POISSON, assert_parity, simulated
from deploy.world import World
from refusals import refuses
from small import federation

from dpscaffold import Gaussian, load_model
from dpscaffold.config.personal import PersonalSettings
from dpscaffold.deployment.server.config import load_served

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
    world.engine.settle(None)


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
    own_noises = FIXED.changed(noise=(0.8, 2.5, 1.2))
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
    with refuses("not-applicable: dpscaffold personalise"):
        load_served(served)


@strengths
def test_a_site_keeps_the_model_that_the_run_trained_for_it(tmp_path, personal):
    world = World(tmp_path / "sites", "fedavg", privacy=SECRET, data=federation((30, 40, 35)),
                  rounds=2, user_ratio=1.0, personal=personal)  # fmt: skip
    deployment(world, tmp_path / "run").run(world.names, resume=False)
    (memory,) = world.sites["north"].state.runs()
    model = load_model(tmp_path / "sites/north/state/models" / f"{memory.folder.name}-own")
    slots, common = memory.acknowledged().slots, world.model("north").params
    if personal.strength == 0.5:
        np.testing.assert_array_equal(model.params.numpy(), slots["personal"])
    else:  # on the line from x to w
        whole, part = torch.from_numpy(slots["personal"]) - common, model.params - common
        share = float(part @ whole / (whole @ whole))
        assert 0 <= share <= 1
        torch.testing.assert_close(part, share * whole, rtol=1e-4, atol=1e-6)
    assert model.origin.personal == "north" and model.privacy is None
