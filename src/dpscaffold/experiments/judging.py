"""Judge all models of a stack together: one product for many models where the task allows it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpscaffold.federation import Federation
from dpscaffold.metrics import Evaluator
from dpscaffold.setting import Setting

#: Logits held together: (models, classes, records) numbers.
_HELD = 1 << 25


class Judge:
    """Metrics of one model per setting: test accuracy and, where ``full``, the whole of
    :class:`Evaluator`.

    ``optima`` maps a federation (by ``id``) and λ to F(x*), for the gap to it.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        device: torch.device,
        full: bool,
        optima: Mapping[tuple[int, float], float] | None = None,
    ) -> None:
        self.settings, self.device, self.full = list(settings), device, full
        self.optima = optima or {}
        self.groups: dict[int, list[int]] = {}
        for k, setting in enumerate(self.settings):
            self.groups.setdefault(id(setting.federation), []).append(k)
        self._tables = {
            key: _TestTable(self.settings[ks[0]], device) for key, ks in self.groups.items()
        }
        self._evaluators = {
            key: Evaluator(self.settings[ks[0]].federation, self.settings[ks[0]].task, 0.0, device)
            for key, ks in self.groups.items()
            if full
        }

    def __call__(self, models: Sequence[Tensor]) -> list[dict[str, float | None]]:
        """The metrics of each setting's model, (P,) each."""
        rows: list[dict[str, float | None]] = [{} for _ in models]
        for key, members in self.groups.items():
            accuracies = self._tables[key].accuracies(torch.stack([models[k] for k in members]))
            for k, accuracy in zip(members, accuracies, strict=True):
                rows[k] = self._whole(key, k, models[k]) if self.full else {}
                rows[k]["test_accuracy"] = accuracy
        return rows

    def _whole(self, key: int, k: int, model: Tensor) -> dict[str, Any]:
        """Loss, gap and dissimilarity of one model; a model that is not finite has none."""
        evaluator = copy.copy(self._evaluators[key])
        evaluator.regularisation = self.settings[k].plan.regularisation
        evaluator.optimum_loss = self.optima.get((key, evaluator.regularisation))
        loss, squares, mean_square = evaluator._train_side(model)
        gap = None
        if evaluator.optimum_loss is not None and math.isfinite(loss):
            gap = math.log10(max(loss - evaluator.optimum_loss, 1e-12))
        ratio = math.log(squares / mean_square) if squares > 0 and mean_square > 0 else None
        return {
            "train_loss": loss,
            "log10_gap": gap,
            "gradient_dissimilarity": squares - mean_square,
            "gradient_log_dissimilarity": ratio,
        }


class _TestTable:
    """A federation's test records, prepared once."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.task, self.federation, self.device = setting.task, setting.federation, device
        test = self.federation.test
        self.features = self.task.prepare(test.features.to(device))
        self.labels = test.labels.to(device)
        users = torch.arange(test.users, device=device)
        self.user = torch.repeat_interleave(users, test.sizes.to(device))
        self.sizes = test.sizes.to(device).double()

    def accuracies(self, models: Tensor) -> list[float]:
        """Test accuracy averaged over users, of each of the models (S, P)."""
        step = max(1, _HELD // (len(self.labels) * max(1, self.task.outputs)))
        values: list[float] = []
        for part in models.split(step):
            guess = self.task.scores_of(part, self.features).argmax(2)
            values += self._mean(guess == self.labels)
        return values

    def _mean(self, hits: Tensor) -> list[float]:
        """(S, records) → (S,)."""
        total = torch.zeros(len(hits), len(self.sizes), dtype=torch.float64, device=self.device)
        total.index_add_(1, self.user, hits.double())
        return [float(value) for value in (total / self.sizes).mean(1)]


def optimum_losses(
    settings: Sequence[Setting], solved: Mapping[tuple[int, float], float]
) -> dict[tuple[int, float], float]:
    """The part of ``solved`` that these settings need."""
    wanted = {(id(s.federation), s.plan.regularisation) for s in settings}
    return {key: value for key, value in solved.items() if key in wanted}


def federations(settings: Sequence[Setting]) -> list[Federation]:
    """The distinct federations of some settings."""
    return list({id(s.federation): s.federation for s in settings}.values())
