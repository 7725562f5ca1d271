"""The commands of docs/deploy.md, "On machines of their own": each machine is a folder of its own,
and between them go only the files that the page says are sent."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dpscaffold.deployment.transports import flower

flower.require()

from local_federation import PATIENCE, free_port  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
SITES = ("north", "east", "south")
PLAN = """
[schema]
features = ["age", "pressure"]
label = "ill"
classes = ["no", "yes"]
[plan]
learning_rate = 0.5
rounds = 2
local_steps = 2
user_ratio = 1.0
[privacy]
noise = 60.0
"""


def blocks() -> list[tuple[str, str]]:
    """The page's commands in order, with the machine that each is for."""
    text = PAGE.read_text(encoding="utf-8")
    part = text.split("## Set it up on separate machines", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```sh\n# at (?:the )?(\w+)\n(.*?)```", part, flags=re.DOTALL)


def test_the_page_has_the_commands():
    assert [machine for machine, _ in blocks()] == ["server", "north", "server", "north", "server"]


class Machines:
    """One folder for each machine; whatever was started is ended."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        tools = folder / "bin"
        for name in ("bin", "server", *SITES):
            (folder / name).mkdir()
        (tools / "dpscaffold").write_text(f'#!/bin/sh\nexec {sys.executable} -m dpscaffold "$@"\n')
        (tools / "dpscaffold").chmod(0o755)
        path = f"{tools}:{os.environ['PATH']}"
        self.environment = os.environ | {"PATH": path, "FLWR_HOME": str(folder / "flwr")}
        self.ports = {"federation.example:8443": f"127.0.0.1:{free_port()}"}
        self.ports["0.0.0.0:8443"] = self.ports["federation.example:8443"]

    def begin(self, machine: str, commands: str) -> subprocess.Popen:
        for old, new in self.ports.items():
            commands = commands.replace(old, new)
        process = subprocess.Popen(
            ["bash", "-e", "-c", commands],
            cwd=self.folder / machine,
            env=self.environment,
            stdout=(self.folder / f"{machine}.log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, machine: str, commands: str) -> None:
        status = self.begin(machine, commands).wait(PATIENCE)
        assert status == 0, (self.folder / f"{machine}.log").read_text()

    def until(self, machine: str, word: str) -> None:
        stop = time.monotonic() + PATIENCE
        while word not in (self.folder / f"{machine}.log").read_text():
            assert time.monotonic() < stop and self.started[-1].poll() is None
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(PATIENCE)


@pytest.mark.slow
@pytest.mark.processes
def test_three_machines_as_printed(tmp_path):
    machines = Machines(tmp_path)
    inner = f"127.0.0.1:{free_port()}"
    provision, init, serve, start, run = (commands for _, commands in blocks())
    plan = PLAN + f'[deploy]\naddress = "{inner}"\n'
    (tmp_path / "server" / "plan.toml").write_text(plan)
    try:
        machines.run("server", provision)
        for name in SITES:
            place = tmp_path / name
            shutil.copy(tmp_path / "server" / "federation" / f"{name}.invitation", place)
            rows = [f"{40 + k % 30},{100 + k % 50},{'yes' if k % 3 else 'no'}" for k in range(60)]
            (place / "records.csv").write_text("\n".join(["age,pressure,ill", *rows]) + "\n")
            machines.run(name, init.replace("north", name))
            shutil.copy(place / f"{name}.site", tmp_path / "server")
        # the loopback side is on a free port here
        serving = serve.replace("--public", f"--inner {inner} --public")
        machines.begin("server", serving)
        machines.until("server", "sites connect to")
        for name in SITES:
            machines.begin(name, start)
            machines.until(name, "online")
        machines.run("server", run)
        said = (tmp_path / "server.log").read_text()
        assert "completed after round 2" in said
        for name in SITES:
            assert re.search(rf"^ +{name} +2 ", said, re.MULTILINE)  # took part in both rounds
            assert not list((tmp_path / name).glob("**/coordinator.key"))
            assert not list((tmp_path / "server").glob(f"**/{name}*.key"))
    finally:
        machines.close()
