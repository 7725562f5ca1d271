"""The model at a site: what is kept at the end of a run, and the commands that use it."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from deploy.test_deployed import FIXED, deployment
from deploy.world import World
from refusals import refuses
from typer.testing import CliRunner

from dpscaffold import load_model
from dpscaffold.cli import app
from dpscaffold.deployment.protocol.messages import ask
from dpscaffold.deployment.site.model import stored_model

SITE = """name = "north"
server = "127.0.0.1:1"
ca = "ca.crt"
coordinator = "ed25519:{zeros}"
node_key = "node.key"
signing_key = "site.key"
state = "state"
[data]
source = "npz"
path = "data.npz"
[policy]
epsilon = 1e6
delta = 1e-2
min_noise = 0.0
max_clip = 1e3
max_data_ratio = 1.0
rehearsal = true
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: the world, the server's run folder and north's ``site.toml``."""
    folder = tmp_path_factory.mktemp("finished")
    world = World(folder / "sites", "scaffold", privacy=FIXED, rounds=2, user_ratio=1.0)
    deployment(world, folder / "run").run(world.names, resume=False)
    world.enrolled = world.sites["north"].state.runs()[0].enrolment()
    site = folder / "sites" / "north" / "site.toml"
    site.write_text(SITE.format(zeros=64 * "0"))
    rows = folder / "rows.csv"
    features, labels = world.data.train.of(1)
    columns = [*map(str, range(features.shape[1])), "label"]
    table = np.column_stack([features.numpy(), labels.numpy()])
    np.savetxt(rows, table, "%.9g", ",", header=",".join(columns), comments="")
    return world, folder / "run", site, rows


def said(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_stored_model_is_the_servers(finished):
    _, run, site, _ = finished
    here, there = stored_model(site, None), load_model(run)
    assert torch.equal(here.params, there.params) and here.columns == there.columns
    assert here.target == there.target and here.origin.rounds == 2
    assert here.privacy is None  # the site cannot vouch for the other sites' records


def test_predictions_are_those_of_the_servers_model(finished, tmp_path):
    _, run, site, rows = finished
    assert said("site", "predict", site, rows, "--out", tmp_path / "a.csv").exit_code == 0
    assert said("predict", run, rows, "--out", tmp_path / "b.csv").exit_code == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    with (tmp_path / "a.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 12


def test_evaluation_on_rows_is_that_of_the_servers_model(finished):
    _, run, site, rows = finished
    here = json.loads(said("site", "evaluate", site, rows, "--json").output)
    assert here == json.loads(said("evaluate", run, rows, "--json").output)
    own = json.loads(said("site", "evaluate", site, "--json").output)
    assert own["records"] == 12 and own["accuracy"] == pytest.approx(
        here["metrics"]["test_accuracy"]
    )
    assert f"accuracy: {own['accuracy']:.4g}\n" in said("site", "evaluate", site).output


def test_an_exported_model_predicts_the_same(finished, tmp_path):
    _, _, site, _ = finished
    done = said("site", "export", site, "--to", "safetensors", "--out", tmp_path / "model")
    assert done.exit_code == 0 and "no privacy statement" in done.output
    assert torch.equal(load_model(tmp_path / "model").params, stored_model(site, None).params)


def test_a_site_keeps_no_model_of_another_shape(finished):
    """Names, lengths and numbers of the final model are checked before it is stored."""
    world, _, site, _ = finished
    before, memory = stored_model(site, None).params, world.memory("north")
    head = {"acknowledged": memory.acknowledged().upload, "over": True, "seen": 0, "seen_total": 0}
    good = np.zeros(15, "<f4")
    for vectors, code in (
        ({"model.params": np.zeros(16, "<f4")}, "bad-shape"),
        ({"model.params": good, "model.more": good}, "bad-shape"),
        ({}, "bad-shape"),
        ({"model.params": np.full(15, np.nan, "<f4")}, "not-finite"),
    ):
        message = ask("settle", world.enrolled.run, "north", head, vectors, world.key)
        assert world.reason("north", message) == code
    assert torch.equal(stored_model(site, None).params, before)
    message = ask("settle", world.enrolled.run, "north", head,
                  {"model.params": before.numpy()}, world.key)  # fmt: skip
    assert world.reason("north", message) == ""


def test_commands_without_a_model_say_so(finished, tmp_path):
    _, _, site, rows = finished
    for words in (["predict", site, rows], ["evaluate", site], ["export", site, "--to", "torch"]):
        with refuses("no-finished-run: --run is 'ab'"):
            raise said("site", *words, "--run", "ab").exception
    with refuses("missing-argument: --json"):
        raise said("site", "predict", site, rows, "--json").exception
    with refuses("not-applicable: --label"):
        raise said("site", "evaluate", site, "--label", "x").exception
