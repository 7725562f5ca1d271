"""One run's use of a budget file: its grant before it begins, its rounds before they run.

What a run may spend is fixed before it begins: ε over the random draw, for all planned rounds.
Where the seed of the draw is given, it is the larger of that and ε given the draw that the seed
makes, which holds even for whoever knows the seed, and for two runs with the same one.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from dpscaffold.config import Run
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Cost, Ledger, Mechanism, adversaries, epsilon
from dpscaffold.privacy.numbers import largest_count
from dpscaffold.runs.budget_file import BudgetFile, BudgetFileContents, BudgetGrant, BudgetRound
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.journal import Anchor, digest
from dpscaffold.runs.parts import Parts, RoundEntry

#: The file of a run folder that names the run in its budget file, and how that file stood.
GRANT = "grant.json"


@dataclass(frozen=True)
class Price:
    """ε and δ of this many planned rounds, some of them run again."""

    epsilon: float
    delta: float
    rounds: int


class Prices:
    """What a plan costs, before it runs: a function of public numbers and the plan's seed."""

    def __init__(
        self, setting: Run, run: Mechanism, costs: Sequence[Cost], user_epsilon: float | None
    ) -> None:
        self._setting, self._run, self._costs = setting, run, tuple(costs)
        self._user_epsilon = user_epsilon

    def of(self, rounds: int, repeats: Sequence[int] = (), first: int = 1) -> Price:
        """The rounds from ``first`` on, up to ``rounds``; ``repeats`` are those that were, or would
        be, run again, each as often as it was. What preparing the data cost is spent in round 1."""
        costs, count = self._costs if first == 1 else (), rounds - first + 1
        run = replace(self._run, extra=max(self._run.extra, len(repeats)))
        price = epsilon(run, adversaries(run)["server"], count, costs=costs)
        if self._setting.draw_given:
            price = max(price, self._given_the_draw(rounds, repeats, first, costs))
        return Price(price, run.delta, count)

    def _given_the_draw(
        self, rounds: int, repeats: Sequence[int], first: int, costs: tuple[Cost, ...]
    ) -> float:
        """ε for whoever knows the seed, and with it who takes part when."""
        run, setting = self._run, self._setting
        # Of a later part this counts the user's whole ε, of which less is left: too much, if any.
        longest = replace(run, rounds=max(run.rounds, rounds - first + 1))
        ledger = Ledger(longest, self._user_epsilon, costs)
        randomness = setting.randomness()
        for round in range(first, rounds + 1):
            drawn = randomness.cohort(round, setting.users, setting.cohort_size)
            ledger.record(round - first + 1, ledger.allowed(drawn.tolist()))
        for round in repeats:
            drawn = randomness.cohort(round, setting.users, setting.cohort_size)
            ledger.record(round - first + 1, drawn.tolist(), again=True)
        return ledger.largest()

    def most_rounds(self, contents: BudgetFileContents, grant: BudgetGrant) -> int:
        """The largest number of rounds that the budget file has room for; 0 where not even one."""

        def fits(rounds: int) -> bool:
            return contents.fits(replace(grant, epsilon=self.of(rounds).epsilon, rounds=rounds))

        return largest_count(fits, grant.rounds)


