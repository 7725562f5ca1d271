"""A soak: random kills, a flood and slow links together, for as long as one likes.

    python tests/deploy/soak.py [--minutes 20] [--seed 1] [--mbit 0.5] [--flood 0.3]

Real processes on loopback, nothing leaves the machine. Each site is behind a link whose rate
changes at random between ``--mbit`` and a hundred times that, and which is cut now and then. About
three times a minute a site, the server or the SuperLink gets a kill −9 and is started again. For
the share ``--flood`` of the minutes a stranger without a key sends bodies and half requests to the
public port. Every upload is noted before it leaves, and after every fault no ledger may hold less.
At the end the run must stand bit for bit where the simulator stands after as many rounds. The exit
status is 0 only then.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parents[1] / "benchmarks")]

import tapped  # noqa: E402

from dpscaffold.deployment.transports import flower  # noqa: E402

flower.require()

from deploy_demo import (  # noqa: E402
    POLICY,
    demo_data,
    demo_tables,
    deployed,
    simulated,
    site_data,
)
from flood import Flood, resident  # noqa: E402
from local_federation import LocalFederation, SlowLink  # noqa: E402

#: More rounds than any machine takes in a minute.
ROUNDS_A_MINUTE = 600


class Soak:
    """One federation under fire; ``faults`` counts what was done to it."""

    def __init__(self, folder: Path, minutes: float, seed: int, mbit: float, share: float) -> None:
        self.minutes, self.mbit, self.share = minutes, mbit, share
        self.stream, self.federation = np.random.default_rng(seed), demo_data(200)
        self.tables = demo_tables(rounds=max(10, round(ROUNDS_A_MINUTE * minutes)))
        self.tables["deploy"] |= {"deadline": 3600.0}
        policy = dict(POLICY) | {"epsilon": "1000000.0"}
        self.local = LocalFederation(
            folder / "fed", site_data(self.federation), policy, program=tapped.PROGRAM
        )
        self.out = folder / "run"
        self.links = {name: SlowLink(self.local.public, 1e8) for name in self.local.names}
        for name, link in self.links.items():
            link.carry(self.local, name)
        self.faults: dict[str, int] = {}
        self.flood: Flood | None = None
        self.rounds: list[tuple[float, int]] = []
        self.killed_at = 0

    def done(self) -> int:
        """The last finished round."""
        try:
            return int(json.loads((self.out / "status.json").read_text())["round"])
        except (OSError, ValueError, KeyError):
            return 0

    def count(self, what: str) -> None:
        self.faults[what] = self.faults.get(what, 0) + 1

    def check(self) -> None:
        """No ledger below its uploads, and nobody gone who was not killed."""
        for name in self.local.names:
            left = tapped.uploads(self.local.folder / name)
            assert tapped.reserved(self.local.folder / name) >= len(left), name
        for name, process in self.local.processes.items():
            assert process.poll() is None, f"{name} ended: {self.local.log(name)[-2000:]}"

    def run(self) -> None:
        """All of it."""
        with self.local as local:
            local.start()
            self.config = local.config("plan", self.tables)
            local.start_server(self.config, self.out)
            self.await_round(1)
            began = time.monotonic()
            until, most = began + 60 * self.minutes, 0.0
            while time.monotonic() < until:
                time.sleep(float(self.stream.uniform(0.5, 3.0)))
                self.rounds.append((time.monotonic() - began, self.done()))
                self.fault()
                self.check()
                most = max(most, resident(local.processes["link"]))
            self.stop_flood()
            for link in self.links.values():
                link.rate = 1e8
            self.await_round(self.done() + 1)  # rounds still go on
            self.check()
            local.processes["server"].send_signal(signal.SIGTERM)
            local.processes["server"].wait(600)
            self.report(most)

    def await_round(self, number: int) -> None:
        """Until a round is over; an hour without it is a failure."""
        until = time.monotonic() + 3600
        while self.done() < number:
            assert time.monotonic() < until, self.local.log("server")[-2000:]
            assert self.local.processes["server"].poll() is None, self.local.log("server")[-2000:]
            time.sleep(0.2)

    def fault(self) -> None:
        """Something, or nothing."""
        for name, link in self.links.items():
            if self.stream.random() < 0.2:
                link.rate = self.mbit * 1e6 / 8 * 100 ** float(self.stream.random())
                self.count("rates changed")
            if self.stream.random() < 0.02:
                link.cut()
                self.count(f"links cut at {name}")
        if self.stream.random() < 0.09 and self.done() > self.killed_at:
            self.killed_at = self.done()  # the next one only once the run has gone on
            self.kill(str(self.stream.choice([*self.local.names, "server", "link"])))
        flooding = self.flood is not None
        if self.stream.random() < 0.05 * (1 - self.share if flooding else self.share):
            self.stop_flood() if flooding else self.start_flood()

    def kill(self, name: str) -> None:
        """kill −9, and another one."""
        self.local.kill(name)
        self.count(f"kills of {name}")
        if name == "server":
            self.local.start_server(self.config, self.out, resume=True)
        elif name == "link":
            self.local.start_link()
        else:
            self.local.start_site(name)

    def start_flood(self) -> None:
        self.flood = Flood(self.local.public, body=50, half=200)
        self.flood.start()
        self.count("floods")

    def stop_flood(self) -> None:
        if self.flood is not None:
            self.flood.stop.set()
            for one in self.flood.held:
                one.close()
        self.flood = None

    def report(self, most: float) -> None:
        """What was done, and where it ended."""
        rounds = self.done()
        gains = [late - early for (_, early), (_, late) in zip(self.rounds, self.rounds[10:])]  # noqa: B905
        print(f"{self.minutes:g} minutes, {rounds} rounds; SuperLink at most {most:.0f} MB")
        print("; ".join(f"{what}: {count}" for what, count in sorted(self.faults.items())))
        if gains:
            print(f"rounds in ten steps of the clock: median {statistics.median(gains):g}")
        counts = {name: tapped.reserved(self.local.folder / name) for name in self.local.names}
        left = {name: len(tapped.uploads(self.local.folder / name)) for name in self.local.names}
        print(f"participations in the ledgers {counts}, uploads that left {left}")
        assert rounds >= 1, self.local.log("server")[-2000:]
        tables = {**self.tables, "plan": self.tables["plan"] | {"rounds": rounds}}
        found, wanted = deployed(self.out), simulated(self.federation, tables)
        for name, value in wanted.items():
            assert torch.equal(found[name], value), f"{name} is not the simulator's"
        print(f"bit for bit the simulator's after {rounds} rounds")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, value in (("minutes", 20.0), ("mbit", 0.5), ("flood", 0.3)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        Soak(Path(folder), given.minutes, given.seed, given.mbit, given.flood).run()


if __name__ == "__main__":
    main()
