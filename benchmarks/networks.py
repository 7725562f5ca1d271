"""Rounds of a network and of FEMNIST's shape on a CPU, next to their bare work, and what they spend
their time on.

    python benchmarks/networks.py [--repeats 8]

CPU time of one thread; the sides take turns, and the best of all repeats counts. The bare work is
the row gather and the products of the same shapes, forward and back, without privacy.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from going import rounds_of
from torch.profiler import ProfilerActivity, profile

from dpscaffold import Gaussian, Logistic, Mlp, Plan, scaffold, synthetic
from dpscaffold.config import make_run
from dpscaffold.tasks import Task

USERS, STEPS, BATCH, INPUTS = 4, 5, 400, 784


def ours(task: Task, classes: int) -> Callable[[], object]:
    """A DP-SCAFFOLD round of four users."""
    data = synthetic(
        alpha=1, beta=1, users=2 * USERS, records=1250, dimension=INPUTS, classes=classes
    )
    plan = Plan(rounds=10**6, local_steps=STEPS, user_ratio=0.5, data_ratio=0.4)
    run = make_run(data.roster, task, scaffold(), plan, Gaussian(clip=1.0, noise=30.0))
    left = rounds_of([run], data)
    return lambda: next(left)


def bare(widths: list[int]) -> Callable[[], object]:
    """The gather and the products of layers of these widths."""
    records = torch.randn(8000, widths[0])
    layers = [torch.randn(USERS, out, given) * 0.05 for given, out in pairwise(widths)]
    index = torch.randint(0, len(records), (STEPS, USERS * BATCH))

    def once() -> None:
        for k in range(STEPS):
            rows = records.index_select(0, index[k]).view(USERS, BATCH, -1).transpose(1, 2)
            seen = [rows]
            for layer in layers:
                last = layer is layers[-1]
                out = torch.bmm(layer, seen[-1])
                seen.append(torch.softmax(out, 1) if last else out.relu())
            error = seen.pop()
            for layer, given in zip(reversed(layers), reversed(seen), strict=True):
                torch.bmm(error, given.transpose(1, 2))
                if given is not rows:
                    error = torch.bmm(layer.transpose(1, 2), error) * (given > 0)

    return once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print("| round | ours, ms a user-step | bare, ms | ratio | shares of ours |")
    print("|---|---|---|---|---|")
    for name, task, widths in (
        ("network 784-200-10", Mlp(INPUTS, 10, hidden=200), [INPUTS, 200, 10]),
        ("FEMNIST's shape, 784 × 47", Logistic(INPUTS, 47), [INPUTS + 1, 47]),
    ):
        sides = {"ours": ours(task, widths[-1]), "bare": bare(widths)}
        best = dict.fromkeys(sides, float("inf"))
        for turn in range(repeats + 1):
            for side, work in sides.items():
                start = time.process_time()
                work()
                spent = time.process_time() - start
                best[side] = min(best[side], spent) if turn else best[side]
        with profile(activities=[ProfilerActivity.CPU]) as found:
            sides["ours"]()
        events = sorted(found.key_averages(), key=lambda event: -event.self_cpu_time_total)
        total = sum(event.self_cpu_time_total for event in events)
        shares = ", ".join(
            f"{event.key.removeprefix('aten::')} {100 * event.self_cpu_time_total / total:.0f} %"
            for event in events[:4]
        )
        mine, plain = (1e3 * best[side] / (USERS * STEPS) for side in ("ours", "bare"))
        print(f"| {name} | {mine:.2f} | {plain:.2f} | {mine / plain:.2f} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
