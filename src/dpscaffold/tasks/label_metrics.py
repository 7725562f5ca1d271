"""Metrics of several labels: each label is a question of its own, answered yes where its score is
above 0.

Scores are (N, L) and targets sets of labels (N,) (:mod:`dpscaffold.federation.labels`). *Micro*
counts all answers together, *macro* takes each label by itself and averages over those for which
the measure is defined.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from dpscaffold.federation.labels import unpack
from dpscaffold.tasks.pooled import over_all


def means(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """The means of values (N, L) in each group, (groups, L); NaN in an empty one.

    >>> means(torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0]), 2).tolist()
    [[2.0], [nan]]
    """
    total = torch.zeros(groups, values.shape[1], dtype=torch.float64, device=values.device)
    total.index_add_(0, group, values.double())
    count = torch.zeros(groups, dtype=torch.float64, device=values.device)
    count.index_add_(0, group, torch.ones_like(group, dtype=torch.float64))
    return over_all(total) / over_all(count)[:, None]


def _answers(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What is said and what is true, each (N, L) of 0 and 1."""
    return (scores > 0).double(), unpack(targets, scores.shape[1]).double()


def label_accuracy(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The share of right answers over all labels (1 − Hamming loss)."""
    said, true = _answers(scores, targets)
    return means((said == true).double(), group, groups).mean(1)


def subset_accuracy(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The share of records of which every label is right."""
    said, true = _answers(scores, targets)
    return means((said == true).all(1, keepdim=True).double(), group, groups)[:, 0]


def label_log_loss(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean of Σ_j −log p(what is true of label j), which is the training loss."""
    _, true = _answers(scores, targets)
    losses = softplus((1 - 2 * true) * scores.double()).sum(1, keepdim=True)
    return means(losses, group, groups)[:, 0]


def _f1(both: Tensor, said: Tensor, true: Tensor) -> Tensor:
    return 2 * both / (said + true)  # 0/0 where nobody has the label and nobody is said to


def micro_f1(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """2TP/(2TP + FP + FN), the counts summed over labels."""
    said, true = _answers(scores, targets)
    return _f1(*(means(v, group, groups).sum(1) for v in (said * true, said, true)))


def macro_f1(scores: Tensor, targets: Tensor, group: Tensor, groups: int) -> Tensor:
    """The mean over labels of their F1."""
    said, true = _answers(scores, targets)
    found = _f1(*(means(v, group, groups) for v in (said * true, said, true)))
    return found.nanmean(1)


def over_labels(
    one: Callable[[Tensor, Tensor, Tensor, int], Tensor],
    scores: Tensor,
    targets: Tensor,
    group: Tensor,
    groups: int,
) -> Tensor:
    """A metric of two classes, of each label by itself, (groups, L)."""
    true = unpack(targets, scores.shape[1])
    found = [one(scores[:, j : j + 1], true[:, j], group, groups) for j in range(scores.shape[1])]
    return torch.stack(found, dim=1)
