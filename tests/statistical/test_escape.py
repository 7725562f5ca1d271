"""A published account says that noise averages out over a round's local steps. It does not.

On f(y; (a, s)) = −½ay² + s·y a step is y ← (1 + ηa)·y − η(s + noise), so what came first has grown
by ρ = 1 + ηa at every later step, while the other users, who hold records of a = s = 0, add the
noise of one step each. After K steps the canary's share of the sum of m users' moves is

    (Σ ρʲ)² / (Σ ρ²ʲ + (m − 1)·K),  j = 0 … K−1,  in units of one step's,

where the published account has K/m. A claim towards a third party is for every loss, so it must
hold for this one, which is measured here on the real engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from privacy.explicit_pairs import gaussian_epsilon
from small import Trial, uploads
from stated import over_draw

from dpscaffold import Gaussian, Plan, fedavg
from dpscaffold.federation import Federation
from dpscaffold.privacy import describe
from dpscaffold.tasks import Batch, ClippedSum, stacked_scores
from dpscaffold.tasks.base import clip_factors

GAMES, USERS, STEPS, RECORDS = 600, 6, 4, 60
CLIP, NOISE, DELTA, RATE = 0.5, 1.0, 1e-5, 2.0


@dataclass(frozen=True)
class Escaping:
    """f(y; (a, s)) = −½ay² + s·y on one parameter; a record's features are (a, s)."""

    name: str = "escaping"
    parameters: int = 1
    outputs: int = 2
    convex: bool = False
    width: int = 4
    scores_of = stacked_scores

    def prepare(self, features):
        return features

    def initial(self, seed):
        """The ridge, y = 0."""
        return torch.zeros(1)

    def scores(self, params, features):
        return torch.zeros(len(features), 2)

    def losses(self, params, features, labels):
        slope, push = features.unbind(-1)
        return -0.5 * slope * params**2 + push * params

    def clipped_sum(self, params, batch: Batch, clip):
        """The sum of s − ay, each clipped."""
        slope, push = batch.features.unbind(-1)
        gradients = push - slope * params
        factor, bound = clip_factors(gradients.abs(), batch.weight, clip)
        weighted = gradients if factor is None else gradients * factor
        return ClippedSum(weighted.sum(1, keepdim=True), bound)


def share(rate: float, others: int) -> float:
    weights = [rate**j for j in range(STEPS)]
    return sum(weights) ** 2 / (sum(w * w for w in weights) + others * STEPS)


def sums_of_games() -> tuple[np.ndarray, np.ndarray]:
    """How far the sum of a round's moves went in games with the canary and with its opposite, in
    units of the canary in one step's sum."""
    rows = torch.tensor([RATE - 1, 0.0]).repeat(RECORDS, 1)
    inside, outside = rows.clone(), rows.clone()
    inside[0], outside[0] = torch.tensor([0.0, CLIP]), torch.tensor([0.0, -CLIP])
    idle, labels = torch.zeros_like(rows), torch.zeros(RECORDS, dtype=torch.int64)
    others = [(idle, labels)] * (USERS - 1)
    tables = [(inside, labels), *others, (outside, labels), *others]
    test = [(idle[:1], labels[:1])] * len(tables) * GAMES
    data = Federation.from_arrays(tables * GAMES, test, classes=2)
    plan = Plan(
        rounds=1,
        local_steps=STEPS,
        user_ratio=1.0,
        data_ratio=1.0,
        learning_rate=float(STEPS),  # η_l = 1
        regularisation=0.0,
    )
    run = Trial.of(data, Escaping(), fedavg(), plan, Gaussian(CLIP, NOISE))
    [seen] = uploads("simulator", run)
    moves = -seen["move"][:, 0].double().numpy() / (2 * CLIP / RECORDS)
    of_games = moves.reshape(GAMES, 2, USERS).sum(2)
    return of_games[:, 0], of_games[:, 1]


def test_noise_does_not_average_out_over_local_steps():
    """Between the published claim, K steps under the noise of all six users, and what is claimed
    here."""
    inside, outside = sums_of_games()
    apart = inside.mean() - outside.mean()
    deviation = math.sqrt((inside.var() + outside.var()) / 2)
    exact_rate = 1 + (RATE - 1) * (RECORDS - 1) / RECORDS
    expected = math.sqrt(share(exact_rate, USERS - 1)) / NOISE
    assert apart / deviation == pytest.approx(expected, rel=0.15)

    measured = gaussian_epsilon(DELTA, 0.85 * expected)
    published = gaussian_epsilon(DELTA, math.sqrt(STEPS / USERS) / NOISE)
    run = describe(
        rounds=1,
        local_steps=STEPS,
        users=USERS,
        cohort_size=USERS,
        records=RECORDS,
        batch_sizes=RECORDS,
        noise=NOISE,
        delta=DELTA,
        memory=False,
    )
    assert published < measured < over_draw(run)


def test_the_loss_is_clipped_as_it_is_written():
    task, rows = Escaping(), torch.tensor([[2.0, 0.0], [0.0, 0.5], [1.0, -3.0]])
    y = torch.tensor([[0.75], [-0.1]])
    found = task.clipped_sum(y, Batch(rows.expand(2, 3, 2), torch.zeros(2, 3)), torch.ones(2))
    for k in range(2):
        at = y[k].clone().requires_grad_()
        each = [torch.autograd.grad(task.losses(at, row[None], row)[0], at)[0] for row in rows]
        assert float(found.total[k]) == pytest.approx(sum(float(g.clamp(-1, 1)) for g in each))
