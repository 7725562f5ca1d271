"""What a clipped mean costs and what it is good for: accuracy with honest and with hostile users.

    python benchmarks/clipped_mean.py [--seeds 3] [--rounds 60] [--factor -10]

Logistic regression on the synthetic data of the paper with 20 users, all of whom take part. Hostile
users multiply their moves by ``--factor``: none of them, one, or four. Printed are
the test accuracies of the last model, the mean over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

from dpscaffold import ALGORITHMS, Gaussian, Logistic, Plan, synthetic, train
from dpscaffold.algorithms import Algorithm, Upload

USERS = 20


def hostile(algorithm: Algorithm, marked: int, factor: float) -> Algorithm:
    """The algorithm, in which the first ``marked`` rows of a stack of users send other moves."""
    honest = algorithm.finish

    def finish(local, at):
        upload, kept = honest(local, at)
        moves = upload.params.clone()
        moves[:marked] *= factor
        return Upload(moves, upload.totals), kept

    return replace(algorithm, finish=finish)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--factor", type=float, default=-10.0)
    given = parser.parse_args()
    print(f"{'algorithm':<10} {'noise':>5} {'hostile':>7} {'mean':>6} {'clipped':>7}")
    for name in ("fedavg", "scaffold"):
        for noise in (0.0, 5.0):
            for marked in (0, 1, 4):
                scores = [
                    accuracy(name, noise, marked, aggregation, given)
                    for aggregation in ("mean", "clipped")
                ]
                shown = " ".join(f"{100 * score:>6.1f}" for score in scores)
                print(f"{name:<10} {noise:>5g} {marked:>7} {shown}", flush=True)


def accuracy(
    name: str, noise: float, marked: int, aggregation: str, given: argparse.Namespace
) -> float:
    """The mean test accuracy over the seeds."""
    found = []
    for seed in range(given.seeds):
        data = synthetic(1.0, 1.0, users=USERS, records=1000, seed=seed)
        plan = Plan(given.rounds, local_steps=10, user_ratio=1.0, data_ratio=0.2, seed=seed,
                    aggregation=aggregation)  # fmt: skip
        privacy = Gaussian(clip=1.0, noise=noise) if noise else None
        algorithm = hostile(ALGORITHMS[name](), marked, given.factor)
        found.append(
            train(
                data, Logistic(data.dimension, data.classes), algorithm, plan, privacy, chunk=USERS
            )
        )
    return statistics.mean(result.history[-1].metrics["test_accuracy"] for result in found)


if __name__ == "__main__":
    main()
