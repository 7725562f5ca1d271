"""The ledger of a run folder: written before uploads are used, read back by anyone.

``ledger.jsonl`` is a :class:`~.journal.Journal` with one object a line:

=============== ==================================================================================
key             what the line says
=============== ==================================================================================
``opens``       the first line: what the run is, and what makes its promise true
``round``       who took part in a round; ``again`` with fresh noise, ``ahead`` of its running
``extends``     the run was given more rounds, up to this one
``budget``      how its budget file stood
=============== ==================================================================================

``ledger.head`` holds the hash of the last line and is replaced after every line, so a journal that
lost lines is refused. A statement is made here, of a run in progress and of a folder alike.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dpscaffold.atomic import write_text
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Cost, Facts, Ledger, Mechanism, Part, Remark, Statement, state
from dpscaffold.privacy.mechanism import Stored
from dpscaffold.privacy.page import JournalHead
from dpscaffold.privacy.parts import allowed_in_parts, within_cap
from dpscaffold.privacy.seeds import Origin, SeedKnowledge
from dpscaffold.runs.earlier import EARLIER, People, mark_of_earlier, read_people, refuse_old
from dpscaffold.runs.journal import START, Anchor, Journal, Unwritten
from dpscaffold.runs.secret import Secret, read_secret
from dpscaffold.runs.written import read_json

JOURNAL, HEAD = "ledger.jsonl", "ledger.head"
#: Where a run folder keeps its model.
WITHIN = "model"
#: Why any site of a deployed run may decline, in the description of its mechanism.
MAY_STAY_AWAY = "a site may decline or stay away"
#: The layout of the journal; raise it when an older one can no longer be read.
FORMAT = 4


@dataclass(frozen=True)
class Opening(Stored):
    """What a run is, and what makes its promise true.

    Attributes:
        run: Its mechanism, of as many rounds as it was planned with.
        user_epsilon: What each user may spend.
        costs: What preparing its data cost.
        preparation: How its data were prepared.
        secret: Whether its noise came from the operating system.
        allowed: What a release overlooks; None where nothing is released.
        colluders: How many participants pool what they know.
        origin: Who chose its seed.
        mark: The mark of its seed (:class:`~dpscaffold.privacy.seeds.SeedKnowledge`).
        data: The identity of its data.
        earlier: What binds it to a run that it continues.
    """

    run: Mechanism
    user_epsilon: float | None
    costs: tuple[Cost, ...]
    preparation: tuple[Remark, ...]
    secret: bool
    allowed: tuple[str, ...] | None
    colluders: int
    origin: Origin
    mark: str | None = None
    data: str = ""
    earlier: str | None = None


class Account:
    """What a run has spent, and all that a statement of it needs.

    Where a larger T was chosen after a run had begun, its rounds come in parts, each a mechanism of
    its own, whose ε and δ add (Rogers, Roth, Ullman, Vadhan 2016). ``earlier`` is the account of a
    run that this one continues, ``people`` says who the users of both are.
    """

    def __init__(
        self,
        opening: Opening,
        journal: Journal | Unwritten,
        secret: Secret | None = None,
        earlier: Account | None = None,
        people: People | None = None,
    ) -> None:
        self.opening, self.journal, self.secret = opening, journal, secret
        self.earlier, self.people = earlier, people
        #: The last round of every part, rising, and who took part in each.
        self.ends = [opening.run.rounds]
        self.ledgers = [Ledger(opening.run, opening.user_epsilon, opening.costs)]
        #: The last round that is recorded, and the last that has run.
        self.rounds, self.last = 0, 0
        #: Every release, in order: its round, and whether it was run again.
        self.releases: list[tuple[int, bool]] = []
        #: How the budget file stood.
        self.budget: Anchor | None = None

    # --- what happens

    def take(self, line: Mapping[str, Any]) -> None:
        """Count what a line of the journal says."""
        if "budget" in line:
            self.budget = Anchor(**line["budget"])
        elif "extends" in line:
            rounds = line["extends"] - self.ends[-1]
            run = replace(self.opening.run, rounds=rounds)
            self.ledgers.append(Ledger(run, self.opening.user_epsilon))
            self.ends.append(line["extends"])
        else:
            self._record(**line)

    def _record(self, round: int, users: Sequence[int], again: bool, ahead: bool = False) -> None:
        """Count who takes part in a round; one that was counted ahead is not counted again."""
        if round > self.rounds + 1:  # a run takes every round, so a gap is a loss
            raise ValueError(f"round {self.rounds + 1} is missing")
        part = self._part_of(round)
        first = self.ends[part - 1] if part else 0
        self.ledgers[part].record(round - first, users, again=again)
        if again or round > self.rounds:
            self.releases.append((round, again))
        self.rounds = max(self.rounds, round)
        if not ahead:
            self.last = max(self.last, round)

    def write(self, line: Mapping[str, Any], last: bool = True) -> None:
        """Add a line; it is on the disk when this returns. Of several only the ``last`` names the
        journal's new head: a crash before leaves a journal that is longer than its head says, by
        rounds that have not run."""
        self.journal.append(line)
        self.take(line)
        if last:
            self.name_head()

    def name_head(self) -> None:
        """Write the journal's head to its second place."""
        if self.journal.path is not None:
            write_text(self.journal.path.with_name(HEAD), self.journal.head, lasting=False)

    def recorded(self, round: int) -> tuple[int, ...]:
        """Who took part when this round first ran: a repeat under a cap admits the same users."""
        rounds = (line for line in self.journal.lines() if line.get("round") == round)
        return tuple(next(rounds)["users"])

    def allowed(self, round: int, drawn: Sequence[int]) -> list[int]:
        """Those of the drawn users whom no cap lets decline."""
        return allowed_in_parts(self.own_parts(), self._part_of(round), drawn)

    def _part_of(self, round: int) -> int:
        """The number of the part that a round belongs to."""
        return min(bisect_left(self.ends, round), len(self.ends) - 1)

    # --- what is stated

    @property
    def ledger(self) -> Ledger:
        """Who took part in the rounds that the run was planned with."""
        return self.ledgers[0]

    @cached_property
    def drawn(self) -> SeedKnowledge:
        """What is known about the seed of the draw."""
        seed = self.secret.seed if self.secret else None
        opening, value = self.opening, None if seed is None else seed.value
        return SeedKnowledge(opening.origin, opening.mark, value, self.journal.first)

    @property
    def seeded(self) -> bool:
        """Whether the noise came from a seed, or nothing shows that it did not."""
        before = self.earlier is not None and self.earlier.seeded
        return before or self.opening.secret is not True

    def own_parts(self) -> list[Part]:
        """The parts of this run alone; what preparing the data cost is spent by the first."""
        people = self.people.now if self.people else ()
        return [
            Part(
                ledger.run,
                ledger.rounds,
                ledger,
                ledger.costs,
                secret=not self.seeded,
                drawn=self.drawn,
                source=self.journal.first,
                people=people,
            )
            for ledger in self.ledgers
        ]

    @property
    def parts(self) -> list[Part]:
        """All parts; those of a run that this one continues come first."""
        own = self.own_parts()
        if self.earlier is None or self.people is None:
            return own
        before = [
            replace(
                part,
                people=part.people or self.people.before,
                secret=own[0].secret,
                drawn=own[0].drawn,
                source=own[0].source,
            )
            for part in self.earlier.parts
        ]
        return [*before, *own]

    @cached_property
    def most(self) -> float:
        """The ε that no user exceeds in all parts by its own rule; infinite without one."""
        cap = self.facts.cap
        return within_cap(self.parts, cap).epsilon if cap else math.inf

    @property
    def continues(self) -> tuple[str, ...]:
        """The beginnings of the journals of the runs that this one continues."""
        return (*self.earlier.continues, self.earlier.journal.first) if self.earlier else ()

    @property
    def facts(self) -> Facts:
        """What is true of the run besides its mechanism."""
        opening, anchor = self.opening, self.journal.anchor
        deployed = opening.origin == "sites" or MAY_STAY_AWAY in (opening.run.declines or "")
        return Facts(
            held="sites" if deployed else "one computer",
            seeded=self.seeded,
            draw_given=self.drawn.given,
            preparation=opening.preparation,
            allowed=opening.allowed,
            colluders=opening.colluders,
            cap=self.people.cap if self.people else 0,
            journal=None if anchor is None else JournalHead(anchor.lines, anchor.head),
        )

    def statement(self) -> Statement:
        """The privacy statement: every round that was journalled counts, kept or lost."""
        return state(self.parts, self.facts)


