"""dpscaffold: private federated learning on heterogeneous data.

>>> from dpscaffold import Gaussian, Logistic, Plan, scaffold, synthetic, train
>>> federation = synthetic(alpha=5, beta=5, users=20, records=200)
>>> plan = Plan(rounds=3, local_steps=5)
>>> result = train(federation, Logistic(40, 10), scaffold(), plan, Gaussian(clip=1.5, noise=10))
>>> result.ended
'completed'
"""

from dpscaffold.accounts import Budget
from dpscaffold.algorithms import ALGORITHMS, Algorithm, fedavg, fedprox, fedsgd, scaffold, scaffold_warm
from dpscaffold.data.synthetic import synthetic
from dpscaffold.errors import BadInput, Diverged
from dpscaffold.federation import Federation, Records
from dpscaffold.local import Gaussian
from dpscaffold.plan import Plan
from dpscaffold.tasks import Logistic, Mlp, ModuleTask, Task
from dpscaffold.training import Result, train

__version__ = "0.1.0"

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
