"""Solve for the noise, or list the combinations that spend a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import scipy

from dpscaffold.privacy.bound import Bound
from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.mechanism import MOST_NOISE, Mechanism
from dpscaffold.privacy.showing import round_up

#: The noise is found to this relative precision, upwards.
PRECISION = 1e-3
#: The least noise that is solved for: a budget that needs less hides nothing.
LEAST_SOLVED = 1e-3


def calibrate_noise(
    run: Mechanism, epsilon: float, bound: Bound = RANDOM_PARTICIPATION, costs: Sequence[Cost] = ()
) -> float:
    """The smallest σ_g, to five digits, whose ε is at most ``epsilon``.

    ε falls as the noise rises. The root of log ε(σ) − log ε is found on a logarithmic scale, then
    rounded up and checked, so the ε of the answer is never above the target and within one per cent
    of it.

    Args:
        run: The run; its own noise is not used.
        epsilon: The target.
        bound: The bound by which ε is computed.
        costs: Further mechanisms that the budget must cover too.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=100, local_steps=5, users=60, cohort_size=12,
    ...                records=800, batch_sizes=160, noise=1)
    >>> noise = calibrate_noise(run, 1.0)
    >>> 0.99 <= RANDOM_PARTICIPATION.epsilon(replace(run, noise=noise)) <= 1.0
    True
    """
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(
            "out-of-range", f"epsilon is {epsilon:g}; give a number above 0, such as 2"
        )
    seen: dict[float, float] = {}

    def spent(log_noise: float) -> float:
        if log_noise not in seen:
            seen[log_noise] = bound.epsilon(replace(run, noise=math.exp(log_noise)), costs=costs)
        return seen[log_noise]

    # An ε that is reported as 0 has no logarithm; whatever represents it lies below the target.
    least = min(1e-12, epsilon / 2)

    def excess(log_noise: float) -> float:
        return math.log(max(spent(log_noise), least)) - math.log(epsilon)

    low, high = _bracket(spent, epsilon)
    root = scipy.optimize.brentq(excess, low, high, xtol=PRECISION / 4, rtol=1e-12)
    noise = round_up_digits(math.exp(root))
    while spent(math.log(noise)) > epsilon:
        noise = round_up_digits(noise * (1 + PRECISION / 2))
    return noise


def _bracket(spent: Callable[[float], float], epsilon: float) -> tuple[float, float]:
    """log σ with ε above and ε at or below the target, a factor of at most 4 apart."""
    step, low, most = math.log(4.0), 0.0, math.log(MOST_NOISE)
    if spent(low) <= epsilon:
        while spent(low - step) <= epsilon:
            low -= step
            if low < math.log(LEAST_SOLVED):
                raise PrivacyError(
                    "goal-too-weak",
                    f"epsilon={epsilon:g} is met with a noise below {LEAST_SOLVED:g}; a budget "
                    f"that large hides nothing, give a smaller epsilon",
                )
        return low - step, low
    while spent(min(low + step, most)) > epsilon:
        low += step
        if low >= most:
            raise PrivacyError(
                "goal-not-met",
                f"epsilon={epsilon:g} is not met by any noise up to {MOST_NOISE:g}, where it is "
                f"still {round_up(spent(most), 4)}; give a larger epsilon, fewer rounds, or "
                f"another bound",
            )
    return low, min(low + step, most)


def round_up_digits(value: float, digits: int = 5) -> float:
    """The next number with this many significant digits."""
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale - 1e-9) / scale


@dataclass(frozen=True)
class Combination:
    """K local steps, T rounds and noise σ_g that together spend ``epsilon``."""

    local_steps: int
    rounds: int
    noise: float
    epsilon: float


def budget_table(
    run: Mechanism,
    epsilon: float,
    bound: Bound = RANDOM_PARTICIPATION,
    local_steps: Sequence[int] = (1, 5, 10, 20, 50),
    rounds: Sequence[int] = (),
    costs: Sequence[Cost] = (),
) -> list[Combination]:
    """The noise that puts each (K, T) on the budget; T defaults to ¼, 1 and 4 times the run's."""
    listed = tuple(rounds) or tuple(sorted({max(1, run.rounds // 4), run.rounds, 4 * run.rounds}))
    table = []
    for steps in local_steps:
        for total in listed:
            variant = replace(run, local_steps=steps, rounds=total)
            if bound.applies(variant) is not None:
                continue
            noise = calibrate_noise(variant, epsilon, bound, costs)
            spent = bound.epsilon(replace(variant, noise=noise), costs=costs)
            table.append(Combination(steps, total, noise, spent))
    if not table:
        raise PrivacyError(
            "bound-not-applicable", f"the bound {bound.name!r} does not apply: {bound.applies(run)}"
        )
    return table
