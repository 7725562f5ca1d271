"""The real engine with an adversary looking on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpscaffold.algorithms import Slots, Upload
from dpscaffold.config import Run
from dpscaffold.engine.aggregate import Averaged
from dpscaffold.engine.steps import Drawn, Participation
from dpscaffold.privacy.loss import Array


def rows_of(users_of: Mapping[int, Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The run and the user of every row."""
    runs, users = np.array([(run, user) for run, own in users_of.items() for user in own]).T
    return runs, users


@dataclass(frozen=True)
class UploadProjections:
    """What some participants uploaded, as far as it matters: how long each vector is along the
    canary's direction (U,), and how long the rest of Δy is."""

    runs: np.ndarray
    users: np.ndarray
    move: Array
    rest: Array
    totals: dict[str, Array]


class Watched(Averaged):
    """The law of an engine, with every upload looked at as it leaves its user."""

    def __init__(self, runs: Sequence[Run], direction: Tensor) -> None:
        super().__init__(runs)
        self.direction = direction.double()
        self._seen: list[UploadProjections] = []

    def participate(
        self, of: Participation, drawn: Drawn, users: Mapping[int, Sequence[int]]
    ) -> tuple[Upload, Slots]:
        """The uploads of these users of each run."""
        upload, kept = super().participate(of, drawn, users)
        self._seen.append(self._look(users, upload))
        return upload, kept

    def _look(self, users_of: Mapping[int, Sequence[int]], upload: Upload) -> UploadProjections:
        runs, users = rows_of(users_of)
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
