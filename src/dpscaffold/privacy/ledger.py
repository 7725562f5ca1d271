"""The ledger: who took part how often, and what that has cost each of them."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpscaffold.privacy.bound import largest_epsilon, no_guarantee
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.laws import Step, group_steps, participations_laws, worst_step
from dpscaffold.privacy.loss import LossDistribution
from dpscaffold.privacy.mechanism import Group, Mechanism
from dpscaffold.privacy.showing import round_up
from dpscaffold.privacy.statement_types import EpsilonSpread

VERSION = 2
#: Where users have more distinct rates than this, rates are rounded up to this many for per-user
#: figures.
MOST_RATES = 48
#: Why a user with an ε of its own may decline, in a described run.
USER_BUDGET = "user_epsilon"


def next_knot(count: int) -> int:
    """The next of few numbers, each a tenth above the one before; up to ten it is ``count``.

    >>> [next_knot(count) for count in (0, 10, 11, 99, 100)]
    [0, 10, 12, 107, 107]
    """
    if count <= 10:
        return count
    return math.ceil(1.1 ** math.ceil(math.log(count) / math.log(1.1) - 1e-9))


@lru_cache(maxsize=4096)
def spent(run: Mechanism, participations: int, group: Group, costs: tuple[Cost, ...] = ()) -> float:
    """ε of a record of a user of ``group`` that took part n times: n·K adaptively composed steps,
    and the other mechanisms that read the same records (``costs``), whether it took part or not."""
    if group not in run.groups:
        raise PrivacyError(
            "unknown-user", f"{group} is not a group of this run; ask its group_of(user)"
        )
    return _spent_at(run, participations, group_steps(run)[run.groups.index(group)], costs)


@lru_cache(maxsize=4096)
def _spent_at(
    run: Mechanism, participations: int, step: Step, costs: tuple[Cost, ...] = ()
) -> float:
    """The same for a user whose step is hidden so."""
    reason = no_guarantee(run)
    if reason:
        raise PrivacyError("no-privacy", reason)
    if participations == 0 and not costs:
        return 0.0
    if run.noise == 0.0:
        return math.inf
    return largest_epsilon(participations_laws(run, participations, step), run.delta, costs)


def _unbeaten(counts: Mapping[Step, int]) -> list[tuple[Step, int]]:
    """Those of these steps and counts that no other exceeds in rate and in count with no more
    noise: one of them has the largest ε."""
    order = sorted(counts.items(), key=lambda item: (-item[0][0], item[0][1], -item[1]))
    found: list[tuple[Step, int]] = []
    for (rate, noise), count in order:  # rates downwards: those found have a rate as large
        if not any(other <= noise and times >= count for (_, other), times in found):
            found.append(((rate, noise), count))
    return found


class Ledger:
    """Participations per user, kept with the run and saved before a round's uploads are used.

    It never goes backwards: rounds are recorded in rising order, passing over those in which none
    of these users was drawn; recording a round again with the same participants changes nothing (a
    resumed simulation repeats its very outputs), with others is refused. ``again=True`` counts a
    round that is run a second time with fresh noise, as a deployment does.

    ``max_participations`` (of the run) and ``user_budget`` (an ε per user) are caps: a user whose
    next participation would exceed its cap declines. The draw is still made from all users and the
    divisor stays m, so nobody else's chance of being drawn changes.

    ``costs`` are further mechanisms that read the same records (a private mean, say): every user
    has spent them from the start, so every ε includes them and the caps leave room for them.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=9, local_steps=2, users=4, cohort_size=2, records=50,
    ...                batch_sizes=5, noise=2.0)
    >>> ledger = Ledger(run)
    >>> ledger.record(1, [0, 3]); ledger.record(2, [3, 1]); ledger.record(2, [3, 1])
    >>> ledger.participations.tolist(), ledger.rounds, ledger.of(2)
    ([1, 1, 0, 2], 2, 0.0)
    >>> Ledger.from_dict(ledger.to_dict()).largest() == ledger.largest() > ledger.of(0)
    True
    """

    def __init__(
        self, run: Mechanism, user_budget: float | None = None, costs: Sequence[Cost] = ()
    ) -> None:
        if user_budget is not None and not user_budget > 0:
            raise PrivacyError(
                "out-of-range",
                f"user_budget={user_budget} lets nobody take part; give a number above 0",
            )
        if user_budget is not None and run.may_decline is None:
            run = replace(run, may_decline=USER_BUDGET)
        self.run = run
        self.user_budget = user_budget
        self.costs = tuple(costs)
        self.participations: NDArray[np.int64] = np.zeros(run.users, dtype=np.int64)
        #: Whether anybody may ever have to decline.
        self.capped = run.max_participations is not None or user_budget is not None
        #: The last recorded round: this many may have drawn anyone; the next has a larger number.
        self.rounds = 0
        self._marks: dict[int, int] = {}  # one number a recorded round: is it a repeat or a change?
        self._repeats: dict[int, int] = {}
        self._caps: NDArray[np.int64] | None = None

    def record(self, round: int, cohort: Iterable[int], again: bool = False) -> None:
        """Enter who took part in a round (counted from 1), before its uploads are used."""
        users = np.unique(np.fromiter(cohort, dtype=np.int64))
        if len(users) and (users[0] < 0 or users[-1] >= self.run.users):
            raise PrivacyError(
                "unknown-user",
                f"round {round} names user {users[-1]} of {self.run.users}; users are counted "
                f"from 0",
            )
        if len(users) > self.run.cohort_size:
            raise PrivacyError(
                "wrong-participants",
                f"round {round} has {len(users)} participants where the run draws "
                f"{self.run.cohort_size}; the bounds would not hold",
            )
        mark = zlib.crc32(users.tobytes())
        if round > self.rounds:
            self._marks[round], self.rounds = mark, round
        elif round not in self._marks:
            raise PrivacyError(
                "round-out-of-order",
                f"round={round} does not follow the last recorded round; record "
                f"{self.rounds + 1} or a later one",
            )
        elif not again:
            if self._marks[round] != mark:
                raise PrivacyError(
                    "round-recorded",
                    f"round={round} is already recorded with other participants; a ledger never "
                    f"changes what was spent (again=True counts a second run of the round)",
                )
            return
        else:
            self._repeats[round] = self._repeats.get(round, 0) + 1
        self.participations[users] += 1

    @property
    def repeats(self) -> tuple[int, ...]:
        """For each round that was run again with fresh noise, how many times it was."""
        return tuple(sorted(self._repeats.values()))

    def with_round(self, round: int, again: bool = False) -> tuple[int, tuple[int, ...]]:
        """:attr:`rounds` and :attr:`repeats` as they would stand with this round recorded too.

        >>> from dpscaffold.privacy import describe
        >>> run = describe(rounds=9, local_steps=2, users=4, cohort_size=2, records=50,
        ...                batch_sizes=5, noise=2.0)
        >>> ledger = Ledger(run)
        >>> ledger.record(1, [0, 3]); ledger.record(2, [3, 1]); ledger.record(1, [0, 3], again=True)
        >>> ledger.with_round(1, again=True), ledger.with_round(3)
        ((2, (2,)), (3, (1,)))
        """
        if round > self.rounds or not again:
            return max(round, self.rounds), self.repeats
        more = {**self._repeats, round: self._repeats.get(round, 0) + 1}
        return self.rounds, tuple(sorted(more.values()))

    def within(self, first: int, last: int, again: int = 0) -> tuple[int, tuple[int, ...]]:
        """How many of the rounds from ``first`` to ``last`` are recorded, and :attr:`repeats`
        among them, for a run whose rounds were planned in parts; as they would stand with the round
        ``again`` run once more.

        >>> from dpscaffold.privacy import describe
        >>> run = describe(rounds=9, local_steps=2, users=4, cohort_size=2, records=50,
        ...                batch_sizes=5, noise=2.0)
        >>> ledger = Ledger(run)
        >>> ledger.record(1, [0, 3]); ledger.record(2, [3, 1]); ledger.record(2, [0, 3], again=True)
        >>> ledger.within(1, 1), ledger.within(2, 9), ledger.within(2, 9, again=2)
        ((1, ()), (1, (1,)), (1, (2,)))
        """
        more = {**self._repeats, again: self._repeats.get(again, 0) + 1}
        inside = tuple(sorted(n for round, n in more.items() if first <= round <= last))
        return max(0, min(self.rounds, last) - first + 1), inside

    def charged(self, costs: Sequence[Cost]) -> Ledger:
        """The same record, with further mechanisms that read the same records."""
        other = copy(self)
        other.costs, other._caps = tuple(costs), None
        return other

    def without_secure_sums(self) -> Ledger:
        """The same record for a server that sees every upload."""
        other = copy(self)
        other.run, other._caps = replace(self.run, secure=None), None
        other.costs = tuple(cost.if_others_collude for cost in self.costs)
        return other

    def of(self, user: int) -> float:
        """ε of a record of this user so far."""
        return spent(self.run, int(self.participations[user]), self.run.group_of(user), self.costs)

    def largest(self) -> float:
        """The largest ε over users.

        ε rises with the rate and with the count and falls with the noise, so only the users that
        nobody exceeds in all three are computed.
        """
        return self._largest(self._most_often())

    def shown(self) -> float:
        """An upper value of :meth:`largest`, cheap enough for every round: participations are
        rounded up to the next of few numbers (:func:`next_knot`)."""
        most = self.run.rounds
        often = self._most_often().items()
        return self._largest({g: max(n, min(next_knot(n), most)) for g, n in often})

    def _largest(self, counts: Mapping[Step, int]) -> float:
        """The largest ε of users that took part this often."""
        spent = [_spent_at(self.run, n, step, self.costs) for step, n in _unbeaten(counts)]
        return max(spent, default=0.0)

    def laws(self) -> tuple[LossDistribution, ...]:
        """The loss distributions of the users that nobody exceeds in rate and count with less
        noise; none before the first participation."""
        reason = no_guarantee(self.run)
        if reason:
            raise PrivacyError("no-privacy", reason)
        often = {step: count for step, count in self._most_often().items() if count}
        return tuple(
            law
            for step, count in _unbeaten(often)
            for law in participations_laws(self.run, count, step)
        )

    def epsilons(self) -> NDArray[np.float64]:
        """ε of every user, (M,). With very many distinct rates each is rounded up by a per cent or
        two."""
        stand_in = _rounded_steps(self.run)
        groups = np.array(self.run.membership)
        values = np.zeros(self.run.users)
        for place, step in enumerate(stand_in):
            # Of one group nothing is copied: users may be very many.
            mine = groups == place if len(groups) else np.True_
            counts = self.participations[mine] if len(groups) else self.participations
            for count in np.flatnonzero(np.bincount(counts)).tolist():
                values[mine & (self.participations == count)] = _spent_at(
                    self.run, count, step, self.costs
                )
        return values

    def distribution(self) -> tuple[dict[int, int], EpsilonSpread]:
        """How often users took part and what it cost: counts, and quantiles of ε over users."""
        counts, spread = distribution_of(self.participations, self.epsilons())
        return counts, replace(spread, max=self.largest())

    def declines(self, user: int) -> bool:
        """Whether this user's next participation would exceed its cap."""
        return bool(self.participations[user] >= self._cap()[user])

    def allowed(self, users: Sequence[int]) -> list[int]:
        """Those of the drawn users that do not decline, in their order."""
        if not self.capped:
            return list(users)
        cap = self._cap()
        return [user for user in users if self.participations[user] < cap[user]]

    def _most_often(self) -> dict[Step, int]:
        most = np.zeros(len(self.run.groups), dtype=np.int64)
        if self.run.membership:
            np.maximum.at(most, np.array(self.run.membership), self.participations)
        else:
            most[:] = self.participations.max(initial=0)
        found: dict[Step, int] = {}
        for step, n in zip(group_steps(self.run), most.tolist(), strict=True):
            found[step] = max(n, found.get(step, 0))
        return found

    def _cap(self) -> NDArray[np.int64]:
        """The most participations of each user, (M,): a function of public numbers alone."""
        if self._caps is None:
            most = self.run.max_participations or self.run.rounds
            caps = np.full(len(self.run.groups), most, dtype=np.int64)
            if self.user_budget is not None:
                steps = _rounded_steps(self.run)
                within = {
                    step: _within(self.run, step, self.user_budget, most, self.costs)
                    for step in set(steps)
                }
                caps = np.array([within[step] for step in steps], dtype=np.int64)
            if self.run.max_participations is None and self.user_budget is None:
                caps[:] = np.iinfo(np.int64).max
            self._caps = caps[np.array(self.run.membership or [0] * self.run.users)]
        return self._caps

    def to_dict(self) -> dict[str, Any]:
        """JSON values with a checksum; together with the description of the run, readable on its
        own."""
        body = {
            "version": VERSION,
            "run": self.run.to_dict(),
            "user_budget": self.user_budget,
            "participations": self.participations.tolist(),
            "rounds": {str(round): mark for round, mark in self._marks.items()},
            "repeats": {str(round): times for round, times in self._repeats.items()},
        }
        return {**body, "checksum": _checksum(body)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ledger:
        """The inverse of :meth:`to_dict`; a damaged ledger is refused."""
        body = (
            {k: v for k, v in values.items() if k != "checksum"}
            if isinstance(values, Mapping)
            else {}
        )
        if not body or values.get("checksum") != _checksum(body):
            raise PrivacyError(
                "ledger-damaged",
                "the ledger is damaged: its checksum does not match; restore it from a checkpoint",
            )
        if body.get("version") != VERSION:
            raise PrivacyError(
                "wrong-version",
                f"the ledger has version {body.get('version')}, and this program reads {VERSION}",
            )
        ledger = cls(Mechanism.from_dict(body["run"]), body["user_budget"])
        ledger.participations = np.array(body["participations"], dtype=np.int64)
        ledger._marks = {int(round): int(mark) for round, mark in body["rounds"].items()}
        ledger.rounds = max(ledger._marks, default=0)
        ledger._repeats = {int(round): int(times) for round, times in body["repeats"].items()}
        if ledger.participations.shape != (ledger.run.users,):
            raise PrivacyError(
                "ledger-damaged",
                "the ledger is damaged: it does not count every user; restore it from a checkpoint",
            )
        return ledger


def _checksum(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def rounded_steps(steps: Sequence[Step]) -> tuple[Step, ...]:
    """One step for each of these, in order; beyond MOST_RATES distinct ones, of a few together the
    one that hides no user better than any of them.

    A larger rate or less noise never has a smaller ε, so this rounds ε up, and keeps thousands of
    sizes affordable.

    >>> rounded_steps([(0.2, 3.0), (0.1, 3.0)])
    ((0.2, 3.0), (0.1, 3.0))
    """
    distinct = sorted(set(steps), key=lambda step: (step[1], step[0]))
    if len(distinct) <= MOST_RATES:
        return tuple(steps)
    found: dict[Step, Step] = {}
    for part in np.array_split(np.arange(len(distinct)), MOST_RATES):
        members = [distinct[k] for k in part]
        found |= dict.fromkeys(members, worst_step(members))
    return tuple(found[step] for step in steps)


def _rounded_steps(run: Mechanism) -> tuple[Step, ...]:
    """The step of each group of the run, in order, rounded where there are many."""
    return rounded_steps(group_steps(run))


def distribution_of(
    counts: NDArray[np.int64], epsilons: NDArray[np.float64]
) -> tuple[dict[int, int], EpsilonSpread]:
    """How many users took part how often, and quantiles of their ε: each is one user's, never an
    average with a smaller one.

    >>> distribution_of(np.array([0, 2, 2]), np.array([0.0, 1.5, 1.5]))[0]
    {0: 1, 2: 2}
    """
    users = np.bincount(counts)
    numbers = np.flatnonzero(users)
    levels = (float(np.quantile(epsilons, k / 4, method="higher")) for k in range(5))
    by_count = {int(n): int(users[n]) for n in numbers}
    return by_count, EpsilonSpread(*levels)


def largest_count(holds: Callable[[int], bool], most: int) -> int:
    """The largest n ≤ ``most`` for which ``holds(n)``, where all smaller ones hold too; 0 where not
    even 1 does. Found by doubling and halving, so large n are tried only where they may hold.

    >>> largest_count(lambda n: n <= 37, 400), largest_count(lambda n: n <= 37, 20)
    (37, 20)
    """
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def participations_within(
    run: Mechanism, group: Group, budget: float, most: int, costs: tuple[Cost, ...] = ()
) -> int:
    """The largest n ≤ ``most`` with ε(n) ≤ ``budget``, what was spent before training included."""
    return _within(run, group_steps(run)[run.groups.index(group)], budget, most, costs)


def _within(
    run: Mechanism, step: Step, budget: float, most: int, costs: tuple[Cost, ...] = ()
) -> int:
    """The same for a user whose step is hidden so."""
    if costs and (before := _spent_at(run, 0, step, costs)) > budget:
        raise PrivacyError(
            "budget-too-small",
            f"user_epsilon={budget:g} is spent before training: "
            f"{', '.join(cost.name for cost in costs)} alone cost{'s' * (len(costs) == 1)} "
            f"{round_up(before, 4)}; give a larger one",
        )
    if not budget > 0:
        return 0
    return largest_count(lambda n: _spent_at(run, n, step, costs) <= budget, most)
