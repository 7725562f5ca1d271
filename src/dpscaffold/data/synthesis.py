"""The paper's synthetic federation, with heterogeneity as two dials."""

from __future__ import annotations

import math

import numpy as np
import torch

from dpscaffold.checks import at_least, number, whole
from dpscaffold.data.pool import held_out_size
from dpscaffold.data.prepared import Standardised, UnitNorm, applied
from dpscaffold.data.streams import DRAWS, LAW, user_stream
from dpscaffold.errors import BadInput
from dpscaffold.federation import Federation, Records
from dpscaffold.federation.schema import Target


def synthetic(
    alpha: float = 0.0,
    beta: float = 0.0,
    users: int = 100,
    records: int = 5000,
    dimension: int = 40,
    classes: int = 10,
    label_noise: float = 0.05,
    iid: bool = False,
    size_spread: float = 0.0,
    test_ratio: float = 0.2,
    seed: int = 0,
) -> Federation:
    """The paper's synthetic federation: users with different models (α) and features (β).

    User i has W_i ~ N(u_i, Id) and b_i ~ N(u'_i, Id) with u_i, u'_i ~ N(0, α·Id); features
    X ~ N(v_i, Σ) with Σ_jj = j^{−1.2}, v_i ~ N(B_i, Id) and B_i ~ N(0, β·Id); labels argmax(W_iᵀx +
    b_i). (0, 0) is still heterogeneous. Features are standardised with the mean and deviation of
    all users' *training* records pooled, then every row is scaled to unit norm. A classifier adds
    its own bias.

    Generation follows the appendix "Synthetic Data Generation" of the paper, after Li et al. 2020.

    Args:
        alpha: α, how much the users' models differ.
        beta: β, how much the users' features differ.
        users: M, the number of users.
        records: The records of each user, training and test together.
        dimension: The number of features.
        classes: The number of classes.
        label_noise: The fraction of labels that are redrawn uniformly.
        iid: Give all users the same W, b and v.
        size_spread: Make sizes log-normal with this σ around ``records``.
        test_ratio: The share of each user's records that is kept for testing.
        seed: The seed of the data.

    >>> synthetic(alpha=5, beta=5, users=3, records=50)
    Federation(synthetic (5, 5): 3 users, 40 train records each, 40 features, 10 classes)
    """
    for name, value in (("alpha", alpha), ("beta", beta), ("size_spread", size_spread)):
        at_least(f"data.{name}", value, 0)
    for name, value, least in (
        ("users", users, 1),
        ("records", records, 2),
        ("dimension", dimension, 1),
        ("classes", classes, 2),
    ):
        whole(f"data.{name}", value, least)
    whole("data.seed", seed, 0)
    if not 0 <= number("data.label_noise", label_noise) <= 1:
        raise BadInput("out-of-range", f"data.label_noise is {label_noise}; it must lie in [0, 1]")
    if not 0 < number("data.test_ratio", test_ratio) < 1:
        raise BadInput("out-of-range", f"data.test_ratio is {test_ratio}; it must lie in (0, 1)")

    deviations = np.arange(1, dimension + 1) ** -0.6
    train, test = [], []
    for user in range(users):
        stream, law = user_stream(seed, DRAWS, user), user_stream(seed, LAW, 0 if iid else user)
        weights = law.normal(law.normal(0, math.sqrt(alpha), (dimension, classes)), 1)
        bias = law.normal(law.normal(0, math.sqrt(alpha), classes), 1)
        centre = law.normal(law.normal(0, math.sqrt(beta), dimension), 1)
        size = records
        if size_spread > 0:
            size = max(
                2,
                round(
                    records * math.exp(size_spread * stream.standard_normal() - size_spread**2 / 2)
                ),
            )
        x = centre + deviations * stream.standard_normal((size, dimension))
        y = (x @ weights + bias).argmax(axis=1)
        redrawn = stream.random(size) < label_noise
        y[redrawn] = stream.integers(0, classes, int(redrawn.sum()))
        held_out = held_out_size(size, test_ratio)
        train.append((x[held_out:].astype(np.float32), y[held_out:]))
        test.append((x[:held_out].astype(np.float32), y[:held_out]))

    pooled = np.concatenate([x for x, _ in train])
    mean, deviation = pooled.mean(axis=0, dtype=np.float64), pooled.std(axis=0, dtype=np.float64)
    sentence = (
        "Features were standardised with the pooled mean and deviation of all training records, "
        "without noise."
    )
    standardised = Standardised(mean, np.maximum(deviation, 1e-12), "unprotected", sentence)
    kind = "synthetic iid" if iid else f"synthetic ({alpha:g}, {beta:g})"
    raw = Federation(_table(train), _table(test), Target.numbered(classes), title=kind)
    return applied(raw, (standardised, UnitNorm()))


def _table(parts: list[tuple[np.ndarray, np.ndarray]]) -> Records:
    return Records.from_users(
        [torch.from_numpy(x) for x, _ in parts], [torch.from_numpy(y) for _, y in parts]
    )
