"""A budget for each user: ε_i by name, the noise σ_i that keeps each, and weights by noise.

Everything here is a function of public numbers: sizes, budgets, the plan. Where uploads are seen
one by one, a user is hidden by its own noise alone, so σ_i is solved for each user by itself. In a
secure sum all members hide each other, and the strictest decides on the noise of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from dpscaffold.errors import BadInput
from dpscaffold.privacy import SERVER, adversaries, epsilons_by_group, solve_noise
from dpscaffold.privacy.accounting import rounded_steps
from dpscaffold.privacy.mechanism import Group, Mechanism
from dpscaffold.privacy.preparation import Cost

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from dpscaffold.federation.roster import Roster

    Number = TypeVar("Number", float, Tensor)

#: The key for all users that a table of budgets does not name.
DEFAULT = "default"

#: ε of all users, or a table by name.
Epsilon = float | Mapping[str, float]


def budgets_of(table: Mapping[str, float], roster: Roster) -> tuple[float, ...]:
    """ε_i of every user, in the roster's order; users without a name are called by their
    numbers."""
    names = roster.names or tuple(str(user) for user in range(roster.users))
    if DEFAULT in names:
        raise BadInput(
            "conflicting-arguments",
            f"privacy.epsilon is a table, and a user is called {DEFAULT!r}, which means all users "
            f"that it does not name; call the user otherwise",
        )
    unknown = [user for user in table if user != DEFAULT and user not in names]
    if unknown:
        shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
        raise BadInput(
            "unknown-user",
            f"privacy.epsilon has a budget for {unknown[0]!r}, and no user has this name; give one "
            f"of {shown}, or leave it out",
        )
    missing = [user for user in names if user not in table]
    if missing and DEFAULT not in table:
        raise BadInput(
            "missing-key",
            f"privacy.epsilon has no budget for {missing[0]!r} and no {DEFAULT!r}; add "
            f"{DEFAULT} = 2.0 for all users that the table does not name",
        )
    return tuple(table[user] if user in table else table[DEFAULT] for user in names)


def own_noises(
    run: Mechanism, epsilons: Sequence[float], costs: Sequence[Cost] = ()
) -> tuple[float, ...]:
    """σ_i of every user: the smallest with which its own noise keeps ε_i towards everybody, the
    server included (Theorem 1).

    It depends on the user's own rate and budget and on nobody else, so that each is solved by
    itself. Beyond a few distinct pairs, rates are rounded up and budgets down.
    """
    places = run.membership or (0,) * run.users
    groups = {group.rate: group for group in run.groups}
    wanted = [(run.groups[g].rate, epsilon) for g, epsilon in zip(places, epsilons, strict=True)]
    rounded = rounded_steps(wanted)
    solved = {
        (rate, epsilon): solve_noise(_of_one_kind(run, groups[rate]), epsilon, SERVER, costs)
        for rate, epsilon in set(rounded)
    }
    return tuple(solved[pair] for pair in rounded)


def alike(run: Mechanism) -> Mechanism:
    """The run in which every user has the smallest σ_i of all."""
    return replace(run, groups=tuple(replace(group, louder=1.0) for group in run.groups))


def _of_one_kind(run: Mechanism, group: Group) -> Mechanism:
    """The run as if all users were of one kind, and every upload seen."""
    one = Group(group.records, group.batch, run.users)
    return replace(run, groups=(one,), membership=(), secure=None)


def noise_weight(variance: Number, heterogeneity: float) -> Number:
    """τ²/(v + τ²), or 1/v where τ² is 0: a user's weight in means, up to a factor that all users
    share, from the variance of its noise and public numbers alone.

    >>> noise_weight(3.0, 1.0), noise_weight(4.0, 0.0)
    (0.25, 0.25)
    """
    return (heterogeneity or 1.0) / (variance + heterogeneity)


def heterogeneity_of(clip: float | str) -> float:
    """τ² = C²: a coordinate of a mean of clipped gradients lies between −C and C, so its variance
    between users is at most C²."""
    return 0.0 if isinstance(clip, str) else float(clip) ** 2


def joint_noises(
    run: Mechanism, epsilons: Sequence[float], costs: Sequence[Cost] = ()
) -> NDArray[np.float64]:
    """σ_i of every user of a secure sum.

    User i needs the multiplier z_i over the sum of its honest members. All members add noise of the
    same deviation 2C·a to the sum, so that any m − k of them hide user i if
    a·√(m − k) ≥ z_i·ω_i/b_i: the strictest user decides on a, and σ_i = a·b_i/ω_i. With
    ``weighting="noise"`` a strict user has a smaller weight instead, ω_i = b_i/z_i, with which the
    mean of a round has the least noise.
    """
    assert run.secure is not None
    honest, places = run.cohort_size - run.secure.colluders, run.membership or (0,) * run.users
    batches = np.array([run.groups[g].batch for g in places], dtype=float)
    needed = np.array(own_noises(run, epsilons, costs))
    divisors = batches if run.unit == "record" else np.ones(run.users)
    weights = np.ones(run.users)
    if run.weighting == "noise":
        weights = divisors / needed
    if run.weighting == "records":
        weights = np.array([float(run.groups[g].records) for g in places])
    common = float((needed * weights / divisors).max()) / math.sqrt(honest)
    return common * divisors / weights


def keeps_budgets(run: Mechanism, epsilons: Sequence[float], costs: Sequence[Cost] = ()) -> bool:
    """Whether every user's ε through the sums is within its budget."""
    allowed: dict[int, float] = {}
    for place, epsilon in zip(run.membership or (0,) * run.users, epsilons, strict=True):
        allowed[place] = min(epsilon, allowed.get(place, math.inf))
    spent = epsilons_by_group(run, adversaries(run)["server"], costs=costs)
    return all(spent[place] <= epsilon for place, epsilon in allowed.items())


def louder_of(noises: Sequence[float]) -> tuple[float, ...]:
    """σ_i over the smallest, rounded down, so that no more noise is accounted than is added.

    >>> louder_of([2.0, 3.0])
    (1.0, 1.5)
    """
    least = min(noises)
    ratios = (noise / least for noise in noises)
    return tuple(
        ratio if least * ratio <= noise else math.nextafter(ratio, 0.0)
        for noise, ratio in zip(noises, ratios, strict=True)
    )
