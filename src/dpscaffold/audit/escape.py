"""A loss that carries a user's own noise above everybody else's, for views of sums.

Whoever sees a round's sum sees one canary under the noise of m users. With K > 1 local steps of a
memoryless algorithm that need not hide it: on f(y; (a, s)) = −½ay² + s·y a step is
y ← (1 + η·a)·y − η·(s + noise), so what came first has grown by ρ = 1 + ηa at every later step,
while the others, who hold records of a = s = 0, add the noise of one step each. The claim towards a
third party is for every loss, so it must hold for this one. After K steps the canary's share is

    (Σ ρʲ)² / (Σ ρ²ʲ + (m − 1)·K),  j = 0 … K−1,  in units of one step's,

against K/m without growth and K for the server; a gradient stays below the clip as long as
8σ·ρ^{K−1}·√((ρ−1)/(ρ+1)) ≤ b, four standard deviations of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpscaffold.audit.canary import MOST_RECORDS, Pair, sizes
from dpscaffold.audit.subject import AuditSubject
from dpscaffold.tasks import Batch, Clip, ClippedSum, stacked_scores
from dpscaffold.tasks.base import clip_factors

#: Rates of growth that are looked at, besides none.
RATES = tuple(1 + k / 20 for k in range(1, 81))
#: The adversary's step size.
STEP = 1.0
#: A game with growth is played where it promises so much more than one without.
WORTH = 1.2


@dataclass(frozen=True)
class Escaping:
    """f(y; (a, s)) = −½ay² + s·y on one parameter; a record's features are (a, s)."""

    name: str = "escaping"
    parameters: int = 1
    outputs: int = 2
    convex: bool = False
    width: int = 4
    scores_of = stacked_scores

    def prepare(self, features: Tensor) -> Tensor:
        """As they are."""
        return features

    def initial(self, seed: int) -> Tensor:
        """The ridge, y = 0."""
        return torch.zeros(1)

    def scores(self, params: Tensor, features: Tensor) -> Tensor:
        """None to speak of."""
        return torch.zeros(len(features), 2)

    def losses(self, params: Tensor, features: Tensor, labels: Tensor) -> Tensor:
        """f, (N,)."""
        slope, push = features.unbind(-1)
        return -0.5 * slope * params**2 + push * params

    def clipped_sum(self, params: Tensor, batch: Batch, clip: Clip) -> ClippedSum:
        """The sum of s − ay, each clipped; what is not finite adds nothing."""
        slope, push = batch.features.unbind(-1)
        gradients = push - slope * params
        gradients = torch.where(gradients.isfinite(), gradients, 0.0)
        factor, bound = clip_factors(gradients.abs(), batch.weight, clip)
        weighted = gradients if factor is None else gradients * factor
        return ClippedSum(weighted.sum(1, keepdim=True), bound)


def share(rate: float, steps: int, others: int) -> float:
    """The canary's share of a sum with ``others`` besides its user, as above.

    >>> share(1.0, 5, 9), share(2.0, 5, 9) > 2.4
    (0.5, True)
    """
    weights = [rate**j for j in range(steps)]
    return sum(weights) ** 2 / (sum(w * w for w in weights) + others * steps)


def least_batch(rate: float, steps: int, noise: float) -> float:
    """The batch size from which gradients stay below the clip."""
    return 8 * noise * rate ** (steps - 1) * math.sqrt((rate - 1) / (rate + 1))


def escaping(subject: AuditSubject, colluders: int = 0) -> AuditSubject | None:
    """The same mechanism on the loss above, grown as far as pays; None where it does not pay:
    with one step, with memory (which takes the growth off again), for whole users."""
    run = subject.run
    if run.local_steps == 1 or run.memory or run.unit == "user" or isinstance(run.clip, str):
        return None
    others = run.cohort_size - 1 - colluders
    records, batch = sizes(run)
    most = max(1, MOST_RECORDS // records)
    rates = [r for r in RATES if least_batch(r, run.local_steps, run.noise) <= most * batch]
    rate = max(rates, key=lambda r: share(r, run.local_steps, others), default=1.0)
    if share(rate, run.local_steps, others) < WORTH * share(1.0, run.local_steps, others):
        return None
    times = math.ceil(least_batch(rate, run.local_steps, run.noise) / batch)
    pair = _pair(subject, rate, records * times, batch * times)
    return replace(subject, task=Escaping(), kind="class", classes=2, pair=pair, step=STEP)


def _pair(subject: AuditSubject, rate: float, records: int, batch: int) -> Pair:
    """All records push nobody anywhere but away; the canary pushes with all its length."""
    run = subject.run
    clip = float(run.clip)
    rows = torch.tensor([(rate - 1) / STEP, 0.0]).repeat(records, 1)
    labels = torch.zeros(records, dtype=torch.int64)
    inside, outside = rows.clone(), rows.clone()
    replaced = run.sampling == "fixed"
    inside[0] = torch.tensor([0.0, clip])
    outside[0] = torch.tensor([0.0, -clip]) if replaced else math.nan
    moved = torch.tensor([2 * clip if replaced else clip])
    without = slice(1, None) if run.declared_sizes else slice(None)
    tables = (inside, labels), (outside[without], labels[without])
    idle = torch.zeros_like(rows), labels
    return Pair(*tables, moved, 2.0 if replaced else 1.0, batch, idle)
