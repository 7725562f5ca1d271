"""What a wrong score costs: softmax, logistic, squared and Huber loss, and that of many labels.

A clipped gradient needs only the error δ = ∂loss/∂scores of each record: the rest is the model's
own. A loss is therefore two functions, and a task takes any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from dpscaffold.checks import number
from dpscaffold.errors import BadInput
from dpscaffold.federation.labels import unpack
from dpscaffold.federation.schema import Kind

#: (scores, targets) → losses or errors.
OfScores = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A per-record loss of scores z and a target t, and its derivative.

    Args:
        name: A unique name: runs, caches and checkpoints identify a loss by it.
        values: Scores (N, outputs) and targets (N,) → losses (N,).
        errors: δ = ∂loss/∂z, from scores (U, outputs, B), which it may overwrite, and targets
            (U, B) → (U, outputs, B).
        convex: Whether it is convex in the scores, so that a linear model has one optimum.
        kind: The targets that fit: classes (int64), numbers (float32) or sets of labels (int64).
        scores: The number of scores per record; None for one per class or label.
        weights: The weight of a record of each class (:func:`weighted`); empty: all equal.

    >>> LOSSES["squared"].values(torch.tensor([[3.0]]), torch.tensor([1.0])).tolist()
    [2.0]
    """

    name: str
    values: OfScores
    errors: OfScores
    convex: bool
    kind: Kind
    scores: int | None = 1
    weights: tuple[float, ...] = ()

    def fits(self, kind: Kind, classes: int = 0) -> None:
        """Refuse a target of the other kind, or more classes than one score can tell apart.

        >>> LOSSES["softmax"].fits("class", 10)
        >>> try:
        ...     LOSSES["huber"].fits("class")
        ... except BadInput as refused:
        ...     print(refused)
        task.loss is 'huber', which is for numbers; the target is a class: use softmax or logistic
        """
        if kind != self.kind:
            raise BadInput("wrong-loss", self._other_kind(kind))
        if self.kind == "class" and self.scores == 1 and classes not in (0, 2):
            raise BadInput(
                "wrong-loss",
                f"task.loss is {self.name!r}, which tells two classes apart; the target has "
                f"{classes}: use softmax",
            )

        if self.weights and classes and len(self.weights) != classes:
            raise BadInput(
                "count-differs",
                f"task.class_weights has {len(self.weights)} numbers, and the target has {classes} "
                f"classes; give one each",
            )

    def _other_kind(self, kind: Kind) -> str:
        others = " or ".join(name for name, loss in LOSSES.items() if loss.kind == kind)
        mine = {"number": "numbers", "class": "classes", "labels": "several labels"}
        theirs = "several labels" if kind == "labels" else f"a {kind}"
        return (
            f"task.loss is {self.name!r}, which is for {mine[self.kind]}; the target is "
            f"{theirs}: use {others}"
        )

    def outputs(self, classes: int) -> int:
        """How many scores a model needs for a target of this many classes or labels (any, for a
        number)."""
        return classes if self.scores is None else self.scores

    def check_outputs(self, outputs: int) -> None:
        """Refuse a model whose number of scores is not the loss's."""
        if self.scores not in (None, outputs):
            raise BadInput(
                "wrong-scores",
                f"the task gives {outputs} scores a record, but the loss {self.name!r} reads "
                f"{self.scores}: make it with {self.scores}",
            )

    def probabilities(self, scores: Tensor) -> Tensor:
        """Each class's or label's probability (…, classes) from scores (…, outputs); none for a
        number."""
        if self.kind == "number":
            raise BadInput(
                "wrong-target",
                f"the loss {self.name!r} predicts a number, which has no class probabilities; "
                f"use its predictions",
            )
        if self.kind == "labels":
            return scores.sigmoid()
        if self.scores is None:
            return scores.softmax(-1)
        return torch.cat([torch.sigmoid(-scores), torch.sigmoid(scores)], dim=-1)


