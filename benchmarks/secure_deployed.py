"""Deployed rounds with and without secure sums, side by side, and random kills: real processes on
loopback, with TLS and keys.

    python benchmarks/secure_deployed.py --sites 8 --parameters 1000
    python benchmarks/secure_deployed.py --sites 3 --parameters 1000000 --rounds 8
    python benchmarks/secure_deployed.py --sites 30 --exact --rounds 10
    python benchmarks/secure_deployed.py --kills 100 --sites 4 --minutes 8

The first two print seconds per round (median and least over ``--repeats`` runs of ``--rounds``
rounds each, plain and secure in turn, without the first round of each) and the ratio of
the medians.

``--kills N`` trains a rehearsal while N processes (sites, the server, the SuperLink, at random from
``--seed``, one to four at a time) are killed with SIGKILL and started again, for at most
``--minutes``; two rounds after the last kill the server is stopped. ``--exact`` does the same
without kills, over all rounds. Every sum that the server opened is then
compared with the simulator's sum over the same list of sites, bit for bit, and every site's ledger
with the uploads that left it. The exit status is 0 only if all sums are equal and no ledger is
below what left.

Needs the extra ``flower``; ``PYTHONPATH=src`` is enough, no installed program is called.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpscaffold.deployment.transports import flower

#: The federation of processes is next to the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
flower.require()

from local_federation import LocalFederation  # noqa: E402

from dpscaffold.deployment.protocol.messages import fingerprint, public_of  # noqa: E402
from dpscaffold.deployment.provision import read_signing_key  # noqa: E402

CLASSES, RECORDS = 10, 100
POLICY = {
    "epsilon": "1e6",
    "delta": "1e-2",
    "max_runs": "100",
    "units": '["record", "none"]',
    "algorithms": '["fedavg"]',
}
#: Where a watched process notes what it sends, next to its other files.
UPLOADS, SUMS = "uploads.txt", "sums.jsonl"

Tables = dict[str, dict[str, Any]]


# --- a federation


def site_data(sites: int, parameters: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """As many features as give that many parameters."""
    features, stream = max(1, parameters // CLASSES - 1), np.random.default_rng(0)
    return {
        f"s{k:02d}": (
            stream.standard_normal((RECORDS, features)).astype(np.float32),
            stream.integers(0, CLASSES, RECORDS),
        )
        for k in range(sites)
    }


def plan_tables(data: dict[str, tuple[np.ndarray, np.ndarray]], rounds: int) -> Tables:
    """The plan of a server, one local step on every site."""
    width = next(iter(data.values()))[0].shape[1]
    return {
        "schema": {"features": width, "classes": CLASSES},
        "algorithm": {"name": "fedavg"},
        "plan": {
            "rounds": rounds,
            "local_steps": 1,
            "user_ratio": 1.0,
            "data_ratio": 0.2,
            "learning_rate": 0.1,
            "evaluate_every": 1,
        },
        "privacy": {"clip": 1.0, "noise": 10.0},
        "deploy": {"deadline": 600.0, "records": dict.fromkeys(data, RECORDS)},
    }


def secure_table(sites: int, voids: int) -> dict[str, int]:
    """Lists may lose up to half of the sites."""
    return {"colluders": 1, "least": max(3, sites // 2), "voids": voids}


def confirm(local: LocalFederation, voids: int) -> None:
    """The people of all sites compare fingerprints."""
    keys = {name: read_signing_key(local.folder / name / "site.key") for name in local.names}
    prints = ", ".join(f'{n} = "{fingerprint(public_of(key))}"' for n, key in keys.items())
    for name in local.names:
        path = local.folder / name / "site.toml"
        table = f"\n[secure]\nvoids = {voids}\nepsilon_alone = 1e6\n"
        path.write_text(path.read_text() + table + f"members = {{ {prints} }}\n")


# --- seconds per round


def round_seconds(out: Path) -> list[float]:
    """The seconds of every round but the first, which waits for processes to warm up."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [float(row["round_seconds"]) for row in rows][1:]


def measure(folder: Path, sites: int, parameters: int, rounds: int, repeats: int) -> float:
    """Print seconds per round, plain and secure in turn; returns the ratio of the medians."""
    data = site_data(sites, parameters)
    plain = plan_tables(data, rounds)
    kinds = {"plain": plain, "secure": plain | {"secure": secure_table(sites, 20)}}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    with LocalFederation(folder, data, POLICY) as local:
        confirm(local, 20)
        began = time.monotonic()
        local.start()
        print(f"{sites} sites online after {time.monotonic() - began:.1f} s", flush=True)
        for turn in range(repeats):
            for name, tables in kinds.items():
                out = folder / f"{name}-{turn}"
                if local.run(local.config(out.name, tables), out):
                    raise SystemExit(local.log("server")[-2000:])
                found[name] += round_seconds(out)
    medians = {name: statistics.median(times) for name, times in found.items()}
    ratio = medians["secure"] / medians["plain"]
    for name, times in found.items():
        print(f"{name:6}: median {medians[name]:.3f} s a round, least {min(times):.3f} s")
    print(
        f"{sites} sites x {parameters} parameters: secure / plain = {ratio:.2f} "
        f"({len(found['plain'])} rounds each)",
        flush=True,
    )
    return ratio


