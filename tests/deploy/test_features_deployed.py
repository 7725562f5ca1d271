"""Public feature steps in a deployed federation: sites hold raw rows, and the model takes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from deploy.test_deployed import deployment
from deploy.test_sites import simulated
from deploy.world import LOOSE, World
from refusals import refuses
from small import federation

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.data import preprocess
from dpscaffold.deployment.protocol.agreement import SchemaSettings
from dpscaffold.deployment.protocol.enrolment import NotEnrolled
from dpscaffold.deployment.server.config import load_served
from dpscaffold.models.loading import load_model

POISSON = Gaussian(clip=0.7, noise=0.8, sampling="poisson")
#: Steps for images of 6 × 6 pixels, by the number of features that they give.
STEPS = {
    32: ["hog:6x6"],
    18: [{"step": "hog", "shape": [4, 3, 3]}, "random-features:18"],
    20: [{"step": "random-features", "features": 20}, "unit-norm"],
}


class Pixels(World):
    """Sites whose files have the pixels, next to a simulator that has the features."""

    def __init__(self, folder, steps, **given):
        self.raw = federation((9, 12, 7), dimension=36)
        data = preprocess(self.raw, steps)
        super().__init__(folder, "fedavg", privacy=POISSON, data=data, **given)
        self.rows = SchemaSettings(features=36, classes=3, prepare=tuple(steps))
        self.fresh_server()

    def write_data(self, name, user, rows=slice(None)):
        features, labels = (part.numpy()[rows] for part in self.raw.train.of(user))
        np.savez(self.folder / name / "data.npz", features=features, labels=labels)


@pytest.mark.parametrize("width", STEPS)
def test_a_rehearsal_ends_where_the_simulator_does(tmp_path, width):
    world = Pixels(tmp_path, STEPS[width])
    assert world.rows.dimension == world.data.dimension == width
    world.enrol()
    world.drive()
    # Features are made of one record at a time at a site, and of many in the simulator: another
    # kernel of the processor, whose last bits may differ.
    assert torch.allclose(world.state.params, simulated(world).reached.params, atol=1e-6)


def test_the_model_takes_raw_rows(tmp_path):
    world = Pixels(tmp_path / "sites", STEPS[18])
    made = deployment(world, tmp_path / "run")
    made.scorer = None
    assert made.run(world.names, resume=False).ended == "completed"
    model, (features, _) = load_model(tmp_path / "run"), world.raw.train.of(0)
    prepared, task = world.data.train.of(0)[0], world.setting.task
    wanted = task.scores(model.params, task.prepare(prepared))
    assert torch.allclose(model.scores(features), wanted, atol=1e-5)


PLAN = """
[schema]
features = 36
classes = 3
prepare = [STEP]
[plan]
learning_rate = 0.5
rounds = 2
[privacy]
noise = 20.0
"""


@pytest.mark.parametrize(
    ("step", "code"),
    [
        ('"hog:5x5"', "wrong-shape: 25 pixels"),
        ('"hog:1x36"', "wrong-shape: at least 2"),
        ('"hog:tall"', "wrong-shape: tall"),
        ('"random-features:5000000"', "out-of-range: random numbers"),
        ('{ step = "hog" }', "missing-key: shape"),
        ('{ step = "random-features" }', "missing-key: features"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_before_anybody_is_asked(tmp_path, step, code):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.replace("STEP", step))
    with refuses(code):
        load_served(path).offer()


def test_a_site_does_not_draw_more_than_its_policy_allows(tmp_path):
    world = Pixels(tmp_path, ["random-features:40"], policy=LOOSE | {"max_parameters": 39})
    with pytest.raises(NotEnrolled, match="policy-model"):
        world.enrol()
