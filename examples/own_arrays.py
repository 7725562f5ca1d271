"""Your own arrays, your own module: a federation of three sites and a small network.

python examples/own_arrays.py
"""

import numpy as np
import torch

from dpscaffold import Federation, Gaussian, ModuleTask, Plan, scaffold, train

stream = np.random.default_rng(0)


def site(shift: float, records: int) -> tuple[np.ndarray, np.ndarray]:
    """One site's features and labels; sites differ by a shift."""
    x = stream.normal(shift, 1.0, (records, 8)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] > shift).astype(np.int64)


sites = [(0.0, 400), (1.0, 250), (-1.0, 300)]
federation = Federation.from_arrays(
    train=[site(shift, records) for shift, records in sites],
    test=[site(shift, 100) for shift, _ in sites],
    names=["north", "south", "west"],
)
network = ModuleTask(
    torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
)
result = train(
    federation,
    network,
    scaffold(),
    Plan(
        rounds=20,
        local_steps=10,
        user_ratio=1.0,
        data_ratio=0.2,
        learning_rate=0.5,
        weighting="records",
    ),
    Gaussian(clip=1.0, noise=4.0),
)
print(f"test accuracy {result.final['test_accuracy']:.3f}")
print(result.privacy)
