"""Who shares draws: runs of one seed in a stack."""

from __future__ import annotations

from collections.abc import Sequence

from dpscaffold.config import Run
from dpscaffold.randomness.streams import Randomness


def shared_draws(settings: Sequence[Run]) -> list[Randomness]:
    """One object per seed. Runs of one seed draw the same participants, batches and noise whatever
    their step size, and the simulator draws once for all that hold the same object. Secret runs
    keep their own.

    >>> from dpscaffold import Logistic, Plan, scaffold, synthetic
    >>> roster = synthetic(users=4, records=20).roster
    >>> plans = [Plan(user_ratio=0.5, seed=s) for s in (0, 0, 1)]
    >>> task = Logistic(40, 10)
    >>> drawn = shared_draws([Run(roster, task, scaffold(), plan) for plan in plans])
    >>> drawn[0] is drawn[1], drawn[0] is drawn[2]
    (True, False)
    """
    own = [setting.randomness() for setting in settings]
    first: dict[int, Randomness] = {}
    return [one if one.secret else first.setdefault(one.seed, one) for one in own]
