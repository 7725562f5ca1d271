"""A round that also trains a model for each user, next to one of FedAvg: ratios, all sides in one
process, interleaved, best of several.

    python benchmarks/personal_round.py

The setting is that of ``round.py``: 20 users × 50 steps × batch 800, 41 × 10 weights. Goal: 1.05.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

from going import rounds_of
from round import CLASSES, FEATURES, RECORDS, STEPS, USERS, best_times

from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic
from dpscaffold.algorithms import Algorithm
from dpscaffold.algorithms.mean_regularised import mean_regularised
from dpscaffold.config import make_run
from dpscaffold.federation import Federation


def side(data: Federation, algorithm: Algorithm) -> Callable[[], object]:
    """A round of the simulator."""
    plan = Plan(rounds=10**6, local_steps=STEPS, user_ratio=0.2, data_ratio=0.2)
    task = Logistic(FEATURES, CLASSES)
    setting = make_run(data.roster, task, algorithm, plan, Gaussian(clip=1.5, noise=60.0))
    left = rounds_of([setting], data)
    return lambda: next(left)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    data = synthetic(alpha=5, beta=5, users=USERS, records=RECORDS)
    sides = {
        "fedavg": side(data, fedavg()),
        "number": side(data, mean_regularised(fedavg(), 0.5)),
        "auto": side(data, mean_regularised(fedavg(), "auto")),
    }
    best = best_times(sides, parser.parse_args().repeats)
    ratios = {name: round(seconds / best["fedavg"], 3) for name, seconds in best.items()}
    print(json.dumps({"seconds": best, "ratio to FedAvg": ratios}, indent=2))


if __name__ == "__main__":
    main()
