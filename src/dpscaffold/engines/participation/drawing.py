"""The batches and the noise of some participants, each drawn from its own streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpscaffold.config.gaussian import NoisedStep
from dpscaffold.config.plan import Plan
from dpscaffold.config.secure import SumPlan
from dpscaffold.privacy.mechanism import Sampling
from dpscaffold.randomness.streams import Batches, Randomness, in_threads

#: How many numbers of noise are drawn together.
NOISE_BLOCK = 1 << 22

#: What decides a row's draws: its streams, its user, and how many of how many records.
Kind = tuple[int, int, int, int, int | None]

#: Record numbers (U, K, B) of each user's own, and how many of each batch are real, (U, K).
Indices = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """One participant of one run: user i with its R_i records and b_i, under a plan and a
    mechanism. Rows of several runs may be stacked if they agree in all but numbers; ``run`` tells
    them apart. ``step_size`` is η_l in this round, and ``declared`` the size that represents R_i in
    the rate of Poisson batches. With ``sums`` the upload is integers of a secure sum.
    """

    user: int
    records: int
    batch: int
    plan: Plan
    privacy: NoisedStep | None
    randomness: Randomness
    step_size: float
    run: int = 0
    declared: int | None = None
    sums: SumPlan | None = None
    #: The weight in means where it is by noise.
    noise_weight: float | None = None

    @property
    def sampling(self) -> Sampling:
        """How batches are drawn; without privacy they have a fixed size."""
        return self.privacy.sampling if self.privacy else "fixed"

    @property
    def weight(self) -> float:
        """The user's weight in means, up to a common factor."""
        if self.noise_weight is not None:
            return self.noise_weight
        # A declared size, not the true one: the weight may go up with the upload.
        size = self.records if self.declared is None else self.declared
        return float(size) if self.plan.weighting == "records" else 1.0

    @property
    def steps(self) -> int:
        """K_i."""
        return self.plan.steps_of(self.user)

    @property
    def kind(self) -> Kind:
        """Rows of one kind draw the same."""
        return id(self.randomness), self.user, self.records, self.batch, self.declared


def distinct(rows: Sequence[Row]) -> tuple[list[Row], list[int] | None]:
    """Rows that draw the same are drawn once: the first of each kind, and every row's place among
    them.

    Runs that were given one and the same :class:`~dpscaffold.randomness.streams.Randomness` (those
    of one seed in a sweep) draw alike for a user who holds as many records in both. The places are
    None where all rows differ.
    """
    kinds = [row.kind for row in rows]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    if len(numbers) == len(rows):
        return list(rows), None
    firsts = dict(zip(reversed(kinds), reversed(rows), strict=True))
    return [firsts[kind] for kind in numbers], [numbers[kind] for kind in kinds]


def indices(round: int, rows: Sequence[Row]) -> Indices:
    """The K batches of every row: record numbers, padded with 0, and how many are real."""
    steps, sampling = rows[0].plan.local_steps, rows[0].sampling

    def draw(u: int, out: np.ndarray | None = None) -> Batches:
        row = rows[u]
        return row.randomness.batches(
            round, row.user, row.records, row.batch, steps, sampling, out, row.declared
        )

    if sampling == "fixed":
        sizes = [row.batch for row in rows]
        index = np.empty((len(rows), steps, max(sizes)), dtype=np.int64)

        def place(u: int) -> np.ndarray:
            index[u, :, sizes[u] :] = 0
            return draw(u, index[u, :, : sizes[u]]).count

        counts = in_threads(place, len(rows)) if len(rows) > 1 else [place(0)]
    else:
        drawn = in_threads(draw, len(rows))
        counts = [batches.count for batches in drawn]
        longest = max(batches.index.shape[1] for batches in drawn)
        index = np.zeros((len(rows), steps, longest), dtype=np.int64)
        for u, batches in enumerate(drawn):
            index[u, :, : batches.index.shape[1]] = batches.index
    return torch.from_numpy(index), torch.from_numpy(np.stack(counts))
