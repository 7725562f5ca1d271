"""Secure sums: every site uploads noised integers, and the server learns only their sum.

A site adds its noise in float64, rounds to a public grid and sends integers modulo 2^w. Masks that
cancel in the sum hide single uploads (``dpscaffold.deployment``); the simulator adds the same
integers without masks. Everything here is a function of public numbers and of values that already
carry their noise.

How to use it, at a site and at whoever adds up:

>>> import torch
>>> grid = SumGrid.of(deviation=1.0, reach=100.0)
>>> grid
SumGrid(step=0.0009765625, bits=32)
>>> parts = [grid.quantise(torch.tensor([1.0, -2.0], dtype=torch.float64)) for _ in range(5)]
>>> words = [grid.words(part) for part in parts]  # unsigned integers, to be masked and sent
>>> grid.restore(grid.total(grid.integers(sum(words)))).tolist()  # float64
[5.0, -10.0]

For training, :attr:`~dpscaffold.config.Run.sums` is the :class:`SumPlan` of a run. It gives
each site's noise for a list of members, its integers, and the mean of a list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dpscaffold.config.table import RunTable
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Mechanism, adversaries, noise_seen, unproved
from dpscaffold.privacy.adversary import MOST_SUMMED
from dpscaffold.privacy.mechanism import SecureSums

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dpscaffold.algorithms import Algorithm

#: The step of the grid is at most 2⁻ᴳ times the standard deviation of the quietest site's noise.
SUM_GRID_BITS = 10
#: How many standard deviations of noise the range of a sum has room for.
TAILS = 16.0


class Colluding(BaseModel):
    """How many may work against the others."""

    model_config = ConfigDict(use_attribute_docstrings=True)
    colluders: int | None = Field(default=1, ge=0)
    """k, the number of sites that may share all they know with whoever adds up; a site counts
    members that it has not confirmed among them. In [sums], a number asks for masks: with less
    noise at each site, nobody learns more than the total. Value: an integer, 0 or more. Example:
    ``2``"""


class SumRules(Colluding):
    """What the members of a sum agree on, and what one of them accepts."""

    colluders: int = Field(default=1, ge=0)
    least: int | None = Field(default=None, ge=1)
    """The smallest number of sites whose uploads are added up; by default all that take part in a
    round, at a site 3. Value: an integer, at least 2 more than colluders. Example: ``10``"""
    voids: int = Field(default=0, ge=0)
    """The number of attempts without a result that a site permits in all. Each is accounted as a
    further participation. In a deployed run the default is one for every 20 rounds, and 0 for a
    single round; at a site 10. Value: an integer, 0 or more. Example: ``20``"""

    @model_validator(mode="after")
    def _two_honest(self) -> Self:
        if self.least is not None and self.least - self.colluders < 2:
            raise BadInput(
                "too-few-sites",
                f"secure.least is {self.least} with secure.colluders = {self.colluders}; at "
                f"least two honest sites must hide each other, so give {self.colluders + 2} "
                f"or more",
            )
        return self


class Secure(SumRules, RunTable):
    """``[secure]``: the server sees sums of uploads and no single upload.

    The guarantee holds towards a server that may be hostile, together with at most ``colluders``
    of the sites (docs/privacy-proofs.md, Theorem 4). Every participant of a list A of sites then
    needs √(|A| − k) times less noise for the same ε.

    It needs ``plan.local_steps = 1`` and an algorithm without memory.

    >>> Secure(colluders=1).smallest_list(participants=10)
    10
    """

    table: ClassVar[str] = "secure"

    def smallest_list(self, participants: int) -> int:
        """The fewest members of a list where ``participants`` are drawn; refuses too few."""
        least = participants if self.least is None else self.least
        if least > participants:
            raise BadInput(
                "too-few-sites",
                f"secure.least is {least}, and only {participants} sites take part in a round; "
                f"give at most {participants}, or raise plan.user_ratio",
            )
        if least - self.colluders < 2:
            raise BadInput(
                "too-few-sites",
                f"secure.colluders is {self.colluders}, and {least} sites take part in a round; "
                f"at least two honest sites must hide each other, so let {self.colluders + 2} or "
                f"more take part, or lower secure.colluders",
            )
        return least

    def terms(self, participants: int) -> SecureSums:
        """What the accountant has to know."""
        return SecureSums(self.colluders, self.smallest_list(participants))


def check_secure(
    secure: Secure, run: Mechanism | None, algorithm: Algorithm, sizes: Sequence[int]
) -> None:
    """Refuse secure sums of a run for which they are not proved. ``sizes`` are R_i of all users."""
    if run is None or run.noise == 0:
        raise BadInput(
            "no-noise",
            "secure is given without noise, which sums need; give privacy.noise or "
            "privacy.epsilon, or leave secure out",
        )
    if run.local_steps != 1:
        raise BadInput(
            "secure-not-proved",
            f"plan.local_steps is {run.local_steps}, and secure sums are proved for one local "
            f"step; set plan.local_steps = 1, or leave secure out",
        )
    if algorithm.memory or algorithm.warm_up is not None:
        raise BadInput(
            "secure-not-proved",
            f"algorithm.name is {algorithm.name!r}, whose users keep a memory between "
            f"rounds, and secure sums are not proved for it; use 'fedavg', or leave secure out",
        )
    reason = unproved(run) or noise_seen(run, adversaries(run)["server"]).not_more
    if reason is not None:
        raise BadInput("secure-not-proved", f"secure sums are not proved for this run: {reason}")
    if run.query != "sums" and max(sizes) > MOST_SUMMED:
        raise BadInput(
            "too-many-records",
            f"a site has {max(sizes)} records, and the rounding of secure sums is "
            f"bounded for {MOST_SUMMED}; divide them among several sites",
        )


@dataclass(frozen=True)
class SumGrid:
    """The integers of a sum: multiples of ``step`` (a power of two), modulo 2^``bits``.

    Tensors of integers are int64, between −2^(w−1) and 2^(w−1) − 1. A value beyond this range
    wraps around: that costs accuracy, never privacy, and raises no error, because an error would
    depend on the data.
    """

    step: float
    bits: int = 32

    @classmethod
    def of(cls, deviation: float, reach: float) -> SumGrid:
        """The grid for noise of at least this ``deviation`` at each site, with integers wide enough
        for sums up to ``reach`` in absolute value, noise included. Both are public numbers.

        >>> SumGrid.of(1e-6, reach=1e3).bits
        64
        """
        if not (math.isfinite(deviation) and deviation > 0):
            raise BadInput(
                "no-noise",
                f"the noise of a secure sum has deviation {deviation:g}; give noise above 0",
            )
        step = 2.0 ** (math.floor(math.log2(deviation)) - SUM_GRID_BITS)
        widths = [bits for bits in (32, 64) if reach < step * 2.0 ** (bits - 1)]
        if not widths:
            raise BadInput(
                "sum-overflows",
                f"sums up to {reach:g} with noise of deviation {deviation:g} do not fit integers "
                f"of 64 bits; give more noise or a smaller clip",
            )
        return cls(step, widths[0])

    def quantise(self, values: Tensor) -> Tensor:
        """rint(values/step) modulo 2^w, int64. ``values`` already carry their noise, in float64."""
        full = 2.0**self.bits
        scaled = values.double().div(self.step).round().nan_to_num(0.0, 0.0, 0.0)
        rest = scaled.fmod(full)  # exact
        rest = rest.where(rest < full / 2, rest - full)
        return rest.where(rest >= -full / 2, rest + full).long()

    def total(self, integers: Tensor) -> Tensor:
        """Integers (…) of any size, reduced modulo 2^w to the range of this grid."""
        if self.bits == 64:
            return integers
        return ((integers + (1 << 31)) & ((1 << 32) - 1)) - (1 << 31)

    def add(self, uploads: Tensor) -> Tensor:
        """The sum of uploads (U, P) modulo 2^w, (P,): the same on every machine, in any order."""
        return self.total(uploads.sum(0))

    def restore(self, total: Tensor, divisor: float = 1.0) -> Tensor:
        """The sum in float64, divided by ``divisor`` (for a mean: the sum of the weights)."""
        return self.total(total).double().mul(self.step).div(divisor)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of :meth:`words`: little-endian uint32 or uint64."""
        return np.dtype("<u4" if self.bits == 32 else "<u8")

    def words(self, integers: Tensor) -> NDArray[Any]:
        """The integers as unsigned words, as they are masked and sent; numpy adds them modulo
        2^w."""
        return integers.cpu().numpy().astype(np.int64).view(np.uint64).astype(self.dtype)

    def integers(self, words: NDArray[Any]) -> Tensor:
        """The inverse of :meth:`words`."""
        import torch

        if words.dtype != self.dtype:
            raise BadInput(
                "wrong-type", f"the words are {words.dtype}, and this sum has {self.dtype}"
            )
        signed = words.astype(np.uint64).view(np.int64)
        return self.total(torch.from_numpy(signed))