def softmax_values(scores: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(z)_t of each row."""
    return cross_entropy(scores, targets, reduction="none")


def softmax_errors(scores: Tensor, targets: Tensor) -> Tensor:
    """δ = softmax(z) − onehot(t), in place."""
    if scores.is_cuda:  # one kernel there; on a CPU the steps apart are faster
        errors = scores.softmax(1)
    else:
        errors = scores.sub_(scores.amax(1, keepdim=True)).exp_()
        errors /= errors.sum(1, keepdim=True)
    errors.scatter_add_(
        1, targets[:, None, :], errors.new_full((), -1.0).expand(targets.shape)[:, None, :]
    )
    return errors


def logistic_values(scores: Tensor, targets: Tensor) -> Tensor:
    """log(1 + exp(−sz)) with s = ±1 for the classes 1 and 0."""
    return softplus((1 - 2 * targets) * scores[:, 0])


def logistic_errors(scores: Tensor, targets: Tensor) -> Tensor:
    """δ = −s/(1 + exp(sz)): σ(z) − t without the cancellation where t = 1."""
    away = (1 - 2 * targets).to(scores.dtype)[:, None, :]
    return scores.mul_(away).sigmoid_().mul_(away)


def labels_values(scores: Tensor, targets: Tensor) -> Tensor:
    """Σ_j log(1 + exp(−s_j z_j)) with s_j = ±1 as label j holds or not: L logistic losses."""
    held = unpack(targets, scores.shape[-1])
    return softplus((1 - 2 * held) * scores).sum(-1)


def labels_errors(scores: Tensor, targets: Tensor) -> Tensor:
    """δ_j = −s_j/(1 + exp(s_j z_j)), label by label, in place."""
    away = (1 - 2 * unpack(targets, scores.shape[1], axis=1)).to(scores.dtype)
    return scores.mul_(away).sigmoid_().mul_(away)


def squared_values(scores: Tensor, targets: Tensor) -> Tensor:
    """½(z − t)²."""
    return 0.5 * (scores[:, 0] - targets).square()


def squared_errors(scores: Tensor, targets: Tensor) -> Tensor:
    """δ = z − t, in place."""
    return scores.sub_(targets[:, None, :])


@dataclass(frozen=True)
class HuberValues:
    """½r² for a residual r = z − t of at most ``delta``, and delta·(|r| − ½delta) beyond."""

    delta: float

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        residual = scores[:, 0] - targets
        near = residual.clamp(-self.delta, self.delta)
        return near * (residual - 0.5 * near)


@dataclass(frozen=True)
class HuberErrors:
    """δ = z − t, cut off at ±``delta``, in place."""

    delta: float

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        return squared_errors(scores, targets).clamp_(-self.delta, self.delta)


def huber(delta: float = 1.0) -> Loss:
    """The Huber loss, quadratic up to a residual of ``delta`` and linear beyond (Huber 1964).

    >>> huber(0.5) == huber(0.5), huber(0.5) == huber(1.0), huber(0.5).name
    (True, False, 'huber:0.5')
    """
    delta = number("delta", delta)
    if delta <= 0:
        raise BadInput("out-of-range", f"delta is {delta}; the Huber loss needs a positive number")
    name = "huber" if delta == 1 else f"huber:{delta!r}"
    return Loss(name, HuberValues(delta), HuberErrors(delta), convex=True, kind="number")


@dataclass(frozen=True)
class WeightedValues:
    """w_t·loss(z, t): the loss of a record times the weight of its class."""

    of: OfScores
    weights: tuple[float, ...]

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.of(scores, targets) * scores.new_tensor(self.weights)[targets]


@dataclass(frozen=True)
class WeightedErrors:
    """δ = w_t·∂loss/∂z."""

    of: OfScores
    weights: tuple[float, ...]

    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.of(scores, targets).mul_(scores.new_tensor(self.weights)[targets][:, None, :])


def weighted(loss: Loss, weights: Sequence[float]) -> Loss:
    """A loss of classes in which a record counts w_t, the weight of its class t.

    The weights are constants chosen without looking at the records: weights computed from the
    labels would reveal something about them. Clipping comes after them, so ε stays the same.

    >>> weighted(LOSSES["softmax"], [1, 3]).name
    'softmax@1.0,3.0'
    """
    if loss.kind != "class":
        what = "numbers" if loss.kind == "number" else "several labels, which are no classes"
        raise BadInput(
            "not-applicable",
            f"task.class_weights is given with the loss {loss.name!r} of {what}; leave it out",
        )
    if loss.weights:
        raise BadInput("not-applicable", f"the loss {loss.name!r} has class weights already")
    numbers = tuple(number("task.class_weights", value) for value in weights)
    if len(numbers) < 2 or min(numbers) <= 0:
        raise BadInput(
            "out-of-range", f"task.class_weights is {list(weights)}; give a positive number a class"
        )
    return replace(
        loss,
        name=f"{loss.name}@{','.join(map(repr, numbers))}",
        values=WeightedValues(loss.values, numbers),
        errors=WeightedErrors(loss.errors, numbers),
        weights=numbers,
    )


SOFTMAX = Loss("softmax", softmax_values, softmax_errors, convex=True, kind="class", scores=None)

#: Every loss by name. Of its entries ``huber`` alone has a number; :func:`huber` makes others.
LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        SOFTMAX,
        Loss("logistic", logistic_values, logistic_errors, convex=True, kind="class"),
        Loss("squared", squared_values, squared_errors, convex=True, kind="number"),
        huber(),
        Loss("labels", labels_values, labels_errors, convex=True, kind="labels", scores=None),
    )
}


def loss_named(name: str) -> Loss:
    """The loss of this name, ``huber:DELTA`` included; others are refused in a sentence.

    >>> loss_named("huber:0.5") == huber(0.5)
    True
    """
    plain, _, numbers = name.partition("@")
    if numbers:
        try:
            return weighted(loss_named(plain), [float(text) for text in numbers.split(",")])
        except ValueError as problem:
            raise BadInput(
                "bad-weights", f"task.loss is {name!r}; its weights cannot be read ({problem})"
            ) from None
    kind, _, delta = name.partition(":")
    if kind == "huber" and delta:
        try:
            return huber(float(delta))
        except ValueError:
            raise BadInput(
                "out-of-range",
                f"task.loss is {name!r}; after 'huber:' give a positive number, as in 'huber:0.5'",
            ) from None
    if name not in LOSSES:
        raise BadInput(
            "unknown-loss", f"task.loss is {name!r}; choose one of {', '.join(LOSSES)}, huber:DELTA"
        )
    return LOSSES[name]
