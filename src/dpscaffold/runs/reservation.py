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
from dpscaffold.runs.journal import digest
from dpscaffold.runs.ledger import Account, Opening


class BudgetReservation:
    """The reservations of one run, begun or resumed."""

    def __init__(self, path: str, setting: Run, opening: Opening) -> None:
        self.file, self._setting, self._opening = BudgetFile(path), setting, opening
        self._name = ""
        self._ends = [opening.run.rounds]
        self._grants: list[BudgetGrant] = []
        self._again: list[int] = []
        self._granted_repeats = 0
        self._recorded = 0

    def check(self) -> None:
        """Refuse, before anything is written, a run that does not fit."""
        grant = self._missing(self._ends, ())
        try:
            self.file.check(grant)
        except BadInput as error:
            contents = self.file.read()
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
        self._name, self._ends = account.journal.first[:16], list(account.ends)
        contents, path, released = self.file.read(), self.file.path, account.releases
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
        for round, again in released[self._recorded :]:
            self._write(round, again)
        self._again = [round for round, again in released if again]
        if not self._grants:
            self._reserve(self._ends, ())
        anchor = self.file.read().journal.anchor
        if anchor != account.budget:
            account.write({"budget": vars(anchor)})

    def extend(self, rounds: int) -> None:
        """Reserve what more rounds would spend, ε and δ, or refuse."""
        ends = [*self._ends, rounds]
        self._reserve(ends, self._again)
        self._ends = ends

    def refuses(self, round: int, again: bool) -> str:
        """Why a round may not run, or the empty string; rounds that were run again, this one too if
        it would be, may need a larger grant."""
        repeats = [*self._again, round] if again else self._again
        if len(repeats) > self._granted_repeats:
            try:
                self._reserve(self._ends, repeats)
            except BadInput as error:
                would = "would be" if again else "was"
                return f"round {repeats[-1]} {would} run again with fresh noise, and {error}"
            self._granted_repeats = len(repeats)
        return ""

    def enter(self, round: int, again: bool) -> None:
        """Enter a round, before its uploads are used."""
        self._write(round, again)
        if again:
            self._again.append(round)

    def _write(self, round: int, again: bool) -> None:
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
        run, number = self._opening.run, len(self._grants)
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
            plan=digest(run.to_json()),
            noise_seed=None if self._setting.secret else self._setting.plan.public_seed,
        )

    def _price(self, first: int, last: int, repeats: Sequence[int]) -> float:
        """ε of the rounds from ``first`` to ``last``; ``repeats`` are those that were, or would be,
        run again, each as often as it was. What preparing the data cost is spent in round 1."""
        costs, count = self._opening.costs if first == 1 else (), last - first + 1
        run = self._opening.run
        run = replace(run, rounds=max(run.rounds, count), extra=max(run.extra, len(repeats)))
        price = epsilon(run, adversaries(run)["server"], count, costs=costs)
        if not self._setting.draw_given:
            return price
        # Of a later part this counts the user's whole ε, of which less is left: too much, if any.
        setting, ledger = self._setting, Ledger(run, self._opening.user_epsilon, costs)
        randomness = setting.randomness()
        for round in (*range(first, last + 1), *repeats):
            drawn = randomness.cohort(round, setting.users, setting.cohort_size).tolist()
            again = ledger.rounds > round - first
            ledger.record(round - first + 1, drawn if again else ledger.allowed(drawn), again)
        return max(price, ledger.largest())
