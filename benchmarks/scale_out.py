"""One run on several processes: rounds a second, the share of communication, and memory.

    python benchmarks/scale_out.py speed                  # the paper's size, about two minutes
    python benchmarks/scale_out.py share                  # a network of a million parameters
    python benchmarks/scale_out.py memory --folder FOLDER # ten million users, 4.5 GB on disk
    python benchmarks/scale_out.py gpu --users 1000000    # the time of a participation on a GPU

Needs dpscaffold on the path alone (``PYTHONPATH=src``): the processes are started here, with what
a launcher such as torchrun would tell them. Each process is pinned to cores of its own. Run it on
a machine with at least as many idle cores as the largest number of processes times threads.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np


def launch(what: str, ranks: int, threads: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``measure`` finds on each of some processes, which have cores of their own."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(ranks):
            own = cores[rank * threads : (rank + 1) * threads]
            given = {**options, "what": what, "out": f"{folder}/{rank}", "cores": own}
            environment = os.environ | {
                "OMP_NUM_THREADS": str(threads),
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            command = [sys.executable, __file__, "measure", json.dumps(given)]
            processes.append(subprocess.Popen(command, env=environment))
        for process in processes:
            if process.wait():
                raise SystemExit(f"a process of {what} ended with status {process.returncode}")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


# --- what a process does


def measure(given: dict[str, Any]) -> None:
    """One process of a measurement."""
    if given["cores"]:
        os.sched_setaffinity(0, given["cores"])
    from dpscaffold.training.train import train

    several = int(os.environ["WORLD_SIZE"]) > 1
    clock = Clock() if several and given["what"] == "share" else None
    with Memory() as memory:
        arguments = RUNS[given["what"]](given)
        times: list[float] = []
        result = train(
            *arguments,
            distributed=several,
            device=given.get("device", "cpu"),
            on_round=lambda row: times.append(time.perf_counter()),
        )
    gaps = np.diff(times[given.get("warm", 2) :]).tolist()
    found = {
        "seconds": statistics.median(gaps) if gaps else None,
        "mean": statistics.fmean(gaps) if gaps else None,
        "anonymous": memory.peak,
        "resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "sum": float(result.params.double().sum()),
        "sent": clock.seconds if clock else 0.0,
        "rounds": len(times),
    }
    Path(given["out"]).write_text(json.dumps(found))


class Memory:
    """The most anonymous memory of this process, sampled (Linux)."""

    def __enter__(self) -> Memory:
        self.peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        path = Path("/proc/self/smaps_rollup")
        while path.exists():
            for line in path.read_text().splitlines():
                if line.startswith("Anonymous:"):
                    self.peak = max(self.peak, int(line.split()[1]) * 1024)
            if self._done.wait(0.1):
                return


class Clock:
    """The time in which this process waits for sums."""

    def __init__(self) -> None:
        from dpscaffold.engine.distributed import Ranks

        self.seconds = 0.0
        Ranks.sum = self._timed(Ranks.sum)

    def _timed(self, real: Any) -> Any:
        import torch.distributed as dist

        def timed(ranks: Any, values: Any) -> Any:
            if values.numel() < 1 << 16:
                return real(ranks, values)
            dist.barrier(group=ranks._small)  # from when all ranks are ready
            start = time.perf_counter()
            found = real(ranks, values)
            self.seconds += time.perf_counter() - start
            return found

        return timed


def paper_size(given: dict[str, Any]) -> tuple[Any, ...]:
    """Logistic regression with 20 of 100 users, 50 steps and batches of 800 records."""
    from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic

    data = synthetic(alpha=5, beta=5, users=100, records=5000)
    rounds = given["rounds"]
    plan = Plan(
        rounds=rounds,
        local_steps=50,
        user_ratio=given.get("user_ratio", 0.2),
        data_ratio=0.2,
        learning_rate=0.5,
        evaluate_every=rounds,
    )
    return data, Logistic(40, 10), scaffold(), plan, Gaussian(clip=1.5, noise=60.0)


def network(given: dict[str, Any]) -> tuple[Any, ...]:
    """A network of a million parameters: 16 of 32 users, 5 steps and batches of 64 images."""
    from dpscaffold import Gaussian, Mlp, Plan, scaffold, synthetic

    data = synthetic(users=32, records=400, dimension=784)
    rounds = given["rounds"]
    plan = Plan(rounds=rounds, local_steps=5, user_ratio=0.5, data_ratio=0.2, evaluate_every=rounds)
    return data, Mlp(784, 10, hidden=1258), scaffold(), plan, Gaussian(clip=1.0, noise=1.0)


def many_users(given: dict[str, Any]) -> tuple[Any, ...]:
    """Two classes, 10,000 participants a round, from a stored federation."""
    from dpscaffold import Gaussian, Linear, Plan, scaffold
    from dpscaffold.data import load
    from dpscaffold.tasks import LOSSES

    data, rounds = load(given["folder"]), given.get("rounds", 3)
    plan = Plan(
        rounds=rounds,
        local_steps=5,
        user_ratio=min(1.0, given.get("participants", 10_000) / data.users),
        data_ratio=0.5,
        evaluate_every=rounds,
    )
    task = Linear(data.dimension, 1, LOSSES["logistic"])
    return data, task, scaffold(), plan, Gaussian(clip=1.0, noise=1.0)


RUNS = {"speed": paper_size, "share": network, "memory": many_users, "gpu": many_users}


# --- tables


def best(what: str, ranks: int, threads: int, options: dict[str, Any], repeats: int) -> float:
    """Seconds a round at rank 0: the mean of a run, the best of several runs."""
    found = [launch(what, ranks, threads, options)[0]["mean"] for _ in range(repeats)]
    return min(found)


def speed(chosen: argparse.Namespace) -> None:
    """Rounds a second at the paper's size."""
    sides = [(1, 1), (1, 2), (2, 1)]
    sides += [(n, 1) for n in (4, 8) if n <= chosen.ranks]
    for ratio in (0.2, 1.0):
        options = {"rounds": chosen.rounds, "user_ratio": ratio}
        seconds = {side: float("inf") for side in sides}
        for _ in range(chosen.repeats):  # in turns, so that other work hits all alike
            for side in sides:
                seconds[side] = min(seconds[side], best("speed", *side, options, 1))
        one = seconds[1, 1]
        print(f"\n{round(100 * ratio)} of 100 users a round\n")
        print("| ranks | threads | ms a round | times one rank, one thread |\n|---|---|---|---|")
        for (ranks, threads), value in seconds.items():
            print(f"| {ranks} | {threads} | {1e3 * value:.1f} | {one / value:.2f} |")
        print(f"\n2 ranks / 1 process with 2 threads: {seconds[1, 2] / seconds[2, 1]:.2f}")


