"""Where no plan meets what was asked: what was asked, and the least ε that would be met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dpscaffold.config import Run
from dpscaffold.errors import BadInput
from dpscaffold.privacy import epsilon as epsilon_of
from dpscaffold.privacy import no_guarantee
from dpscaffold.privacy.mechanism import MOST_NOISE


def unmet(settings: Sequence[Run], epsilon: float, error: BadInput) -> BadInput:
    """The refusal of an ε that no noise gives any of these candidates, in one sentence: what was
    asked, why the first fails, and the least ε that one of them meets."""
    first = settings[0]
    run, plan = first.describe(), first.plan
    delta = "" if run is None else f" at delta {run.delta:.4g}"
    why, _, remedy = str(error).partition("; ")
    least = least_epsilon(settings)
    if least is not None and epsilon < least:
        remedy = f"ask for an epsilon of at least {least:g}"
    return BadInput(
        "goal-not-met",
        f"no plan keeps epsilon {epsilon:g} towards {first.limits.view}{delta} with at most "
        f"{plan.rounds} rounds of {plan.local_steps} local steps, {first.cohort_size} of "
        f"{first.users} users in each, and {first.sampling} batches ({why}); {remedy}",
    )


def least_epsilon(settings: Sequence[Run]) -> float | None:
    """The smallest ε that the most noise gives one of these, rounded up to four digits; None where
    their bound says nothing."""
    found = [value for one in settings if (value := _spent_with_most_noise(one))]
    if not found:
        return None
    scale = 10.0 ** (3 - math.floor(math.log10(min(found))))
    return math.ceil(min(found) * scale) / scale


def _spent_with_most_noise(setting: Run) -> float | None:
    """ε of this run with the most noise that is ever solved for; None where its bound says
    nothing."""
    run = setting.describe()
    if run is None:
        return None
    loudest = replace(run, noise=MOST_NOISE)
    if no_guarantee(loudest):
        return None
    return epsilon_of(loudest, setting.limits.against(loudest))
