"""The step size of noisy gradient descent, by a formula.

A run whose sites take one step per round on their own records is gradient descent on all of them
together: no site drifts, whatever its records are. For a linear model two public numbers decide how
long a step may be.

- *Curvature.* Rows have a norm of at most N, so with the bias the loss bends by at most
  L = κ(N² + 1), κ being that of the loss in the scores. A step of 1/L never overshoots.
- *Noise.* Each round adds noise of deviation s to every coordinate of the mean gradient
  (:func:`~dpscaffold.config.noise.round_noise`). T steps of length η add up to η·s·√T in a weight,
  and to N times that in a score, if nothing pulls it back. The step is so short that this stays
  below :data:`MOST_NOISE`.

So the noise in the scores is known before the run, and a probability is moved by little: this is
what keeps the log-loss below that of a constant answer. The limits were chosen on made-up tables
(docs/drafts.md); no record is read here.
"""

from __future__ import annotations

import math

from dpscaffold.algorithms.fedavg import add_mean_move, along_gradient, send_move
from dpscaffold.algorithms.fedprox import Proximal
from dpscaffold.config import Run
from dpscaffold.config.noise import round_noise
from dpscaffold.tasks import Linear

#: κ: how much a loss bends at most in its scores.
CURVATURE = {"softmax": 0.5, "logistic": 0.25, "labels": 0.25, "squared": 1.0, "huber": 1.0}

#: The deviation that all rounds' noise may have in a score, or in the difference of two classes'
#: scores, which are logits; and in a number that is predicted, whose range is [−1, 1].
MOST_NOISE = {"class": 0.75, "labels": 0.75, "number": 0.25}


def descent_rate(setting: Run, norm: float | None) -> float | None:
    """η₀ of a run that is noisy gradient descent with rows of at most this norm; None where it is
    not: several local steps, controls or momentum, a network, rows of any norm, no noise.

    >>> from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic
    >>> plan = Plan(local_steps=1, user_ratio=1.0, data_ratio=1.0, weighting="records")
    >>> roster = synthetic(users=10, records=50).roster
    >>> task, noise = Logistic(40, 10), Gaussian(1.4, 10.0, "poisson")
    >>> descent_rate(Run(roster, task, fedavg(), plan, noise), norm=1.0)
    0.24
    """
    if norm is None or not _is_descent(setting):
        return None
    assert isinstance(setting.task, Linear)
    loss, plan = setting.task.loss, setting.plan
    name = loss.name.partition("@")[0].partition(":")[0]
    bend = CURVATURE[name] * max(loss.weights or (1.0,)) * (norm**2 + 1)
    scores = math.sqrt(2.0) if loss.scores is None and loss.kind == "class" else 1.0
    drift = scores * norm * round_noise(setting) * math.sqrt(plan.rounds)
    step = min(1 / bend, MOST_NOISE[loss.kind] / drift)
    return float(f"{step * plan.data_ratio / plan.server_rate:.2g}")


def _is_descent(setting: Run) -> bool:
    """Whether a round is one noisy gradient step of a linear model."""
    algorithm, privacy = setting.algorithm, setting.privacy
    if privacy is None or privacy.noise == 0 or privacy.clip == "median":
        return False
    # FedProx pulls towards x, where its one step begins.
    along = algorithm.direction is along_gradient or isinstance(algorithm.direction, Proximal)
    plain = along and algorithm.finish is send_move and algorithm.update is add_mean_move
    one_step = setting.plan.local_steps == 1 and privacy.unit == "record"
    return plain and one_step and isinstance(setting.task, Linear)
