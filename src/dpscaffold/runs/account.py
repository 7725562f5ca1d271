"""The privacy account of a run in progress: who may take part, what has been spent, what may be
said.

The journal ``ledger.jsonl`` gets one line per round *before* the round's uploads are used, so a
crash can only make the ledger say too much, never too little. Every ε, live or stated,
counts the journalled rounds, those that a crash has lost included. The files are
:mod:`~dpscaffold.runs.ledger`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dpscaffold.atomic import write_text
from dpscaffold.config import Run
from dpscaffold.engines import Draw
from dpscaffold.errors import BadInput
from dpscaffold.privacy import (
    Facts,
    Ledger,
    Part,
    adversaries,
    charged,
    epsilon,
    no_guarantee,
    page,
    state,
)
from dpscaffold.privacy.numbers import next_knot
from dpscaffold.privacy.page import Statement
from dpscaffold.privacy.parts import allowed_in_parts, spent_by_users
from dpscaffold.privacy.preparation import prepared
from dpscaffold.privacy.seeds import Seed
from dpscaffold.randomness.streams import Randomness
from dpscaffold.runs.earlier import mark_of_earlier
from dpscaffold.runs.folder import RunFolder
from dpscaffold.runs.journal import Anchor, Journal
from dpscaffold.runs.ledger import (
    EXTENDS,
    JOURNAL,
    PREPARATION,
    SUMMARY,
    LedgerSummary,
    Opening,
    check_anchor,
    described,
    read_account,
    read_entries,
    read_ledger,
    read_opening,
    read_parts,
    read_releases,
)
from dpscaffold.runs.parts import Parts, spent_in_parts
from dpscaffold.runs.reservation import BudgetReservation


class PrivacyAccount:
    """Keeps the ledger of one run; without privacy it admits everyone and has no guarantee.

    ``before`` is the number of rounds that were taken by a run that this one continues: rounds
    count from there, and in the ledger from 1.
    """

    def __init__(self, setting: Run, before: int = 0) -> None:
        self.setting, self.before = setting, before
        planned = self._planned = setting.plan.rounds - before
        self.run = setting.mechanism
        if self.run is not None and before:
            self.run = replace(self.run, rounds=planned)
        #: ε of a run that this one continues, and the most of both together.
        self._earlier: dict[str, float | None] = {}
        self._most = math.inf
        self.refusal, self.begun = "", 0  # why a round did not run, and the one begun last
        self.folder: RunFolder | None = None
        self._journal: Journal | None = None
        self._reservation: BudgetReservation | None = None
        self._replay_until = 0
        self.allowed: tuple[str, ...] | None = None  # what a release overlooks; None: no release
        self._summary = LedgerSummary({})
        self._released = 0
        self._parts = Parts((planned,))
        self._by_part: tuple[Ledger, ...] = ()  # read where each user's ε over parts is needed
        if self.run is None:
            return
        assert setting.privacy is not None
        limits = self.limits = setting.privacy
        self.allowed = limits.allowed
        self.costs, self._unprotected = charged(setting.roster.schema.preparation, self.run)
        self.ledger = Ledger(self.run, limits.user_epsilon, self.costs)
        self.promises = no_guarantee(self.run) is None
        if limits.user_epsilon is not None:
            # Refuses, here and not in the first round, a run without a guarantee.
            self.ledger.allowed([0])
        if limits.budget_file is not None:
            if reason := no_guarantee(self.run):
                raise BadInput(
                    "no-privacy",
                    f"privacy.budget_file is set for a run that nothing can be counted of: "
                    f"{reason}",
                )
            self._reservation = BudgetReservation(
                limits.budget_file, setting, self.run, self.costs, limits.user_epsilon, planned
            )

    def check_room(self) -> None:
        """Refuse, before anything is written, a run that its budget file has no room for."""
        if self._reservation:
            self._reservation.check()

    def reserve(self, folder: RunFolder | None = None) -> None:
        """Have the run's grant reserved, or find the one it was given when it began."""
        if self._reservation:
            entries = read_releases(self._journal) if self._journal else []
            self._reservation.begin(folder, entries, self._parts)

    def attach(
        self,
        folder: RunFolder,
        data: str,
        seed: Seed,
        completed: int = 0,
        anchor: Anchor | None = None,
        stored: bool = False,
    ) -> None:
        """Keep the ledger in a run folder; picks up what was spent there.

        ``data`` is the identity of the run's data, ``seed`` what its participants are drawn from.
        ``completed`` and ``anchor`` are the round and journal of the checkpoint: what was spent is
        at or beyond them. Nothing is written before all is checked. ``stored`` says that
        participants keep their uploads, so that a round that is run again is the same release;
        those that are not are passed to :meth:`count_again`.
        """
        self.folder, completed = folder, max(0, completed - self.before)
        if self.run is None:
            return
        journal = Journal(folder.file(JOURNAL))
        if folder.file(SUMMARY).exists():
            self.ledger = read_ledger(folder.path)
            self._as_planned(journal)
        elif completed or len(journal) > 1:
            raise BadInput(
                "ledger-missing",
                f"{folder.path} holds a private run without its ledger; restore ledger.json or "
                f"start a new run",
            )
        steps = (*self.setting.roster.schema.preparation, *self._unprotected)
        said = [vars(step) for step in prepared(steps, self.run.unit)]
        costs = list(map(vars, self.costs))
        opening = Opening.of(
            described(Ledger(self.run, self.limits.user_epsilon)),
            self.costs,
            data,
            seed,
            self.setting.secret,
            self.allowed,
            self.limits.colluders,
            mark_of_earlier(folder.path),
        )
        if self.ledger.run != self.run or (len(journal) and read_opening(journal) != opening):
            raise BadInput(
                "ledger-of-another-run",
                f"the ledger in {folder.path} describes another run; resume it with its own "
                f"configuration",
            )
        if self.ledger.rounds < completed:
            raise BadInput(
                "ledger-behind",
                f"the ledger in {folder.path} records {self.ledger.rounds} of {completed} "
                f"completed rounds; restore ledger.jsonl or start a new run",
            )
        if anchor is not None:
            check_anchor(journal, anchor, "the checkpoint")
        # Rounds recorded but not in the checkpoint are run again. A seeded run repeats its very
        # outputs, which costs nothing; a secret one draws fresh noise, which does.
        entries = read_entries(journal) if len(journal) else ()
        self._released = max((entry.round for entry in entries if not entry.ahead), default=0)
        self._replay_until = self._released if self.setting.secret and not stored else 0
        self._journal = journal
        if not len(journal):
            journal.append({"opens": opening.to_dict()})
        folder.write_text(PREPARATION, json.dumps({"steps": said, "costs": costs}, indent=2) + "\n")
        self._write_summary(folder)
        if opening.earlier is not None:
            whole = read_account(folder.path)
            self._earlier, self._most = whole.earlier_epsilons(), whole.most_within_cap()
        if self._reservation:
            self.reserve(folder)

    def _as_planned(self, journal: Journal) -> None:
        """See this run as it was planned: T at first, and the parts that were added to it."""
        assert self.run is not None
        first = self.ledger.run.rounds
        self._parts = read_parts(journal, first) if len(journal) else Parts((first,))
        self.run = replace(self.run, rounds=first)

    def extend(self, folder: RunFolder) -> None:
        """Give the run the rounds of its setting's plan beyond those that it was planned with: a
        part of its own, whose ε and δ add. Nothing is written where there is none."""
        rounds = self._planned
        if self.run is None or rounds <= self._parts.ends[-1]:
            return
        assert self._journal is not None
        parts = self._parts.extended(rounds)
        if self._reservation:
            self._reservation.extend(parts)
        self._withdraw_statement()
        self._journal.append({EXTENDS: rounds})
        self._parts, self._by_part = parts, ()
        self._write_summary(folder)

    @property
    def anchor(self) -> Anchor | None:
        """The journal as it stands, for a checkpoint."""
        return self._journal.anchor if self._journal else None

    def draw(self, randomness: Randomness, round: int, ahead: bool = False) -> Draw | None:
        """Who takes part in a round, in the ledger by then; None where it must not run, and then
        ``refusal`` says why."""
        self.begun = self.begun if ahead else round
        self.refusal = self.refuses(round - self.before)
        if self.refusal:
            return None
        drawn = randomness.cohort(round, self.setting.users, self.setting.cohort_size)
        return Draw(drawn, self.admit(round - self.before, drawn, ahead))

    def refuses(self, round: int) -> str:
        """Why this round must not run, or the empty string."""
        if not self._reservation:
            return ""
        reason = self._reservation.refuses(round, again=round <= self._replay_until)
        planned = self.setting.plan.rounds
        return f"halted after round {round - 1} of {planned}: {reason}" if reason else ""

    def admit(self, round: int, drawn: np.ndarray, ahead: bool = False) -> np.ndarray:
        """Those of the drawn users who take part; they are in the ledger when this returns.

        ``ahead`` counts a round before it runs, where what comes out may decide whether it does;
        the journal gets another line when it is released.
        """
        if self.run is None:
            return drawn
        again = round <= self._replay_until
        if round <= self.ledger.rounds and not again:
            users = self._recorded(round)
            if round > self._released and self._journal:
                self._enter({"round": round, "users": list(users), "again": False})
                self._released = round
            return np.array(users, dtype=np.int64)
        active = drawn.tolist()
        active = self._allowed(round, active)
        if self._journal:
            line = {"round": round, "users": active, "again": again}
            self._enter({**line, "ahead": True} if ahead else line, last=not ahead)
        self._released = self._released if ahead else max(self._released, round)
        self._record(round, active, again)
        if self._reservation:
            self._reservation.participate(round, again)
        return np.array(active, dtype=np.int64)

    def count_rest(self, randomness: Randomness) -> None:
        """Put all rounds that are left of the plan into the ledger: where outputs decide how many
        are run, those that were run say too little."""
        if self.run is None:
            return
        for round in range(self.ledger.rounds + 1, self._planned + 1):
            if self.draw(randomness, self.before + round, ahead=True) is None:
                break
        if self._journal:
            self._name_head()

    def count_again(self, round: int, users: Sequence[int]) -> None:
        """Count these users once more in a round that is recorded: they released with fresh
        noise."""
        if self.run is None or not users:
            return
        round -= self.before
        if self._journal:
            self._enter({"round": round, "users": list(users), "again": True})
        self._record(round, users, again=True)
        if self._reservation:
            self._reservation.participate(round, again=True)

    def _allowed(self, round: int, drawn: Sequence[int]) -> list[int]:
        """Those of the drawn users whom no cap lets decline; the ε of a user that was given more
        rounds is the sum over the parts."""
        if not self._parts.several or self.limits.user_epsilon is None:
            return self.ledger.allowed(drawn)
        return allowed_in_parts(self._begun_parts(), self._parts.of(round), drawn)

    def _record(self, round: int, users: Sequence[int], again: bool) -> None:
        """Enter who takes part, in the ledger of all rounds and in that of their part."""
        self.ledger.record(round, users, again=again)
        if self._by_part:
            place = self._parts.of(round)
            first = self._parts.spans[place][0]
            self._by_part[place].record(round - first + 1, users, again=again)

    def _recorded(self, round: int) -> tuple[int, ...]:
        """Who took part when this round first ran: a repeat under a cap must admit the same
        users."""
        assert self._journal is not None
        for entry in read_entries(self._journal):
            if entry.round == round:
                return entry.users
        raise BadInput(
            "ledger-damaged",
            f"{self._journal.path} lacks round {round}; restore it or start a new run",
        )

    def _enter(self, line: Mapping[str, Any], last: bool = True) -> None:
        """Add a line to the journal, then name the journal's new head in ``ledger.json``; of
        several lines only after the ``last``.

        A crash between the two leaves a journal that is longer than ``ledger.json`` says, by rounds
        that have not run. A journal that is shorter has lost lines, and is refused.
        """
        assert self._journal is not None
        self._withdraw_statement()
        self._journal.append(line)
        if last:
            self._name_head()

    def _name_head(self) -> None:
        """Write the journal's head to ``ledger.json``."""
        assert self._journal is not None and self.folder is not None
        text = self._summary.text(self._journal.anchor)
        write_text(self.folder.file(SUMMARY), text, lasting=False)

    def _write_summary(self, folder: RunFolder) -> None:
        """``ledger.json``: what the run is, and the journal's head."""
        assert self._journal is not None
        self._summary = LedgerSummary(described(self.ledger))
        folder.write_text(SUMMARY, self._summary.text(self._journal.anchor))

    def _withdraw_statement(self) -> None:
        """Take back what an earlier part of the run stated, before more is released than that."""
        assert self.folder is not None
        for name in ("privacy.md", "privacy.json"):
            self.folder.file(name).unlink(missing_ok=True)

    def live(self, round: int) -> dict[str, float | None]:
        """ε once this round is over, with all that was released and lost: towards the server, and
        towards everybody where that is what the statement will quote."""
        if self.run is None:
            return {}
        if not self.promises:
            return {"epsilon_server": None}
        own = self._live(round - self.before)
        if not self._earlier:
            return own
        both: dict[str, float | None] = {}
        for name, value in own.items():
            before = self._earlier.get(name, 0.0)
            both[name] = None
            if value is not None and before is not None:
                both[name] = min(value + before, self._most)
        return both

    def _live(self, round: int) -> dict[str, float | None]:
        """The same of this run alone."""
        if self._parts.several:
            shown = spent_in_parts(self._parts, self.ledger, self._shown, round)
            return {"epsilon_server": shown, **self._given_the_draw(round)}
        released, everybody = max(round, self.ledger.rounds), self._given_the_draw(round)
        shown = self._shown(0, released, self.ledger.extra)
        return {"epsilon_server": shown, **everybody}

    def _given_the_draw(self, round: int) -> dict[str, float | None]:
        """ε given who took part, where the noise is secret and somebody chose the draw's seed; an
        upper value until the run ends."""
        if not (self.setting.secret and self.setting.draw_given):
            return {}
        if self._parts.several:
            return {"epsilon_everybody": float(spent_by_users(self._begun_parts()).max())}
        ends = self.refusal or round + self.before >= self.setting.plan.rounds
        return {"epsilon_everybody": self.ledger.largest() if ends else self.ledger.shown()}

    def _part_ledgers(self) -> tuple[Ledger, ...]:
        """Who took part in each part of a run that was given more rounds."""
        if not self._by_part:
            assert self._journal is not None  # parts come with a folder
            self._by_part = self._parts.ledgers(self.ledger, read_entries(self._journal))
        return self._by_part

    def _begun_parts(self) -> list[Part]:
        """The parts of a run; what preparing the data cost is spent by the first."""
        return [
            Part(ledger.run, ledger.rounds, ledger, () if place else self.costs)
            for place, ledger in enumerate(self._part_ledgers())
        ]

    def _shown(self, part: int, rounds: int, extra: int) -> float:
        """An upper value of ε after this many rounds of a part, at hand for most of them: it is
        that of the next of few numbers of rounds."""
        assert self.run is not None
        run = replace(self.run, extra=max(self.run.extra, extra))
        rounds = max(rounds, min(next_knot(rounds), run.rounds))
        costs = () if part else self.costs
        return epsilon(run, adversaries(run)["server"], rounds, costs=costs)

    def statement(self) -> Statement:
        """The privacy statement of what was released so far; with a folder, what the folder says
        to anyone who reads it."""
        steps = self.setting.roster.schema.preparation
        if self.run is None:
            return state((), Facts(held="one computer", preparation=steps))
        if self.folder is not None:
            account = read_account(self.folder.path)
            if account.anchor != self.anchor:
                raise BadInput(
                    "ledger-damaged",
                    f"{self.folder.file(JOURNAL)} is not as this run left it, so nothing is "
                    f"stated; restore it",
                )
            return account.statement()
        part = Part(self.ledger.run, self.ledger.rounds, self.ledger, self.costs)
        facts = Facts(
            held="one computer",
            seeded=not self.setting.secret,
            draw_given=self.setting.draw_given,
            preparation=(*steps, *self._unprotected),
            allowed=self.allowed,
            colluders=self.limits.colluders,
        )
        return state([part], facts)

    def write_statement(self, folder: RunFolder, said: Statement) -> None:
        """The ledger's summary, then ``privacy.json`` and ``privacy.md``."""
        if self._journal is not None:
            self._write_summary(folder)
        folder.write_text("privacy.json", json.dumps(said.to_json()) + "\n")
        folder.write_text("privacy.md", page(said))