def share(chosen: argparse.Namespace) -> None:
    """The part of a round that is communication, at a million parameters."""
    print("| ranks | seconds a round | sending, share of the round |\n|---|---|---|")
    for ranks in (1, 2, 4):
        if ranks <= chosen.ranks:
            found = launch("share", ranks, 1, {"rounds": chosen.rounds})[0]
            a_round = found["sent"] / found["rounds"]
            print(f"| {ranks} | {found['mean']:.3f} | {a_round / found['mean']:.1%} |", flush=True)


def memory(chosen: argparse.Namespace) -> None:
    """Anonymous memory of one process and of four ranks."""
    if not chosen.folder.exists():
        write(chosen.folder, chosen.users)
    print("| ranks | anonymous memory of each, MB | resident, MB | sum of x |\n|---|---|---|---|")
    most = 0.0
    for ranks in (1, 4):
        found = launch("memory", ranks, 1, {"folder": str(chosen.folder)})
        most = most or found[0]["anonymous"] / 4 + 300e6
        each = ", ".join(f"{one['anonymous'] / 1e6:.0f}" for one in found)
        resident = ", ".join(f"{one['resident'] / 1e6:.0f}" for one in found)
        print(f"| {ranks} | {each} | {resident} | {found[0]['sum']!r} |", flush=True)
    print(f"\nA quarter of one process, and 300 MB: {most / 1e6:.0f} MB")
    if not chosen.keep:
        shutil.rmtree(chosen.folder)


def gpu(chosen: argparse.Namespace) -> None:
    """Seconds a round on one GPU, and on two ranks, which share it where there is no other."""
    import torch

    if not chosen.folder.exists():
        write(chosen.folder, chosen.users)
    print("| ranks | participants | ms a round | µs a participation |\n|---|---|---|---|")
    for ranks in (1, 2):
        own = ranks <= torch.cuda.device_count()
        for participants in (1_000, 10_000, 30_000):
            options = {"folder": str(chosen.folder), "rounds": 12, "participants": participants}
            options |= {"device": "cuda" if own else "cuda:0"}
            seconds = launch("gpu", ranks, 1, options)[0]["seconds"]
            each = 1e6 * seconds / participants
            print(f"| {ranks} | {participants:,} | {1e3 * seconds:.1f} | {each:.1f} |", flush=True)
    if not chosen.keep:
        shutil.rmtree(chosen.folder)


#: How many rows are written together.
ROWS = 1 << 18


def block(part: int, start: int, rows: int) -> np.ndarray:
    """Some rows of unit norm, the same at every call."""
    x = np.random.default_rng((part, start)).standard_normal((rows, 20), dtype=np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def write(folder: Path, users: int) -> None:
    """Four training records and a test record of 20 features for each user."""
    import torch

    from dpscaffold.data.writer import FederationWriter

    rule = np.random.default_rng(0).standard_normal(20, dtype=np.float32)
    with FederationWriter(folder, 2, title=f"{users:,} users") as writer:
        for number, (part, records) in enumerate({"train": 4, "test": 1}.items()):
            count = users * records
            spans = [(start, min(ROWS, count - start)) for start in range(0, count, ROWS)]
            labels = np.concatenate([block(number, *span) @ rule > 0 for span in spans])
            rows = (block(number, *span) for span in spans)
            sizes = torch.full((users,), records)
            writer.append_table(part, rows, torch.from_numpy(labels.astype(np.int64)), sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "share", "memory", "gpu", "measure"))
    parser.add_argument("given", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=None, help="40; 6 for share")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=8, help="the most ranks to start")
    parser.add_argument("--users", type=int, default=10_000_000)
    parser.add_argument("--folder", type=Path, default=Path("scale-out-users"))
    parser.add_argument("--keep", action="store_true", help="leave the folder for another time")
    chosen = parser.parse_args()
    chosen.rounds = chosen.rounds or (6 if chosen.what == "share" else 40)
    if chosen.what == "measure":
        measure(json.loads(chosen.given))
        return
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"Machine: {platform.machine()}, {cores} cores, PyTorch {torch.__version__}")
    {"speed": speed, "share": share, "memory": memory, "gpu": gpu}[chosen.what](chosen)


if __name__ == "__main__":
    main()