def begin_account(folder: Path, asked: Opening, checkpoint: Anchor | None) -> Account:
    """The account of a folder, for a run that is ``asked`` and whose ``checkpoint`` names this
    journal; it is opened where there is none. Nothing is written before all is checked."""
    journal, head = Journal(folder / JOURNAL), folder / HEAD
    if not len(journal):
        if checkpoint or (head.exists() and head.read_text() != START):
            raise BadInput(
                "ledger-missing",
                f"{folder} holds a private run without its ledger ({JOURNAL}); restore it or "
                f"start a new run",
            )
        write_text(head, START)
        journal.append({"opens": {"format": FORMAT, **asked.to_json()}})
    account = _read(folder, journal)
    planned = replace(asked.run, rounds=account.opening.run.rounds)
    if account.opening != replace(asked, run=planned):
        raise BadInput(
            "ledger-of-another-run",
            f"the ledger in {folder} describes another run; resume it with its own configuration",
        )
    if checkpoint is not None:
        check_anchor(journal, checkpoint, "the checkpoint")
    return account


def read_account(folder: Path) -> Account:
    """Read a run folder, checking that its parts belong together.

    What makes a run more than a simulation is read from the first line of its journal, and from
    nothing that can be edited or left out.
    """
    refuse_old(folder)
    if not any((folder / name).exists() for name in (JOURNAL, HEAD)):
        raise BadInput(
            "ledger-missing", f"{folder} holds no ledger ({JOURNAL}); name a private run's folder"
        )
    return _read(folder, Journal(folder / JOURNAL))


