"""Metrics as a table: each maps scores and targets to a number, pooled or user by user.

Accuracy and losses are taken within each user and then averaged over users, whatever their sizes,
as in the paper's appendix "Metrics". Measures that are not means over records (AUC, F1, balanced
accuracy, RMSE, R²) are given both over all records pooled and averaged over users. A value that is
not defined (the AUC of a user who has one class, say) is NaN, and the average is over the users
that have one. Of two classes the second, number 1, is the positive one. Of several labels the
measures are in :mod:`dpscaffold.tasks.label_metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from dpscaffold.errors import BadInput
from dpscaffold.federation.labels import unpack
from dpscaffold.federation.schema import Kind, Target
from dpscaffold.tasks.label_metrics import (
    label_accuracy,
    label_log_loss,
    macro_f1,
    micro_f1,
    over_labels,
    subset_accuracy,
)
from dpscaffold.tasks.pooled import Holders, over_all, pooled_over, pooling

#: Rows whose scores are held in float64 at a time.
_BLOCK = 1 << 18

#: Users whose metrics are computed at a time.
_USERS = 1 << 16

#: Scores of negative records that are compared at a time.
_COMPARED = 1 << 20

#: Scores (N, outputs), targets (N,), groups (N,) in 0 to G − 1, and G → values (G,) in float64.
ByGroup = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Metric:
    """A measure of scores against targets.

    ``taken`` says whether it is averaged over users, pooled over records, or both; ``classes`` how
    many classes it needs, None for any number; ``title`` is its name in tables and figures.

    >>> METRICS["accuracy"].of(torch.tensor([[0.0, 2.0], [1.0, 0.0]]), torch.tensor([1, 1]))
    0.5
    """

    name: str
    by_group: ByGroup
    better: Literal["higher", "lower"]
    kind: Kind = "class"
    taken: Literal["per user", "both"] = "both"
    classes: int | None = None
    title: str = ""

    def of(self, scores: Tensor, targets: Tensor) -> float:
        """The value over all records pooled; NaN where it is not defined."""
        one = torch.zeros(len(targets), dtype=torch.int64, device=targets.device)
        return float(self.by_group(scores, targets, one, 1)[0])

    def per_user(self, scores: Tensor, targets: Tensor, user: Tensor, users: int) -> float:
        """The mean over the users for whom it is defined; NaN where it is for none."""
        return float(self.by_group(scores, targets, user, users).nanmean())

    def fits(self, target: Target) -> None:
        """Refuse a target that it cannot evaluate."""
        fitting = [metric.name for metric in metrics_for(target)]
        advice = f"use {', '.join(fitting)}"
        if target.kind != self.kind:
            mine = {"class": "classes", "number": "numbers", "labels": "several labels"}
            raise BadInput(
                "wrong-target",
                f"the metric '{self.name}' is for {mine[self.kind]}, and the target is {target}; "
                f"{advice}",
            )
        if self.classes is not None and len(target.classes) != self.classes:
            raise BadInput(
                "wrong-target",
                f"the metric '{self.name}' needs two classes, and the target has "
                f"{len(target.classes)}; {advice}",
            )


def predicted_class(scores: Tensor) -> Tensor:
    """The class (…) that scores (…, outputs) represent; a single score is the second class's."""
    return (scores[..., 0] > 0).long() if scores.shape[-1] == 1 else scores.argmax(-1)


def margin(scores: Tensor) -> Tensor:
    """How much speaks for the second of two classes, (N,)."""
    return scores[:, 0] if scores.shape[1] == 1 else scores[:, 1] - scores[:, 0]


