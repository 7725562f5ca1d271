"""Seconds, CPU and bytes of deployed rounds: real processes on loopback, TLS and authentication.

    python benchmarks/deploy.py [--sites 3,8] [--parameters 410,1000000] [--rounds 20]
    python benchmarks/deploy.py --sites 3 --idle 30

One line for each size: the median of the rounds' seconds and the least, CPU seconds a round of the
SuperLink, the server and all sites, bytes of letters (headers, signatures and vectors, both ways) a
participation, and the resident memory of the SuperLink and of one site.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from dpscaffold import flower

flower.require()

from dpscaffold.flower.local import LocalFederation  # noqa: E402

POLICY = {
    "epsilon": "100000.0",
    "delta": "1e-2",
    "max_runs": "4",
    "rehearsal": "true",
    "max_participations": "1000",
    "min_noise": "0.1",
}
CLASSES = 10


def cpu_seconds(process) -> float:
    """CPU seconds that a process has used, from the kernel."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process) -> float:
    """Resident megabytes."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024


def measure(sites: int, parameters: int, rounds: int, algorithm: str) -> str:
    """One size."""
    features = parameters // CLASSES - 1
    names = [f"site{k}" for k in range(sites)]
    stream = np.random.default_rng(0)
    data = {
        name: (
            stream.standard_normal((40, features)).astype(np.float32) / np.sqrt(features),
            stream.integers(0, CLASSES, 40),
        )
        for name in names
    }
    tables = {
        "schema": {"features": features, "classes": CLASSES},
        "algorithm": {"name": algorithm},
        "plan": {
            "rounds": rounds,
            "local_steps": 2,
            "user_ratio": 1.0,
            "data_ratio": 0.5,
            "evaluate_every": rounds,
        },
        "privacy": {"clip": 1.0, "noise": 1.0},
        "deploy": {"rehearsal": True, "resend": 30.0, "deadline": 300.0},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalFederation(Path(folder) / "fed", data, POLICY) as local,
    ):
        local.start()
        out = Path(folder) / "run"
        local.start_server(local.config("plan", tables), out)
        while "round 1:" not in local.log("server"):
            time.sleep(0.05)
            if local.processes["server"].poll() is not None:
                raise SystemExit(local.log("server"))
        others = ["link", *names]
        before = {name: cpu_seconds(local.processes[name]) for name in ["server", *others]}
        while f"round {rounds}:" not in local.log("server"):
            time.sleep(0.05)
            served = cpu_seconds(local.processes["server"])
        after = {name: cpu_seconds(local.processes[name]) for name in others}
        memory = (resident(local.processes["link"]), resident(local.processes[names[0]]))
        local.processes["server"].wait(120)
        said = re.findall(r"round (\d+): \d+ answered in ([\d.]+) s", local.log("server"))
        seconds = [float(value) for number, value in said if int(number) > 1]
        status = json.loads((out / "status.json").read_text())
    crossed = (status["bytes_sent"] + status["bytes_received"]) / (rounds * sites)
    per = max(1, rounds - 1)
    used = [
        (after["link"] - before["link"]) / per,
        (served - before["server"]) / per,
        sum(after[name] - before[name] for name in names) / per,
    ]
    return (
        f"| {algorithm} | {sites} | {CLASSES * (features + 1):,} | "
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f}) | {used[0]:.2f} · {used[1]:.2f} · "
        f"{used[2]:.2f} | {crossed:,.0f} | {memory[0]:.0f} · {memory[1]:.0f} |"
    )


def measure_idle(sites: int, seconds: float) -> str:
    """What idle sites cost the SuperLink, and what a hundred of them would."""
    stream = np.random.default_rng(0)
    data = {
        f"site{k}": (stream.standard_normal((4, 3)), np.array([0, 1, 0, 1])) for k in range(sites)
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalFederation(Path(folder) / "fed", data, POLICY) as local,
    ):
        local.start()
        time.sleep(40)  # until every site has backed off to one poll in three seconds
        link = local.processes["link"]
        before, began = cpu_seconds(link), time.monotonic()
        time.sleep(seconds)
        share = (cpu_seconds(link) - before) / (time.monotonic() - began)
    return (
        f"{sites} idle sites take {100 * share:.1f} % of one core of the SuperLink "
        f"({1000 * share * 3 / sites:.1f} ms a poll); a hundred take {100 * share / sites:.0%}"
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", default="3,8")
    parser.add_argument("--parameters", default="410,1000000")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--algorithm", default="scaffold")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds of idle sites instead")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start")
    if given.idle:
        print(measure_idle(int(given.sites.split(",")[0]), given.idle))
        return
    print(
        "| algorithm | sites | parameters | s/round: median (min) | CPU s/round: SuperLink · "
        "server · sites | bytes a participation | MB: SuperLink · a site |"
    )
    print("|---|---|---|---|---|---|---|")
    for parameters in given.parameters.split(","):
        for sites in given.sites.split(","):
            print(measure(int(sites), int(parameters), given.rounds, given.algorithm), flush=True)


if __name__ == "__main__":
    main()
