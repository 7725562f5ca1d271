"""ε by Rényi divergences: looser than the loss distributions, and computed by another library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant, compute_epsilon

#: The series for fractional orders need not converge when the noise of Poisson batches is small.
WHOLE_ORDERS = [*range(2, 65), 96, 128, 256, 512, 1024]


def participation_curve(run: Any, group: Any) -> tuple[np.ndarray, np.ndarray]:
    """Orders α and K·ε_s(α): one participation of a user of a group.

    Fixed-size batches: Wang, Balle, Kasiviswanathan 2019, in the form strengthened for the
    Gaussian, for replace-one neighbours. Poisson batches: Mironov, Talwar, Zhang 2019, for
    neighbours with and without a record, multiplier 2σ_g. A user as unit: α/2σ_g².
    """
    noise = run.noise * group.louder
    if run.unit == "user":
        orders = RdpAccountant().orders
        return orders, run.local_steps * orders / (2 * noise**2)
    if run.sampling == "fixed":
        accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        gaussian = dp_event.GaussianDpEvent(noise)
        event = dp_event.SampledWithoutReplacementDpEvent(group.records, group.batch, gaussian)
    else:
        accountant = RdpAccountant(WHOLE_ORDERS, NeighboringRelation.ADD_OR_REMOVE_ONE)
        event = dp_event.PoissonSampledDpEvent(group.rate, dp_event.GaussianDpEvent(2 * noise))
    accountant.compose(event)
    return accountant.orders, run.local_steps * accountant.rdp


def renyi_epsilon(run: Any) -> float:
    """ε over the draw: ε(α) = 1/(α−1) · log(1 − l + l·e^{(α−1)·K·ε_s(α)}) a round, since the two
    cases have disjoint supports, and one participation for each extra attempt."""
    found = []
    for group in run.groups:
        orders, once = participation_curve(run, group)
        curve, ratio = once, run.user_ratio
        if ratio < 1.0:
            exponent = (orders - 1) * once
            curve = np.logaddexp(math.log1p(-ratio), math.log(ratio) + exponent) / (orders - 1)
        total = run.rounds * curve + run.extra * once
        found.append(float(compute_epsilon(orders, total, run.delta)[0]))
    return max(found)
