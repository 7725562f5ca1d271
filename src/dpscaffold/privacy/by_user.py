"""ε of each user, where users differ in their noise or in their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dpscaffold.privacy.bound import Bound
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.laws import group_steps
from dpscaffold.privacy.ledger import MOST_RATES, distribution_of
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.statement_types import EpsilonByUser


def epsilons_by_group(
    bound: Bound,
    run: Mechanism,
    rounds: int | None = None,
    costs: Sequence[Cost] = (),
    repeats: Sequence[int] = (),
) -> list[float]:
    """ε of a record of each group's users by one bound. Beyond a few distinct groups, several have
    the largest of their ε.

    >>> from dpscaffold.privacy import RANDOM_PARTICIPATION, describe
    >>> run = describe(rounds=9, local_steps=2, users=2, cohort_size=1, records=50, batch_sizes=5,
    ...                noise=2.0, louder=[1.0, 3.0])
    >>> loose, strict = epsilons_by_group(RANDOM_PARTICIPATION, run)
    >>> strict < loose == RANDOM_PARTICIPATION.epsilon(run)
    True
    """
    steps = group_steps(run)
    order = sorted(range(len(steps)), key=lambda g: (steps[g][1], steps[g][0]))
    found = [0.0] * len(steps)
    for part in np.array_split(np.array(order), min(len(order), MOST_RATES)):
        asked = replace(run, protects=tuple(int(g) for g in part))
        epsilon = bound.epsilon(asked, rounds, costs, repeats)
        for place in asked.protects:
            found[place] = epsilon
    return found


def epsilons_by_user(
    bound: Bound,
    run: Mechanism,
    rounds: int | None = None,
    costs: Sequence[Cost] = (),
    repeats: Sequence[int] = (),
) -> NDArray[np.float64]:
    """The same for every user, (M,)."""
    found = epsilons_by_group(bound, run, rounds, costs, repeats)
    return np.array([found[place] for place in run.membership or [0] * run.users])


def epsilon_by_user(
    bound: str, epsilons: NDArray[np.float64], noises: Sequence[float]
) -> EpsilonByUser:
    """The part of a statement that has ε of every user, (M,)."""
    _, spread = distribution_of(np.zeros(len(epsilons), dtype=np.int64), epsilons)
    return EpsilonByUser(bound, tuple(epsilons.tolist()), tuple(noises), spread)
