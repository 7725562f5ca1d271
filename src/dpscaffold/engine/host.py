"""Batches and noise from the streams of the CPU: seeded ones there, and secret ones everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpscaffold.privacy.mechanism import Sampling
from dpscaffold.randomness.streams import Batches, NoiseStreams, Randomness, in_threads

#: How many numbers of noise are drawn together.
NOISE_BLOCK = 1 << 22


class Source(NamedTuple):
    """Where the draws of one participation come from: the streams of its run, the user, R_i and
    b_i, and the declared size that stands for R_i in the rate of Poisson batches."""

    streams: Randomness
    user: int
    records: int
    batch: int
    declared: int | None = None


def drawn_on_host(
    round: int,
    sources: Sequence[Source],
    steps: int,
    sampling: Sampling,
    noise: int | None,
    device: torch.device,
) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None]]:
    """K times the record numbers (U, B), their weights and the standard normals (U, P) of these
    participations, with ``noise`` = P numbers a step (None: none)."""
    index, count = _indices(round, sources, steps, sampling)
    longest = index.shape[2]
    index, weights = index.to(device), None
    if not bool((count == longest).all()):
        weights = (torch.arange(longest) < count[:, :, None]).float().to(device)
    streams = None
    if noise is not None:
        own = [(source.streams, source.user) for source in sources]
        streams = NoiseStreams.of(round, own, noise)
    block = max(1, NOISE_BLOCK // (len(sources) * (noise or 1)))
    normals: Tensor | None = None
    for k in range(steps):
        if streams is not None and k % block == 0:
            normals = torch.from_numpy(streams.draw(min(block, steps - k))).to(device)
        own_weights = None if weights is None else weights[:, k]
        yield index[:, k], own_weights, None if normals is None else normals[k % block]


def _indices(
    round: int, sources: Sequence[Source], steps: int, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """The K batches of every source: record numbers (U, K, B), padded with 0, and how many are
    real, (U, K)."""
    sizes = [source.batch for source in sources]
    index = np.zeros((len(sources), steps, max(sizes)), dtype=np.int64)

    def draw(u: int) -> Batches:
        streams, user, records, batch, declared = sources[u]
        out = index[u, :, :batch] if sampling == "fixed" else None
        return streams.batches(round, user, records, batch, steps, sampling, out, declared)

    drawn = in_threads(draw, len(sources))
    if sampling == "poisson":
        longest = max(batches.index.shape[1] for batches in drawn)
        index = np.zeros((len(sources), steps, longest), dtype=np.int64)
        for u, batches in enumerate(drawn):
            index[u, :, : batches.index.shape[1]] = batches.index
    return torch.from_numpy(index), torch.from_numpy(np.stack([one.count for one in drawn]))