def _read(folder: Path, journal: Journal) -> Account:
    """The account that a journal holds, once it is checked against the folder's other files."""
    _check_head(folder, journal)
    lines = journal.lines()
    opening = _opening(next(lines, {}), journal.path)
    if opening.earlier != mark_of_earlier(folder):
        raise BadInput(
            "run-file-changed",
            f"{folder / EARLIER} is not what this run keeps of the run that it continues; restore "
            f"it",
        )
    secret = read_secret(folder)
    seed = secret.seed if secret else None
    if seed and (seed.origin, seed.mark) != (opening.origin, opening.mark):
        raise BadInput(
            "run-file-changed",
            f"{folder} holds the seed of another run, not the seed that this run began with; "
            f"restore it",
        )
    continued = opening.earlier is not None
    earlier = read_account(folder / EARLIER) if continued else None
    people = read_people(folder) if continued else None
    account = Account(opening, journal, secret, earlier, people)
    for place, line in enumerate(lines, start=2):
        try:
            account.take(line)
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(
                "ledger-damaged",
                f"{journal.path} at line {place} is not what it should be ({error}); restore it",
            ) from error
    return account


def check_anchor(journal: Journal, anchor: Anchor, where: str) -> None:
    """Refuse a journal that does not begin with the lines that ``where`` was written after."""
    if not journal.follows(anchor):
        raise BadInput(
            "ledger-damaged",
            f"{journal.path} is not the journal that {where} names: its first {anchor.lines} lines "
            f"were shortened or changed; restore it or start a new run",
        )


def _check_head(folder: Path, journal: Journal) -> None:
    """Refuse a journal that lacks the line that its head names, or the statement of its model."""
    path = folder / HEAD
    head = path.read_text(encoding="ascii", errors="replace") if path.exists() else "missing"
    if head not in journal.heads:
        raise BadInput(
            "ledger-damaged",
            f"{journal.path} is not the journal that {HEAD} names: lines of it were shortened or "
            f"changed; restore it or start a new run",
        )
    stated = read_statement(folder / WITHIN)
    if stated is not None and stated.journal is not None:
        check_anchor(journal, Anchor(**vars(stated.journal)), "the statement of its model")


def read_statement(folder: Path) -> Statement | None:
    """The statement in the folder of a model; None where there is none."""
    path = folder / "privacy.json"
    found = read_json(path)
    return None if found is None else Statement.from_json(found, str(path))


def _opening(line: Mapping[str, Any], path: Path) -> Opening:
    """What a journal was opened for, by its first line."""
    values = dict(line.get("opens", {}))
    found = values.pop("format", None)
    if found != FORMAT:
        raise BadInput(
            "ledger-damaged" if found is None else "wrong-version",
            f"{path} begins with format {found}, and this version of dpscaffold reads "
            f"{FORMAT}; read it with the version that wrote it, or restore it",
        )
    return Opening.from_json(values, str(path))
