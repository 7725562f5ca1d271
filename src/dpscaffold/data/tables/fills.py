"""A private number for missing values: the mean or median of a column, with noise.

Values are clipped to a declared range [a, b], and one record moves what is released by at most Δ
(a record without a value counts as nothing at all):

========  ==========================================  =======================  =================
statistic released, with u = (2x − a − b)/(b − a)     Δ, replace-one           Δ, zero-out
========  ==========================================  =======================  =================
mean      (Σ u, how many), together                   2: (1, 1) for (−1, 1)    √2: (±1, 1)
median    how many in each of 100 bins of [a, b]      √2: two bins             1: one bin
========  ==========================================  =======================  =================

Gaussian noise of standard deviation z·Δ is added, z the multiplier; from the operating system it is
a cipher's, and the noised sums lie on a public grid (:mod:`dpscaffold.data.private`). The mean is
the quotient, kept in the range; the median is where the noised counts, summed up, pass their half.
All else is post-processing. Train and test records alike are protected, each being counted once.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from dpscaffold.data.private import released
from dpscaffold.data.streams import stream
from dpscaffold.errors import BadValue
from dpscaffold.privacy import Cost
from dpscaffold.privacy.gaussian import gaussian_multiplier
from dpscaffold.randomness.csprng import CipherStream
from dpscaffold.randomness.streams import Stream

#: How many bins a private median looks at.
BINS = 100


class PrivateFill(BaseModel):
    """``missing.COLUMN = {fill = "mean", low = 0, high = 60, noise = 20.0}``: what represents a
    missing value, fitted privately. ``low`` and ``high`` are declared without looking at the data;
    give ``noise`` (a multiplier), or ``epsilon`` and ``delta``.

    >>> PrivateFill(fill="mean", low=0, high=60, noise=20.0).multiplier
    20.0
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    fill: Literal["mean", "median"]
    low: float
    high: float
    noise: float | None = Field(default=None, gt=0)
    epsilon: float | None = Field(default=None, gt=0)
    delta: float | None = Field(default=None, gt=0, lt=1)
    entropy: Literal["seed", "system"] = "seed"

    @model_validator(mode="after")
    def _consistent(self) -> PrivateFill:
        if not self.low < self.high:
            raise BadValue(
                "bad-range", f"low is {self.low} and high {self.high}; low must be the smaller"
            )
        given = (self.noise is not None, self.epsilon is not None, self.delta is not None)
        if given not in ((True, False, False), (False, True, True)):
            raise BadValue(
                "noise-or-epsilon", "a private fill needs either noise, or epsilon and delta"
            )
        return self

    @property
    def multiplier(self) -> float:
        """z."""
        if self.noise is not None:
            return self.noise
        assert self.epsilon is not None and self.delta is not None  # the validator saw to it
        return gaussian_multiplier(self.epsilon, self.delta)

    def cost(self, column: str) -> Cost:
        """What the release spends, for either kind of neighbours."""
        z = self.multiplier
        name = f"{self.fill} of column '{column}'"
        return Cost(name, noise=z, add_remove=math.sqrt(2) * z, seeded=self.entropy == "seed")

    def sentence(self, column: str) -> str:
        """What was done, for people."""
        return (
            f"Missing values of column '{column}' were replaced by the {self.fill} of all records "
            f"between {self.low:g} and {self.high:g}, released once with Gaussian noise of "
            f"multiplier {self.multiplier:g}."
        )

    def value(self, column: str, values: np.ndarray, seed: int) -> float:
        """The number that is released, of values (n,) with NaN where one is missing."""
        system = self.entropy == "system"
        rng: Stream = CipherStream() if system else stream(seed, f"fill {column}")
        there = np.clip(values[~np.isnan(values)].astype(np.float64), self.low, self.high)
        half, middle = (self.high - self.low) / 2, (self.high + self.low) / 2
        if self.fill == "mean":
            units = (there - middle) / half
            total = np.array([units.sum(), len(there)])
            total = released(total, 2 * self.multiplier, rng.standard_normal(2), rng)
            return float(middle + half * np.clip(total[0] / max(total[1], 1.0), -1.0, 1.0))
        counts = np.histogram(there, BINS, (self.low, self.high))[0].astype(np.float64)
        spread = math.sqrt(2) * self.multiplier
        counts = released(counts, spread, rng.standard_normal(BINS), rng)
        passed = np.cumsum(counts) >= counts.sum() / 2
        bin_ = int(np.argmax(passed)) if passed.any() else BINS // 2
        return float(self.low + (bin_ + 0.5) * 2 * half / BINS)
