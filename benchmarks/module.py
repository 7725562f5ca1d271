"""One private step of a small convolutional network next to a step without privacy and Opacus'.

    python benchmarks/module.py [--repeats N] [--threads 2]

All sides work on the same batch of 400 records and 13,066 parameters, clip at 1 and add no noise;
they take turns, and the best of all repeats counts. Opacus (its hooks, and its ghost clipping) is
left out where it is not installed. The clipped sums are compared before anything is timed. Time is
the thread's own CPU time with ``--threads 1``, so that other programs matter less, and wall-clock
time otherwise.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

from dpscaffold.tasks import Batch, ModuleTask

RECORDS, CLIP = 400, 1.0


def network() -> nn.Module:
    """1 × 28 × 28 → two convolutions of stride 2 → 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 10),
    )


def plain_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step without privacy: the gradient of the batch's sum of losses."""
    net = copy.deepcopy(net)

    def step() -> torch.Tensor:
        loss = nn.functional.cross_entropy(net(x), y, reduction="sum")
        found = torch.autograd.grad(loss, list(net.parameters()))
        return torch.cat([value.flatten() for value in found])

    return step


def our_step(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Callable[[], torch.Tensor]:
    """The clipped sum of a ModuleTask."""
    task = ModuleTask(net, tuple(x.shape[1:]))
    params, clip = task.initial(0)[None], torch.tensor([CLIP])
    batch = Batch(x.flatten(1)[None], y[None])
    return lambda: task.clipped_sum(params, batch, clip).total[0]


def opacus_steps(
    net: nn.Module, x: torch.Tensor, y: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """Opacus' hooks and its ghost clipping, each with its own optimiser, or nothing."""
    try:
        from opacus import GradSampleModule
        from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
            GradSampleModuleFastGradientClipping,
        )
        from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    except ImportError:
        return {}
    options = {"noise_multiplier": 0.0, "max_grad_norm": CLIP, "expected_batch_size": 1}
    loss = nn.CrossEntropyLoss(reduction="mean")
    hooked = GradSampleModule(copy.deepcopy(net))
    hooks = DPOptimizer(torch.optim.SGD(hooked.parameters(), lr=0.0), **options)
    fast = GradSampleModuleFastGradientClipping(
        copy.deepcopy(net), max_grad_norm=CLIP, use_ghost_clipping=True
    )
    ghost = DPOptimizerFastGradientClipping(torch.optim.SGD(fast.parameters(), lr=0.0), **options)
    ghost_loss = DPLossFastGradientClipping(fast, ghost, loss)

    def step_of(model: nn.Module, optimiser: object, criterion: object) -> torch.Tensor:
        optimiser.zero_grad()
        criterion(model(x), y).backward()
        optimiser.step()
        return torch.cat([value.grad.flatten() for value in model.parameters()])

    return {
        "Opacus' hooks": lambda: step_of(hooked, hooks, loss),
        "Opacus' ghost clipping": lambda: step_of(fast, ghost, ghost_loss),
    }


def main() -> None:
    """Compare, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    clock = time.thread_time if asked.threads == 1 else time.perf_counter
    net, x, y = network(), torch.randn(RECORDS, 1, 28, 28), torch.randint(0, 10, (RECORDS,))
    steps = {"without privacy": plain_step(net, x, y), "ours": our_step(net, x, y)}
    others = opacus_steps(net, x, y)
    reference = steps["ours"]()
    for name, step in others.items():
        apart = float((step() - reference).norm() / reference.norm())
        print(f"{name} and ours differ by {apart:.1e} of their length")
    steps |= others
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(asked.repeats):
        for name, step in steps.items():
            start = clock()
            step()
            best[name] = min(best[name], clock() - start)
    for name, seconds in best.items():
        ratio, speed = seconds / best["without privacy"], seconds / best["ours"]
        print(f"{name:24} {seconds * 1e3:7.2f} ms  {ratio:5.2f} × plain  {speed:5.2f} × ours")


if __name__ == "__main__":
    main()
