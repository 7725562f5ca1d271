"""Seconds, CPU, bytes and memory of deployed rounds: real processes on loopback, TLS and keys.

    python benchmarks/deploy.py [--sites 3,8] [--parameters 1000,1000000] [--rounds 20]
        [--algorithm scaffold]
    python benchmarks/deploy.py --sites 100 --idle 60
    python benchmarks/deploy.py --recovery 3

One line for each size: the median of the rounds' seconds and the least; CPU seconds a round of the
SuperLink, the server and all sites; bytes a participation by Flower's own count, from the end of
the first round to the end of the last; resident memory of the SuperLink, the server and one site,
at the end and at most. Below it, where a round's seconds go: what is neither Flower's nor a local
step is this package's own share, on the server and at the slowest site of each round. ``--idle``
measures what sites that poll and have nothing to do cost the SuperLink, ``--recovery`` how long
rounds stand still after a kill −9 of a site, the server or the SuperLink.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from deploy_timed import OTHERS, PROGRAM, read_timed

from dpscaffold.deployment.transports import flower

#: The federation of processes is next to the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
flower.require()

from local_federation import LocalFederation  # noqa: E402

from dpscaffold.deployment.provision import read_node_key  # noqa: E402
from dpscaffold.deployment.transports.flower.node import (  # noqa: E402
    HEARTBEAT,
    SLOW,
    Address,
    Fleet,
    FleetHttpClient,
    serve,
)

POLICY = {
    "epsilon": "100000.0",
    "delta": "1e-2",
    "max_runs": "4",
    "units": '["record", "none"]',
    "max_parameters": "100_000_000",
    "algorithms": '["scaffold", "fedavg", "scaffold-balanced"]',
}
CLASSES = 10


def cpu_seconds(process) -> float:
    """CPU seconds that a process has used, from the kernel."""
    try:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(process) -> tuple[float, float]:
    """Resident megabytes, now and at most."""
    text = Path(f"/proc/{process.pid}/status").read_text()
    return tuple(
        int(re.search(rf"{key}:\s+(\d+)", text)[1]) / 1024  # type: ignore[index]
        for key in ("VmRSS", "VmHWM")
    )


def federation_of(sites: int, parameters: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Forty records for each site, as many features as give that many parameters."""
    features, stream = parameters // CLASSES - 1, np.random.default_rng(0)
    return {
        f"site{k}": (
            stream.standard_normal((40, features)).astype(np.float32) / np.sqrt(features),
            stream.integers(0, CLASSES, 40),
        )
        for k in range(sites)
    }


def plan_of(parameters: int, rounds: int, algorithm: str) -> dict:
    """A rehearsal with few local steps: the round is the transport's."""
    return {
        "schema": {"features": parameters // CLASSES - 1, "classes": CLASSES},
        "algorithm": {"name": algorithm},
        "plan": {
            "rounds": rounds,
            "local_steps": 2,
            "user_ratio": 1.0,
            "data_ratio": 0.5,
            "evaluate_every": rounds,
        },
        "privacy": {"clip": 1.0, "noise": 1.0, "secret": False},
        "deploy": {"deadline": 600.0},
    }


def wait_for(local: LocalFederation, what: Callable[[], bool], pause: float = 0.02) -> float:
    """Until it is so; gives the moment. A server that ends before is an error."""
    while not what():
        if local.processes["server"].poll() is not None and not what():
            raise SystemExit(local.log("server"))
        time.sleep(pause)
    return time.monotonic()


def measure(sites: int, parameters: int, rounds: int, algorithm: str) -> tuple[str, str]:
    """One size: its line, and where its time goes."""
    data = federation_of(sites, parameters)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalFederation(Path(folder) / "fed", data, POLICY, program=PROGRAM) as local,
    ):
        local.start()
        out = Path(folder) / "run"
        local.start_server(local.config("plan", plan_of(parameters, rounds, algorithm)), out)
        wait_for(local, lambda: "round 1:" in local.log("server"))
        others = ["link", *local.names]
        before = {name: cpu_seconds(local.processes[name]) for name in ["server", *others]}
        served, held = before["server"], (0.0, 0.0)
        while f"round {rounds}:" not in local.log("server"):
            time.sleep(0.05)
            served = cpu_seconds(local.processes["server"])
            held = resident(local.processes["server"])
        after = {name: cpu_seconds(local.processes[name]) for name in others}
        local.processes["server"].wait()
        link, site = (resident(local.processes[name]) for name in ("link", local.names[0]))
        memory = [link, held, site]
        server = read_timed(out)
        answers = [read_timed(local.folder / name) for name in local.names]
    seconds = [_total(line) for line in server[1:]]
    per = rounds - 1
    crossed = (server[-1]["flower_bytes"] - server[0]["flower_bytes"]) / (per * sites)
    used = [
        (after["link"] - before["link"]) / per,
        (served - before["server"]) / per,
        sum(after[name] - before[name] for name in local.names) / per,
    ]
    line = (
        f"| {algorithm} | {sites} | {CLASSES * (parameters // CLASSES):,} | "
        f"{statistics.median(seconds):.2f} ({min(seconds):.2f}) | {used[0]:.2f} · {used[1]:.2f} · "
        f"{used[2]:.2f} | {crossed:,.0f} | "
        + " · ".join(f"{now:.0f} ({most:.0f})" for now, most in memory)
        + " |"
    )
    return line, whereabouts(server[1:], answers)


def _total(line: dict[str, float]) -> float:
    return sum(value for key, value in line.items() if key not in ("round", "flower_bytes"))


