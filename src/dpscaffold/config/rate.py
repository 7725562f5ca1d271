"""The step size that nobody gave: a formula of public numbers.

Three things say how far a round may go, in lengths of a gradient; η₀ is s times that.

- *Curvature.* Rows have a norm of at most N, and a gradient is clipped to C, so with the bias the
  loss bends by about κ·N·min(N, C) + κ + λ at most, κ being that of the loss in the scores. A step
  of one part in this never overshoots a linear model.
- *Drift.* K steps go K times as far, but with more than :data:`MOST_STEPS` of them the sites'
  models would go apart, and without control variates with more than :data:`MOST_DRIFTING`.
- *Noise.* Each round adds noise of deviation s to every coordinate of the mean of the moves
  (:attr:`~dpscaffold.config.Run.round_noise`). T rounds of length η add up to η·s·√T in a weight,
  and to N times that in a score, if nothing pulls it back. The round is so short that this stays
  below :data:`MOST_NOISE`, so that a probability is moved by little.

How well this does: docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpscaffold.algorithms import Algorithm
from dpscaffold.config.plan import Plan
from dpscaffold.federation.schema import Schema
from dpscaffold.tasks import Linear, Task
from dpscaffold.tasks.losses import SOFTMAX

#: κ: how much a loss bends at most in its scores.
CURVATURE = {"softmax": 0.5, "logistic": 0.25, "labels": 0.25, "squared": 1.0, "huber": 1.0}

#: The deviation that all rounds' noise may have in a score, or in the difference of two classes'
#: scores, which are logits; and in a number that is predicted, whose range is [−1, 1].
MOST_NOISE = {"class": 0.75, "labels": 0.75, "number": 0.25}

#: The same of a model that is not linear, as a share: its noise is heard in several layers.
DEEP = 2 / 3

#: Steps of a participant in a round that count at most, and of one whom no control keeps from its
#: own optimum.
MOST_STEPS, MOST_DRIFTING = 20, 5

#: The norm of a row at most, where no preparation promises one and the model is not linear: its
#: first weights are small where there are many features.
DEEP_NORM = 5.0


@dataclass(frozen=True)
class PublicNumbers:
    """What the choice looks at: no record can be reached from it."""

    task: Task
    schema: Schema
    algorithm: Algorithm
    plan: Plan
    #: C, and the deviation of the noise on one coordinate of a round's mean gradient,
    #: both of clip 1 where C is not known beforehand.
    clip: float = math.inf
    noise: float = 0.0


def choose_rate(known: PublicNumbers) -> float:
    """η₀ for a run, from its public numbers alone.

    >>> from dpscaffold import Logistic, Plan, fedavg, synthetic
    >>> plan = Plan(local_steps=1, user_ratio=1.0, data_ratio=1.0)
    >>> schema = synthetic(users=10, records=50).schema
    >>> choose_rate(PublicNumbers(Logistic(40, 10), schema, fedavg(), plan, 1.4, 0.2214))
    0.24
    """
    plan, task, clip = known.plan, known.task, known.clip
    loss, norm = getattr(task, "loss", SOFTMAX), _row_norm(known)
    noise = known.noise / math.sqrt(plan.local_steps)
    bend = CURVATURE.get(loss.name.partition("@")[0].partition(":")[0], 1.0)
    bend = bend * max(loss.weights or (1.0,)) * (norm * min(norm, clip) + 1) + plan.regularisation
    drifts = "control" not in known.algorithm.remembers
    length = min(plan.local_steps, MOST_DRIFTING if drifts else MOST_STEPS) / bend
    if noise > 0:
        scores = math.sqrt(2.0) if loss.scores is None and loss.kind == "class" else 1.0
        most = MOST_NOISE[loss.kind] * (1.0 if isinstance(task, Linear) else DEEP)
        length = min(length, most / (scores * norm * noise * math.sqrt(plan.rounds)))
    return float(f"{length * plan.data_ratio / _quickened(known):.2g}")


def _row_norm(known: PublicNumbers) -> float:
    """The norm of a row that the last step of preparation promises, or else √d: that of d
    standardised features."""
    schema = known.schema
    promised = getattr(schema.preparation[-1], "norm", None) if schema.preparation else None
    if promised is not None:
        return float(promised)
    usual = math.sqrt(schema.dimension)
    return usual if isinstance(known.task, Linear) else min(usual, DEEP_NORM)


def _quickened(known: PublicNumbers) -> float:
    """How many times further than the mean of the moves the server goes in the long run. Adam goes
    as far whatever the moves are."""
    numbers = known.algorithm.numbers
    if numbers.get("server") == "adam":
        return 1.0
    kept = float(numbers["beta"]) if numbers.get("server") == "momentum" else 0.0
    return known.plan.server_rate / (1 - kept)
