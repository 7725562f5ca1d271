"""How long a plan takes, in processor seconds and as a ratio to one training.

    python benchmarks/plan_time.py [--size synthetic|network] [--threads 1]

The sizes are those of the paper: 100 users × 4000 records of 40 features, at most 50 local steps
and 20 participants; and the network 60 → 200 → 10 for 60 users × 800 records, at most ten local
steps. T is at most 400. The ratio is to one run of 100 rounds of ten steps, 12 participants and
batches of 32 on a surrogate, timed on the same machine before and after: machines and their load
differ, ratios less.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

import dpscaffold
from dpscaffold.config import parse
from dpscaffold.planning import Facts, Goal, Limits
from dpscaffold.planning.recommendation import Preset, _candidates
from dpscaffold.planning.shape import Fidelity
from dpscaffold.planning.trial import Bench
from dpscaffold.training.events import StackBegun, silence

SIZES = {
    "synthetic": (Facts.of(users=100, records=4000, features=40, classes=10), Limits(400, 50, 20)),
    "network": (Facts.of(users=60, records=800, features=60, classes=10), Limits(400, 10, 12)),
}


def preset_of(size: str) -> Preset:
    """The linear model, or the network."""
    task = {"kind": "mlp", "hidden": 200} if size == "network" else {"kind": "logistic"}
    return Preset(task=parse({"task": task}).task.build(SIZES[size][0]))


def one_training(size: str) -> float:
    """Processor seconds of one run on a surrogate."""
    facts, limits = SIZES[size]
    first = _candidates(facts, Goal(1.0), replace(limits, local_steps=10), preset_of(size))[0]
    fidelity = Fidelity(participants=12, steps_in_all=1000)
    bench = Bench(replace(facts.guess, own_models=False), torch.device("cpu"), silence, (0,))
    begun = time.process_time()
    replace(bench, fidelity=fidelity).run([(first, 0.3)])
    return (time.process_time() - begun) / 2  # one easy and one hard surrogate


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="synthetic")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--epsilon", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    (facts, limits), preset = SIZES[arguments.size], preset_of(arguments.size)
    parts: dict[str, float] = {}
    clock = [time.process_time(), "solving for the noise"]

    def tell(event: object) -> None:
        if isinstance(event, StackBegun):
            now = time.process_time()
            parts[clock[1]] = parts.get(clock[1], 0.0) + now - clock[0]
            clock[:] = [now, event.title]

    before, begun, wall = one_training(arguments.size), time.process_time(), time.perf_counter()
    clock[0] = begun
    found = dpscaffold.plan(facts, Goal(arguments.epsilon), limits, preset, tell=tell)
    seconds, wall = time.process_time() - begun, time.perf_counter() - wall
    parts[clock[1]] = parts.get(clock[1], 0.0) + time.process_time() - clock[0]
    one = (before + one_training(arguments.size)) / 2
    for title, spent in parts.items():
        print(f"{spent:7.1f} s  {title}")
    plan = found.setting.plan
    print(
        f"{arguments.size}: {seconds:.0f} processor seconds, {wall:.0f} s by the clock, "
        f"{seconds / one:.0f} times one training ({one:.2f} s); "
        f"{found.setting.algorithm.name}, K = {plan.local_steps}, T = {plan.rounds}, "
        f"averaging {plan.averaging}, η₀ = {found.choice.rate:g}, score {found.choice.score:.3f}"
    )


if __name__ == "__main__":
    main()
