"""Records as local steps want them: prepared for the task and on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalRecords:
    """Prepared records at hand: features (N, D), their squared norms and labels (N,), and where the
    records of each participant begin. ``tame`` says that no row is extreme (False: unknown)."""

    features: Tensor
    squares: Tensor
    labels: Tensor
    starts: list[int]
    tame: bool = False

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.features.device
