"""The real engine with an adversary looking on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Algorithm, Slots, Upload
from dpscaffold.config import Run
from dpscaffold.engines import Hardware, Simulator
from dpscaffold.engines.fast.stacking import StackedBroadcast
from dpscaffold.engines.participation.drawing import Row
from dpscaffold.federation import Federation
from dpscaffold.privacy.loss import Array
from dpscaffold.randomness.streams import Randomness


@dataclass(frozen=True)
class UploadProjections:
    """What some participants uploaded, as far as it matters: how long each vector is along the
    canary's direction (U,), and how long the rest of Δy is."""

    runs: np.ndarray
    users: np.ndarray
    move: Array
    rest: Array
    totals: dict[str, Array]


class WatchedSimulator(Simulator):
    """The simulator, unchanged, with every upload looked at as it leaves its user."""

    def __init__(
        self,
        settings: Sequence[Run],
        federations: Sequence[Federation],
        randomness: Sequence[Randomness],
        direction: Tensor,
    ) -> None:
        super().__init__(settings, federations, Hardware(), randomness)
        self.direction = direction.double()
        self._seen: list[UploadProjections] = []

    def _participate(
        self, phase: Algorithm, rows: Sequence[Row], broadcast: StackedBroadcast
    ) -> tuple[Upload, Slots]:
        upload, kept = super()._participate(phase, rows, broadcast)
        self._seen.append(self._look(rows, upload))
        return upload, kept

    def _look(self, rows: Sequence[Row], upload: Upload) -> UploadProjections:
        runs, users = np.array([(row.run, row.user) for row in rows]).T
        totals = {
            n: self.along(v) for n, v in upload.totals.items() if v.shape == upload.params.shape
        }
        return UploadProjections(
            runs, users, self.along(upload.params), self._rest(upload.params), totals
        )

    def along(self, vectors: Tensor) -> Array:
        """How long vectors (U, P) or (P,) are along the canary's direction."""
        return np.asarray((vectors.double() @ self.direction).numpy())

    def _rest(self, vectors: Tensor) -> Array:
        wide = vectors.double()
        rest = wide - (wide @ self.direction)[:, None] * self.direction
        return np.asarray(torch.linalg.vector_norm(rest, dim=1).numpy())

    def round_seen(self) -> UploadProjections:
        """All that was uploaded since this was last asked."""
        seen, self._seen = self._seen, []
        join = np.concatenate
        return UploadProjections(
            join([s.runs for s in seen]),
            join([s.users for s in seen]),
            join([s.move for s in seen]),
            join([s.rest for s in seen]),
            {name: join([s.totals[name] for s in seen]) for name in seen[0].totals},
        )
