"""A federation larger than memory should be: 100,000 users × 200 records × 100 features, 8 GB on
disk, or a million users × 20 records × 40 features.

Writes it with a ``FederationWriter`` (unless the folder is there), maps it, describes it and trains
a few rounds of DP-SCAFFOLD, while a thread samples this process's anonymous memory (mapped pages,
which the system may drop at any time, do not count).

    python benchmarks/scale.py --folder FOLDER [--users 100000] [--rounds 3] [--keep]
    python benchmarks/scale.py --folder FOLDER --users 1000000 --records 25 --dimension 40 \\
        --user-ratio 0.001 --algorithms scaffold scaffold-balanced

A fifth of the records is held out. At the end the most that the whole process ever held is printed,
mapped pages included (``ru_maxrss``).
"""

from __future__ import annotations

import argparse
import resource
import shutil
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpscaffold import Gaussian, Logistic, Plan, train
from dpscaffold.algorithms import ALGORITHMS
from dpscaffold.data import FederationWriter, describe, load

if TYPE_CHECKING:
    from collections.abc import Iterator

CLASSES = 10


def anonymous() -> int:
    """Bytes of anonymous memory of this process (Linux)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel reports no anonymous memory")


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Print how long a stage took and the most anonymous memory seen during it, sampled every 20
    ms."""
    peak, done = [anonymous()], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], anonymous())

    thread = threading.Thread(target=sample)
    start = time.perf_counter()
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    print(
        f"{what}: {time.perf_counter() - start:.1f} s, anonymous memory at most "
        f"{peak[0] / 1e9:.2f} GB",
        flush=True,
    )


def write(folder: Path, users: int, records: int, dimension: int) -> None:
    """Users with shifted features and a common linear rule, unit-norm rows."""
    rng = np.random.default_rng(0)
    rule = rng.standard_normal((dimension, CLASSES), dtype=np.float32)
    held_out = records // 5
    with FederationWriter(folder, CLASSES, title=f"{users:,} users") as writer:
        for _ in range(users):
            x = rng.standard_normal((records, dimension), dtype=np.float32)
            x += rng.standard_normal(dimension, dtype=np.float32)
            x /= np.linalg.norm(x, axis=1, keepdims=True)
            y = (x @ rule).argmax(axis=1)
            writer.append((x[held_out:], y[held_out:]), (x[:held_out], y[:held_out]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, required=True, help="where the federation is written"
    )
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--dimension", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--user-ratio", type=float, default=0.002)
    parser.add_argument("--algorithms", nargs="+", default=["scaffold"], choices=ALGORITHMS)
    parser.add_argument("--keep", action="store_true", help="leave the folder for another time")
    chosen = parser.parse_args()

    if not chosen.folder.exists():
        needed = 4 * chosen.users * chosen.records * chosen.dimension * 1.05
        free = shutil.disk_usage(chosen.folder.absolute().parent).free
        if free < needed:
            parser.error(f"{needed / 1e9:.0f} GB are needed and {free / 1e9:.0f} GB are free")
        with watched("write"):
            write(chosen.folder, chosen.users, chosen.records, chosen.dimension)
    with watched("load"):
        federation = load(chosen.folder)
    print(federation)
    with watched("describe"):
        description = describe(federation)
    print(f"label heterogeneity {description.label_heterogeneity:.3f}")
    task = Logistic(federation.dimension, federation.classes)
    plan = Plan(
        rounds=chosen.rounds,
        local_steps=10,
        user_ratio=chosen.user_ratio,
        data_ratio=0.2,
        learning_rate=1.0,
        evaluate_every=chosen.rounds,
    )
    for name in chosen.algorithms:
        with watched(f"train {chosen.rounds} rounds of {name} with noise"):
            result = train(
                federation, task, ALGORITHMS[name](), plan, Gaussian(clip=1.5, noise=10.0)
            )
        print({name: value for name, value in result.final.items() if isinstance(value, float)})
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"the whole process: at most {most:.2f} GB resident, mapped pages included")
    if not chosen.keep:
        shutil.rmtree(chosen.folder)


if __name__ == "__main__":
    main()
