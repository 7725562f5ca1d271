"""An evaluation with and without gradient dissimilarity, next to a round of training.

    python benchmarks/evaluation.py [--users 60] [--records 1000] [--repeats 3]

A network is evaluated without, unless ``task.metrics`` names "dissimilarity".
The networks are the paper's for MNIST (60 features, 200 hidden units, 10 classes) and the
convolutional module of ``module.py`` (28 × 28 features); a round has 20 participants with 10 steps
on a fifth of their records. The three take turns, one thread, and the least CPU time of all repeats
counts, so that other programs matter less.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from going import rounds_of
from module import network

from dpscaffold import Gaussian, Mlp, ModuleTask, Plan, scaffold, synthetic
from dpscaffold.config import make_run
from dpscaffold.tasks import Task
from dpscaffold.training.evaluator import Evaluator, Measures


def seconds(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def measure(task: Task, features: int, asked: argparse.Namespace) -> None:
    """Time the three on a federation of this many features, and print them."""
    federation = synthetic(users=asked.users, records=asked.records, dimension=features, classes=10)
    plan = Plan(rounds=1, local_steps=10, user_ratio=min(1.0, 20 / asked.users), data_ratio=0.2)
    setting = make_run(federation.roster, task, scaffold(), plan, Gaussian(clip=1.0, noise=10.0))
    params, device = task.initial(0), torch.device("cpu")
    evaluators = {
        name: Evaluator(federation, task, 0.0, device, measures=Measures((), compared))
        for name, compared in (("with", True), ("without", False))
    }
    left = rounds_of([setting], federation)
    work: dict[str, Callable[[], object]] = {
        "an evaluation with dissimilarity": lambda: evaluators["with"](params),
        "an evaluation without": lambda: evaluators["without"](params),
        "a round": lambda: next(left),
    }
    best = dict.fromkeys(work, float("inf"))
    for _ in range(asked.repeats):
        for name, call in work.items():
            best[name] = min(best[name], seconds(call))
    print(f"{task.name}, {task.parameters} parameters")
    for name, value in best.items():
        print(f"  {name}: {value:.2f} s of CPU time")
    full, short, _ = best.values()
    print(f"  without dissimilarity an evaluation takes {short / full:.2f} of the time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=60)
    parser.add_argument("--records", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    measure(Mlp(60, 10, 200), 60, asked)
    measure(ModuleTask(network(), (1, 28, 28)), 784, asked)


if __name__ == "__main__":
    main()
