"""The reference of keys: whole, current, and true of the code."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import tomli_w
from click.testing import CliRunner
from pydantic import BaseModel, Field
from refusals import refuses
from typer.main import get_command

from dpscaffold.algorithms import SERVERS
from dpscaffold.cli import app
from dpscaffold.config import ConfigTable, Configuration, parse
from dpscaffold.config.reference.keys import keys, model_keys
from dpscaffold.config.reference.page import page
from dpscaffold.config.reference.values import NEEDED
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
WHOLE = ("data.source", "step.step", "algorithm.name")
AGAIN = "run python -m dpscaffold.config.reference"

#: Other keys that a key needs.
NEEDS = {
    "privacy.noise_by_user": {"noise": 30.0},
    "task.delta": {"loss": "huber", "kind": "linear"},
    "task.module": {"kind": "module"},
    "task.class_weights": {"kind": "linear"},
    "algorithm.mu": {"name": "fedprox"},
    "algorithm.trust": {"name": "scaffold-balanced"},
    "algorithm.beta": {"server": "momentum"},
    "algorithm.beta2": {"server": "adam"},
    "algorithm.tau": {"server": "adam"},
    "privacy.neighbours": {"sampling": "poisson"},
    "privacy.allow": {"release": True},
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
    "privacy.neighbours": "near",
    "privacy.delta": 2.0,
    "privacy.user_epsilon": 0.0,
    "privacy.allow": ["everything"],
}


def test_the_generated_page_is_current():
    assert (HERE / "docs" / "configuration.md").read_text(encoding="utf-8") == page(FOUND), AGAIN


@pytest.mark.parametrize("entry", [key for key in FOUND if key.table in ("plan", "privacy")])
def test_examples_are_accepted_and_refused_values_are_refused(entry):
    table, _, key = entry.name.partition(".")
    noise = {"noise": 1.0} if table == "privacy" and key != "epsilon" else {}
    base = noise | NEEDS.get(entry.name, {})
    read = getattr(parse({table: {**base, key: entry.example}}), table)
    given, found = entry.example, getattr(read, key)
    assert found == given or list(found) == given
    if entry.name in REFUSED:
        with refuses(f"out-of-range|unknown-choice: {key}"):
            parse({table: {**base, key: REFUSED[entry.name]}})


def test_a_key_without_an_explanation_is_refused():
    """A field without a docstring, and a docstring without an example, fail the generator."""

    class Silent(ConfigTable):
        one: int = 1

    class Half(ConfigTable):
        one: int = 1
        """What it means."""

    class Explained(ConfigTable):
        one: int = Field(default=1, ge=1)
        """What it means. Example: ``2``"""

    class Again(Explained):
        one: int = 3

    for model in (Silent, Half):
        with refuses("key-not-explained: plan.one"):
            list(model_keys("plan", "", model))
    (key,), (again,) = (list(model_keys("plan", "", one)) for one in (Explained, Again))
    assert (key.about, key.kind, key.example) == ("What it means.", "an integer (1 or more)", 2)
    assert (again.about, again.default) == (key.about, 3)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Configuration, ("plan", "privacy", "secure", "facts", "personal")),
        (ServerConfiguration, ("schema", "plan", "privacy", "deploy")),
    ],
)
def test_every_key_of_a_run_and_of_a_servers_plan_is_there(model, names):
    named = {key.name for key in FOUND}
    for field, info in model.model_fields.items():
        table = info.alias or field
        if table in names:
            [settings] = [
                kind
                for kind in (info.annotation, *get_args(info.annotation))
                if isinstance(kind, type) and issubclass(kind, BaseModel)
            ]
            assert {f"{table}.{key}" for key in settings.model_fields} <= named


def test_every_key_of_a_deployment_is_there_and_its_example_is_accepted(tmp_path):
    """A site's file with every key at its example is read, and says each of them."""
    federation = {key.name.partition(".")[2]: key.example for key in FOUND if key.table in FILES}
    path = tmp_path / "federation.toml"
    path.write_text(tomli_w.dumps(federation))
    read = read_federation(path)
    assert {field.name for field in fields(read)} == set(federation)
    assert all(list(v) == federation[k] if isinstance(v, tuple) else v == federation[k]
               for k, v in vars(read).items())  # fmt: skip
    provision(read, tmp_path / "made")
    make_site(read_invitation(tmp_path / "made" / "north.invitation"), tmp_path / "north")
    written = tomllib.loads((tmp_path / "north" / "site.toml").read_text())
    named = {key.name.removeprefix("site.") for key in FOUND if key.table == "site"}
    assert {f"policy.{name}" for name in Policy.model_fields} <= named
    assert {f"secure.{name}" for name in SecurePolicy.model_fields} <= named
    assert set(SiteFile.model_fields) - {"data", "policy", "secure"} <= named
    assert set(written) - {"data", "policy"} | {f"policy.{n}" for n in written["policy"]} <= named
    for key in (key for key in FOUND if key.name.startswith(("site.policy.", "site.records"))):
        *table, name = key.name.removeprefix("site.").split(".")
        (written["policy"] if table else written)[name] = key.example
    path = tmp_path / "north" / "site.toml"
    path.write_text(tomli_w.dumps(written))
    policy = read_site_file(path).policy.model_dump(mode="json")
    assert policy == written["policy"] and read_site_file(path).records == written["records"]
    assert json.loads(typed("config", "show", str(path), "--json")) == written


