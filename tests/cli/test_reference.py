"""The names of configurations: explained, counted, and with examples that are accepted."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import tomli_w
from refusals import refuses

from dpscaffold.config import parse
from dpscaffold.config.reference import declared, files, keys, schemas
from dpscaffold.deployment.provision import provision, read_federation, read_invitation
from dpscaffold.deployment.server.config import ServerConfiguration
from dpscaffold.deployment.site.begin import make_site
from dpscaffold.deployment.site.file import Policy, SecurePolicy, SiteFile, read_site_file
from dpscaffold.errors import BadInput
from dpscaffold.tuning.tuning import parse_tuning

HERE = Path(__file__).parents[2]
FOUND = keys()
FILES = ("federation",)
ROWS = {"schema": "rows"}
AGAIN = "run python -m dpscaffold.config.reference"

#: Other keys that a key needs.
NEEDS = {
    "task.module": {"kind": "module"},
    "task.class_weights": {"kind": "linear"},
    "algorithm.mu": {"name": "fedprox"},
    "algorithm.trust": {"name": "scaffold-balanced"},
    "algorithm.beta": {"server": "momentum"},
    "algorithm.beta2": {"server": "adam"},
    "algorithm.tau": {"server": "adam"},
}
#: A value of each key that must be refused.
REFUSED = {
    "plan.rounds": 0,
    "plan.local_steps": 0,
    "plan.user_ratio": 1.5,
    "plan.data_ratio": 0.0,
    "plan.learning_rate": -1.0,
    "plan.server_rate": 0.0,
    "plan.regularisation": -0.1,
    "plan.weighting": "size",
    "plan.warm_rounds": -1,
    "plan.averaging": "head",
    "plan.evaluate_every": 0,
    "plan.checkpoint_every": 0,
    "plan.schedule": "step",
    "plan.steps_by_user": [0],
    "plan.seed": -1,
    "privacy.clip": 0.0,
    "privacy.noise": -1.0,
    "privacy.colluders": 0,
    "privacy.sampling": "some",
    "privacy.unit": "person",
    "privacy.delta": 2.0,
    "privacy.user_epsilon": 0.0,
    "privacy.release": ["everything"],
}


@pytest.mark.parametrize("path", files())
def test_generated_files_are_current(path):
    assert (HERE / "docs" / path).read_text(encoding="utf-8") == files()[path], AGAIN


def test_every_name_is_explained_with_an_example():
    state = ("schema.prepare.spent",)  # of a run, and not written by people
    silent = [
        key.path
        for key in FOUND
        if not (key.about and key.example is not None) and key.table not in state
    ]
    assert silent == []


def test_there_are_few_names():
    assert len(declared()) <= 119


def test_tables_that_share_their_classes_are_there_once():
    tables = [key.table for key in FOUND]
    assert "plan" in tables and "tune.public" not in tables


@pytest.mark.parametrize(
    "entry", [k for k in FOUND if k.table in ("plan", "privacy")], ids=lambda entry: entry.path
)
def test_examples_are_accepted_and_refused_values_are_refused(entry):
    table, key = entry.table, entry.name
    noise = {"noise": 1.0} if table == "privacy" and key != "epsilon" else {}
    base = noise | NEEDS.get(entry.path, {})
    read = getattr(parse({table: {**base, key: entry.example}}), table)
    given, found = entry.example, getattr(read, key)
    assert found == given or list(found) == given
    if entry.path in REFUSED:
        with refuses(f"out-of-range|unknown-choice: {key}"):
            parse({table: {**base, key: REFUSED[entry.path]}})


def test_every_key_of_a_deployment_is_there_and_its_example_is_accepted(tmp_path):
    """A site's file with every key at its example is read, and says each of them."""
    federation = {key.name: key.example for key in FOUND if key.table in FILES}
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(federation))
    read = read_federation(path)
    assert {field.name for field in fields(read)} == set(federation)
    assert all(list(v) == federation[k] if isinstance(v, tuple) else v == federation[k]
               for k, v in vars(read).items())  # fmt: skip
    provision(read, tmp_path / "made")
    make_site(read_invitation(tmp_path / "made" / "north.invitation"), tmp_path / "north")
    written = tomllib.loads((tmp_path / "north" / "site.toml").read_text())
    of_site = [key for key in FOUND if key.table.partition(".")[0] == "site"]
    named = {key.path.removeprefix("site.") for key in of_site}
    assert {f"policy.{name}" for name in Policy.model_fields} <= named
    assert {f"secure.{name}" for name in SecurePolicy.model_fields} <= named
    assert set(SiteFile.model_fields) - {"data", "policy", "secure"} <= named
    assert set(written) - {"data", "policy"} | {f"policy.{n}" for n in written["policy"]} <= named
    for key in of_site:
        if key.table == "site.policy" or key.path == "site.records":
            (written["policy"] if key.table == "site.policy" else written)[key.name] = key.example
    path = tmp_path / "north" / "site.toml"
    path.write_text(tomli_w.dumps(written))
    policy = read_site_file(path).policy.model_dump(mode="json")
    assert policy == written["policy"] and read_site_file(path).records == written["records"]


