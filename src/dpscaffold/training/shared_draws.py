"""Who shares draws: runs of one seed in a sweep, and (in one experiment) all users of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpscaffold.randomness.streams import Batches, Randomness, Stream
from dpscaffold.setting import Setting


def shared_draws(settings: Sequence[Setting]) -> list[Randomness]:
    """One object per seed. Runs of one seed draw the same participants, batches and noise whatever
    their step size, and the simulator draws once for all that hold the same object. Secret runs
    keep their own.

    >>> from dpscaffold import Logistic, Plan, scaffold, synthetic
    >>> roster = synthetic(users=4, records=20).roster
    >>> plans = [Plan(user_ratio=0.5, seed=s) for s in (0, 0, 1)]
    >>> task = Logistic(40, 10)
    >>> drawn = shared_draws([Setting(roster, task, scaffold(), plan) for plan in plans])
    >>> drawn[0] is drawn[1], drawn[0] is drawn[2]
    (True, False)
    """
    own = [setting.randomness() for setting in settings]
    first: dict[int, Randomness] = {}
    return [one if one.secret else first.setdefault(one.seed, one) for one in own]


class SameForEveryUser(Randomness):
    """All users draw the batches and the noise of user 0, as the paper's published code does.

    Only for the experiment that shows what this does to accuracy: the noise of the participants
    then adds up instead of averaging out, and the server could subtract one user's upload from
    another's.

    >>> same = SameForEveryUser(0)
    >>> bool((same.normals(1, 3).standard_normal(4) == same.normals(1, 8).standard_normal(4)).all())
    True
    """

    def batches(self, round: int, user: int, *arguments: Any, **more: Any) -> Batches:
        """User 0's batches."""
        return super().batches(round, 0, *arguments, **more)

    def normals(self, round: int, user: int) -> Stream:
        """User 0's noise."""
        return super().normals(round, 0)
