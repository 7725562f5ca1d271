"""Records as local steps want them: prepared for the task and on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalRecords:
    """Prepared records at hand: features (N, D), their squared norms and labels (N,), and where the
    records of each participant begin. ``tame`` says that no row is extreme (False: unknown).
    ``weight`` (N,) is 0 for records that count but contribute nothing (None: all contribute)."""

    features: Tensor
    squares: Tensor
    labels: Tensor
    starts: list[int]
    tame: bool = False
    weight: Tensor | None = None

    def weights(self, index: Tensor, real: Tensor | None) -> Tensor | None:
        """The weights of a batch, (U, B), from the numbers of its records and what is ``real`` and
        not padding (None: all of it)."""
        if self.weight is None:
            return real
        chosen = self.weight.index_select(0, index.reshape(-1)).view(index.shape)
        return chosen if real is None else chosen * real

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.features.device