def _mean(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean of values (N,) in each group; NaN in an empty one."""
    count = torch.zeros(groups, dtype=torch.float64, device=values.device)
    total = count.clone().index_add_(0, group, values.double())
    count.index_add_(0, group, torch.ones_like(values, dtype=torch.float64))
    return over_all(total) / over_all(count)


def accuracy(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The share of records whose class is predicted."""
    return _mean((predicted_class(scores) == targets).double(), group, groups)


def log_loss(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean of −log p(true class)."""
    if scores.shape[1] == 1:
        losses = softplus((1 - 2 * targets) * scores[:, 0].double())
    else:  # in float64, a block of rows at a time
        blocks = zip(scores.split(_BLOCK), targets.split(_BLOCK), strict=True)
        losses = torch.cat([cross_entropy(z.double(), t, reduction="none") for z, t in blocks])
    return _mean(losses, group, groups)


def balanced_accuracy(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean, over the classes that a group has, of the share of each that is predicted."""
    classes = max(2, scores.shape[1])
    hits = (predicted_class(scores) == targets).double()
    recalls = _mean(hits, group * classes + targets, groups * classes)
    return recalls.view(groups, classes).nanmean(1)


def auc(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The chance that a positive record scores above a negative one, ties counting one half.

    From midranks: (Σ ranks of positives − n₊(n₊ + 1)/2) / (n₊n₋) (Mann and Whitney 1947).
    """
    holders = pooling()
    if holders is not None:
        return _auc_of_all(margin(scores), targets == 1, holders)
    value = margin(scores).double()
    order = torch.argsort(value, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    value, group, positive = value[order], group[order], (targets[order] == 1).double()
    new = torch.ones_like(group, dtype=torch.bool)
    new[1:] = (group[1:] != group[:-1]) | (value[1:] != value[:-1])
    tied = new.long().cumsum(0) - 1  # which run of equal scores of one group
    place = torch.arange(1, len(value) + 1, dtype=torch.float64, device=value.device)
    midrank = _mean(place, tied, int(tied[-1]) + 1 if len(tied) else 0)[tied]
    count = torch.zeros(groups, dtype=torch.float64, device=value.device)
    total = count.clone().index_add_(0, group, torch.ones_like(value))
    positives = count.clone().index_add_(0, group, positive)
    ranks = count.clone().index_add_(0, group, positive * midrank)
    first = total.cumsum(0) - total  # ranks count from 1 within each group
    above = ranks - positives * first - positives * (positives + 1) / 2
    return above / (positives * (total - positives))


def _auc_of_all(value: Tensor, positive: Tensor, holders: Holders) -> Tensor:
    """The AUC of the records of all holders, (1,): the negative ones of each holder in turn are
    compared, a block at a time, with the positive ones of every other."""
    mine, other = value[positive].sort().values, value[~positive].cpu().sort().values
    sizes = torch.zeros(holders.count, 2, dtype=torch.float64)
    sizes[holders.rank] = torch.tensor([len(mine), len(other)], dtype=torch.float64)
    sizes = holders.sum(sizes)
    above = torch.zeros(1, dtype=torch.float64)
    for holder, count in enumerate(sizes[:, 1].long().tolist()):
        for start in range(0, count, _COMPARED):
            block = torch.zeros(min(_COMPARED, count - start), dtype=value.dtype)
            if holder == holders.rank:
                block = other[start : start + len(block)]
            block = holders.sum(block).to(mine.device)
            for right in (False, True):  # ties count one half
                above += torch.searchsorted(block, mine, right=right).sum().double().cpu() / 2
    return holders.sum(above) / sizes.sum(0).prod()


def f1(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """2TP/(2TP + FP + FN); not defined where no record is positive or taken for it."""
    taken, positive = (predicted_class(scores) == 1).double(), (targets == 1).double()
    both = _mean(taken * positive, group, groups)
    return 2 * both / (_mean(taken, group, groups) + _mean(positive, group, groups))


def _residuals(scores: Tensor, targets: Tensor) -> Tensor:
    return scores[:, 0].double() - targets.double()


def rmse(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """√(mean of (z − t)²)."""
    return _mean(_residuals(scores, targets).square(), group, groups).sqrt()


def mae(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean of |z − t|."""
    return _mean(_residuals(scores, targets).abs(), group, groups)


def r2(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """1 − Σ(z − t)²/Σ(t − t̄)²; not defined where the targets do not vary."""
    spread = targets.double() - _mean(targets, group, groups)[group]
    variance = _mean(spread.square(), group, groups)
    share = _mean(_residuals(scores, targets).square(), group, groups) / variance
    return torch.where(variance > 0, 1 - share, torch.nan)


def label_auc(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean over labels of their AUC."""
    return over_labels(auc, scores, targets, group, groups).nanmean(1)


#: Every metric by name.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", accuracy, "higher", taken="per user", title="accuracy"),
        Metric("log_loss", log_loss, "lower", taken="per user", title="log-loss"),
        Metric("balanced_accuracy", balanced_accuracy, "higher", title="balanced accuracy"),
        Metric("auc", auc, "higher", classes=2, title="AUC"),
        Metric("f1", f1, "higher", classes=2, title="F1"),
        Metric("rmse", rmse, "lower", "number", title="RMSE"),
        Metric("mae", mae, "lower", "number", taken="per user", title="MAE"),
        Metric("r2", r2, "higher", "number", title="R²"),
        Metric("label_accuracy", label_accuracy, "higher", "labels", "per user"),
        Metric("subset_accuracy", subset_accuracy, "higher", "labels", "per user"),
        Metric("label_log_loss", label_log_loss, "lower", "labels", "per user"),
        Metric("micro_f1", micro_f1, "higher", "labels", title="micro F1"),
        Metric("macro_f1", macro_f1, "higher", "labels", title="macro F1"),
        Metric("label_auc", label_auc, "higher", "labels", title="AUC, mean over labels"),
    )
}


def metrics_for(target: Target) -> tuple[Metric, ...]:
    """The metrics that people expect of a target; the first one is shown.

    >>> [metric.name for metric in metrics_for(Target("number"))]
    ['rmse', 'mae', 'r2']
    """
    return tuple(
        metric
        for metric in METRICS.values()
        if metric.kind == target.kind and metric.classes in (None, len(target.classes))
    )


def shown_metric(target: Target) -> str:
    """The metric that represents a model in tables and figures, by its name in a history."""
    return f"test_{metrics_for(target)[0].name}"


def titled(name: str) -> str:
    """What a metric of a history is called in tables: its title, without the ``test_``.

    >>> titled("test_rmse"), titled("test_auc_per_user"), titled("train_loss")
    ('RMSE', 'AUC per user', 'train loss')
    """
    short = name.removeprefix("test_")
    metric = METRICS.get(short.removesuffix("_per_user"))
    if metric is None:
        return short.replace("_", " ")
    plain = metric.title or metric.name.replace("_", " ")
    return plain + (" per user" if short.endswith("_per_user") else "")


def report(
    metrics: Iterable[Metric],
    scores: Tensor,
    targets: Tensor,
    user: Tensor,
    users: int,
    holders: Holders | None = None,
) -> dict[str, float | None]:
    """The values of metrics by name: ``test_auc`` over all records pooled and
    ``test_auc_per_user`` averaged over users, ``test_accuracy`` averaged over users. None stands
    for a value that is not defined.

    Where several processes hold the records, ``users`` are those of this one, every process calls
    this function, and sums are reduced.
    """
    values: dict[str, float] = {}
    for metric in metrics:
        own = _by_user(metric, scores, targets, user, users)
        defined = ~own.isnan()
        sums = torch.stack([own.nansum().double(), defined.sum().double()])
        with pooled_over(holders):
            total, count = over_all(sums).tolist()
            averaged = total / count if count else math.nan
            if metric.taken == "per user":
                values[f"test_{metric.name}"] = averaged
            else:
                values[f"test_{metric.name}"] = metric.of(scores, targets)
                values[f"test_{metric.name}_per_user"] = averaged
    return {name: None if value != value else value for name, value in values.items()}


def _by_user(metric: Metric, scores: Tensor, targets: Tensor, user: Tensor, users: int) -> Tensor:
    """A metric of each user, (U,), some users at a time: their records follow each other."""
    found = []
    for first in range(0, max(1, users), _USERS):
        end = min(first + _USERS, users)
        bounds = torch.searchsorted(user, torch.tensor([first, end], device=user.device)).tolist()
        rows = slice(*bounds)
        found.append(metric.by_group(scores[rows], targets[rows], user[rows] - first, end - first))
    return torch.cat(found)


def constant_report(
    metrics: Iterable[Metric],
    known: Tensor,
    target: Target,
    targets: Tensor,
    user: Tensor,
    users: int,
) -> dict[str, float | None]:
    """As :func:`report`, of the constant baseline: the best single answer for all records, chosen
    for each metric by the labels ``known`` and scored on ``targets``."""
    found: dict[str, float | None] = {}
    for metric in metrics:
        scores = constant_scores(known, target, metric.name).to(targets.device)
        found |= report([metric], scores.expand(len(targets), -1), targets, user, users)
    return found


def constant_scores(labels: Tensor, target: Target, metric: str = "") -> Tensor:
    """The scores (1, outputs) of the best answer for all records alike, by a metric: how frequent
    each class or label is, or the mean. By F1 it is always the positive class, by MAE the median.

    >>> constant_scores(torch.tensor([1, 0, 1]), Target.numbered(2)).exp().tolist()
    [[1.0, 2.0]]
    """
    if target.kind == "number":
        numbers = labels.double()
        return (numbers.median() if metric == "mae" else numbers.mean()).float().view(1, 1)
    if target.kind == "labels":
        held = unpack(labels, len(target.classes)).double().sum(0)
        if metric == "macro_f1":
            return torch.ones(1, len(held))
        if metric == "micro_f1":
            return _most_frequent(held, len(labels))
        odds = held.clamp_min(0.5) / (len(labels) - held).clamp_min(0.5)
        return odds.log().float()[None]
    if metric == "f1":
        return torch.tensor([[0.0, 1.0]])
    counts = torch.bincount(labels, minlength=len(target.classes)).double()
    return counts.clamp_min(0.5).log().float()[None]


def _most_frequent(held: Tensor, records: int) -> Tensor:
    """The set of labels, as scores (1, L), of the largest micro F1: some of the most frequent."""
    order = held.argsort(descending=True)
    sizes = torch.arange(1, len(held) + 1, dtype=torch.float64)
    best = int((2 * held[order].cumsum(0) / (sizes * records + held.sum())).argmax()) + 1
    scores = torch.full((1, len(held)), -1.0)
    scores[0, order[:best]] = 1.0
    return scores
