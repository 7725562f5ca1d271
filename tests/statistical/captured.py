"""The noise that an engine really adds, captured where a step receives it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import norm
from small import final, setting
from toys import Linear, vectors

from dpscaffold.config.gaussian import Gaussian
from dpscaffold.engine.work import Work

#: The chance of a false alarm.
ALARM = 1e-6
#: Numbers in a noise vector.
SIZE = 4000


def uncorrelated(one: np.ndarray, two: np.ndarray) -> bool:
    """Whether two samples of independent normals show no correlation (Fisher's interval)."""
    r = np.corrcoef(one.ravel(), two.ravel())[0, 1]
    return bool(abs(r) < np.tanh(norm.isf(ALARM / 2) / np.sqrt(one.size - 3)))


def queries(
    engine: str, algorithm: str, privacy: Gaussian, sizes: tuple[int, ...], **plan: object
) -> np.ndarray:
    """The noised gradients H̃ of records whose gradient is zero: (rounds, K, users, P) of pure
    noise."""
    data = vectors([torch.zeros(n, SIZE) for n in sizes])
    plan = {"rounds": 3, "user_ratio": 1.0, "regularisation": 0.0, "warm_rounds": 1} | plan
    run = setting(algorithm, Linear(SIZE), privacy, data, **plan)
    seen: dict[int, list[torch.Tensor]] = {}

    def watched(made):
        def direction(gradient, y, at):
            seen.setdefault(int(at.broadcast.round), []).append(gradient.clone().cpu())
            return made.direction(gradient, y, at)

        return made.replace(direction=direction, warm_up=made.warm_up and watched(made.warm_up))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "key", None)  # a recorded round shows nothing on its way
        final(engine, replace(run, algorithm=watched(run.algorithm)))
    steps, users = run.plan.local_steps, len(sizes)
    rounds = []
    for values in seen.values():
        stacked = torch.stack(values)
        by_user = stacked.view(users, steps, SIZE).transpose(0, 1) if engine == "loop" else stacked
        rounds.append(by_user.numpy())
    return np.stack(rounds)
