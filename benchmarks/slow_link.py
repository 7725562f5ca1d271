"""Rounds over slow links: seconds and bytes against the arithmetic minimum.

    python benchmarks/slow_link.py [--mbit 10] [--parameters 1000000] [--sites 3] [--rounds 4]

Real processes on loopback with TLS; every site has a link of its own with ``--mbit`` Mbit/s each
way. A round of SCAFFOLD cannot be shorter than x and c down and both moves up take: 16 bytes a
parameter. Printed are the seconds of each round after the first, their median as a multiple of that
minimum, and the bytes that each site's link carried in a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path

from deploy import POLICY, federation_of, plan_of
from dpscaffold.deployment.transports import flower

flower.require()

from local_federation import LocalFederation, SlowLink  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mbit", type=float, default=10.0)
    for name, value in (("parameters", 1_000_000), ("sites", 3), ("rounds", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    folder, data = Path(tempfile.mkdtemp()), federation_of(given.sites, given.parameters)
    with LocalFederation(folder / "fed", data, POLICY) as local:
        links = {name: SlowLink(local.public, given.mbit * 1e6) for name in local.names}
        for name, link in links.items():
            link.carry(local, name)
        local.start()
        tables = plan_of(given.parameters, given.rounds, "scaffold")
        local.start_server(local.config("plan", tables), folder / "run")
        ends, carried = watch(local, folder / "run", links)
        code = local.processes["server"].poll()
        report(given, code, ends, carried)
        if code:
            print(local.log("server")[-2000:])


def watch(local: LocalFederation, out: Path, links: dict[str, SlowLink]) -> tuple[list, list]:
    """When each round was over, and what the links had carried by then."""
    ends: list[float] = []
    carried: list[list[tuple[int, int]]] = []
    status = out / "status.json"
    while local.processes["server"].poll() is None:
        done = json.loads(status.read_text())["round"] if status.exists() else 0
        if done > len(ends):
            ends += [time.monotonic()] * (done - len(ends))
            carried.append([tuple(link.carried) for link in links.values()])
        time.sleep(0.05)
    return ends, carried


def report(given: argparse.Namespace, code: int | None, ends: list, carried: list) -> None:
    """The figures."""
    least = 16 * given.parameters / (given.mbit * 1e6 / 8)
    seconds = [late - early for early, late in itertools.pairwise(ends)]
    print(f"exit status {code}, {given.sites} sites, {given.parameters} parameters,")
    print(f"{given.mbit:g} Mbit/s each way: at least {least:.1f} s a round")
    print("seconds a round:", " ".join(f"{one:.1f}" for one in seconds))
    median = statistics.median(seconds)
    print(f"median {median:.1f} s, {median / least:.2f} times the minimum")
    for way, word in ((0, "up"), (1, "down")):
        each = [
            (last[way] - first[way]) / (len(carried) - 1)
            for first, last in zip(carried[0], carried[-1], strict=True)
        ]
        print(f"MB {word} a round and site: at most {max(each) / 1e6:.2f}")


if __name__ == "__main__":
    main()
