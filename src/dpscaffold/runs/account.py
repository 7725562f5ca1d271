"""The privacy account of a run in progress: who may take part, and what has been spent.

The journal ``ledger.jsonl`` gets one line per round *before* the round's uploads are used, so a
crash can only make the ledger say too much, never too little. Every ε, live or stated, counts the
journalled rounds, those that a crash has lost included.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dpscaffold.config import Run
from dpscaffold.engine import Draw
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Facts, Part, Statement, charged, epsilon, no_guarantee, state
from dpscaffold.privacy.numbers import next_knot
from dpscaffold.privacy.parts import given_the_draw
from dpscaffold.privacy.preparation import prepared
from dpscaffold.privacy.seeds import Seed, origin_of
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.earlier import mark_of_earlier
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.journal import Anchor, Unwritten
from dpscaffold.runs.ledger import WITHIN, Account, Opening, begin_account
from dpscaffold.runs.reservation import BudgetReservation


class NoAccount:
    """The account of a run without privacy: everybody takes part, and nothing is promised."""

    run, anchor, refusal, rounds = None, None, "", 0

    def __init__(self, setting: Run) -> None:
        self.setting, self.begun = setting, 0

    def check_room(self) -> None:
        """There is no limit."""

    def attach(
        self,
        folder: RunFolder,
        data: str,
        seed: Seed,
        anchor: Anchor | None = None,
        stored: bool = False,
    ) -> None:
        """Nothing is kept."""

    def draw(self, randomness: Randomness, round: int) -> Draw:
        """Who takes part in a round."""
        self.begun = round
        drawn = randomness.cohort(round, self.setting.users, self.setting.cohort_size)
        return Draw(drawn, drawn)

    def count_rest(self, randomness: Randomness) -> None:
        """Nothing is counted."""

    def count_again(self, round: int, users: Sequence[int]) -> None:
        """Nothing is counted."""

    def live(self, round: int) -> dict[str, float | None]:
        """No ε."""
        return {}

    def statement(self) -> Statement:
        """That nothing is promised."""
        steps = self.setting.roster.schema.preparation
        return state((), Facts(held="one computer", preparation=steps))


class PrivacyAccount:
    """Keeps the ledger of one run.

    ``before`` is the number of rounds that were taken by a run that this one continues: rounds
    count from there, and in the ledger from 1.
    """

    def __init__(self, setting: Run, before: int = 0) -> None:
        run, privacy = setting.mechanism, setting.limits
        assert run is not None
        self.setting, self.before = setting, before
        self.planned = setting.plan.rounds - before
        self.run = replace(run, rounds=self.planned)
        self.refusal, self.begun = "", 0  # why a round did not run, and the one begun last
        steps = setting.roster.schema.preparation
        costs, unprotected = charged(steps, self.run)
        opening = Opening(
            self.run,
            privacy.user_epsilon,
            costs,
            prepared((*steps, *unprotected), run.unit),
            setting.secret,
            privacy.allowed,
            privacy.colluders,
            origin_of(setting.plan.seed, setting.secret),
        )
        self.account = Account(opening, Unwritten())
        self.account.allowed(1, [0])  # refuses, here and not in the first round, an impossible cap
        self.limits: list[BudgetReservation] = []
        if privacy.budget_file is not None:
            if reason := no_guarantee(self.run):
                raise BadInput(
                    "no-privacy",
                    f"privacy.budget_file is set for a run that nothing can be counted of: "
                    f"{reason}",
                )
            self.limits.append(BudgetReservation(privacy.budget_file, setting, self.account))
        self.folder: RunFolder | None = None
        self._replay_until = 0

    @property
    def rounds(self) -> int:
        """How many rounds are recorded."""
        return self.account.rounds

    @property
    def anchor(self) -> Anchor | None:
        """The journal as it stands, for a checkpoint."""
        return self.account.journal.anchor

    def check_room(self) -> None:
        """Refuse, before anything is written, a run that its limits have no room for."""
        for limit in self.limits:
            limit.check()

    def attach(
        self,
        folder: RunFolder,
        data: str,
        seed: Seed,
        anchor: Anchor | None = None,
        stored: bool = False,
    ) -> None:
        """Keep the ledger in a run folder; picks up what was spent there, and gives the run the
        rounds of its plan beyond those that it was planned with.

        ``data`` is the identity of the run's data, ``seed`` what its participants are drawn from,
        and ``anchor`` the journal of the checkpoint: what was spent is at or beyond it. Nothing is
        written before all is checked. ``stored`` says that participants keep their uploads, so that
        a round that is run again is the same release; those that are not are passed to
        :meth:`count_again`.
        """
        asked = replace(
            self.account.opening,
            data=data,
            origin=seed.origin,
            mark=seed.mark,
            earlier=mark_of_earlier(folder.path),
        )
        account = begin_account(folder.path, asked, anchor)
        self.account, self.folder = account, folder
        # Rounds recorded but not in the checkpoint are run again. A seeded run repeats its very
        # outputs, which costs nothing; a secret one draws fresh noise, which does.
        self._replay_until = account.last if self.setting.secret and not stored else 0
        for limit in self.limits:
            limit.begin(account)
        if self.planned > account.ends[-1]:
            for limit in self.limits:
                limit.extend(self.planned)
            self._withdraw_model()
            account.write({"extends": self.planned})
        account.name_head()

    def draw(self, randomness: Randomness, round: int, ahead: bool = False) -> Draw | None:
        """Who takes part in a round, in the ledger by then; None where it must not run, and then
        ``refusal`` says why. ``ahead`` counts a round before it runs, where what comes out may
        decide whether it does; the journal gets another line when it is released."""
        self.begun = self.begun if ahead else round
        drawn = randomness.cohort(round, self.setting.users, self.setting.cohort_size)
        active = self.admit(round - self.before, drawn, ahead)
        return None if active is None else Draw(drawn, active)

    def admit(self, round: int, drawn: np.ndarray, ahead: bool = False) -> np.ndarray | None:
        """Those of the drawn users who take part; they are in the ledger when this returns."""
        again = round <= self._replay_until
        reasons = (limit.refuses(round, again) for limit in self.limits)
        if reason := next(filter(None, reasons), ""):
            planned = self.setting.plan.rounds
            self.refusal = f"halted after round {round - 1} of {planned}: {reason}"
            return None
        if round <= self.account.rounds and not again:
            users = self.account.recorded(round)
            if round > self.account.last:
                self._enter(round, users)
        else:
            users = tuple(self.account.allowed(round, drawn.tolist()))
            self._enter(round, users, again, ahead)
        return np.array(users, dtype=np.int64)

    def count_rest(self, randomness: Randomness) -> None:
        """Put all rounds that are left of the plan into the ledger: where outputs decide how many
        are run, those that were run say too little."""
        for round in range(self.account.rounds + 1, self.planned + 1):
            if self.draw(randomness, self.before + round, ahead=True) is None:
                break
        self.account.name_head()

    def count_again(self, round: int, users: Sequence[int]) -> None:
        """Count these users once more in a round that is recorded: they released with fresh
        noise."""
        self._enter(round - self.before, tuple(users), again=True)

    def _enter(
        self, round: int, users: tuple[int, ...], again: bool = False, ahead: bool = False
    ) -> None:
        self._withdraw_model()
        line = {"round": round, "users": users, "again": again} | ({"ahead": True} if ahead else {})
        self.account.write(line, last=not ahead)
        for limit in self.limits:
            limit.enter()

    def _withdraw_model(self) -> None:
        """Take back the model of an earlier part of the run, whose statement says less than is
        released from now on."""
        if self.folder is not None:
            model = self.folder.file(WITHIN)
            if model.exists():
                shutil.rmtree(model.replace(model.with_name(f".{WITHIN}.partial")))

    def live(self, round: int) -> dict[str, float | None]:
        """ε once this round is over, with all that was released and lost: towards the server, and
        towards everybody where that is what the statement will quote."""
        if no_guarantee(self.run):
            return {"epsilon_server": None}
        *full, last = self.account.parts
        began = self.account.ends[-1] - last.run.rounds
        parts = [*full, replace(last, rounds=max(last.rounds, round - self.before - began))]
        most, parts = self.account.most, [part for part in parts if part.rounds] or parts[:1]
        found: dict[str, float | None] = {
            "epsilon_server": min(math.fsum(map(_shown, parts)), most)
        }
        if self.setting.secret and self.account.drawn.given:
            over = self.refusal or round >= self.setting.plan.rounds
            given = (
                given_the_draw(parts, "server", self.account.opening.colluders).epsilon
                if over
                else math.fsum(part.charged().shown() for part in parts)
            )
            found["epsilon_everybody"] = min(given, most)
        return found

    def statement(self) -> Statement:
        """The privacy statement of what was released so far."""
        return self.account.statement()


#: The account of any run.
AnyAccount = PrivacyAccount | NoAccount


def account_of(setting: Run, before: int = 0) -> AnyAccount:
    """The account of a run; ``before`` rounds were taken by one that it continues."""
    if setting.mechanism is None:
        return NoAccount(setting)
    return PrivacyAccount(setting, before)


def _shown(part: Part) -> float:
    """An upper value of ε of a part, at hand for most numbers of rounds: it is that of the next of
    few of them."""
    rounds = max(part.rounds, min(next_knot(part.rounds), part.run.rounds))
    return epsilon(part.released, part.against("server"), rounds, costs=part.costs)
