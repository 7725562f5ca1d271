"""The central optimum x* of a convex task: what an algorithm with all data in one place would
reach."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits
from torch import Tensor

from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation
from dpscaffold.tasks import Batch, Task
from dpscaffold.training.evaluator import Evaluator, Metrics

#: Records whose losses are added up together.
BLOCK = 1 << 16


@dataclass(frozen=True)
class Optimum:
    """x*, F(x*), the norm of ∇F there, and its test metrics."""

    params: Tensor
    loss: float
    gradient_norm: float
    metrics: Metrics


def require_convex(task: Task) -> None:
    """Refuse a task that has no central optimum."""
    if not task.convex:
        raise BadInput(
            "not-convex",
            f"the task {task.name!r} is not convex, so it has no central optimum to solve for; "
            f"leave it out",
        )


def solve(federation: Federation, task: Task, regularisation: float) -> Optimum:
    """Minimise F(x) = (1/M)ΣF_i(x) + (λ/2)‖x‖² to ‖∇F‖ ≤ 1e-7 in double precision.

    F weighs users equally, whatever their sizes, as the paper's objective does. Only convex tasks
    have one optimum to speak of; others are refused.

    >>> from dpscaffold import synthetic, Logistic
    >>> federation = synthetic(users=4, records=60, seed=1)
    >>> optimum = solve(federation, Logistic(40, 10), regularisation=1e-2)
    >>> optimum.gradient_norm < 1e-6
    True
    """
    require_convex(task)
    # L-BFGS on the weighted sum over all records, in blocks.
    train = federation.train
    share = torch.repeat_interleave(1.0 / (train.users * train.sizes.double()), train.sizes)
    columns = (train.features, train.labels, share)
    parts = zip(*(column.split(BLOCK) for column in columns), strict=True)
    blocks = [(task.prepare(x.double()), labels, weight) for x, labels, weight in parts]

    def value_and_gradient(flat: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.from_numpy(flat)
        value = 0.5 * regularisation * float(x @ x)
        gradient = regularisation * x
        for features, labels, weight in blocks:
            value += float(task.losses(x, features, labels) @ weight)
            batch = Batch(features[None], labels[None], weight[None])
            gradient = gradient + task.clipped_sum(x[None], batch, None).total[0]
        return value, gradient.numpy()

    start = task.initial(0).double().numpy()
    options = {"maxiter": 5000, "maxfun": 10000, "maxcor": 30, "gtol": 1e-9, "ftol": 1e-16}
    with threadpool_limits(1, "blas"):  # its threads and PyTorch's would wait for each other
        found = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options=options)
    params = torch.from_numpy(found.x)
    evaluator = Evaluator(federation, task, regularisation, torch.device("cpu"))
    norm = float(np.linalg.norm(value_and_gradient(found.x)[1]))
    return Optimum(params, float(found.fun), norm, evaluator.test_side(params.float()))
