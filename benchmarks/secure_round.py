"""A simulated round with secure sums next to FedAvg's own, one local step each: median of CPU time.

OMP_NUM_THREADS=1 python benchmarks/secure_round.py
"""

from __future__ import annotations

import statistics
import time

import torch
from going import rounds_of

from dpscaffold import Gaussian, Logistic, Mlp, Plan, fedavg, synthetic
from dpscaffold.config import Secure, make_run

CASES = {"logistic, 100 users": (100, Logistic(40, 10)), "network, 30 users": (30, Mlp(40, 10))}


def main() -> None:
    """One line for each case."""
    torch.set_num_threads(1)
    for name, (users, task) in CASES.items():
        data = synthetic(alpha=5, beta=5, users=users, records=5000)
        plan = Plan(rounds=50, local_steps=1, user_ratio=1.0, seed=1)
        going, times = {}, {None: [], Secure(1): []}
        for secure in times:
            privacy = Gaussian(1.0, 2.0, "poisson")
            run = make_run(data.roster, task, fedavg(), plan, privacy, secure=secure)
            going[secure] = rounds_of([run], data)
            next(going[secure])
        for _ in range(10):
            for secure, one in going.items():
                began = time.process_time()
                next(one)
                times[secure].append(time.process_time() - began)
        plain, summed = (1e3 * statistics.median(found) for found in times.values())
        print(f"{name}: {plain:.1f} ms, secure {summed:.1f} ms, ratio {summed / plain:.2f}")


if __name__ == "__main__":
    main()
