"""The model that a site keeps at the end of a run: the folder of any other model."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from deploy.test_deployed import FIXED, deployment
from deploy.world import World
from typer.testing import CliRunner

from dpscaffold import load_model
from dpscaffold.cli import app
from dpscaffold.deployment.protocol.messages import ask


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: the world, the server's run folder, north's model and some rows."""
    folder = tmp_path_factory.mktemp("finished")
    world = World(folder / "sites", "scaffold", privacy=FIXED, rounds=2, user_ratio=1.0)
    deployment(world, folder / "run").run(world.names, resume=False)
    world.enrolled = world.sites["north"].state.runs()[0].enrolment()
    rows = folder / "rows.csv"
    features, labels = world.data.train.of(1)
    columns = [*map(str, range(features.shape[1])), "label"]
    table = np.column_stack([features.numpy(), labels.numpy()])
    np.savetxt(rows, table, "%.9g", ",", header=",".join(columns), comments="")
    (model,) = (folder / "sites" / "north" / "state" / "models").iterdir()
    return world, folder / "run", model, rows


def said(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_kept_model_is_the_servers(finished):
    world, run, model, _ = finished
    here, there = load_model(model), load_model(run)
    assert model.name == world.enrolled.run
    assert torch.equal(here.params, there.params) and here.columns == there.columns
    assert here.target == there.target and here.origin.rounds == 2
    assert here.privacy is None  # the site cannot vouch for the other sites' records


def test_predictions_are_those_of_the_servers_model(finished, tmp_path):
    _, run, model, rows = finished
    assert said("predict", model, rows, "--out", tmp_path / "a.csv").exit_code == 0
    assert said("predict", run, rows, "--out", tmp_path / "b.csv").exit_code == 0
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    with (tmp_path / "a.csv").open() as stream:
        assert len(list(csv.DictReader(stream))) == 12


def test_it_is_evaluated_personalised_and_exported_as_any_other(finished, tmp_path):
    _, run, model, rows = finished
    here = said("evaluate", model, rows, "--json")
    assert here.exit_code == 0 and here.output == said("evaluate", run, rows, "--json").output
    done = said("export", model, "--to", "safetensors", "--out", tmp_path / "model")
    assert done.exit_code == 0, done.output
    assert torch.equal(load_model(tmp_path / "model").params, load_model(model).params)
    done = said("personalise", model, rows, "--site", "north", "--out", tmp_path / "own")
    assert done.exit_code == 0, done.output
    own = load_model(tmp_path / "own")
    assert own.origin.personal == "north" and not own.privacy.guarantee


def test_a_site_keeps_no_model_of_another_shape(finished):
    """Names, lengths and numbers of the final model are checked before it is stored."""
    world, _, model, _ = finished
    before, memory = load_model(model).params, world.memory("north")
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
    assert torch.equal(load_model(model).params, before)
    message = ask("settle", world.enrolled.run, "north", head,
                  {"model.params": before.numpy()}, world.key)  # fmt: skip
    assert world.reason("north", message) == ""
