"""Algorithms 1 and 2 of the paper in plain numpy, double precision, for softmax regression.

Written from the paper's pseudo-code alone; it shares nothing with the package but the random draws,
which are handed in as functions.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Data = list[tuple[np.ndarray, np.ndarray]]


def gradient(weights: np.ndarray, a: np.ndarray, label: int) -> np.ndarray:
    """∇f of one example: f = −log softmax(W·(a, 1))_label, with W (classes, features + 1)."""
    a = np.append(a.astype(np.float64), 1.0)
    z = weights @ a
    p = np.exp(z - z.max())
    p /= p.sum()
    p[label] -= 1.0
    return np.outer(p, a)


def dp_scaffold(
    data: Data,
    classes: int,
    rounds: int,
    steps: int,
    size: Callable[[int], int],
    step_size: float,
    server_rate: float,
    clip: float,
    sigma: float,
    regularisation: float,
    participants: Callable[[int], np.ndarray],
    batches: Callable[[int, int], list[np.ndarray]],
    noise: Callable[[int, int], Callable[[], np.ndarray]],
    controls: bool = True,
    warm: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x^T, c^T and all c_i^T. ``controls=False`` is Algorithm 2, DP-FedAvg.

    ``size(i)`` is ⌊sR_i⌋, ``batches(t, i)`` the K index sets S_i^k and ``noise(t, i)()`` the next
    standard normal vector. The ℓ2 term λy joins the noised gradient, as if it were part of it.
    """
    shape = (classes, data[0][0].shape[1] + 1)
    x, c = np.zeros(shape), np.zeros(shape)
    own = np.zeros((len(data), *shape))
    for t in range(1, rounds + 1):
        chosen = participants(t)
        moves, changes = [], []
        for i in chosen:
            features, labels = data[i]
            y = x.copy()
            drawn, normal = batches(t, i), noise(t, i)
            measured = np.zeros(shape)
            for k in range(steps):
                total = np.zeros(shape)
                for j in drawn[k]:
                    g = gradient(y, features[j], int(labels[j]))
                    total += g / max(1.0, np.sqrt((g**2).sum()) / clip)
                b = size(i)
                h = total / b + (2 * clip / b) * sigma * normal().astype(np.float64).reshape(shape)
                h += regularisation * y
                measured += h / steps
                if t > warm:
                    y = y - step_size * (h - own[i] + c if controls else h)
            if t <= warm:  # the warm start: c_i ← (1/K)Σ H̃(x⁰), and x stays
                new = measured
            else:
                new = own[i] - c + (x - y) / (steps * step_size)
            moves.append(y - x)
            changes.append(new - own[i])
            if controls:
                own[i] = new
        x = x + server_rate * np.mean(moves, axis=0)
        if controls:
            ratio = len(chosen) / len(data)
            c = c + ratio * np.mean(changes, axis=0)
    return x, c, own