#: What a schema says of a number to predict, in place of classes.
NUMBER = {"classes": 0, "low": 0.0, "high": 60.0}


@pytest.mark.parametrize("table", ["schema", "deploy", "facts", "tune", "evaluate"])
def test_examples_of_the_other_tables_are_accepted(table, tmp_path):
    """Each key alone, next to what it needs."""
    base = {"features": ["age", "pressure", "sex"], "categories": {"sex": ["f", "m"]}}
    base |= {"label": "readmitted", "classes": ["no", "yes"]}
    entries = [key for key in FOUND if key.table == table]
    assert entries
    for key in entries:
        name = key.name
        if table in ("facts", "tune"):
            needed = {"trials": 5.0} if name == "score_bound" else {}
            settings, tune = parse_tuning({table: {**needed, name: key.example}})
            read = tune if table == "tune" else settings.facts
        else:
            own = {**base, **NUMBER} if name in ("low", "high") else base
            given = {"schema": own, table: {**(own if table == "schema" else {}),
                                            name: key.example}}  # fmt: skip
            read = ServerConfiguration.model_validate(given)
            read = read.evaluate if table == "evaluate" else getattr(read, ROWS.get(table, table))
        found = read[name] if isinstance(read, dict) else getattr(read, name)
        found = found.model_dump(exclude_defaults=True) if hasattr(found, "model_dump") else found
        if name not in ("grid", "prepare", "categories", "na_values", "values", "dates"):
            assert found == key.example or list(found) == key.example, key.name


#: What a key needs next to it: a partition, or the fit that it belongs to.
FURTHER = {
    "data": {
        "alpha": {"partition": "dirichlet"},
        "similarity": {"partition": "similarity"},
        "size_spread": {"partition": "similarity"},
    },
    "step": {
        "statistics": {"fit": "public"},
        "norm_bound": {"fit": "private", "noise": 20.0},
        "noise": {"fit": "private", "norm_bound": 1.0},
        "epsilon": {"fit": "private", "norm_bound": 1.0},
        "mean": {"fit": "public"},
        "deviation": {"fit": "public", "mean": 0.5},
    },
}


def with_key(shape, name, value):
    """A configuration with the key of a source or step, and what it needs next to it."""
    tag = "source" if "source" in shape["properties"] else "step"
    place = shape["properties"][tag]["const"]
    examples = {key.name: key.example for key in FOUND if key.table in ("data", "data.preprocess")}
    needed = {one: examples[one] for one in shape.get("required", ()) if one != tag}
    further = FURTHER["data" if tag == "source" else "step"].get(name, {})
    if tag == "source":
        further = further if place != "synthetic" else {}
        users = {} if place in ("synthetic", "saved") else {"users": 20}
        return {"data": {"source": place, **users, **needed, **further, name: value}}
    if name == "mean" and place == "standardise":
        further = further | {"deviation": 0.25}
    step = {"step": place, **needed, **further, name: value}
    return {"data": {"source": "digits", "preprocess": ["centre", step]}}


def test_examples_of_sources_and_steps_are_accepted():
    """Each key of each source and step, at its example, with what it needs next to it."""
    tried = 0
    for shape in schemas()["run"]["$defs"].values():
        if not {"source", "step"} & set(shape["properties"]):
            continue
        for name, node in shape["properties"].items():
            if "const" in node or "examples" not in node:
                continue
            tried += 1
            tables = with_key(shape, name, node["examples"][0])
            try:
                parse(tables)
            except BadInput as error:
                pytest.fail(f"{name} in {tables}: {error}")
    assert tried > 50


@pytest.mark.parametrize(
    "key", [k for k in FOUND if k.table in ("task", "algorithm")], ids=lambda key: key.path
)
def test_examples_of_task_and_algorithm_are_accepted(key):
    parse({key.table: {**NEEDS.get(key.path, {}), key.name: key.example}})
