"""How a model is evaluated: accuracy, loss, distance to the optimum, and how far apart the users'
gradients are.

The definitions are those of the paper's appendix, "Metrics". They are computed on private records
and stand outside every privacy guarantee if they are published.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dpscaffold.errors import BadInput, nearest
from dpscaffold.federation import Federation, Records
from dpscaffold.federation.schema import Target
from dpscaffold.runs.history import HistoryRow
from dpscaffold.tasks import Batch, Loss, Task
from dpscaffold.tasks.clipping import prepared
from dpscaffold.tasks.metrics import (
    METRICS,
    Metric,
    constant_report,
    constant_scores,
    metrics_for,
    predicted_class,
    report,
)
from dpscaffold.tasks.pooled import Holders, over_all, pooled_over

#: Records evaluated together; bounds the memory of an evaluation.
_BLOCK = 1 << 17

#: Scores held together: (models, records, outputs) numbers.
_HELD = 1 << 25

#: log₁₀ of the gap is cut off here: below it the difference of two float losses is noise.
_SMALLEST_GAP = 1e-12


#: Prepared features, labels, user number within the block, and the block's sizes (float64).
Block = tuple[Tensor, Tensor, Tensor, Tensor]
Metrics = dict[str, float | None]

#: What is asked for next to the metrics, and measured on the training records.
OPTIMUM, DISSIMILARITY = OF_TRAINING = ("optimum", "dissimilarity")


@dataclass(frozen=True)
class Measures:
    """What is measured of a model: metrics by name (none: those that people expect of the target;
    the one that represents a model is always among them), whether the users' gradients are
    compared, which is most of the time of an evaluation of a network, and whether anything is
    computed on the training records.

    >>> Measures(("auc",)).chosen(Target.numbered(2))[1].name
    'auc'
    """

    metrics: tuple[str, ...] = ()
    dissimilarity: bool = True
    training: bool = True

    @classmethod
    def of(cls, named: Sequence[str], task: Task) -> Measures:
        """What a run measures where these metrics are asked for by name."""
        metrics = tuple(name for name in named if name not in OF_TRAINING)
        return cls(metrics, task.convex or DISSIMILARITY in named)

    def chosen(self, target: Target) -> tuple[Metric, ...]:
        """The metrics of a target; one that does not fit is refused."""
        for name in self.metrics:
            if name not in METRICS:
                known = ", ".join((*[m.name for m in metrics_for(target)], *OF_TRAINING))
                raise BadInput(
                    "unknown-metric",
                    f"task.metrics names '{name}'{nearest(name, METRICS)}; there are {known}",
                )
            METRICS[name].fits(target)
        expected = metrics_for(target)
        if not self.metrics:
            return expected
        wanted = dict.fromkeys((expected[0].name, *self.metrics))
        return tuple(METRICS[name] for name in wanted)


class Evaluator:
    """Evaluates models on one federation, a block of users at a time.

    ``optimum_loss`` is F(x*), from :func:`~dpscaffold.training.optimum.solve`; without it
    ``log10_gap`` is None. Records that fit memory are prepared once, when first needed. Where
    several processes hold the records (``holders``), every process evaluates the same models;
    ``users`` is then the number of users of them all.
    """

    def __init__(
        self,
        federation: Federation,
        task: Task,
        regularisation: float,
        device: torch.device,
        optimum_loss: float | None = None,
        measures: Measures | None = None,
        holders: Holders | None = None,
        users: int = 0,
    ) -> None:
        self.measures = measures or Measures()
        self.metrics = self.measures.chosen(federation.target)
        self.federation, self.task, self.device = federation, task, device
        self.regularisation, self.optimum_loss = regularisation, optimum_loss
        self.holders, self.users = holders, users or federation.users
        self._held: dict[str, list[Block]] = {}

    def sharing(self, regularisation: float, optimum_loss: float | None = None) -> Evaluator:
        """An evaluator of the same records under another objective; what is prepared is shared."""
        other = copy.copy(self)
        other.regularisation, other.optimum_loss = regularisation, optimum_loss
        return other

    def __call__(self, params: Tensor) -> Metrics:
        """All metrics of one model, (P,)."""
        found = self.test_side(params)
        return {**found, **self.train_side(params)} if self.measures.training else found

    def test_side(self, params: Tensor) -> Metrics:
        """The metrics of the target, on its own scale, on the test records."""
        parts: list[tuple[Tensor, ...]] = []
        seen = 0
        for x, y, user, sizes in self._of("test"):
            parts.append((self.task.scores_of(params[None], x)[0], y, user + seen))
            seen += len(sizes)
        scores, labels, user = (torch.cat(column) for column in zip(*parts, strict=True))
        target = self.federation.target
        answers, truth = target.answers(scores), target.restored(labels)
        return report(self.metrics, answers, truth, user, seen, self.holders)

    def accuracies(self, models: Tensor) -> list[float]:
        """Test accuracy, averaged over users whatever their sizes, of each of the models (S, P): as
        many at a time as fit."""
        totals = torch.zeros(len(models), dtype=torch.float64)
        for x, y, user, sizes in self._of("test"):
            step = max(1, _HELD // (len(y) * max(1, self.task.outputs)))
            for start in range(0, len(models), step):
                scores = self.task.scores_of(models[start : start + step], x)
                hits = (predicted_class(scores) == y).double()
                by_user = hits.new_zeros(len(hits), len(sizes)).index_add_(1, user, hits)
                totals[start : start + step] += (by_user / sizes).sum(1).cpu()
        return [float(total) / self.users for total in totals]

    def train_side(self, params: Tensor) -> Metrics:
        """F(x), the gap to the optimum, and how far apart the users' gradients are, all with the ℓ2
        term."""
        # The sums over users of F_i(x), ‖∇F_i(x)‖² and ∇F_i(x).
        sums = torch.zeros(2 + len(params), dtype=torch.float64, device=self.device)
        for x, y, user, sizes in self._of("train"):
            losses = self.task.losses(params, x, y).double()
            sums[0] += (torch.zeros_like(sizes).index_add_(0, user, losses) / sizes).sum()
            if self.measures.dissimilarity:
                gradients = self._gradients(params, x, y, sizes)
                sums[1] += gradients.square().sum()
                sums[2:] += gradients.double().sum(0)
        with pooled_over(self.holders):
            means = over_all(sums) / self.users

        ridge = 0.5 * self.regularisation * float(params.double().square().sum())
        loss = float(means[0]) + ridge
        found: Metrics = {"train_loss": loss, "log10_gap": self._gap(loss)}
        if self.measures.dissimilarity:
            squares, square = means[1], means[2:].square().sum()
            found["gradient_dissimilarity"] = float(squares - square)
            found["gradient_log_dissimilarity"] = float(squares.log() - square.log())
        return found

    def _gap(self, loss: float) -> float | None:
        """log₁₀(F(x) − F(x*))."""
        if self.optimum_loss is None or not math.isfinite(loss):
            return None if self.optimum_loss is None else math.inf
        return math.log10(max(loss - self.optimum_loss, _SMALLEST_GAP))

    def _of(self, part: Literal["train", "test"]) -> Iterable[Block]:
        """The blocks of one part, held where they fit."""
        records = self.federation.train if part == "train" else self.federation.test
        if self.federation.mapped:
            return self._blocks(records)
        if part not in self._held:
            self._held[part] = list(self._blocks(records))
        return self._held[part]

    def _gradients(self, params: Tensor, x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
        """∇F_i(x) of a block's users, (users, P): users of unequal size are padded with weight
        0."""
        rows = sizes.long().tolist()
        if min(rows) == max(rows):  # nothing is copied
            batch = Batch(x.view(len(rows), rows[0], -1), y.view(len(rows), -1))
        else:
            features, labels, real = (
                pad_sequence(column.split(rows), batch_first=True)
                for column in (x, y, x.new_ones(len(x)))
            )
            batch = Batch(features, labels, real)
        total = self.task.clipped_sum(params.expand(len(rows), -1), batch, None).total
        return total / sizes[:, None].to(total.dtype) + self.regularisation * params

    def _blocks(self, records: Records) -> Iterator[Block]:
        """Prepared features, labels, user number within the block, and the block's sizes
        (float64)."""
        offsets, start = records.offsets.numpy(), 0
        while start < records.users:
            fitting = int(np.searchsorted(offsets, offsets[start] + _BLOCK, side="right")) - 1
            end = max(start + 1, fitting)
            rows = slice(int(offsets[start]), int(offsets[end]))
            sizes = records.offsets[start : end + 1].diff().to(self.device)
            user = torch.repeat_interleave(torch.arange(end - start, device=self.device), sizes)
            x, _ = prepared(self.task, records.features[rows], self.device)
            yield x, records.labels[rows].to(self.device), user, sizes.double()
            start = end


def baseline(federation: Federation) -> Metrics:
    """Every metric of the constant baseline: the best single answer by the training records (the
    most frequent class, the mean), scored on the test records."""
    target, test = federation.target, federation.test
    known, true = target.restored(federation.train.labels), target.restored(test.labels)
    user = torch.repeat_interleave(torch.arange(test.users), test.sizes)
    return constant_report(metrics_for(target), known, target, true, user, test.users)


def constant_loss(federation: Federation, task: Task) -> float | None:
    """F of the best model that looks at no feature, without ℓ2 term: the frequencies of the
    training labels as probabilities (label by label where there are several), or their mean; None
    for a task that tells no loss."""
    loss, train = getattr(task, "loss", None), federation.train
    if not isinstance(loss, Loss):
        return None
    scores = constant_scores(train.labels, federation.target).double()
    if loss.kind == "class" and loss.scores is not None:
        scores = scores[:, 1:] - scores[:, :1]
    values = loss.values(scores.expand(len(train), -1), train.labels)
    user = torch.repeat_interleave(torch.arange(train.users), train.sizes)
    sums = torch.zeros(train.users, dtype=torch.float64).index_add_(0, user, values.double())
    return float((sums / train.sizes).mean())


def late(
    history: Sequence[HistoryRow],
    metric: str,
    rounds: int,
    fraction: float = 0.1,
    diverged: int | None = None,
) -> float | None:
    """The mean of a metric over the last ``fraction`` of ``rounds``, as the paper's tables report
    it; None for a run that diverged (at some round), or where a value is missing.

    >>> late([HistoryRow(9, {"loss": 3.0}), HistoryRow(10, {"loss": 1.0})], "loss", 20, 0.6)
    2.0
    """
    first = rounds - max(1, round(fraction * rounds))
    rows = [row for row in history if row.round > first] or history[-1:]
    values = [row.metrics.get(metric) for row in rows]
    known = [value for value in values if value is not None and math.isfinite(value)]
    if diverged is not None or not values or len(known) < len(values):
        return None
    return sum(known) / len(known)
