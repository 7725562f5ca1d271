"""The ledger: who took part how often, and what that has cost each of them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dpscaffold.errors import BadInput
from dpscaffold.privacy.accounting import (
    Laws,
    Step,
    group_steps,
    rounded_steps,
    step_epsilon,
    step_laws,
    unbeaten,
    worst_step,
)
from dpscaffold.privacy.adversary import Adversary, adversaries
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.numbers import largest_count, next_knot, round_up
from dpscaffold.privacy.preparation import Cost

#: Why a user with an ε of its own may decline, in a described run.
USER_BUDGET = "user_epsilon"


class Ledger:
    """Participations per user, kept with the run and saved before a round's uploads are used.

    It never goes backwards: rounds are recorded in rising order, passing over those in which none
    of these users was drawn; recording a round again with the same participants changes nothing (a
    resumed simulation repeats its very outputs), with others is refused. ``again=True`` counts a
    round that is run a second time with fresh noise, as a deployment does: one more participation
    of whoever took part.

    ``user_budget`` (an ε per user) is a cap: a user whose next participation would exceed it
    declines. The draw is still made from all users and the divisor stays m, so nobody else's chance
    of being drawn changes.

    ``costs`` are further mechanisms that read the same records (a private mean, say): every user
    has spent them from the start, so every ε includes them and the caps leave room for them.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=9, local_steps=2, users=4, cohort_size=2, records=50,
    ...                batch_sizes=5, noise=2.0)
    >>> ledger = Ledger(run)
    >>> ledger.record(1, [0, 3]); ledger.record(2, [3, 1]); ledger.record(2, [3, 1])
    >>> ledger.participations.tolist(), ledger.rounds, ledger.of(2)
    ([1, 1, 0, 2], 2, 0.0)
    >>> ledger.largest() == ledger.of(3) > ledger.of(0)
    True
    """

    def __init__(
        self, run: Mechanism, user_budget: float | None = None, costs: Sequence[Cost] = ()
    ) -> None:
        if user_budget is not None and not user_budget > 0:
            raise BadInput(
                "out-of-range",
                f"user_budget={user_budget} lets nobody take part; give a number above 0",
            )
        if user_budget is not None and run.declines is None:
            run = replace(run, declines=USER_BUDGET)
        self.run = run
        self.user_budget = user_budget
        self.costs = tuple(costs)
        self.participations: NDArray[np.int64] = np.zeros(run.users, dtype=np.int64)
        #: The last recorded round: this many may have drawn anyone; the next has a larger number.
        self.rounds = 0
        self._marks: dict[int, int] = {}  # one number a recorded round: is it a repeat or a change?
        self._repeats: Counter[int] = Counter()

    def record(self, round: int, cohort: Iterable[int], again: bool = False) -> None:
        """Enter who took part in a round (counted from 1), before its uploads are used."""
        users = np.unique(np.fromiter(cohort, dtype=np.int64))
        if len(users) and (users[0] < 0 or users[-1] >= self.run.users):
            raise BadInput(
                "unknown-user",
                f"round {round} names user {users[-1]} of {self.run.users}; users are counted "
                f"from 0",
            )
        if len(users) > self.run.cohort_size:
            raise BadInput(
                "wrong-participants",
                f"round {round} has {len(users)} participants where the run draws "
                f"{self.run.cohort_size}; the bounds would not hold",
            )
        mark = zlib.crc32(users.tobytes())
        if round > self.rounds:
            self._marks[round], self.rounds = mark, round
        elif round not in self._marks:
            raise BadInput(
                "round-out-of-order",
                f"round={round} does not follow the last recorded round; record "
                f"{self.rounds + 1} or a later one",
            )
        elif not again:
            if self._marks[round] != mark:
                raise BadInput(
                    "round-recorded",
                    f"round={round} is already recorded with other participants; a ledger never "
                    f"changes what was spent (again=True counts a second run of the round)",
                )
            return
        else:
            self._repeats[round] += 1
        self.participations[users] += 1

    @property
    def extra(self) -> int:
        """How many rounds were run again with fresh noise, each as often as it was."""
        return self._repeats.total()

    @property
    def released(self) -> Mechanism:
        """The run as it went: with every attempt beyond its rounds, or as many as were planned
        for."""
        return replace(self.run, extra=max(self.run.extra, self.extra))

    def repeats(self, first: int, last: int) -> int:
        """How often one of the rounds from ``first`` to ``last`` was run again, for a run whose
        rounds were planned in parts.

        >>> from dpscaffold.privacy import describe
        >>> run = describe(rounds=9, local_steps=2, users=4, cohort_size=2, records=50,
        ...                batch_sizes=5, noise=2.0)
        >>> ledger = Ledger(run)
        >>> ledger.record(1, [0, 3]); ledger.record(2, [3, 1]); ledger.record(2, [0, 3], again=True)
        >>> ledger.repeats(1, 1), ledger.repeats(2, 9)
        (0, 1)
        """
        return sum(n for round, n in self._repeats.items() if first <= round <= last)

    def charged(self, costs: Sequence[Cost]) -> Ledger:
        """The same record, with further mechanisms that read the same records."""
        other = copy(self)
        other.costs = tuple(costs)
        return other

    def at_delta(self, delta: float) -> Ledger:
        """The same record at another δ."""
        other = copy(self)
        other.run = replace(self.run, delta=delta)
        return other

    def of(self, user: int, who: Adversary | None = None, more: int = 0) -> float:
        """ε of a record of this user so far, or after some ``more`` participations; by default
        towards the server."""
        step = self._steps(who)[self.run.place(user)]
        return self._spent(step, int(self.participations[user]) + more, who)

    def largest(self, who: Adversary | None = None) -> float:
        """The largest ε over users, by default towards the server.

        ε rises with the rate and with the count and falls with the noise, so only the users that
        nobody exceeds in all three are computed.
        """
        often = self._most_often(who)
        return max((self._spent(step, n, who) for step, n in unbeaten(often)), default=0.0)

    def shown(self) -> float:
        """An upper value of :meth:`largest`, cheap enough for every round: participations are
        rounded up to the next of few numbers."""
        most = self.run.rounds
        often = {s: max(n, min(next_knot(n), most)) for s, n in self._most_often(None).items()}
        return max((self._spent(step, n, None) for step, n in unbeaten(often)), default=0.0)

    def losses(self, who: Adversary | None = None) -> Laws:
        """The losses of the users that nobody exceeds in rate and count with less noise."""
        seen = self._seen(who)
        return tuple(
            law
            for step, count in unbeaten(self._most_often(who))
            for law in step_laws(self.run, seen, step, None, count, self.costs)
        )

    def epsilons(self, who: Adversary | None = None) -> NDArray[np.float64]:
        """ε of every user, (M,). With very many distinct rates each is rounded up by a per cent or
        two."""
        steps, counts = rounded_steps(self._steps(who)), int(self.participations.max()) + 1
        kinds, kind = np.unique(self.run.places * counts + self.participations, return_inverse=True)
        found = [self._spent(steps[k // counts], k % counts, who) for k in kinds.tolist()]
        return np.array(found)[kind]

    def most_by_group(self) -> NDArray[np.int64]:
        """The largest number of participations in each group, (groups,)."""
        most = np.zeros(len(self.run.groups), dtype=np.int64)
        np.maximum.at(most, self.run.places, self.participations)
        return most

    def allowed(self, users: Sequence[int]) -> list[int]:
        """Those of the drawn users that do not decline, in their order."""
        if self.user_budget is None:
            return list(users)
        cap = _caps(self.run, self.user_budget, self.costs)
        return [user for user in users if self.participations[user] < cap[user]]

    def _seen(self, who: Adversary | None) -> Adversary:
        return who or adversaries(self.run)["server"]

    def _steps(self, who: Adversary | None) -> tuple[Step, ...]:
        return group_steps(self.run, self._seen(who))

    def _spent(self, step: Step, count: int, who: Adversary | None) -> float:
        return step_epsilon(self.run, self._seen(who), step, None, count, self.costs)

    def _most_often(self, who: Adversary | None) -> dict[Step, int]:
        found: dict[Step, int] = {}
        for step, n in zip(self._steps(who), self.most_by_group().tolist(), strict=True):
            found[step] = max(n, found.get(step, 0))
        return found


@lru_cache(maxsize=4)
def _caps(run: Mechanism, budget: float, costs: tuple[Cost, ...]) -> NDArray[np.int64]:
    """The most participations of each user, (M,): a function of public numbers alone."""
    steps = rounded_steps(group_steps(run, adversaries(run)["server"]))
    within = {
        step: participations_within(run, budget, run.rounds, costs, step) for step in set(steps)
    }
    return np.array([within[step] for step in steps], dtype=np.int64)[run.places]


def participations_within(
    run: Mechanism,
    budget: float,
    most: int,
    costs: tuple[Cost, ...] = (),
    step: Step | None = None,
) -> int:
    """The largest n ≤ ``most`` with ε(n) ≤ ``budget`` towards the server, by default for the user
    that is hidden least; what was spent before training is included."""
    server = adversaries(run)["server"]
    step = step or worst_step(group_steps(run, server))
    if costs and (before := step_epsilon(run, server, step, None, 0, costs)) > budget:
        raise BadInput(
            "budget-too-small",
            f"user_epsilon={budget:g} is spent before training: "
            f"{', '.join(cost.name for cost in costs)} alone cost{'s' * (len(costs) == 1)} "
            f"{round_up(before, 4)}; give a larger one",
        )
    if not budget > 0:
        return 0
    return largest_count(lambda n: step_epsilon(run, server, step, None, n, costs) <= budget, most)
