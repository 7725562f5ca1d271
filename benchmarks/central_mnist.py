"""The paper's MNIST network trained centrally, in plain torch: is the architecture good for 98 %?

One party holds the 60,000 training images, as if there were no federation: 60 principal components,
one hidden layer of 200 ReLU units, batches of 500. Accuracy is on MNIST's own 10,000 test images.

    python benchmarks/central_mnist.py [--data-dir FOLDER] [--epochs 100]
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dpscaffold import Federation
from dpscaffold.data import mnist, preprocess


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(dim=1) == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", help="where mnist/ is (else $DPSCAFFOLD_DATA)")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=1.0)
    parser.add_argument("--weight-decay", type=float, default=3e-5)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()

    start = time.perf_counter()
    train, test = (mnist(chosen.data_dir, test) for test in (False, True))
    pairs = [
        (pool.take(np.arange(len(pool))), torch.from_numpy(pool.labels)) for pool in (train, test)
    ]
    federation = preprocess(
        Federation.from_arrays(pairs[:1], pairs[1:], title="MNIST in one place"),
        ["centre", "pca:60", "unit-norm"],
    )
    print(f"{federation} in {time.perf_counter() - start:.1f} s")
    x, y = federation.train.features, federation.train.labels
    torch.set_num_threads(1)  # products this small gain nothing from more
    torch.manual_seed(chosen.seed)
    model = nn.Sequential(nn.Linear(60, 200), nn.ReLU(), nn.Linear(200, 10))
    optimiser = torch.optim.SGD(
        model.parameters(), lr=chosen.learning_rate, momentum=0.9, weight_decay=chosen.weight_decay
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, chosen.epochs)
    for epoch in range(1, chosen.epochs + 1):
        for rows in torch.randperm(len(x)).split(chosen.batch):
            optimiser.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
        schedule.step()
        if epoch % 10 == 0 or epoch == chosen.epochs:
            score = accuracy(model, federation.test.features, federation.test.labels)
            print(
                f"epoch {epoch}: test accuracy {score:.4f}, {time.perf_counter() - start:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