# --- kills


#: At most so many processes are killed at once, so many seconds after the last kills where no round
#: was done in between, and so often in a row without a round in between.
AT_ONCE, OUTAGE, IN_A_ROW = 4, 3.0, 2


def kill_randomly(
    local: LocalFederation, config: Path, out: Path, kills: int, seed: int, until: float
) -> Counter:
    """Kill one to four processes at a time until ``kills`` were killed or the time is over: after
    a new round, or within an outage. Then wait for two more rounds and stop the server."""
    stream, killed, dry = np.random.default_rng(seed), Counter[str](), 0
    everyone = [*local.names, "server", "link"]
    local.start_server(config, out)
    _await_rounds(local, config, out, 1, until)
    while (left := kills - killed.total()) > 0 and time.monotonic() < until:
        count = min(left, int(stream.integers(1, AT_ONCE + 1)))
        victims = [str(name) for name in stream.choice(everyone, count, replace=False)]
        time.sleep(float(stream.uniform(0, 0.5)))
        if local.processes["server"].poll() == 0:
            break
        for name in victims:
            local.kill(name)
            killed[name if name in ("server", "link") else "site"] += 1
        for name in sorted(victims, key=lambda name: name != "link"):  # others wait for the link
            _start_again(local, name, config, out)
        patience = until if dry >= IN_A_ROW else time.monotonic() + stream.uniform(0, OUTAGE)
        done = _await_rounds(local, config, out, 1, min(until, patience))
        dry = 0 if done else dry + 1
        print(f"{killed.total()} kills ({', '.join(victims)}), {rounds_done(out)} rounds",
              flush=True)  # fmt: skip
    _await_rounds(local, config, out, 2, max(until, time.monotonic() + 60))
    local.stop("server", 120)
    return killed


def _start_again(local: LocalFederation, name: str, config: Path, out: Path) -> None:
    if name == "server":
        local.start_server(config, out, resume=out.exists())
    elif name == "link":
        local.start_link()
    else:
        local.start_site(name)


def _await_rounds(local: LocalFederation, config: Path, out: Path, more: int, until: float) -> bool:
    """Whether so many more rounds were done in time. A server that gave up is started again."""
    wanted = max(0, rounds_done(out)) + more
    while rounds_done(out) < wanted:
        ended = local.processes["server"].poll()
        if ended == 0:
            return True
        if time.monotonic() > until:
            return False
        if ended is not None:
            print(f"the server ended with status {ended}: {local.log('server')[-300:]}", flush=True)
            _start_again(local, "server", config, out)
        time.sleep(0.05)
    return True


def rounds_done(out: Path) -> int:
    """The last round whose checkpoint is on disk."""
    try:
        return int(json.loads((out / "status.json").read_text())["round"])
    except (OSError, ValueError, KeyError):
        return -1


def torture(
    folder: Path, sites: int, parameters: int, rounds: int, kills: int, seed: int, minutes: float
) -> bool:
    """A rehearsal under kills, and whether its sums are exact and its ledgers complete."""
    data = site_data(sites, parameters)
    tables = plan_tables(data, rounds)
    voids = 20 * kills + 100
    tables["secure"] = secure_table(sites, voids)
    tables["privacy"] |= {"secret": False}
    out, began = folder / "run", time.monotonic()
    with LocalFederation(folder, data, POLICY, program=PROGRAM) as local:
        confirm(local, voids)
        local.start()
        print(f"{sites} sites online after {time.monotonic() - began:.0f} s", flush=True)
        config, until = local.config("plan", tables), began + 60 * minutes
        if kills:
            killed = kill_randomly(local, config, out, kills, seed, until)
        else:
            killed = Counter[str]()
            local.start_server(config, out)
            if not _await_rounds(local, config, out, rounds, until):
                print(f"not over after {minutes} minutes: {local.log('server')[-2000:]}")
            local.stop("server", 120)
    seconds = time.monotonic() - began
    print(f"killed {dict(killed)} in {seconds:.0f} s, {rounds_done(out)} rounds", flush=True)
    enough = killed.total() == kills
    if not enough:
        print(f"the time or the run was over after {killed.total()} kills; give more --minutes or "
              f"--rounds")  # fmt: skip
    return sums_exact(out, data, tables) & ledgers_complete(folder, tuple(data)) & enough


