"""Solve for the noise, or the rounds, that keep a run within a goal in human terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dpscaffold.privacy.bound import Bound
from dpscaffold.privacy.bounds import RANDOM_PARTICIPATION
from dpscaffold.privacy.calibrate import LEAST_SOLVED, Combination, round_up_digits
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.human import check_group, losses
from dpscaffold.privacy.ledger import largest_count
from dpscaffold.privacy.mechanism import MOST_NOISE, Mechanism
from dpscaffold.privacy.showing import digits_up
from dpscaffold.privacy.tradeoff import TradeOff

Kind = Literal["advantage", "tpr", "mu", "epsilon"]
#: The noise is found to this relative precision, upwards.
PRECISION = 1e-3


@dataclass(frozen=True)
class AttackGoal:
    """The most that any membership test may achieve.

    Args:
        kind: ``"advantage"`` (the best TPR − FPR; at even odds the best test is right 1/2 + A/2 of
            the time), ``"tpr"`` (the true-positive rate at ``at_fpr``), ``"mu"`` (approximate
            Gaussian privacy over [δ, 1 − δ], for one record) or ``"epsilon"`` (at the run's δ).
        target: The largest value that is allowed.
        at_fpr: The false-positive rate of ``"tpr"``.
        group: The number of records of one person that change together.

    >>> AttackGoal("tpr", 0.02, at_fpr=0.01)
    AttackGoal(kind='tpr', target=0.02, at_fpr=0.01, group=1)
    """

    kind: Kind
    target: float
    at_fpr: float | None = None
    group: int = 1

    def __post_init__(self) -> None:
        check_group(self.group)
        if self.kind in ("mu", "epsilon"):
            if not (math.isfinite(self.target) and self.target > 0):
                raise PrivacyError(
                    "out-of-range", f"{self.kind} is {self.target:g}; give a number above 0"
                )
            if self.kind == "mu" and self.group != 1:
                raise PrivacyError(
                    "conflicting-arguments",
                    f"group={self.group} is given with mu, which is for one record; leave out one "
                    f"of them",
                )
        elif not 0.0 < self.target < 1.0:
            raise PrivacyError(
                "out-of-range", f"{self.kind}={self.target} must lie strictly between 0 and 1"
            )
        if (self.at_fpr is not None) != (self.kind == "tpr"):
            raise PrivacyError(
                "missing-argument", "a true-positive rate needs its false-positive rate; give both"
            )
        if self.at_fpr is not None and not 0.0 < self.at_fpr < self.target:
            raise PrivacyError(
                "out-of-range",
                f"at_fpr={self.at_fpr} must lie above 0 and below tpr={self.target}; blind "
                f"guessing already finds as many as it falsely accuses",
            )

    def reached(self, curve: TradeOff, delta: float) -> float:
        """What the best test achieves, never below the truth."""
        if self.kind == "advantage":
            return curve.advantage(self.group)
        if self.at_fpr is not None:
            return float(curve.power(self.at_fpr, self.group))
        return curve.mu(delta) if self.kind == "mu" else curve.epsilon(delta, self.group)

    def of(
        self,
        run: Mechanism,
        bound: Bound = RANDOM_PARTICIPATION,
        costs: Sequence[Cost] = (),
        rounds: int | None = None,
    ) -> float:
        """What the best test achieves against a run.

        Args:
            run: The run.
            bound: The bound by which it is computed.
            costs: Further mechanisms that read the same records.
            rounds: The number of rounds; by default all that are planned.
        """
        return self.reached(TradeOff.of(losses(bound, run, rounds, costs)), run.delta)

    def __str__(self) -> str:
        at = f" at fpr={self.at_fpr:g}" if self.at_fpr is not None else ""
        group = f" for {self.group} together" if self.group > 1 else ""
        return f"{self.kind}={self.target:g}{at}{group}"


def noise_for(
    run: Mechanism,
    goal: AttackGoal,
    bound: Bound = RANDOM_PARTICIPATION,
    costs: Sequence[Cost] = (),
) -> float:
    """The smallest σ_g, to a thousandth and upwards, that meets the goal; the run's own plays no
    part.

    More noise never helps a test, so the answer is found by halving on a logarithmic scale.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=100, local_steps=5, users=60, cohort_size=12,
    ...                records=800, batch_sizes=160, noise=1)
    >>> noise = noise_for(run, AttackGoal("advantage", 0.1))
    >>> 0.0995 <= AttackGoal("advantage", 0.1).of(replace(run, noise=noise)) <= 0.1
    True
    """

    def met(noise: float) -> bool:
        return goal.of(replace(run, noise=noise), bound, costs) <= goal.target

    if costs and goal.of(replace(run, noise=1.0), bound, costs, rounds=0) > goal.target:
        raise PrivacyError(
            "goal-not-met",
            f"{goal} is not met by any noise: {', '.join(cost.name for cost in costs)} alone "
            f"exceeds it; give a larger one",
        )
    low, high = 1.0, 1.0
    while met(low):
        low, high = low / 4, low
        if low < LEAST_SOLVED:
            raise PrivacyError(
                "goal-too-weak",
                f"{goal} is met with a noise below {LEAST_SOLVED:g}; a goal that large hides "
                f"nothing, give a smaller one",
            )
    while high <= low or not met(high):
        if high >= MOST_NOISE:
            raise PrivacyError(
                "goal-not-met",
                f"{goal} is not met by any noise up to {MOST_NOISE:g}; give "
                f"{_least(run, goal, bound, costs)}fewer rounds",
            )
        low, high = high, min(4 * high, MOST_NOISE)
    while high / low > 1 + PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if met(middle) else (middle, high)
    noise = round_up_digits(high)
    while not met(noise):
        noise = round_up_digits(noise * (1 + PRECISION))
    return noise


def _least(run: Mechanism, goal: AttackGoal, bound: Bound, costs: Sequence[Cost]) -> str:
    """What the most noise that a run may have reaches, for whoever asked for less."""
    least = goal.of(replace(run, noise=MOST_NOISE), bound, costs)
    return f"at least {goal.kind}={digits_up(least, 4)}, or " if math.isfinite(least) else ""


def rounds_for(
    run: Mechanism,
    goal: AttackGoal,
    bound: Bound = RANDOM_PARTICIPATION,
    costs: Sequence[Cost] = (),
    at_most: int = 1_000_000,
) -> int:
    """The largest T that meets the goal, at most ``at_most``; the run's own T plays no part."""

    def met(rounds: int) -> bool:
        return goal.of(run, bound, costs, rounds) <= goal.target

    rounds = largest_count(met, at_most)
    if not rounds:
        raise PrivacyError(
            "goal-not-met",
            f"{goal} cannot be met even at one round (the noise is {run.noise:g}); give more "
            f"noise or a larger goal",
        )
    return rounds


def goal_table(
    run: Mechanism,
    goal: AttackGoal,
    bound: Bound = RANDOM_PARTICIPATION,
    costs: Sequence[Cost] = (),
    local_steps: Sequence[int] = (1, 5, 10, 20, 50),
) -> list[Combination]:
    """The noise that puts each (K, T) on the goal, with its ε; T is ¼, 1 and 4 times the run's."""
    table = []
    for steps in local_steps:
        for rounds in sorted({max(1, run.rounds // 4), run.rounds, 4 * run.rounds}):
            variant = replace(run, local_steps=steps, rounds=rounds)
            if bound.applies(variant) is not None:
                continue
            variant = replace(variant, noise=noise_for(variant, goal, bound, costs))
            table.append(
                Combination(steps, rounds, variant.noise, bound.epsilon(variant, costs=costs))
            )
    if not table:
        raise PrivacyError(
            "bound-not-applicable", f"the bound {bound.name!r} does not apply: {bound.applies(run)}"
        )
    return table
