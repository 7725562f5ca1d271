"""How private trials are compared: any metric on public records, and on private ones the sum of a
score that no record moves by more than a public bound, to which every user adds noise.

A record counts s in [0, B]: 1 where its class is predicted (B = 1), its log-loss, absolute or
squared error, cut at B. One record changes one user's sum by at most B, so noise of deviation z·B
makes a Gaussian mechanism of multiplier z. AUC, F1, balanced accuracy and R² are ratios of sums, or
ranks: one record of a rare class can move them by any amount, so they are refused there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpscaffold.errors import BadInput
from dpscaffold.federation import Records
from dpscaffold.federation.schema import Target
from dpscaffold.privacy import Mechanism
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.tasks.metrics import METRICS, Metric, metrics_for
from dpscaffold.training.stack import Outcome
from dpscaffold.tuning.settings import TuneSettings

#: Metrics that are means of a score of each record, and how a score is made of such a mean.
BOUNDED = ("accuracy", "log_loss", "rmse", "mae", "label_accuracy", "subset_accuracy")
SHARES = ("accuracy", "label_accuracy", "subset_accuracy")


@dataclass(frozen=True)
class ScoreRule:
    """What candidates are compared by, and the most that one record counts (1 for a share)."""

    metric: Metric
    bound: float = 1.0

    @property
    def sign(self) -> int:
        """1 where more is better."""
        return 1 if self.metric.better == "higher" else -1

    @property
    def most(self) -> float:
        """B, in the unit of what is summed: errors of an RMSE are squared."""
        return self.bound**2 if self.metric.name == "rmse" else self.bound

    def shown(self, mean: float) -> float:
        """The metric from the mean of what records count."""
        return math.sqrt(max(0.0, mean)) if self.metric.name == "rmse" else mean

    def counts(self, scores: Tensor, targets: Tensor) -> Tensor:
        """What each record counts, (N,) in [0, B]; what is no number counts B.

        >>> rmse = ScoreRule(METRICS["rmse"], bound=2.0)
        >>> rmse.counts(torch.tensor([[1.0], [9.0]]), torch.tensor([0.0, 0.0])).tolist()
        [1.0, 4.0]
        """
        each = torch.arange(len(targets), device=targets.device)
        values = self.metric.by_group(scores, targets, each, len(targets))
        if self.metric.name == "rmse":
            values = values.square()
        worst = 0.0 if self.metric.better == "higher" else self.most
        return torch.nan_to_num(values, nan=worst, posinf=self.most).clamp(0.0, self.most)


def comparison(table: TuneSettings, target: Target) -> ScoreRule:
    """The metric asked for, or the target's own; without public records it must be bounded."""
    metric = METRICS[table.metric] if table.metric else metrics_for(target)[0]
    metric.fits(target)
    if table.public is not None:
        return ScoreRule(metric)
    if metric.name not in BOUNDED:
        fitting = [m.name for m in metrics_for(target) if m.name in BOUNDED]
        raise BadInput(
            "metric-unbounded",
            f"tune.metric is {metric.name!r}, which one record can change by any amount, so no "
            f"noise hides it; use {', '.join(fitting)}, or score on [tune.public] records",
        )
    if metric.name in SHARES:
        if table.score_bound is not None:
            raise BadInput(
                "not-applicable",
                f"tune.score_bound is {table.score_bound:g}, and a record counts at most 1 in "
                f"{metric.name!r}; leave it out",
            )
        return ScoreRule(metric)
    if table.score_bound is None:
        raise BadInput(
            "missing-key",
            f"candidates are compared by {metric.name!r} on private records, and one record may "
            f"count without limit; give tune.score_bound, the most that one may count, chosen "
            f"without looking at the records (5, say)",
        )
    return ScoreRule(metric, table.score_bound)


def scored(
    outcome: Outcome,
    held_out: Records,
    compared: ScoreRule,
    table: TuneSettings,
    run: Mechanism,
    sizes: Sequence[int],
) -> float | None:
    """The score of a trial: the metric as it is on public records, else from noised sums, divided
    by what the public ``sizes`` of all users' training parts say is held out. A run that diverged
    has none, whatever the records: its parameters tell, and they are accounted for."""
    if outcome.diverged is not None or outcome.model is None:
        return None
    if table.public is not None:
        value = on_public(outcome, held_out, compared.metric)
        return value if math.isfinite(value) else None
    assert table.score_noise is not None
    sums, own = record_sums(outcome, held_out, compared)
    deviation, stream = table.score_noise * compared.most, CipherStream()
    if run.unit == "user":  # a mean changes by at most B with all of a user's records
        means = sums / np.maximum(own, 1)
        sent = noised(means, deviation, stream, 1e-6 * compared.most)
        return compared.shown(float(np.mean(sent)))
    grain = 1.0 if compared.metric.name == "accuracy" else 1e-3 * compared.most
    sent = noised(sums, deviation, stream, grain)
    held = float(sum(sizes)) / (table.folds - 1)
    return compared.shown(float(sent.sum() / held))


def on_public(outcome: Outcome, held_out: Records, metric: Metric) -> float:
    """The metric over all public records pooled."""
    assert outcome.model is not None
    task, target = outcome.setting.task, outcome.setting.roster.schema.target
    with torch.no_grad():
        scores = task.scores(outcome.model, task.prepare(held_out.features))
    return metric.of(target.answers(scores), target.restored(held_out.labels))


def record_sums(
    outcome: Outcome, held_out: Records, compared: ScoreRule
) -> tuple[np.ndarray, np.ndarray]:
    """The sum of what each user's records count under a run's model, and how many there are."""
    assert outcome.model is not None
    task, target = outcome.setting.task, outcome.setting.roster.schema.target
    sums, sizes = [], []
    for user in range(len(held_out.sizes)):
        features, labels = held_out.of(user)
        with torch.no_grad():
            scores = task.scores(outcome.model, task.prepare(features))
        counts = compared.counts(target.answers(scores), target.restored(labels))
        sums.append(float(counts.sum()))
        sizes.append(float(len(labels)))
    return np.array(sums), np.array(sizes)


def noised(values: np.ndarray, deviation: float, stream: CipherStream, grain: float) -> np.ndarray:
    """Each value with noise of its own, rounded to the grain, as each user would send it: rounding
    is done afterwards and hides the last bits of the noise.

    >>> bool((noised(np.array([3.0, 4.0]), 0.1, CipherStream(bytes(32)), 1.0) % 1 == 0).all())
    True
    """
    sent = values + deviation * stream.standard_normal(len(values))
    return np.asarray(np.rint(sent / grain) * grain)
