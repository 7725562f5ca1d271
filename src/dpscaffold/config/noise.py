"""Which site brings most of a round's noise: from public numbers alone."""

from __future__ import annotations

from dpscaffold.config.run import Run
from dpscaffold.privacy.numbers import digits_up

#: One site dominates where more than this share of the noise's variance is its own.
DOMINATES = 0.5


def dominating_site(setting: Run) -> str | None:
    """A sentence on the site whose noise is more than all others' together, and what helps; None
    where there is no such site. Sites with the same records as the loudest count with it."""
    if setting.privacy is None or setting.privacy.clip == "median" or setting.users < 3:
        return None
    noise = setting.site_noise
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
