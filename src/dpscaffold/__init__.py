"""dpscaffold: private federated learning on heterogeneous data.

>>> from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic, train
>>> federation = synthetic(alpha=5, beta=5, users=20, records=200)
>>> plan = Plan(rounds=3, local_steps=5)
>>> result = train(federation, Logistic(40, 10), scaffold(), plan, Gaussian(clip=1.5, noise=10))
>>> result.ended
'completed'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Where each public name lives. Names are imported when first used, so that commands which need no
#: training (accounting, help) start without loading PyTorch.
_HOMES = {
    "ALGORITHMS": "algorithms",
    "Algorithm": "algorithms",
    "BadInput": "errors",
    "Budget": "accounts",
    "Diverged": "errors",
    "Federation": "federation",
    "Gaussian": "local",
    "Logistic": "tasks",
    "Mlp": "tasks",
    "ModuleTask": "tasks",
    "Plan": "plan",
    "Records": "federation",
    "Result": "training",
    "Task": "tasks",
    "fedavg": "algorithms",
    "fedprox": "algorithms",
    "fedsgd": "algorithms",
    "scaffold": "algorithms",
    "scaffold_warm": "algorithms",
    "synthetic": "data.synthetic",
    "train": "training",
}

if TYPE_CHECKING:
    from dpscaffold.accounts import Budget
    from dpscaffold.algorithms import (
        ALGORITHMS,
        Algorithm,
        fedavg,
        fedprox,
        fedsgd,
        scaffold,
        scaffold_warm,
    )
    from dpscaffold.data.synthetic import synthetic
    from dpscaffold.errors import BadInput, Diverged
    from dpscaffold.federation import Federation, Records
    from dpscaffold.local import Gaussian
    from dpscaffold.plan import Plan
    from dpscaffold.tasks import Logistic, Mlp, ModuleTask, Task
    from dpscaffold.training import Result, train

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "BadInput",
    "Budget",
    "Diverged",
    "Federation",
    "Gaussian",
    "Logistic",
    "Mlp",
    "ModuleTask",
    "Plan",
    "Records",
    "Result",
    "Task",
    "__version__",
    "fedavg",
    "fedprox",
    "fedsgd",
    "scaffold",
    "scaffold_warm",
    "synthetic",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dpscaffold' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"dpscaffold.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
