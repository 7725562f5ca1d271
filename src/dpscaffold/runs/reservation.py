"""One run's use of a budget file: its grant before it begins, its rounds before they run.

What a run may spend is fixed before it begins: ε over the random draw, for all planned rounds.
Where the seed of the draw is given, it is the larger of that and ε given the draw that the seed
makes, which holds even for whoever knows the seed, and for two runs with the same one. More rounds,
and rounds that are run again, need a further grant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from dpscaffold.config import Run
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Ledger, adversaries, epsilon
from dpscaffold.privacy.numbers import largest_count
from dpscaffold.runs.budget_file import BudgetFile, BudgetGrant
from dpscaffold.runs.ledger import Account


class BudgetReservation:
    """The reservations of one run, begun or resumed."""

    def __init__(self, path: str, setting: Run, account: Account) -> None:
        self.file, self._setting, self._account = BudgetFile(path), setting, account
        self._grants: list[BudgetGrant] = []
        self._granted_repeats = 0
        self._recorded = 0

    @property
    def _name(self) -> str:
        """What the file calls the run."""
        return self._account.journal.first[:16]

    @property
    def _repeats(self) -> list[int]:
        """The rounds that were run again, each as often as it was."""
        return [round for round, again in self._account.releases if again]

    def check(self) -> None:
        """Refuse, before anything is written, a run that does not fit."""
        grant, contents = self._missing(self._account.ends, ()), self.file.read()
        try:
            contents.check(grant)
        except BadInput as error:
            if contents.fits(grant):
                raise

            def fits(rounds: int) -> bool:
                return contents.fits(replace(grant, epsilon=self._price(1, rounds, ())))

            most = largest_count(fits, grant.rounds)
            fit = f"{most} would fit" if most else "not even one would fit"
            raise BadInput(error.code, f"{error} ({fit})") from None

    def begin(self, account: Account) -> None:
        """Reserve the run's grant, or find the one it has, and enter what the file lacks.

        The ledger comes first, so a process that was killed before it entered a round here leaves
        the file one short: a folder restored from then would pass for the newest one round later.
        """
        self._account, released = account, account.releases
        contents, path = self.file.read(), self.file.path
        if account.budget is not None and not contents.journal.follows(account.budget):
            raise BadInput(
                "budget-file-damaged",
                f"{path} is not the budget file that this run was granted from: its first "
                f"{account.budget.lines} lines were shortened or changed; restore it",
            )
        self._recorded = contents.participations.get(self._name, 0)
        if self._recorded > len(released):
            raise BadInput(
                "run-copied",
                f"{path} records {self._recorded} rounds of this run and its own ledger "
                f"{len(released)}: a copy of the run has gone on; resume that one",
            )
        self._grants = contents.of(self._name)
        if released and not self._grants:
            raise BadInput(
                "budget-file-damaged", f"{path} does not hold the grant of this run; restore it"
            )
        self.enter()
        if not self._grants:
            self._reserve(account.ends, ())
        anchor = self.file.read().journal.anchor
        if anchor != account.budget:
            account.write({"budget": vars(anchor)})

    def extend(self, rounds: int) -> None:
        """Reserve what more rounds would spend, ε and δ, or refuse."""
        self._reserve([*self._account.ends, rounds], self._repeats)

    def refuses(self, round: int, again: bool) -> str:
        """Why a round may not run, or the empty string; rounds that were run again, this one too if
        it would be, may need a larger grant."""
        repeats = self._repeats + [round] * again
        if len(repeats) > self._granted_repeats:
            try:
                self._reserve(self._account.ends, repeats)
            except BadInput as error:
                would = "would be" if again else "was"
                return f"round {repeats[-1]} {would} run again with fresh noise, and {error}"
            self._granted_repeats = len(repeats)
        return ""

    def enter(self) -> None:
        """Enter what the ledger has and the file lacks, before its uploads are used."""
        for round, again in self._account.releases[self._recorded :]:
            self.file.participate(self._name, round, self._recorded, again)
            self._recorded += 1

    def _reserve(self, ends: Sequence[int], repeats: Sequence[int]) -> None:
        """Have the file grant all that these parts and repeats need beyond what it has granted."""
        grant = self._missing(ends, repeats)
        if grant.epsilon > 0 or grant.delta > 0:
            self.file.reserve(grant)
            self._grants.append(grant)

    def _missing(self, ends: Sequence[int], repeats: Sequence[int]) -> BudgetGrant:
        """What these parts and repeats need beyond what is granted. Every part has its own δ."""
        run, number = self._account.opening.run, len(self._grants)
        spans = [(before + 1, end) for before, end in pairwise((0, *ends))]
        whole = math.fsum(
            self._price(first, last, [r for r in repeats if first <= r <= last])
            for first, last in spans
        )
        granted = [grant for grant in self._grants if grant.delta > 0]
        more = whole - math.fsum(grant.epsilon for grant in self._grants)
        return BudgetGrant(
            run=f"{self._name}+{number}" if number else self._name,
            epsilon=math.nextafter(more, math.inf) if number and more > 0 else max(more, 0.0),
            delta=run.delta * (len(spans) - len(granted)),
            rounds=ends[-1] - sum(grant.rounds for grant in granted) or 1,
            unit=run.unit,
            neighbours=run.neighbours,
            noise_seed=None if self._setting.secret else self._setting.plan.public_seed,
        )

    def _price(self, first: int, last: int, repeats: Sequence[int]) -> float:
        """ε of the rounds from ``first`` to ``last``; ``repeats`` are those that were, or would be,
        run again, each as often as it was. What preparing the data cost is spent in round 1."""
        opening, count = self._account.opening, last - first + 1
        run, costs = opening.run, opening.costs if first == 1 else ()
        run = replace(run, rounds=max(run.rounds, count), extra=max(run.extra, len(repeats)))
        price = epsilon(run, adversaries(run)["server"], count, costs=costs)
        if not self._setting.draw_given:
            return price
        # Of a later part this counts the user's whole ε, of which less is left: too much, if any.
        setting, ledger = self._setting, Ledger(run, opening.user_epsilon, costs)
        randomness = setting.randomness()
        for round in (*range(first, last + 1), *repeats):
            drawn = randomness.cohort(round, setting.users, setting.cohort_size).tolist()
            again = ledger.rounds > round - first
            ledger.record(round - first + 1, drawn if again else ledger.allowed(drawn), again)
        return max(price, ledger.largest())
