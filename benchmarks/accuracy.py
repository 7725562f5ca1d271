"""The full synthetic setting over data seeds 0, 1, 2: test accuracy next to that of the central
optimum.

    python benchmarks/accuracy.py [--device cuda] [--out accuracy.json]

M = 100, R = 5000, l = s = 0.2, K = 50, T = 400, C = 1.5 fixed, σ_g = 60, λ = 5·10⁻³; η₀ = 0.5
except where a line says "best of". The seeds of one line run stacked in one simulator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from dpscaffold import Gaussian, Logistic, Plan, fedavg, scaffold, synthetic
from dpscaffold.config import make_run
from dpscaffold.training.optimum import solve
from dpscaffold.training.stack import Schedule, train_stack

SEEDS = (0, 1, 2)
NOISE = Gaussian(clip=1.5, noise=60.0)


def plan(rate: float, rounds: int) -> Plan:
    """The setting's plan at one step size."""
    return Plan(rounds=rounds, local_steps=50, user_ratio=0.2, data_ratio=0.2, learning_rate=rate)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    task = Logistic(40, 10)
    report: dict[str, object] = {}
    for level in (5.0, 0.0):
        federations = [synthetic(level, level, seed=seed) for seed in SEEDS]
        optima = [
            solve(federation, task, Plan().regularisation).metrics["test_accuracy"]
            for federation in federations
        ]
        lines = [("DP-SCAFFOLD", scaffold(), NOISE, 0.5)]
        if level == 5.0:
            lines.append(("SCAFFOLD", scaffold(), None, 0.5))
            lines += [
                (f"DP-FedAvg η₀={rate:g}", fedavg(), NOISE, rate) for rate in (0.125, 0.5, 2.0)
            ]
        for name, algorithm, privacy, rate in lines:
            start = time.perf_counter()
            settings = [
                make_run(f.roster, task, algorithm, plan(rate, arguments.rounds), privacy)
                for f in federations
            ]
            courses = train_stack(settings, federations, Schedule(late=10), arguments.device)
            accuracy = [course.late("test_accuracy") or 0.0 for course in courses]
            below = [100 * (best - mine) for best, mine in zip(optima, accuracy, strict=True)]
            key = f"({level:g}, {level:g}) {name}"
            report[key] = {
                "accuracy": [round(a, 4) for a in accuracy],
                "optimum": [round(a, 4) for a in optima],
                "points below the optimum": [round(b, 2) for b in below],
                "mean points below": round(statistics.mean(below), 2),
                "seconds": round(time.perf_counter() - start, 1),
            }
            print(key, json.dumps(report[key], ensure_ascii=False), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
