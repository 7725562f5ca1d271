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

from deploy_demo import (  # noqa: E402
    POLICY,
    demo_data,
    demo_tables,
    deployed,
    simulated,
    site_data,
)
from local_federation import LocalFederation, free_port  # noqa: E402

from dpscaffold.deployment.transports.flower.app import site_path  # noqa: E402

APP = Path(__file__).parents[2] / "examples" / "flower-app"
OWN = APP.parent / "flower-own-model"


def test_a_node_knows_its_site():
    assert site_path({"site": "a/site.toml"}, {}) == Path("a/site.toml")
    assert site_path({"partition-id": 1}, {"sites": "a,b"}) == Path("b")
    for node, run in (({}, {}), ({"partition-id": 2}, {"sites": "a,b"})):
        with refuses("missing-argument: --node-config"):
            site_path(node, run)


def test_the_app_is_a_flower_app():
    from flwr.cli.build import build_fab_from_disk

    assert build_fab_from_disk(APP)


class Stock:
    """Stock Flower processes on loopback; all of them end with the block."""

    def __init__(self, folder):
        self.folder, self.port, self.started = folder, free_port(), []
        self.tools = str(Path(sys.executable).parent)
        home = folder / "home"
        home.mkdir()
        there = {"address": f"127.0.0.1:{self.port}", "insecure": True}
        connection = {"superlink": {"default": "here", "here": there}}
        (home / "config.toml").write_text(tomli_w.dumps(connection))
        self.environment = os.environ | flower.QUIET
        self.environment |= {"FLWR_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self.environment["PATH"] = f"{self.tools}:{self.environment['PATH']}"

    def __enter__(self):
        where = ("--insecure", "--host", "127.0.0.1", "--port", str(self.port))
        self.start("link", "flower-superlink", *where)
        time.sleep(8)
        return self

    def start(self, name, *command):
        with (self.folder / f"{name}.log").open("wb") as log:
            self.started.append(
                subprocess.Popen(
                    [f"{self.tools}/{command[0]}", *command[1:]],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env=self.environment,
                    cwd=self.folder,
                    start_new_session=True,
                )
            )

    def node(self, name, settings):
        self.start(
            name,
            *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self.port}"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", settings),
        )

    def run(self, app, settings, result):
        """Submit an app and wait for a file."""
        self.start("flwr", "flwr", "run", str(app), "here", "--run-config", settings)
        until = time.monotonic() + 300
        while not result.exists() and time.monotonic() < until:
            time.sleep(0.5)
        assert result.exists(), self.logs(1500)

    def logs(self, last=1_000_000):
        return "\n".join(path.read_text()[-last:] for path in self.folder.glob("*.log"))

    def __exit__(self, *_):
        for process in self.started:
            try:
                os.killpg(process.pid, 15)
            except ProcessLookupError:
                continue
        for process in self.started:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()


@pytest.mark.slow
@pytest.mark.processes
def test_it_runs_end_to_end(tmp_path):
    torch.set_num_threads(1)
    federation, tables = demo_data(60), demo_tables(rounds=2)
    tables["deploy"] |= {"deadline": 240.0}
    local = LocalFederation(tmp_path / "fed", site_data(federation), POLICY)
    plan = local.config("plan", tables)
    shutil.copytree(APP, tmp_path / "app")
    out = tmp_path / "run"
    with Stock(tmp_path) as stock:
        for name in local.names:
            stock.node(name, f'site="{tmp_path / "fed" / name / "site.toml"}"')
        config = f'plan="{plan}" server="{tmp_path / "fed" / "server"}" out="{out}"'
        stock.run(tmp_path / "app", config, out / "summary.json")
        found, wanted = deployed(out), simulated(federation, tables)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_page_shows_the_app():
    page = (OWN.parents[1] / "docs" / "howto" / "flower.md").read_text()
    for name in ("own/model.py", "own/client_app.py", "own/server_app.py", "pyproject.toml"):
        assert (OWN / name).read_text().strip() in page, name
    from flwr.cli.build import build_fab_from_disk

    assert build_fab_from_disk(OWN)


@pytest.mark.slow
@pytest.mark.processes
def test_ones_own_model_is_trained_by_stock_nodes(tmp_path):
    """The app of docs/howto/flower.md: it learns, and both clients' ledgers hold every round."""
    torch.set_num_threads(1)
    shutil.copytree(OWN, tmp_path / "app")
    draw, held, out = torch.Generator().manual_seed(0), {}, tmp_path / "model.pt"
    with Stock(tmp_path) as stock:
        for name in ("north", "south"):
            x = torch.randn(400, 4, generator=draw)
            held[name] = (x, (x[:, 0] > 0).long())
            torch.save({"x": x, "y": held[name][1]}, tmp_path / f"{name}.pt")
            stock.node(name, f'data="{tmp_path / name}.pt" state="{tmp_path / name}"')
        stock.run(tmp_path / "app", f'out="{out}"', out.with_suffix(".txt"))
        time.sleep(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        model.load_state_dict(torch.load(out))
        right = [(model(x).argmax(1) == y).float().mean() for x, y in held.values()]
        assert min(right) > 0.7, right
        for name in held:
            lines = (tmp_path / name / "ledger.jsonl").read_text().splitlines()
            assert sum('"participate"' in line for line in lines) == 3
        said = out.with_suffix(".txt").read_text()
        assert "against the server together with all other clients; 3 participations" in said