def whereabouts(server: list[dict[str, float]], answers: list[list[dict[str, float]]]) -> str:
    """Milliseconds of a mean round by label: the server's own, those of its slowest site, and what
    is left to Flower; and the share that is neither Flower's nor the local steps'."""
    numbers = {int(line["round"]) for line in server}
    slowest: dict[int, dict[str, float]] = {}
    for line in (line for site in answers for line in site):
        number = int(line["round"] or 0)
        if number in numbers and _total(line) > _total(slowest.get(number, {})):
            slowest[number] = line
    sums: dict[str, float] = {}
    for where, lines in (("server", server), ("site", list(slowest.values()))):
        for line in lines:
            for label, value in line.items():
                if label not in ("round", "flower_bytes"):
                    key = label if label in OTHERS else f"{where}'s {label}"
                    sums[key] = sums.get(key, 0.0) + value
    sums["Flower"] -= sum(_total(line) for line in slowest.values())
    whole = sum(_total(line) for line in server)
    ours = sum(value for label, value in sums.items() if label not in OTHERS)
    parts = sorted(sums.items(), key=lambda part: -part[1])
    said = ", ".join(f"{label} {1000 * value / len(server):.1f}" for label, value in parts)
    rest = whole - sums.get("local steps", 0.0)
    return f"{said} ms a round; our own share is {ours / rest:.1%} of what is no local step"


def measure_idle(sites: int, seconds: float) -> str:
    """What idle sites cost the SuperLink: nodes as a site's, all in this process, each with a key,
    a connection and a heartbeat of its own."""
    data = federation_of(sites, 50)
    stop, joined, asked = threading.Event(), [], []
    for name in ("PullMessages", "SendNodeHeartbeat"):
        _count_calls(FleetHttpClient, name, asked)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalFederation(Path(folder) / "fed", data, POLICY) as local,
    ):
        local.start_link()
        ca = (local.folder / "server" / "ca.crt").read_bytes()
        address = Address(f"127.0.0.1:{local.public}", ca)
        threads = []
        for name in local.names:
            key = read_node_key(local.folder / name / "node.key")
            fleet = Fleet(address, key, local.folder / name / "node_id")
            given = (fleet, lambda message: message, stop, joined.append)
            threads.append(threading.Thread(target=serve, args=given, daemon=True))
            threads[-1].start()
        while sum(said.startswith("online") for said in joined) < sites:
            time.sleep(0.2)
        time.sleep(40)  # until every site has backed off to one poll in three seconds
        link = local.processes["link"]
        before, began = cpu_seconds(link), time.monotonic()
        time.sleep(seconds)
        used, ended = cpu_seconds(link) - before, time.monotonic()
        requests = sum(began < moment < ended for moment in asked)
        stop.set()
        for thread in threads:
            thread.join()
    wanted = sites * (1 / SLOW + 1 / (0.35 * HEARTBEAT))
    return (
        f"{sites} idle sites made {requests / (ended - began):.1f} requests a second, polls and "
        f"heartbeats, of the {wanted:.1f} of a machine with time for all, and took "
        f"{used / (ended - began):.1%} of one core of the SuperLink, {1000 * used / requests:.1f} "
        f"ms a request; at {wanted:.1f} a second that is {used / requests * wanted:.1%}"
    )


def _count_calls(owner: type, name: str, moments: list[float]) -> None:
    real = getattr(owner, name)

    def counted(*given: object) -> object:
        answer = real(*given)
        moments.append(time.monotonic())
        return answer

    setattr(owner, name, counted)


def measure_recovery(times: int) -> str:
    """Seconds from a kill −9 and an immediate restart until the next round is done."""
    found: dict[str, list[float]] = {"a site": [], "the server": [], "the SuperLink": []}
    data = federation_of(3, 1000)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalFederation(Path(folder) / "fed", data, POLICY) as local,
    ):
        local.start()
        out, config = Path(folder) / "run", local.config("p", plan_of(1000, 900, "scaffold", 6.0))
        local.start_server(config, out)

        def rounds() -> int:
            return len(re.findall(r"round \d+:", local.log("server")))

        for turn in range(3 * times):
            wait_for(local, lambda: rounds() >= 5 * (turn + 1))  # noqa: B023
            victim = list(found)[turn % 3]
            name = {"a site": local.names[turn % len(local.names)], "the server": "server"}
            killed, reached = time.monotonic(), rounds()
            local.kill(name.get(victim, "link"))
            if victim == "a site":
                local.start_site(name[victim])
            elif victim == "the server":
                local.start_server(config, out, resume=True)
            else:
                local.start_link()
            # a round that was done already may still be said: the second one is certain
            wait_for(local, lambda: rounds() >= reached + 2)  # noqa: B023
            found[victim].append(time.monotonic() - killed)
    return "; ".join(
        f"{victim}: {', '.join(f'{value:.1f}' for value in values)} s"
        for victim, values in found.items()
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", default="3,8")
    parser.add_argument("--parameters", default="1000,1000000")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--algorithm", default="scaffold")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds of idle sites instead")
    parser.add_argument("--recovery", type=int, default=0, help="kills of each kind instead")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before the start")
    if given.idle:
        print(measure_idle(int(given.sites.split(",")[0]), given.idle))
        return
    if given.recovery:
        print(f"until the second round after a kill -9: {measure_recovery(given.recovery)}")
        return
    print(
        "| algorithm | sites | parameters | s/round: median (min) | CPU s/round: SuperLink · "
        "server · sites | bytes a participation | MB (most): SuperLink · server · a site |"
    )
    print("|---|---|---|---|---|---|---|")
    spent = []
    for parameters in given.parameters.split(","):
        for sites in given.sites.split(","):
            line, where = measure(int(sites), int(parameters), given.rounds, given.algorithm)
            print(line, flush=True)
            spent.append(f"{sites} sites, {int(parameters):,} parameters: {where}")
    print("\n" + "\n".join(spent))


if __name__ == "__main__":
    main()
