"""How a model is judged: accuracy, loss, distance to the optimum, and how far apart the users'
gradients are.

The definitions are those of the paper's appendix, "Metrics". They are computed on private records
and stand outside every privacy guarantee if they are published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dpscaffold.federation import Federation, Records
from dpscaffold.local.records import prepared
from dpscaffold.tasks import Batch, Task

#: Records evaluated together; bounds the memory of an evaluation.
_BLOCK = 1 << 17

#: log₁₀ of the gap is cut off here: below it the difference of two float losses is noise.
_SMALLEST_GAP = 1e-12


class Evaluator:
    """Evaluates models on one federation, a block of users at a time.

    ``optimum_loss`` is F(x*), from :func:`~dpscaffold.optimum.solve`; without it
    ``log10_gap`` is None.
    """

    def __init__(
        self,
        federation: Federation,
        task: Task,
        regularisation: float,
        device: torch.device,
        optimum_loss: float | None = None,
    ) -> None:
        self.federation, self.task, self.regularisation, self.device = (
            federation,
            task,
            regularisation,
            device,
        )
        self.optimum_loss = optimum_loss
        self._test = list(self._blocks(federation.test)) if not federation.mapped else None
        self._train = list(self._blocks(federation.train)) if not federation.mapped else None

    def __call__(self, params: Tensor) -> dict[str, float | None]:
        """All metrics of one model, (P,)."""
        loss, gradients_square, mean_gradient_square = self._train_side(params)
        gap = None
        if self.optimum_loss is not None:
            gap = (
                math.log10(max(loss - self.optimum_loss, _SMALLEST_GAP))
                if math.isfinite(loss)
                else math.inf
            )
        return {
            "test_accuracy": self.accuracy(params),
            "train_loss": loss,
            "log10_gap": gap,
            "gradient_dissimilarity": gradients_square - mean_gradient_square,
            "gradient_log_dissimilarity": _log(gradients_square) - _log(mean_gradient_square),
        }

    def accuracy(self, params: Tensor) -> float:
        """Test accuracy averaged over users, whatever their sizes."""
        total = 0.0
        for x, y, user, sizes in (
            self._test if self._test is not None else self._blocks(self.federation.test)
        ):
            hits = (self.task.scores(params, x).argmax(1) == y).double()
            total += float((torch.zeros_like(sizes).index_add_(0, user, hits) / sizes).sum())
        return total / self.federation.users

    def _train_side(self, params: Tensor) -> tuple[float, float, float]:
        """F(x), (1/M)Σ‖∇F_i(x)‖² and ‖∇F(x)‖², all with the ℓ2 term."""
        users, loss, squares = self.federation.users, 0.0, 0.0
        mean = torch.zeros_like(params, dtype=torch.float64)
        for x, y, user, sizes in (
            self._train if self._train is not None else self._blocks(self.federation.train)
        ):
            losses = self.task.losses(params, x, y).double()
            loss += float((torch.zeros_like(sizes).index_add_(0, user, losses) / sizes).sum())
            gradients = self._gradients(params, x, y, sizes)
            squares += float(gradients.square().sum())
            mean += gradients.double().sum(0)
        mean /= users
        ridge = 0.5 * self.regularisation * float(params.double().square().sum())
        return loss / users + ridge, squares / users, float(mean.square().sum())

    def _gradients(self, params: Tensor, x: Tensor, y: Tensor, sizes: Tensor) -> Tensor:
        """∇F_i(x) of a block's users, (users, P): users of unequal size are padded with weight
        0."""
        counts = sizes.long()
        count, longest = len(counts), int(counts.max())
        if int(counts.min()) == longest:
            batch = Batch(x.view(count, longest, -1), y.view(count, longest), None)
        else:
            real = torch.arange(longest, device=x.device) < counts[:, None]
            features = x.new_zeros(count, longest, x.shape[1])
            labels = y.new_zeros(count, longest)
            features[real], labels[real] = x, y
            batch = Batch(features, labels, real.to(x.dtype))
        total = self.task.clipped_sum(params.expand(count, -1), batch, None).total
        return total / sizes[:, None].to(total.dtype) + self.regularisation * params

    def _blocks(self, records: Records) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Prepared features, labels, user number within the block, and the block's sizes
        (float64)."""
        offsets, start = records.offsets.tolist(), 0
        while start < records.users:
            end = start + 1
            while end < records.users and offsets[end + 1] - offsets[start] <= _BLOCK:
                end += 1
            rows = slice(offsets[start], offsets[end])
            sizes = records.sizes[start:end].to(self.device)
            user = torch.repeat_interleave(torch.arange(end - start, device=self.device), sizes)
            x, _ = prepared(self.task, records.features[rows], self.device)
            yield x, records.labels[rows].to(self.device), user, sizes.double()
            start = end


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf
