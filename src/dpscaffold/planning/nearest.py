"""Where no plan meets what was asked: which constraint fails, and the nearest that would do.

Nothing here is guessed: whatever a sentence offers was solved for before it is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from dpscaffold.errors import BadInput
from dpscaffold.planning.facts import rounds_tried
from dpscaffold.privacy import PrivacyError
from dpscaffold.privacy.calibrate import LEAST_SOLVED
from dpscaffold.privacy.ledger import largest_count
from dpscaffold.privacy.mechanism import MOST_NOISE
from dpscaffold.setting import Setting

#: A δ below this is not offered: double precision resolves none of them after many steps.
SMALLEST_DELTA = 15


def unmet(settings: Sequence[Setting], epsilon: float, error: PrivacyError) -> BadInput:
    """The refusal of an ε that no noise gives any of these candidates, the most rounds first, in
    one sentence: what was asked, why the first fails, and every constraint that would do if it
    alone were changed, with its nearest value."""
    first = settings[0]
    run, plan = first.describe(), first.plan
    delta = "" if run is None else f" at delta {run.delta:.4g}"
    why = str(error).split(";")[0]
    offers = ", or ".join(_offers(settings, epsilon)) or "change more than one of them"
    return BadInput(
        "goal-not-met",
        f"no plan keeps epsilon {epsilon:g} towards {first.budget.view}{delta} with at most "
        f"{plan.rounds} rounds of {plan.local_steps} local steps, {first.cohort_size} of "
        f"{first.users} users in each, and {first.sampling} batches ({why}); {offers}",
    )


def _offers(settings: Sequence[Setting], epsilon: float) -> Iterator[str]:
    least, most = least_epsilon(settings), most_epsilon(settings)
    if most is not None and epsilon > most:
        yield f"ask for an epsilon of at most {most:g}"
        return  # neither δ nor fewer rounds make such an ε cost more noise
    if least is not None and epsilon < least:
        yield f"ask for an epsilon of at least {least:g}"
    deltas = [delta for one in settings if (delta := least_delta(one, epsilon)) is not None]
    if deltas:
        yield f"allow a delta of {min(deltas):g}"
    rounds = most_rounds(settings, epsilon)
    if rounds:
        yield f"allow at most {rounds} round{'s' * (rounds > 1)}"
    yield from _otherwise(settings, epsilon)


def _otherwise(settings: Sequence[Setting], epsilon: float) -> Iterator[str]:
    """The other sampling, and the view of whoever sees the model alone, where they would do."""
    other: Literal["fixed", "poisson"] = "fixed" if settings[0].sampling == "poisson" else "poisson"
    mechanism = settings[0].privacy
    if mechanism is not None:
        drawn = replace(mechanism, sampling=other)
        if any(kept(replace(one, privacy=drawn), epsilon) for one in settings):
            yield f"draw batches with sampling {other}"
    budget = replace(settings[0].budget, view="third-party")
    if settings[0].budget.view != "third-party" and any(
        kept(replace(one, budget=budget), epsilon) for one in settings
    ):
        yield "promise it towards third-party"


def least_epsilon(settings: Sequence[Setting]) -> float | None:
    """The smallest ε that the most noise gives one of these, to four digits; None where their
    bound says nothing, or any ε is met."""
    found = [value for one in settings if (value := spent(one, MOST_NOISE))]
    shown = _digits(min(found), math.ceil) if found else None
    return shown if shown is not None and any(kept(one, shown) for one in settings) else None


def most_epsilon(settings: Sequence[Setting]) -> float | None:
    """The largest ε for which one of these still needs the least noise, to four digits."""
    found = [value for one in settings if (value := spent(one, LEAST_SOLVED))]
    shown = _digits(max(found), math.floor) if found else None
    return shown if shown is not None and any(kept(one, shown) for one in settings) else None


def spent(setting: Setting, noise: float) -> float | None:
    """ε of this run with another σ_g; None where its bound says nothing."""
    run = setting.describe()
    if run is None:
        return None
    try:
        return setting.budget.bound(run).epsilon(replace(run, noise=noise))
    except PrivacyError:
        return None


def kept(setting: Setting, epsilon: float) -> bool:
    """Whether some noise keeps this ε."""
    try:
        setting.calibrated(epsilon)
    except PrivacyError:
        return False
    return True


def least_delta(setting: Setting, epsilon: float) -> float | None:
    """The smallest power of ten above the run's δ with which its ε can be kept, up to the δ that a
    run has by itself; None where none of them would do."""
    run, usual = setting.describe(), replace(setting, budget=replace(setting.budget, delta=None))
    most = usual.describe()
    if run is None or most is None:
        return None
    for power in range(SMALLEST_DELTA, 0, -1):
        delta = float(f"1e-{power}")
        if run.delta < delta <= most.delta:
            allowed = replace(setting, budget=replace(setting.budget, delta=delta))
            if kept(allowed, epsilon):
                return delta
    return None


def most_rounds(settings: Sequence[Setting], epsilon: float) -> int:
    """The largest limit on T, below the one that was set, with which a candidate keeps ε; 0 where
    even one round is too many."""
    kinds = {(one.algorithm.name, one.plan.local_steps): one for one in settings}.values()

    def keeps(limit: int) -> bool:
        return any(
            kept(replace(one, plan=replace(one.plan, rounds=rounds)), epsilon)
            for one in kinds
            for rounds in rounds_tried(limit, one.warm_rounds)[-1:]
        )

    return largest_count(keeps, max(one.plan.rounds for one in settings) - 1)


def _digits(value: float, towards: Callable[[float], int]) -> float:
    """Four significant digits, rounded up or down."""
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    return towards(value * scale) / scale