def sums_exact(out: Path, data: dict[str, tuple[np.ndarray, np.ndarray]], tables: Tables) -> bool:
    """Whether each sum that the server opened is the simulator's over the same list."""
    from dpscaffold.algorithms import fedavg
    from dpscaffold.config import Secure, make_run
    from dpscaffold.config.gaussian import Gaussian
    from dpscaffold.config.plan import Plan
    from dpscaffold.engine import Draw, Engine, State
    from dpscaffold.federation import Federation
    from dpscaffold.runs.folder import RunFolder
    from dpscaffold.tasks import Logistic

    parts = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in data.values()]
    federation = Federation.from_arrays(parts, parts, classes=CLASSES)
    setting = make_run(
        federation.roster,
        Logistic(federation.dimension, CLASSES),
        fedavg(),
        Plan(**tables["plan"]),
        Gaussian(**tables["privacy"]),
        secure=Secure(**tables["secure"]),
    )
    engine = Engine([setting], [federation], chunk=1)
    state, drawn = State.initial(setting), np.arange(setting.users)
    opened: dict[int, list[dict[str, Any]]] = {}
    for line in (out.parent / SUMS).read_text().splitlines():
        one = json.loads(line)
        opened.setdefault(one["round"], []).append(one)
    wrong, reached = 0, {0: state}
    for number in sorted(opened):
        before = reached[number - 1]
        for one in opened[number]:  # the last one is in the checkpoint
            chosen = Draw(drawn, np.array(one["users"]))
            done = engine.round(before, [chosen])
            wrong += digest(done.uploads[0].mean.params) != one["digest"]
            reached[number] = done.state
    saved = RunFolder(out).load_checkpoint()
    round = -1 if saved is None else saved.state.round
    same = round > 0 and torch.equal(saved.state.params, reached[round].params)
    count, short = (
        sum(map(len, opened.values())),
        sum(len(one["users"]) < setting.users for all_of in opened.values() for one in all_of),
    )
    print(
        f"{count} sums opened ({short} of fewer than all sites), {wrong} differ from the "
        f"simulator's; after round {round} the model {'equals' if same else 'DIFFERS FROM'} the "
        f"simulator's"
    )
    return wrong == 0 and same


def ledgers_complete(folder: Path, names: tuple[str, ...]) -> bool:
    """Whether every ledger has at least as many participations as uploads left the site."""
    fine = True
    for name in names:
        left = set((folder / name / UPLOADS).read_text().split())
        lines = (folder / name / "state" / "ledger.jsonl").read_text().splitlines()
        booked = sum(json.loads(line)["event"] == "participate" for line in lines)
        fine &= booked >= len(left)
        print(f"{name}: {len(left)} uploads left, the ledger has {booked}")
    return fine


# --- the same file as the watched command line


PROGRAM = (sys.executable, str(Path(__file__).resolve()), "watched")


def digest(vector: torch.Tensor) -> str:
    """The SHA-256 of a vector's bytes."""
    return hashlib.sha256(vector.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def note(path: Path, text: str) -> None:
    """One line more, in one write, so that a kill leaves whole lines."""
    place = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(place, text.encode() + b"\n")
    os.close(place)


def watch_site(folder: Path) -> None:
    """Note the id of every upload before it leaves."""
    from dpscaffold.deployment.transports.flower.node import Fleet

    reply = Fleet.reply

    def noted(self, asked, signed):
        if signed.header.get("kind") == "task" and signed.header.get("status") == "yes":
            note(folder / UPLOADS, str(signed.header["upload"]))
        reply(self, asked, signed)

    Fleet.reply = noted


def watch_server() -> None:
    """Note every sum that is opened, before it is used."""
    from dpscaffold.deployment.server.secure import SecureSites

    gather = SecureSites.gather

    def noted(self, phase, broadcast, draw):
        found = gather(self, phase, broadcast, draw)
        line = {"round": broadcast.round, "users": list(found.arrived)}
        line["digest"] = digest(found.mean.params)
        note(self.folder.path.parent / SUMS, json.dumps(line))
        return found

    SecureSites.gather = noted


def watched() -> None:
    """The command line, with notes of what is sent and opened."""
    from dpscaffold.cli import main as command

    del sys.argv[1]
    torch.set_num_threads(1)
    if sys.argv[1:3] == ["site", "start"]:
        watch_site(Path(sys.argv[3]).resolve().parent)
    elif sys.argv[1:3] == ["server", "run"]:
        watch_server()
    command()


def main() -> int:
    """Measure, or kill."""
    torch.set_num_threads(1)
    given = argparse.ArgumentParser(description="Deployed rounds with and without secure sums.")
    given.add_argument("--sites", type=int, default=8)
    given.add_argument("--parameters", type=int, default=1000)
    given.add_argument("--rounds", type=int, help="by default 20, and at most 3 for each kill")
    given.add_argument("--repeats", type=int, default=2)
    given.add_argument("--kills", type=int, default=0)
    given.add_argument("--seed", type=int, default=0)
    given.add_argument("--minutes", type=float, default=8.0, help="for kills, and for --exact")
    given.add_argument("--exact", action="store_true", help="compare with the simulator, no kills")
    asked = given.parse_args()
    with tempfile.TemporaryDirectory(prefix="dpscaffold-") as scratch:
        size = (Path(scratch) / "federation", asked.sites, asked.parameters)
        if asked.kills or asked.exact:
            rounds = asked.rounds or 3 * asked.kills + 20
            fine = torture(*size, rounds, asked.kills, asked.seed, asked.minutes)
            print("exact and complete" if fine else "NOT exact or NOT complete", flush=True)
            return 0 if fine else 1
        measure(*size, asked.rounds or 20, asked.repeats)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["watched"]:
        watched()
    else:
        sys.exit(main())
