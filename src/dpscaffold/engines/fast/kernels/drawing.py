"""Batches and noise as one program each, with the very draws of
:mod:`dpscaffold.engines.fast.draws`.

``draws`` (U, 10) int64 holds a row a participant: user, round, both purposes' keys, and its sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpscaffold.engines.fast.kernels import tried, usable

#: Records of a participant that one program holds at a time.
_MOST = 1 << 14

#: Steps that one launch draws for: the second dimension of a grid.
_STEPS = (1 << 16) - 1

#: Places of noise that one program fills.
_PLACES = 256


def fixed_batches(draws: Tensor, first: int, steps: int, most: int, width: int) -> Tensor | None:
    """Record numbers (steps, U, width), ascending, then 0; None where no program can do it.

    The records with the smallest keys are found by bisection: a bound below which there are exactly
    b of them, which takes about log₂R looks, and no sort.
    """
    if not _fits(draws, steps) or most > _MOST:
        return None

    def run() -> Tensor:
        from dpscaffold.engines.fast.kernels.programs import fixed

        users = len(draws)
        index = torch.zeros(steps, users, width, dtype=torch.int64, device=draws.device)
        places = _places(most)
        fixed[(users, steps)](
            index, draws, first, users, width, places, draws.stride(0), num_warps=_warps(places)
        )
        return index

    return tried("fixed batches", run)


def poisson_batches(
    draws: Tensor, first: int, steps: int, most: int, width: int
) -> tuple[Tensor, Tensor] | None:
    """Record numbers (steps, U, width), ascending, then 0, and how many were drawn, (steps, U)."""
    if not _fits(draws, steps) or most > _MOST:
        return None

    def run() -> tuple[Tensor, Tensor]:
        from dpscaffold.engines.fast.kernels.programs import poisson

        users = len(draws)
        index = torch.zeros(steps, users, width, dtype=torch.int64, device=draws.device)
        counts = torch.empty(steps, users, dtype=torch.int64, device=draws.device)
        places = _places(most)
        poisson[(users, steps)](
            index, counts, draws, first, users, width, places, draws.stride(0),
            num_warps=_warps(places),
        )  # fmt: skip
        return index, counts

    return tried("Poisson batches", run)


def standard_normals(draws: Tensor, first: int, steps: int, size: int) -> Tensor | None:
    """Standard normals (steps, U, size) float32."""
    if not _fits(draws, steps):
        return None

    def run() -> Tensor:
        from dpscaffold.engines.fast.kernels.programs import normals

        users = len(draws)
        out = torch.empty(steps, users, size, device=draws.device)
        grid = (users, steps, -(-size // (4 * _PLACES)))
        normals[grid](out, draws, first, users, size, _PLACES, draws.stride(0), num_warps=4)
        return out

    return tried("normals", run)


def _fits(draws: Tensor, steps: int) -> bool:
    """Whether a grid has room for this many steps."""
    return usable(draws.device) and len(draws) > 0 and 0 < steps <= _STEPS


def _places(most: int) -> int:
    """Places of two records each, a power of two."""
    return max(16, 1 << (max(1, most - 1)).bit_length() - 1)


def _warps(places: int) -> int:
    """Sixteen records or so a thread."""
    return min(16, max(1, places // 256))
