"""The fault campaign: kill, fill the disk, lock the folder, turn the clock, damage every file.

``make torture`` runs all of it, ``tests/torture/test_campaign.py`` a small part. After every fault
the same command is run again, and then nothing may be lost: metrics are those without the fault,
the ledger holds every round that was released, and what is stated is what the folder says.
``--grid`` kills at every point between two file operations instead of at random ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))

from commands import all_works
from faults import (
    ENDINGS,
    clock_once,
    damage_once,
    full_disk_once,
    interrupted,
    kill_once,
    killed_then_ended_once,
    read_only_once,
)
from forked import Lost
from grid import crash_at, points
from works import MIRROR, Work

#: The process alone, or the power with it.
CUTS = (False, True)

Fault = Callable[[], str]


def random_faults(
    works: list[Work], home: Path, rng: random.Random, given: argparse.Namespace
) -> list[Fault]:
    """Kills, full disks, locked folders, clocks and damages, drawn beforehand."""
    weights, kills = [work.weight for work in works], given.kills
    picks = works + rng.choices(works, weights, k=max(0, kills - len(works)))
    faults: list[Fault] = []
    faults += [lambda w=w: "killed: " + kill_once(w, home, rng) for w in picks[:kills]]
    picks = rng.choices(works, weights, k=given.disks)
    faults += [lambda w=w: "disk full: " + full_disk_once(w, home, rng) for w in picks]
    for once in (read_only_once, clock_once):
        faults += [lambda w=w, f=once: f(w, home, rng) for w in works if given.disks]
    for work in (work for work in works if work.name in ("train", "train secret")):
        secret = work.name == "train secret"
        faults += [
            lambda e=ending, w=work: (
                "killed thrice: " + killed_then_ended_once(home, e, w.seconds, rng)
            )
            for ending in ENDINGS * given.endings * secret
        ]
        stopped = interrupted(home, secret)
        names = sorted(p.name for p in (stopped / "run").iterdir() if p.stat().st_size)
        faults += [
            lambda n=one, s=secret, w=work, f=stopped: "damaged: " + damage_once(f, n, s, w, rng)
            for one in islice(cycle(names), given.damages)
        ]
    return faults


def grid_faults(works: list[Work], home: Path, stride: int) -> list[Fault]:
    """A kill and a power cut before every ``stride``-th file operation of every command."""
    faults: list[Fault] = []
    for work in works:
        number = points(work, home)
        print(f"{work.name}: {number} file operations", flush=True)
        for last in range(1, number + 1, stride):
            faults += [lambda w=work, n=last, c=cut: crash_at(w, home, n, c) for cut in CUTS]
    return faults


def play(faults: list[Fault], seconds: float) -> int:
    """All faults, one after the other, as far as the seconds reach; how many lost something."""
    started, played, failed = time.monotonic(), 0, 0
    for fault in faults:
        if time.monotonic() - started > seconds:
            print(f"stopped after {seconds:.0f} s with {len(faults) - played} faults to go")
            break
        try:
            print(f"{played + 1}/{len(faults)} {fault()}", flush=True)
        except (Lost, OSError, ValueError, KeyError) as error:
            failed += 1
            print(f"LOST: {type(error).__name__}: {error}", flush=True)
        played += 1
    print(f"{played} faults, {failed} losses, {time.monotonic() - started:.0f} s")
    return failed


def campaign(given: argparse.Namespace) -> int:
    """What was asked for; how many faults lost something."""
    rng, home = random.Random(given.seed), Path(tempfile.mkdtemp(prefix="torture-"))
    home.chmod(0o755)
    works = [work for work in all_works() if _asked(work.name, given.only)]
    if importlib.util.find_spec("onnx") is None:
        print("the extra [onnx] is not installed: exports to ONNX are left out", flush=True)
        works = [work for work in works if "onnx" not in work.arguments]
    try:
        for work in works:
            work.measure(home)
            print(f"{work.name}: {work.seconds:.2f} s without a fault", flush=True)
        if given.grid:
            faults = grid_faults(works, home, given.grid)
        else:
            faults = random_faults(works, home, rng, given)
        return play(faults, 60 * given.minutes)
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(MIRROR.removeprefix("file://"), ignore_errors=True)


def _asked(name: str, only: str) -> bool:
    return any(part in name if part[-1:] != "." else name == part[:-1] for part in only.split(","))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--disks", type=int, default=40, help="full disks; 0: no locks, no clocks")
    parser.add_argument("--damages", type=int, default=120, help="of each of two stopped runs")
    parser.add_argument("--endings", type=int, default=8, help="three kills, then each way to end")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--grid", type=int, default=0, help="at every N-th point instead")
    parser.add_argument("--only", default="", help="commands whose names contain one of these")
    asked = parser.parse_args()
    print(f"seed {asked.seed}")
    sys.exit(1 if campaign(asked) else 0)
