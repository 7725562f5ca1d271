"""What is asked for the other way round: the noise for an ε or a guess, the rounds for an ε."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from dpscaffold.errors import BadInput
from dpscaffold.privacy.accounting import epsilon, losses
from dpscaffold.privacy.adversary import SERVER, Adversary
from dpscaffold.privacy.loss import Loss
from dpscaffold.privacy.mechanism import MOST_NOISE, Mechanism, check_delta
from dpscaffold.privacy.numbers import digits_up, largest_count, round_up
from dpscaffold.privacy.preparation import Cost

#: The noise is found to this relative precision, upwards.
PRECISION = 1e-3
#: Between two noises that are tried first, on a logarithmic scale.
STEP = math.log(4.0)


def solve_noise(
    run: Mechanism, target: float, who: Adversary = SERVER, costs: Sequence[Cost] = ()
) -> float:
    """The smallest σ_g with which the run keeps ε at most ``target``, for its own rounds.

    ε falls as the noise rises. The root of log ε(σ) − log ε is found on a logarithmic scale, then
    rounded up and checked, so the ε of the answer is never above the target and within one per cent
    of it.

    Args:
        run: The run; its own noise is not used.
        target: ε.
        who: The adversary.
        costs: Further mechanisms that the budget must cover too.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=100, local_steps=5, users=60, cohort_size=12,
    ...                records=800, batch_sizes=160, noise=1)
    >>> noise = solve_noise(run, 1.0)
    >>> 0.99 <= epsilon(replace(run, noise=noise), SERVER) <= 1.0
    True
    """
    check_target(target)
    goal = f"epsilon={target:g}"
    return _least_noise(run, lambda noised: epsilon(noised, who, costs=costs), target, goal)


def solve_noise_for_guess(
    run: Mechanism, target: float, who: Adversary = SERVER, costs: Sequence[Cost] = ()
) -> float:
    """The smallest σ_g with which a guess whether a record was used, made at even odds, is right
    with a probability of at most ``target``.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=100, local_steps=5, users=60, cohort_size=12,
    ...                records=800, batch_sizes=160, noise=1)
    >>> noise = solve_noise_for_guess(run, 0.55)
    >>> 0.545 < guess(losses(replace(run, noise=noise), SERVER)) <= 0.55
    True
    """
    if not 0.5 < target < 1.0:
        raise BadInput(
            "out-of-range",
            f"a guess that is right {100 * target:g} % of the time is no limit; give more than 50 "
            f"and less than 100 per cent",
        )
    goal, spent = f"a guess right {100 * target:g} % of the time", tuple(costs)
    return _least_noise(
        run,
        lambda noised: guess(losses(noised, who, costs=spent)) - 0.5,
        target - 0.5,
        goal,
    )


def guess(laws: Sequence[Loss]) -> float:
    """How often the best guess whether a record was used is right, at even odds: 1/2 + δ(0)/2."""
    return 0.5 + max(law.delta(0.0) for law in laws) / 2


def largest_rounds(
    run: Mechanism,
    target: float,
    who: Adversary = SERVER,
    costs: Sequence[Cost] = (),
    at_most: int = 1_000_000,
) -> int:
    """The largest T with ε(T) ≤ ``target``, at most ``at_most``; the run's own T plays no part.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=1, local_steps=5, users=100, cohort_size=5,
    ...                records=4000, batch_sizes=800, noise=10, delta=2.5e-6)
    >>> rounds = largest_rounds(run, 1.0)
    >>> epsilon(run, SERVER, rounds) <= 1.0 < epsilon(run, SERVER, rounds + 1)
    True
    """
    check_target(target)
    first = epsilon(run, who, 1, costs=costs)
    if first > target:
        raise BadInput(
            "goal-not-met",
            f"epsilon={target:g} cannot be met even at one round, which costs "
            f"{round_up(first, 4)} (the noise is {run.noise:g}); give more noise or a larger "
            f"epsilon",
        )
    return largest_count(lambda rounds: epsilon(run, who, rounds, costs=costs) <= target, at_most)


def check_target(target: float) -> None:
    """Refuse an ε that is none."""
    if not (math.isfinite(target) and target > 0):
        raise BadInput("out-of-range", f"epsilon is {target:g}; give a number above 0, such as 2")


def gaussian_delta(target: float, multiplier: float) -> float:
    """δ(ε) of one Gaussian release of this noise multiplier.

    >>> round(gaussian_delta(1.0, 1.0), 6)
    0.126937
    """
    from scipy.special import log_ndtr

    middle = target * multiplier
    above, below = 1 / (2 * multiplier) - middle, -1 / (2 * multiplier) - middle
    return math.exp(log_ndtr(above)) - math.exp(target + log_ndtr(below))


def gaussian_multiplier(target: float, delta: float) -> float:
    """The smallest noise multiplier with which one Gaussian release is (ε, δ)-differentially
    private.

    >>> round(gaussian_multiplier(1.0, 1e-5), 3)
    3.731
    """
    check_target(target)
    check_delta("delta", delta)
    return _crossing(lambda z: gaussian_delta(target, z) - delta)


def gaussian_epsilon(multiplier: float, delta: float) -> float:
    """The smallest ε with which one Gaussian release is (ε, δ)-differentially private.

    >>> round(gaussian_epsilon(3.731, 1e-5), 3), gaussian_epsilon(1e6, 1e-5)
    (1.0, 0.0)
    """
    if gaussian_delta(0.0, multiplier) <= delta:
        return 0.0
    return _crossing(lambda e: gaussian_delta(e, multiplier) - delta)


def _crossing(falling: Callable[[float], float]) -> float:
    """Where a falling function of a positive number crosses 0, rounded up."""
    from scipy.optimize import brentq

    low = high = 1.0
    while falling(high) > 0:
        high *= 2
    while falling(low) < 0:
        low /= 2
    return float(brentq(falling, low, high, xtol=1e-12)) * (1 + 1e-9)


def _least_noise(
    run: Mechanism, measure: Callable[[Mechanism], float], target: float, goal: str
) -> float:
    """The smallest noise of the run with which ``measure``, which falls with it, is at most
    ``target``."""
    from scipy.optimize import brentq

    @cache
    def of(log_noise: float) -> float:
        # A logarithm and back may end beyond the range of noise by a rounding.
        noise = min(max(math.exp(log_noise), run.least_stated), MOST_NOISE)
        return measure(replace(run, noise=noise))

    # What is reported as 0 has no logarithm; whatever represents it lies below the target.
    least = min(1e-12, target / 2)

    def excess(log_noise: float) -> float:
        return math.log(max(of(log_noise), least)) - math.log(target)

    low, high = _bracket(of, target, goal, run.least_stated)
    root = brentq(excess, low, high, xtol=PRECISION / 4, rtol=1e-12)
    noise = float(digits_up(math.exp(root), 5))
    while of(math.log(noise)) > target:
        noise = float(digits_up(noise * (1 + PRECISION / 2), 5))
    return noise


def _bracket(
    spent: Callable[[float], float], target: float, goal: str, least_stated: float
) -> tuple[float, float]:
    """log σ below and above which the target is met."""
    least, most = math.log(least_stated), math.log(MOST_NOISE)
    low = high = max(0.0, least)
    while spent(low) <= target and low > least:
        low, high = max(low - STEP, least), low
    while spent(high) > target and high < most:
        low, high = high, min(high + STEP, most)
    if spent(low) <= target:
        raise BadInput(
            "goal-too-weak",
            f"{goal} is met with a noise below {least_stated:.3g}; a budget that large hides "
            f"nothing, give a smaller one",
        )
    if spent(high) > target:
        raise BadInput(
            "goal-not-met",
            f"{goal} is not met by any noise up to {MOST_NOISE:g}; give a larger one, or fewer "
            f"rounds",
        )
    return low, high
