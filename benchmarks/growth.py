"""How a DP-SCAFFOLD round grows: with participants, K, batch, parameters and the number of users.

    python benchmarks/growth.py --out FOLDER [--users 1000000] [--repeats 5]

One thing is changed at a time, from 40 participants × 20 steps × batch 100 of 500 records and 41 ×
10 weights. Time is CPU time of this process with one thread, so that other programs matter little;
the least of the repeats counts. The exponent is the slope of a straight line through log time
against log size. Federations of up to ``--users`` users × 20 records × 40 features lie in a mapped
file; 1,000 take part in a round, and the most anonymous memory of the process is printed next to.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from going import rounds_of

from dpscaffold import Gaussian, Logistic, Plan
from dpscaffold.algorithms import ALGORITHMS
from dpscaffold.config import make_run
from dpscaffold.federation import Federation, Records

CPU = torch.device("cpu")
BASE = {"participants": 40, "steps": 20, "batch": 100, "features": 40}
SERIES = {
    "participants": (20, 40, 80, 160),
    "steps": (10, 20, 40, 80),
    "batch": (50, 100, 200, 400),
    "features": (20, 40, 80, 160),
}


@dataclass(frozen=True)
class Point:
    """One measured size: seconds of CPU time a round."""

    size: int
    seconds: float
    memory: float = 0.0


def anonymous() -> float:
    """GB of anonymous memory of this process, where the kernel tells (Linux)."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return math.nan
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1e6


def table(users: int, records: int, features: int, file: Path | None = None) -> Records:
    """Rows of length 1 with random labels; in a file, one block of rows after the other."""
    stream = np.random.default_rng(0)
    count = users * records
    if file is None:
        x = np.empty((count, features), dtype=np.float32)
    else:
        x = np.memmap(file, np.float32, "w+", shape=(count, features))
    block = stream.standard_normal((min(count, 20_000), features), dtype=np.float32)
    block /= np.linalg.norm(block, axis=1, keepdims=True)
    for start in range(0, count, len(block)):
        part = x[start : start + len(block)]
        part[:] = block[: len(part)]
    labels = torch.from_numpy(stream.integers(0, 10, count))
    return Records(torch.from_numpy(x), labels, torch.arange(users + 1) * records)


def least(algorithm: str, data: Federation, plan: Plan, features: int, repeats: int) -> float:
    """The least CPU time of a round, in seconds."""
    setting = make_run(
        data.roster,
        Logistic(features, 10),
        ALGORITHMS[algorithm](),
        plan,
        Gaussian(clip=1.0, noise=5.0),
    )
    left = rounds_of([setting], data)
    next(left)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        next(left)
        times.append(time.process_time() - start)
    return min(times)


def of_sizes(what: str, repeats: int) -> list[Point]:
    """A series in which one size grows."""
    points = []
    for size in SERIES[what]:
        shape = {**BASE, what: size}
        records = 5 * shape["batch"]
        train, test = (table(shape["participants"], n, shape["features"]) for n in (records, 1))
        plan = Plan(
            rounds=10**6, local_steps=shape["steps"], user_ratio=1.0, data_ratio=0.2,
        )  # fmt: skip
        seconds = least("scaffold", Federation(train, test, 10), plan, shape["features"], repeats)
        points.append(Point(size, seconds))
        print(f"{what} {size}: {1e3 * seconds:.1f} ms", flush=True)
    return points


def of_users(algorithm: str, most: int, repeats: int, folder: Path) -> list[Point]:
    """A series of federations of which ever fewer take part."""
    points = []
    for users in [u for u in (1_000, 10_000, 100_000, 1_000_000) if u <= most]:
        file = folder / "features"
        labels, offsets = torch.zeros(users, dtype=torch.int64), torch.arange(users + 1)
        test = Records(torch.zeros(users, 40), labels, offsets)
        data = Federation(table(users, 20, 40, file), test, 10, mapped=True)
        plan = Plan(
            rounds=10**6, local_steps=10, user_ratio=1_000 / users, data_ratio=0.2,
        )  # fmt: skip
        seconds = least(algorithm, data, plan, 40, repeats)
        points.append(Point(users, seconds, anonymous()))
        print(f"{algorithm}, {users:,} users: {1e3 * seconds:.1f} ms, {anonymous():.2f} GB")
        file.unlink()
    return points


def exponent(points: list[Point]) -> float:
    """The slope of log time against log size."""
    x = np.log([point.size for point in points])
    y = np.log([point.seconds for point in points])
    return float(np.polyfit(x, y, 1)[0])


def report(found: dict[str, list[Point]], out: Path, command: str) -> None:
    """Markdown, JSON and a figure."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ["# How a round grows", "",
             f"Machine: {platform.machine()}, one thread, PyTorch {torch.__version__}; CPU time.",
             "", f"Command: `{command}`.", "",
             "| what grows | sizes | ms a round | exponent, or largest/least | memory, GB |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name, points in found.items():
        sizes = ", ".join(f"{point.size:,}" for point in points)
        times = ", ".join(f"{1e3 * point.seconds:.1f}" for point in points)
        seconds = [point.seconds for point in points]
        users = name.startswith("users")
        law = f"ratio {max(seconds) / min(seconds):.2f}" if users else f"{exponent(points):.2f}"
        memory = f"{max(point.memory for point in points):.2f}" if users else "–"
        lines.append(f"| {name} | {sizes} | {times} | {law} | {memory} |")
    lines += ["", "![growth](growth.png)", ""]
    (out / "growth.md").write_text("\n".join(lines), encoding="utf-8")
    plain = {name: [vars(point) for point in points] for name, points in found.items()}
    (out / "growth.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4))
    for name, points in found.items():
        axes.loglog([p.size for p in points], [1e3 * p.seconds for p in points], "o-", label=name)
    axes.set_xlabel("size")
    axes.set_ylabel("CPU milliseconds a round")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "growth.png", dpi=110)
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[Point]] = {}
    work: list[tuple[str, Callable[[], list[Point]]]] = [
        (what, lambda what=what: of_sizes(what, chosen.repeats)) for what in SERIES
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("scaffold", "scaffold-balanced"):
            work.append(
                (
                    f"users, {name}",
                    lambda name=name: of_users(name, chosen.users, chosen.repeats, Path(folder)),
                )
            )
        for name, series in work:
            found[name] = series()
    flags = f"--users {chosen.users} --repeats {chosen.repeats}"
    report(found, chosen.out, f"python benchmarks/growth.py --out FOLDER {flags}")


if __name__ == "__main__":
    main()