#: What a schema says of a number to predict, in place of classes.
NUMBER = {"classes": 0, "class_names": [], "low": 0.0, "high": 60.0}


@pytest.mark.parametrize("table", ["schema", "deploy", "facts", "tune", "evaluate"])
def test_examples_of_the_other_tables_are_accepted(table, tmp_path):
    """Each key alone, next to what it needs."""
    base = {"features": 4, "classes": 2, "columns": ["age", "pressure", "sex"]}
    base |= {"categories": {"sex": ["f", "m"]}, "label": "ill", "class_names": ["no", "yes"]}
    entries = [key for key in FOUND if key.table == table]
    assert entries
    for key in entries:
        name = key.name.partition(".")[2]
        if table in ("facts", "tune"):
            own = {"trials", "score_noise", "score_bound"}
            needed = {"private": True} if table == "tune" and name in own else {}
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
        if name not in ("grid", "prepare", "categories", "na_values", "values", "public"):
            assert found == key.example or list(found) == key.example, key.name


def typed(*words):
    """What a command prints."""
    done = CliRunner().invoke(get_command(app), list(words))
    assert done.exit_code == 0, done.output
    return done.output


SHOWN = {
    "examples/tune-scaffold.toml": ("tune", "folds", 5),
    "federation.toml": ("hosts", None, []),
}


@pytest.mark.parametrize("name", SHOWN)
def test_show_spells_out_the_defaults_of_every_kind_of_file(name, tmp_path):
    (tmp_path / "federation.toml").write_text('address = "a.example:1"\nsites = ["north"]\n')
    path = HERE / name if "/" in name else tmp_path / name
    table, key, value = SHOWN[name]
    told = json.loads(typed("config", "show", str(path), "--json"))[table]
    assert (told if key is None else told[key]) == value


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("site.policy.min_noise", "example: policy.min_noise = 5.0"),
        ("policy.min_noise", "site.policy.min_noise: The smallest"),
        ("deploy.quorum", "example: --set deploy.quorum=2"),
        ("facts.similarity", 'default: "unknown"'),
        ("site.policy", "site.policy.max_runs "),
        ("federation", "federation.hosts "),
        ("step", "step.norm_bound "),
    ],
)
def test_explain_knows_the_files_of_a_deployment(key, said):
    assert said in typed("config", "explain", key)


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


def tables_with(key):
    """A configuration with the key at its example, and what it needs next to it."""
    name = key.name.partition(".")[2]
    needed = {
        other.name.partition(".")[2]: other.example
        for other in FOUND
        if (other.table, other.place, other.default) == (key.table, key.place, NEEDED)
    }
    further = FURTHER.get(key.table, {}).get(name, {}) if key.place != "synthetic" else {}
    if key.table == "data":
        users = {} if key.place in ("synthetic", "saved") else {"users": 20}
        return {"data": {"source": key.place, **users, **needed, **further, name: key.example}}
    if key.table == "step":
        if name == "mean" and key.place == "standardise":
            further = further | {"deviation": 0.25}
        step = {"step": key.place, **needed, **further, name: key.example}
        return {"data": {"source": "digits", "preprocess": ["centre", step]}}
    if key.table == "algorithm":
        place = {"server": key.place} if key.place in SERVERS else {"name": key.place}
        return {"algorithm": {**(place if key.place else {}), name: key.example}}
    return {"task": {**NEEDS.get(key.name, {}), name: key.example}}


def test_examples_of_data_steps_task_and_algorithm_are_accepted():
    """Each key of each source, step and algorithm, at its example, with what it needs next to
    it."""
    tables = ("data", "step", "task", "algorithm")
    tried = [key for key in FOUND if key.table in tables and key.name not in WHOLE]
    assert len(tried) > 150
    for key in tried:
        try:
            parse(tables_with(key))
        except BadInput as error:
            pytest.fail(f"{key.name} of {key.place or 'all'}: {error}")
