"""What secret noise costs: a round with ciphers and the grid next to one with seeded streams.

    python benchmarks/secret.py [--rounds 20]

Both take the same rounds in turn, in one process, so that a busy machine slows both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise

from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic, train


def main() -> None:
    """Print the median seconds of a round and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    federation = synthetic(alpha=5, beta=5, users=100, records=5000)
    plan = Plan(rounds=6, local_steps=50, evaluate_every=6)
    task, taken = Logistic(40, 10), {False: [], True: []}
    for _ in range(max(1, rounds // 5)):
        for secret in (False, True):
            marks: list[float] = []
            train(
                federation,
                task,
                scaffold(),
                plan,
                Gaussian(clip=1.5, noise=60.0, secret=secret),
                on_round=lambda row, marks=marks: marks.append(time.perf_counter()),
            )
            # The first round warms caches and the last one is evaluated.
            taken[secret] += [after - before for before, after in pairwise(marks[:-1])]
    seeded, secret = (statistics.median(taken[kind]) for kind in (False, True))
    print(
        f"seeded {1e3 * seeded:.1f} ms, secret {1e3 * secret:.1f} ms: {secret / seeded:.2f} times"
    )


if __name__ == "__main__":
    main()
