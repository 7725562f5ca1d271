"""examples/flower-app under stock Flower: superlink, supernodes, flwr run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
import torch
from refusals import refuses

from dpscaffold.deployment.transports import flower

flower.require()

from dpscaffold.deployment.transports.flower.app import site_path  # noqa: E402
from dpscaffold.deployment.transports.flower.demo import (  # noqa: E402
    POLICY,
    demo_data,
    demo_tables,
    deployed,
    simulated,
    site_data,
)
from dpscaffold.deployment.transports.flower.local import LocalFederation, free_port  # noqa: E402

APP = Path(__file__).parents[2] / "examples" / "flower-app"


def test_a_node_knows_its_site():
    assert site_path({"site": "a/site.toml"}, {}) == Path("a/site.toml")
    assert site_path({"partition-id": 1}, {"sites": "a,b"}) == Path("b")
    for node, run in (({}, {}), ({"partition-id": 2}, {"sites": "a,b"})):
        with refuses("missing-argument: --node-config"):
            site_path(node, run)


def test_the_app_is_a_flower_app():
    from flwr.cli.build import build_fab_from_disk

    assert build_fab_from_disk(APP)


@pytest.mark.slow
@pytest.mark.processes
def test_it_runs_end_to_end(tmp_path):
    torch.set_num_threads(1)
    federation, tables = demo_data(60), demo_tables(rounds=2)
    tables["deploy"] |= {"deadline": 240.0, "resend": 200.0}
    port = free_port()
    local = LocalFederation(tmp_path / "fed", site_data(federation), POLICY)
    plan = local.config("plan", tables)
    home = tmp_path / "home"
    home.mkdir()
    connection = {"superlink": {"default": "here", "here": {"address": f"127.0.0.1:{port}"}}}
    connection["superlink"]["here"]["insecure"] = True
    (home / "config.toml").write_text(tomli_w.dumps(connection))
    tools = str(Path(sys.executable).parent)
    environment = os.environ | flower.QUIET | {"FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{tools}:{environment['PATH']}"
    started: list[subprocess.Popen[bytes]] = []

    def start(name, *command):
        with (tmp_path / f"{name}.log").open("wb") as log:
            started.append(
                subprocess.Popen(
                    [f"{tools}/{command[0]}", *command[1:]],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=environment,
                    cwd=tmp_path,
                    start_new_session=True,
                )
            )

    shutil.copytree(APP, tmp_path / "app")
    out = tmp_path / "run"
    try:
        start("link", "flower-superlink", "--insecure", "--host", "127.0.0.1", "--port", str(port))
        time.sleep(8)
        for name in local.names:
            site = tmp_path / "fed" / name / "site.toml"
            start(
                name,
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}"),
                *("--host", "127.0.0.1", "--port", str(free_port())),
                *("--node-config", f'site="{site}"'),
            )
        config = f'plan="{plan}" server="{tmp_path / "fed" / "server"}" out="{out}"'
        start("flwr", "flwr", "run", str(tmp_path / "app"), "here", "--run-config", config)
        until = time.monotonic() + 540
        while not (out / "summary.json").exists() and time.monotonic() < until:
            time.sleep(0.5)
        logs = "\n".join(path.read_text()[-1500:] for path in tmp_path.glob("*.log"))
        assert (out / "summary.json").exists(), logs
        found, wanted = deployed(out), simulated(federation, tables)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
    finally:
        for process in started:
            try:
                os.killpg(process.pid, 15)
            except ProcessLookupError:
                continue
        for process in started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