@dataclass(frozen=True)
class SumPlan:
    """The secure sums of a training run, from public numbers alone.

    A member i of a list A of n sites uploads rint(ω_i(v_i + N_i)/g) modulo 2^w: v_i is its clipped
    batch mean, N_i has the deviation of ``privacy.scale`` at σ_g = :meth:`noise_for`\\ (n), and
    ω_i is its public weight. :meth:`mean` gives Σω_i(v_i + N_i)/Σω_i from the sum.
    """

    secure: Secure
    grid: SumGrid
    #: ω_i of every user, (M,): 1, or R_i over the largest R_i.
    weights: tuple[float, ...]
    #: m, how many are drawn in a round.
    participants: int
    #: σ_g for a list of all who were drawn.
    noise: float

    @classmethod
    def of(
        cls,
        secure: Secure,
        weights: Sequence[float],
        deviations: Sequence[float],
        bounds: Sequence[float],
        participants: int,
        noise: float,
    ) -> SumPlan:
        """The plan of a run.

        Args:
            secure: What is promised.
            weights: The weight of every user in the mean, up to a common factor.
            deviations: The standard deviation of every user's noise on v_i, for a full list.
            bounds: The largest norm of every user's v_i.
            participants: m.
            noise: σ_g for a full list.
        """
        secure.smallest_list(participants)
        largest = max(weights)
        omega = tuple(weight / largest for weight in weights)
        # In the shortest list that any site would accept, a member's noise is this much larger.
        louder = math.sqrt((participants - secure.colluders) / 2)
        each = zip(omega, bounds, deviations, strict=True)
        reach = sorted(w * (b + TAILS * d * louder) for w, b, d in each)
        quietest = min(w * d for w, d in zip(omega, deviations, strict=True))
        grid = SumGrid.of(quietest, 2 * sum(reach[-participants:]))
        return cls(secure, grid, omega, participants, noise)

    @cached_property
    def least(self) -> int:
        """The fewest members that a list may have."""
        return self.secure.smallest_list(self.participants)

    def noise_for(self, members: int, noise: float | None = None) -> float:
        """σ_g of each member of a list of this many, or σ_i from a member's own ``noise``; refuses
        a list that is too short."""
        if members < self.least:
            raise BadInput(
                "too-few-sites",
                f"the list has {members} members, and secure.least is {self.least}; a shorter "
                f"list is refused",
            )
        if members > self.participants:
            raise BadInput(
                "too-many-sites",
                f"the list has {members} members, and {self.participants} were drawn; a list is "
                f"part of the draw",
            )
        full, colluders = self.noise if noise is None else noise, self.secure.colluders
        return full * math.sqrt((self.participants - colluders) / (members - colluders))

    def quantise(self, users: Sequence[int], values: Tensor) -> Tensor:
        """The integers that these users upload, (U, P), from their noised batch means in
        float64."""
        omega = values.new_tensor([self.weights[user] for user in users]).double()
        return self.grid.quantise(values.double() * omega[:, None])

    def mean(self, total: Tensor, users: Sequence[int]) -> Tensor:
        """The weighted mean of the noised batch means of a whole list, (P,) float64."""
        return self.grid.restore(total, math.fsum(self.weights[user] for user in users))
