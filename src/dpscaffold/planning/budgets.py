"""What one user's stricter budget costs everybody: planned from public numbers, not measured.

More noise of one user is more noise in the mean of a round. The cost is given as an equivalent ε:
the one at which all users alike would bring as much variance into the mean. What that ε is worth is
read off the scores that a plan found on surrogates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dpscaffold.errors import BadInput
from dpscaffold.privacy.showing import digits_up
from dpscaffold.setting import Setting
from dpscaffold.setting.budgets import DEFAULT, budgets_of

#: Users with a stricter budget that are looked at one by one, the strictest first.
MOST_SITES = 5


@dataclass(frozen=True)
class BudgetCost:
    """What the budget of one user, or of all that are stricter together, costs everybody.

    ``equivalent`` is the ε of all users alike with as much variance in the mean, and ``without``
    the same if this user had the ``usual`` budget. ``points`` is the difference on surrogates, in
    hundredths; None where a plan has no scores by ε.
    """

    user: str
    epsilon: float
    usual: float
    equivalent: float
    without: float
    points: float | None

    def sentence(self) -> str:
        """The cost in words."""
        given = f"{self.user}'s ε = {self.epsilon:g} instead of {self.usual:g}"
        if not self.user:
            given = f"all budgets below {self.usual:g} together"
        worth = "" if self.points is None else f", about {max(0.0, self.points):.1f} points"
        return (
            f"{given}: costs everybody as much as an ε of {digits_up(self.equivalent, 3)} instead "
            f"of {digits_up(self.without, 3)} for all{worth} (planned, not measured)"
        )


def usual_budget(table: Mapping[str, float]) -> float:
    """The budget that a plan is made for: the default's, or else the median of the table.

    >>> usual_budget({"north": 0.5, "default": 2.0}), usual_budget({"a": 1.0, "b": 3.0, "c": 4.0})
    (2.0, 3.0)
    """
    if DEFAULT in table:
        return table[DEFAULT]
    return float(np.quantile(list(table.values()), 0.5, method="lower"))


def named(setting: Setting, table: Mapping[str, float], names: Sequence[str]) -> Setting:
    """The setting with names for its users. Without any, users of equal sizes may have those of the
    table."""
    roster = setting.roster
    if names:
        return replace(setting, roster=replace(roster, names=tuple(names)))
    own = [user for user in table if user != DEFAULT]
    numbers = {str(user) for user in range(roster.users)}
    if numbers.issuperset(own):
        return replace(setting, roster=replace(roster, names=()))
    if len(set(roster.sizes)) > 1 or len(own) > roster.users:
        raise BadInput(
            "unknown-user",
            f"privacy.epsilon has a budget for {own[0]!r}, and facts.records does not say which "
            f"user that is; call users by their numbers (0 is the first), or plan with "
            f"deploy.records",
        )
    rest = [f"user {place}" for place in range(len(own), roster.users)]
    return replace(setting, roster=replace(roster, names=(*own, *rest)))


def costs_of(
    setting: Setting,
    table: Mapping[str, float],
    names: Sequence[str] = (),
    scores: Sequence[tuple[float, float]] = (),
) -> tuple[BudgetCost, ...]:
    """What each stricter budget of a table costs, the strictest first, and all of them together.

    Args:
        setting: The planned run, at the usual budget.
        table: The budgets by name.
        names: The users' names, where they are known.
        scores: (ε, score) of all users alike on surrogates.
    """
    usual, run = usual_budget(table), named(setting, table, names)
    budgets = budgets_of(table, run.roster)
    called = run.roster.names or tuple(str(user) for user in range(run.users))
    strict = sorted((e, user) for user, e in zip(called, budgets, strict=True) if e < usual)
    if not strict:
        return ()
    whole = dict(zip(called, budgets, strict=True))
    equivalent = equivalent_epsilon(run.calibrated(whole))
    found = []
    for epsilon, user in strict[:MOST_SITES]:
        without = equivalent_epsilon(run.calibrated({**whole, user: usual}))
        points = _points(scores, without, equivalent)
        found.append(BudgetCost(user, epsilon, usual, equivalent, without, points))
    if len(strict) > 1:
        relaxed = {user: max(usual, epsilon) for user, epsilon in whole.items()}
        without = equivalent_epsilon(run.calibrated(relaxed))
        points = _points(scores, without, equivalent)
        found.append(BudgetCost("", strict[0][0], usual, equivalent, without, points))
    return tuple(found)


def mean_variance(setting: Setting) -> float:
    """M times the variance of one coordinate of a round's mean gradient over all users, from their
    noise and from their differences τ²: Σw_i²(v_i + τ²)/(Σw_i)²."""
    known = setting.known(range(setting.users))
    spread = torch.as_tensor(known.spread, dtype=torch.float64) * torch.ones(setting.users, 1)
    variance = (spread**2 / torch.as_tensor(known.steps))[:, 0] + setting.heterogeneity
    weights = setting.weights
    return setting.users * float((weights**2 * variance).sum() / weights.sum() ** 2)


def equivalent_epsilon(setting: Setting) -> float:
    """ε towards the budget's view if all users had the same noise, and together as much variance in
    the mean as they have."""
    from scipy.optimize import brentq

    privacy = setting.privacy
    assert privacy is not None
    noise, noises = privacy.noise, privacy.noise_by_user
    if noises is not None:
        target = math.log(mean_variance(setting))

        def excess(log_noise: float) -> float:
            return math.log(mean_variance(setting.with_noises((math.exp(log_noise),)))) - target

        low, high = math.log(min(noises)), math.log(max(noises))
        inside = excess(low) < 0 < excess(high)
        ends = low if excess(low) >= 0 else high
        noise = math.exp(brentq(excess, low, high, xtol=1e-6) if inside else ends)
    run = setting.with_noises((noise,)).mechanism
    assert run is not None
    return setting.budget.bound(run).epsilon(run)


def _points(scores: Sequence[tuple[float, float]], one: float, other: float) -> float | None:
    """100 times the difference of the scores at two ε, between those that are known."""
    if len(scores) < 2:
        return None
    epsilons, values = zip(*sorted(scores), strict=True)
    found = np.interp(np.log([one, other]), np.log(epsilons), values)
    return 100 * float(found[0] - found[1])
