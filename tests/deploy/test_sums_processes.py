"""Secure sums between real processes on loopback, with TLS and node authentication."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small import Driven, Trial, simulator
from stated import described, summary_of

from deploy import tapped
from dpscaffold.deployment.transports import flower

flower.require()

from deploy.test_processes import (  # noqa: E402
    PATIENT,
    assert_booked,
    one_thread,  # noqa: F401
    rounds_done,
    wait_for,
)
from deploy_demo import POLICY, demo_tables, deployed  # noqa: E402
from local_federation import LocalFederation  # noqa: E402

from dpscaffold.algorithms import fedavg, ridge  # noqa: E402
from dpscaffold.config.gaussian import Gaussian  # noqa: E402
from dpscaffold.config.plan import Plan  # noqa: E402
from dpscaffold.config.secure import Secure  # noqa: E402
from dpscaffold.data import synthetic  # noqa: E402
from dpscaffold.data.prepared import applied  # noqa: E402
from dpscaffold.deployment.protocol.agreement import read_offer  # noqa: E402
from dpscaffold.deployment.protocol.messages import fingerprint, public_of  # noqa: E402
from dpscaffold.deployment.provision import read_signing_key  # noqa: E402
from dpscaffold.tasks import Logistic  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.slow]

NAMES = ("east", "north", "south", "west")


def confirm(local, required=True):
    """The people of all sites compare fingerprints."""
    keys = {name: read_signing_key(local.folder / name / "site.key") for name in local.names}
    prints = ", ".join(f'{n} = "{fingerprint(public_of(key))}"' for n, key in keys.items())
    for name in local.names:
        path = local.folder / name / "site.toml"
        table = (
            f"\n[secure]\nrequired = {str(required).lower()}\nvoids = 50\nepsilon_alone = 900.0\n"
        )
        path.write_text(path.read_text() + table + f"members = {{ {prints} }}\n")


def test_a_rehearsal_with_kills_ends_bit_for_bit_where_the_simulator_does(tmp_path):
    """A site and the server are killed; nobody is passed over, so every sum is over all four."""
    data = synthetic(alpha=1, beta=1, users=4, records=200, dimension=40, classes=10, seed=3)
    sizes = dict(zip(NAMES, data.roster.sizes, strict=True))
    tables = demo_tables(rounds=8)
    tables["algorithm"] = {"name": "fedavg"}
    tables["plan"] |= {"local_steps": 1}
    tables["secure"] = {"colluders": 1, "least": 3, "voids": 50}
    tables["deploy"] |= {**PATIENT, "records": sizes}
    records = {}
    for user, name in enumerate(NAMES):
        features, labels = data.train.of(user)
        records[name] = (features.numpy(), labels.numpy())
    policy = {**POLICY, "epsilon": "900.0"}
    out = tmp_path / "run"
    with LocalFederation(tmp_path / "fed", records, policy, program=tapped.PROGRAM) as local:
        confirm(local)
        local.start()
        config = local.config("plan", tables)
        local.start_server(config, out)
        wait_for(lambda: rounds_done(out) >= 2, local)
        local.kill("north")
        local.start_site("north")
        wait_for(lambda: rounds_done(out) >= 4, local)
        local.kill("server")
        assert local.run(config, out, resume=True) == 0, local.log("server")
        assert_booked(local)
        summary = summary_of(out)
        assert summary["ended"] == "completed"
        assert "no-answer" not in summary["refusals"], local.log("server")
        for name in NAMES:
            assert 8 <= tapped.reserved(local.folder / name) <= 11
    plan, privacy = Plan(**tables["plan"]), Gaussian(**tables["privacy"])
    setting = Trial.of(data, Logistic(40, 10), fedavg(), plan, privacy)
    setting = replace(setting, secure=Secure(1, 3, 50))
    whole = Driven(simulator(setting, chunk=1)).drive()
    assert torch.equal(deployed(out)["params"], whole.reached.params)


def test_ridge_regression_in_one_round_plain_and_secure(tmp_path):
    """Both rehearsals end where the simulator does, and both are in the ledgers."""
    data = synthetic(alpha=1, beta=1, users=4, records=60, dimension=8, classes=3, seed=3)
    records = {name: tuple(t.numpy() for t in data.train.of(k)) for k, name in enumerate(NAMES)}
    sizes = dict(zip(NAMES, data.roster.sizes, strict=True))
    policy = {**POLICY, "epsilon": "900.0"}
    policy |= {"algorithms": '["ridge"]'}
    tables = {
        "schema": {"features": 8, "classes": 3},
        "algorithm": {"name": "ridge"},
        "privacy": {"clip": 1.0, "noise": 10.0, "sampling": "poisson", "secret": False},
        "deploy": {**PATIENT, "records": sizes},
    }
    secure = {"colluders": 1, "least": 3, "voids": 5}
    runs = {"plain": tables, "secure": tables | {"secure": secure}}
    with LocalFederation(tmp_path / "fed", records, policy, program=tapped.PROGRAM) as local:
        confirm(local, required=False)
        local.start()
        for name, given in runs.items():
            assert local.run(local.config(name, given), tmp_path / name) == 0, local.log("server")
        assert_booked(local)
        assert all(tapped.reserved(local.folder / name) == 2 for name in NAMES)
    setting = Trial.of(
        data, Logistic(8, 3), ridge(), Plan.one_round(), Gaussian(**tables["privacy"])
    )
    for name, given in {
        "plain": setting,
        "secure": replace(setting, secure=Secure(1, 3, 5)),
    }.items():
        whole = Driven(simulator(given, chunk=1)).drive()
        assert torch.equal(deployed(tmp_path / name)["params"], whole.reached.params)


def test_a_secure_preparation_and_training_end_where_they_do_in_one_process(tmp_path):
    """Two runs of sums fit the preparation, and a site is killed in the training."""
    data = synthetic(alpha=1, beta=1, users=4, records=60, dimension=8, classes=3, seed=3)
    records = {name: tuple(t.numpy() for t in data.train.of(k)) for k, name in enumerate(NAMES)}
    sizes = dict(zip(NAMES, data.roster.sizes, strict=True))
    private = {"fit": "private", "norm_bound": 3.0, "noise": 10.0}
    tables = demo_tables(rounds=6)
    tables["schema"] = {
        "features": 8,
        "classes": 3,
        "prepare": [{"step": "centre", **private}, {"step": "pca", **private, "components": 3}],
    }
    tables["algorithm"] = {"name": "fedavg"}
    tables["plan"] |= {"local_steps": 1}
    tables["secure"] = {"colluders": 1, "least": 3, "voids": 50}
    tables["deploy"] |= {**PATIENT, "records": sizes}
    policy = {**POLICY, "epsilon": "900.0", "max_runs": "3"}
    out = tmp_path / "run"
    with LocalFederation(tmp_path / "fed", records, policy, program=tapped.PROGRAM) as local:
        confirm(local)
        local.start()
        config = local.config("plan", tables)
        local.start_server(config, out)
        wait_for(lambda: rounds_done(out) >= 2, local)
        local.kill("north")
        local.start_site("north")
        assert local.processes["server"].wait() == 0, local.log("server")
        assert_booked(local)
        for name in NAMES:
            assert 8 <= tapped.reserved(local.folder / name) <= 10
    offer = read_offer(described(out)["setting"])
    plan, privacy = Plan(**tables["plan"]), Gaussian(**tables["privacy"])
    setting = Trial.of(applied(data, offer.rows.steps), Logistic(3, 3), fedavg(), plan, privacy)
    whole = Driven(simulator(replace(setting, secure=Secure(1, 3, 50)), chunk=1)).drive()
    assert torch.equal(deployed(out)["params"], whole.reached.params)