class BudgetReservation:
    """The reservations of one run, begun or resumed."""

    def __init__(
        self,
        path: str,
        setting: Run,
        run: Mechanism,
        costs: Sequence[Cost],
        user_epsilon: float | None,
        rounds: int,
    ) -> None:
        self._allowance = BudgetFile(path)
        self._prices = Prices(setting, run, costs, user_epsilon)
        self._setting, self._run, self._rounds = setting, run, rounds
        self._parts = Parts((rounds,))
        self._name = secrets.token_hex(8)
        self._grants: list[BudgetGrant] = []
        self._again: list[int] = []
        self._granted_repeats = 0
        self._recorded = 0

    def check(self) -> None:
        """Refuse, before anything is written, a run that does not fit."""
        grant = self._asked()
        try:
            self._allowance.check(grant)
        except BadInput as error:
            contents = self._allowance.read()
            if contents.fits(grant):
                raise
            most = self._prices.most_rounds(contents, grant)
            fit = f"{most} would fit" if most else "not even one would fit"
            raise BadInput(error.code, f"{error} ({fit})") from None

    def begin(self, folder: RunFolder | None, released: Sequence[RoundEntry], parts: Parts) -> None:
        """Reserve the run's grant, or find the one it has, and enter what the file lacks.

        ``released`` are the rounds in its ledger, in order and repeats included; ``parts`` is how
        its rounds were planned. The ledger comes first, so a process that was killed before it
        entered a round here leaves the file one short: a folder restored from then would pass for
        the newest one round later.
        """
        self._again, self._parts = [entry.round for entry in released if entry.again], parts
        self._rounds = min(self._rounds, parts.ends[0])
        saved = folder.read_json(GRANT) if folder else None
        if saved is not None:
            self._name = str(saved.get("run"))
            self._grants = self._found(saved, len(released))
            for entry in released[self._recorded :]:
                self._enter(entry.round, entry.again)
        if not self._grants:
            if folder:
                self._write(folder, None)
            grant = self._asked()
            self._allowance.reserve(grant)
            self._grants = [grant]
        if folder:
            self._write(folder, self._allowance.read().anchor)

    def refuses(self, round: int, again: bool) -> str:
        """Why a round may not run, or the empty string; rounds that were run again, this one too if
        it would be, may need a larger grant."""
        repeats = [*self._again, round] if again else self._again
        if len(repeats) == self._granted_repeats:
            return ""
        price = self._price_of_all(repeats)
        granted = math.fsum(grant.epsilon for grant in self._grants)
        if price > granted:
            more = replace(
                self._grants[0],
                run=f"{self._name}+{len(self._grants)}",
                epsilon=math.nextafter(price - granted, math.inf),
                delta=0.0,
                rounds=1,
            )
            try:
                self._allowance.reserve(more)
            except BadInput as error:
                would = "would be" if again else "was"
                return f"round {repeats[-1]} {would} run again with fresh noise, and {error}"
            self._grants.append(more)
        self._granted_repeats = len(repeats)
        return ""

    def _price_of_all(self, repeats: Sequence[int]) -> float:
        """ε of all parts, with these rounds run again."""
        spans = [(1, self._rounds), *self._parts.spans[1:]]
        return math.fsum(
            self._prices.of(last, [r for r in repeats if first <= r <= last], first).epsilon
            for first, last in spans
        )

    def extend(self, parts: Parts) -> None:
        """Reserve what the last part would spend, ε and δ, or refuse."""
        first, last = parts.spans[-1]
        granted = sum(grant.rounds for grant in self._grants if grant.delta > 0)
        if granted < last:  # else it was reserved by a process that did not get further
            price = self._prices.of(last, first=first)
            more = replace(
                self._grants[0],
                run=f"{self._name}+{len(self._grants)}",
                epsilon=price.epsilon,
                delta=price.delta,
                rounds=price.rounds,
            )
            self._allowance.reserve(more)
            self._grants.append(more)
        self._parts = parts

    def participate(self, round: int, again: bool) -> None:
        """Enter a round, before its uploads are used."""
        self._enter(round, again)
        if again:
            self._again.append(round)

    def _enter(self, round: int, again: bool) -> None:
        """Write a round to the file."""
        self._allowance.participate(BudgetRound(self._name, round, again), self._recorded)
        self._recorded += 1

    def _asked(self) -> BudgetGrant:
        return replace(self._planned, run=self._name)

    @cached_property
    def _planned(self) -> BudgetGrant:
        """The whole plan, before anything of it has run."""
        price = self._prices.of(self._rounds)
        return BudgetGrant(
            run="",
            epsilon=price.epsilon,
            delta=price.delta,
            rounds=price.rounds,
            unit=self._run.unit,
            neighbours=self._run.neighbours,
            plan=digest(self._run.to_json()),
            noise_seed=None if self._setting.secret else self._setting.plan.public_seed,
        )

    def _found(self, saved: dict[str, object], released: int) -> list[BudgetGrant]:
        """The grants of a resumed run, if the file still holds it and nobody else used it."""
        contents, path = self._allowance.read(), self._allowance.path
        if saved.get("anchor") is not None:
            anchor = Anchor.read(saved["anchor"], GRANT)
            if not self._allowance.follows(anchor):
                raise BadInput(
                    "budget-file-damaged",
                    f"{path} is not the budget file that this run was granted from: its first "
                    f"{anchor.lines} lines were shortened or changed; restore it",
                )
        recorded = contents.participations.get(self._name, 0)
        if recorded > released:
            raise BadInput(
                "run-copied",
                f"{path} records {recorded} rounds of this run and its own ledger {released}: a "
                f"copy of the run has gone on; resume that one",
            )
        self._recorded = recorded
        if self._name not in contents.grants and released:
            raise BadInput(
                "budget-file-damaged", f"{path} does not hold the grant of this run; restore it"
            )
        return contents.of(self._name)

    def _write(self, folder: RunFolder, anchor: Anchor | None) -> None:
        said = {
            "run": self._name,
            "file": str(Path(self._allowance.path).absolute()),
            "anchor": asdict(anchor) if anchor else None,
        }
        folder.write_text(GRANT, json.dumps(said, indent=2) + "\n")
