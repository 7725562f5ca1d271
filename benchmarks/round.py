"""One DP-SCAFFOLD round next to its peers: ratios, all sides in one process, interleaved, best of
several.

    python benchmarks/round.py            # the full setting: 20 users × 50 steps × batch 800, 41 ×
    10 weights

Three sides do the same round: ours (sampling and noise included), a per-user loop with Opacus
(``GradSampleModule`` in hook mode and ``DPOptimizer``), and the bare work: the row gather, the two
batched products and the softmax of the same shapes called directly in torch, in the layout that is
fastest here.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable

import torch
from going import rounds_of

from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic
from dpscaffold.config import make_run

USERS, RECORDS, STEPS, FEATURES, CLASSES = 100, 5000, 50, 40, 10


def ours() -> Callable[[], object]:
    """A round of the engine."""
    data = synthetic(alpha=5, beta=5, users=USERS, records=RECORDS)
    setting = make_run(
        data.roster,
        Logistic(FEATURES, CLASSES),
        scaffold(),
        Plan(rounds=10**6, local_steps=STEPS, user_ratio=0.2, data_ratio=0.2, learning_rate=0.5),
        Gaussian(clip=1.5, noise=60.0),
    )
    left = rounds_of([setting], data)
    return lambda: next(left)


def bare(participants: int = 20, batch: int = 800) -> Callable[[], object]:
    """Gather, two products and a softmax per step, nothing else."""
    records = USERS * RECORDS * 4 // 5
    features = torch.randn(records, FEATURES + 1)
    weights = torch.randn(participants, CLASSES, FEATURES + 1) * 0.1
    index = torch.randint(0, records, (STEPS, participants * batch))

    def once() -> None:
        for k in range(STEPS):
            rows = features.index_select(0, index[k]).view(participants, batch, FEATURES + 1)
            errors = torch.softmax(torch.bmm(weights, rows.transpose(1, 2)), dim=1)
            torch.bmm(errors, rows)

    return once


def opacus(participants: int = 20, batch: int = 800) -> Callable[[], object]:
    """The same round, one user after the other, with Opacus doing the clipping and the noise."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    size = RECORDS * 4 // 5
    features = torch.randn(participants, size, FEATURES)
    features /= features.norm(dim=2, keepdim=True)
    labels = torch.randint(0, CLASSES, (participants, size))
    model = torch.nn.Linear(FEATURES, CLASSES)
    wrapped = GradSampleModule(model)
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    optimizer = DPOptimizer(
        inner, noise_multiplier=120.0, max_grad_norm=1.5, expected_batch_size=batch
    )
    loss = torch.nn.CrossEntropyLoss()
    corrections = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(participants)]

    def once() -> None:
        for user in range(participants):
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            for _ in range(STEPS):
                chosen = torch.randperm(size)[:batch]
                optimizer.zero_grad()
                loss(wrapped(features[user][chosen]), labels[user][chosen]).backward()
                optimizer.pre_step()
                for p, correction in zip(model.parameters(), corrections[user], strict=True):
                    p.grad += correction
                inner.step()

    return once


def best_times(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The best time of each side in seconds; the sides take turns, so that noise hits them
    alike."""
    best = dict.fromkeys(sides, float("inf"))
    for side in sides.values():
        side()
    for _ in range(repeats):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    warnings.filterwarnings("ignore")
    best = best_times({"ours": ours(), "bare": bare(), "opacus": opacus()}, repeats)
    report = {
        "threads": torch.get_num_threads(),
        "milliseconds": {name: round(1000 * seconds, 1) for name, seconds in best.items()},
        "opacus / ours": round(best["opacus"] / best["ours"], 2),
        "ours / bare": round(best["ours"] / best["bare"], 2),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
