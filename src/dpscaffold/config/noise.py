"""How much of a round's noise comes from each site: from public numbers alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dpscaffold.privacy.numbers import digits_up

if TYPE_CHECKING:
    from dpscaffold.config.run import Run

#: One site dominates where more than this share of the noise's variance is its own.
DOMINATES = 0.5


def site_noise(setting: Run) -> Tensor:
    """The standard deviation of every site's noise as a round's mean counts it, (M,): 2Cσ_i/b_i,
    times w_i/w̄ where the mean is weighted. Zeros where nothing is noised."""
    if setting.privacy is None or setting.privacy.noise == 0:
        return torch.zeros(setting.users, dtype=torch.float64)
    if setting.privacy.clip == "median":
        raise ValueError("the noise of a clip bound that is computed from the batch is not known")
    return setting.spreads()[:, 0] * setting.weights / setting.weights.mean()


def round_noise(setting: Run) -> float:
    """The standard deviation of the noise on one coordinate of a round's mean gradient, taken over
    the m participants of a round and one local step.

    >>> from dpscaffold import Gaussian, Logistic, Plan, fedavg, synthetic
    >>> from dpscaffold.config import Run
    >>> plan = Plan(local_steps=1, user_ratio=1.0, data_ratio=1.0, weighting="records")
    >>> roster = synthetic(users=4, records=50).roster
    >>> run = Run(roster, Logistic(40, 10), fedavg(), plan, Gaussian(1.0, 10.0, "poisson"))
    >>> round(round_noise(run), 9)  # 2Cσ_g/R_i = 0.5 for each of four sites
    0.25
    """
    return math.sqrt(float(site_noise(setting).square().mean()) / setting.cohort_size)


def dominating_site(setting: Run) -> str | None:
    """A sentence on the site whose noise is more than all others' together, and what helps; None
    where there is no such site. Sites with the same records as the loudest count with it."""
    if setting.privacy is None or setting.privacy.clip == "median" or setting.users < 3:
        return None
    noise = site_noise(setting)
    loudest, largest = int(noise.argmax()), int(setting.sizes.argmax())
    if not float(noise[loudest].square()) > DOMINATES * float(noise.square().sum()):
        return None
    small, large = int(setting.sizes[loudest]), int(setting.sizes[largest])
    ratio = digits_up(float(noise[loudest] / noise[largest]), 2)
    own = setting.privacy.noise_by_user is not None
    weighting = "noise" if own else "records"
    return (
        f"{_name(setting, loudest)}: {small} records, {ratio} times {_name(setting, largest)}'s "
        f'noise ({large} records); set plan.weighting = "{weighting}", or leave small sites out '
        f"with data.minimum_records"
    )


def _name(setting: Run, site: int) -> str:
    names = setting.roster.names
    return str(names[site]) if names else f"site {site}"
