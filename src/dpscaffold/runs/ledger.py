"""The ledger of a run folder: written before uploads are used, read back by anyone.

``ledger.jsonl`` is the record, a :class:`~.journal.Journal`: an opening line that binds
it to the run, its data and what their preparation cost, then one line a round. ``ledger.json``
holds the description of the run and a summary, ``preprocessing.json`` the preparation. The head of
the journal stands in ``ledger.json``, which is replaced after every line, in every checkpoint and
in the statement (``privacy.json``), so a journal that was shortened or written again is refused.

A statement of a run with a folder is made here, from the files alone, so that what a run writes
and what ``dpscaffold privacy RUN`` answers are the same. Nothing here needs PyTorch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpscaffold.errors import BadInput
from dpscaffold.privacy import Cost, Facts, Ledger, Mechanism, Part, Remark, Statement, state
from dpscaffold.privacy.page import JournalHead
from dpscaffold.privacy.parts import within_cap
from dpscaffold.privacy.seeds import SEED, UNKNOWN, Origin, Seed, SeedKnowledge
from dpscaffold.runs.earlier import EARLIER, People, mark_of_earlier, read_people
from dpscaffold.runs.further import refuse_further
from dpscaffold.runs.journal import Anchor, Journal, digest
from dpscaffold.runs.parts import Parts, RoundEntry

JOURNAL, SUMMARY, PREPARATION = "ledger.jsonl", "ledger.json", "preprocessing.json"
AGAIN = "restore it or start a new run"
#: The format of ``ledger.json``.
VERSION = 3
#: Why any site of a deployed run may decline, in the description of its mechanism.
MAY_STAY_AWAY = "a site may decline or stay away"
#: The key of a line that says up to which round the run was extended.
EXTENDS = "extends"


@dataclass(frozen=True)
class Opening:
    """The first line of a journal: what the run is, and what makes its promise true.

    ``run`` and ``costs`` are SHA-256 of its description and of what preparing its data cost,
    ``data`` is the identity of its data. ``secret`` says that its noise came from the operating
    system, ``allowed`` what a release overlooks (None: no release), ``origin`` and ``mark`` where
    its seed came from (:class:`~dpscaffold.privacy.seeds.SeedKnowledge`), ``colluders`` how many
    participants pool what they know, ``earlier`` which run it continues, if any.
    """

    run: str
    costs: str
    data: str
    secret: bool
    allowed: tuple[str, ...] | None
    origin: Origin
    mark: str | None
    colluders: int
    earlier: str | None = None

    @classmethod
    def of(
        cls,
        ledger: Mapping[str, Any],
        costs: Iterable[Cost],
        data: str,
        seed: Seed,
        secret: bool,
        allowed: tuple[str, ...] | None = None,
        colluders: int = 1,
        earlier: str | None = None,
    ) -> Opening:
        """The opening of a new run, whose ledger is that."""
        described = _run_digest(ledger), _costs_digest(costs), data
        return cls(*described, secret, allowed, seed.origin, seed.mark, colluders, earlier)

    def to_dict(self) -> dict[str, Any]:
        """For the first line of a journal."""
        return {k: v for k, v in asdict(self).items() if k != "earlier" or v is not None}

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Opening:
        """From JSON values; KeyError or TypeError where they are none."""
        allowed = values["allowed"]
        return cls(**{**values, "allowed": None if allowed is None else tuple(allowed)})


@dataclass(frozen=True)
class Account:
    """What a run folder says about its privacy: all that a statement needs.

    ``seeded`` says that the noise came from a seed, or that nothing shows that it did not.
    ``anchor`` is the head of the journal. ``colluders`` is how many participants are taken to pool
    what they know, ``drawn`` what is known about the seed of the draw, and ``allowed`` what a
    release was told to overlook (None: no release). ``parts`` are the ledgers of the parts in which
    its rounds were planned, if there are several. ``data`` is the identity of the records, where it
    can be compared, and ``source`` that of the run.

    Where the run continues another one, the parts of that come first: ``stopped`` is how many, and
    ``people`` names the users of each part. ``cap`` is the most often that any user takes part in
    all of them, 0 where nothing bounds it. ``continues`` are the beginnings of the journals of the
    runs that it continues.
    """

    ledger: Ledger
    preparation: tuple[Remark, ...]
    costs: tuple[Cost, ...]
    seeded: bool
    anchor: Anchor
    colluders: int = 1
    drawn: SeedKnowledge = UNKNOWN
    allowed: tuple[str, ...] | None = None
    parts: tuple[Ledger, ...] = ()
    data: str | None = None
    source: str | None = None
    people: tuple[tuple[str, ...], ...] = ()
    stopped: int = 0
    cap: int = 0
    continues: tuple[str, ...] = ()

    @property
    def released(self) -> list[Part]:
        """The parts of the run, or runs, that this is the account of, as mechanisms that ran; what
        preparing the data cost is spent by the first."""
        ledgers = self.parts or (self.ledger,)
        return [
            Part(
                ledger.run,
                ledger.rounds,
                ledger,
                () if place else self.costs,
                secret=not self.seeded,
                drawn=self.drawn,
                data=self.data,
                source=self.source,
                people=self.people[place] if self.people else (),
            )
            for place, ledger in enumerate(ledgers)
        ]

    def at_delta(self, delta: float) -> Account:
        """The same account at another δ, shared out evenly where the run was planned in parts."""
        each = delta / len(self.parts or (self.ledger,))
        parts = tuple(part.at_delta(each) for part in self.parts)
        return replace(self, ledger=self.ledger.at_delta(each), parts=parts)

    def facts(self, colluders: int | None = None) -> Facts:
        """What is true of the run besides its mechanism."""
        return Facts(
            held="sites" if self.deployed else "one computer",
            seeded=self.seeded,
            draw_given=self.drawn.given,
            preparation=self.preparation,
            allowed=self.allowed,
            colluders=self.colluders if colluders is None else colluders,
            cap=self.cap,
            journal=JournalHead(self.anchor.lines, self.anchor.head),
        )

    @property
    def deployed(self) -> bool:
        """Whether sites held their own records: then any of them may stay away."""
        return self.drawn.origin == "sites" or MAY_STAY_AWAY in (self.ledger.run.declines or "")

    def statement(self, colluders: int | None = None) -> Statement:
        """The privacy statement: every round that was journalled counts, kept or lost."""
        return state(self.released, self.facts(colluders))

    def earlier_epsilons(self) -> dict[str, float | None]:
        """ε of the runs that this one continues, towards the server and given who took part."""
        before = self.released[: self.stopped]
        said = state(before, replace(self.facts(), cap=0))
        server = said.towards("server")
        return {"epsilon_server": server.epsilon, "epsilon_everybody": server.given}

    def most_within_cap(self) -> float:
        """The ε that no user exceeds in all parts by its own rule; infinite without one."""
        return within_cap(self.released, self.cap).epsilon if self.cap else math.inf

    def after(self, earlier: Account, people: People) -> Account:
        """This account together with that of the run that it continues."""
        if self.costs or earlier.costs:
            raise BadInput(
                "not-applicable",
                "a run that continues another one has costs of preparation, which cannot be "
                "attributed to its users; start a new run",
            )
        before = earlier.parts or (earlier.ledger,)
        named = earlier.people or (people.before,) * len(before)
        own = self.parts or (self.ledger,)
        first = (earlier.drawn.journal,) if earlier.drawn.journal else ()
        return replace(
            self,
            seeded=self.seeded or earlier.seeded,
            parts=(*before, *own),
            people=(*named, *(people.now,) * len(own)),
            stopped=len(before),
            cap=people.cap,
            continues=(*earlier.continues, *first),
        )


def read_account(folder: Path) -> Account:
    """Read a run folder, checking that its parts belong together.

    What makes a run more than a simulation is read from the first line of its journal, and from
    nothing that can be edited or left out.
    """
    refuse_further(folder)
    ledger, journal = _read(folder)
    steps, costs = read_preprocessing(folder)
    opening = read_opening(journal)
    if opening.costs != _costs_digest(costs):
        raise BadInput(
            "run-file-changed",
            f"{folder / PREPARATION} is not the one this run began with; {AGAIN}",
        )
    ledger = ledger.charged(costs)
    planning = read_parts(journal, ledger.run.rounds)
    parts = planning.ledgers(ledger, read_entries(journal)) if planning.several else ()
    if opening.earlier != mark_of_earlier(folder):
        raise BadInput(
            "run-file-changed",
            f"{folder / EARLIER} is not what this run keeps of the run that it continues; {AGAIN}",
        )
    account = Account(
        ledger,
        steps,
        costs,
        seeded=opening.secret is not True,
        anchor=journal.anchor,
        colluders=opening.colluders,
        drawn=_drawn(folder, opening, journal),
        allowed=opening.allowed,
        parts=parts,
        source=journal.first,
    )
    if opening.earlier is None:
        return account
    return account.after(read_account(folder / EARLIER), read_people(folder))


def _drawn(folder: Path, opening: Opening, journal: Journal) -> SeedKnowledge:
    """What is known about a run's seed: what its journal says, and the seed where it is kept."""
    known = SeedKnowledge(opening.origin, opening.mark, journal=journal.first)
    path = folder / SEED
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except OSError:  # it is not here, or for others
        return known
    except ValueError as error:
        raise BadInput("seed-damaged", f"{path} is damaged ({error}); {AGAIN}") from error
    seed = Seed.from_json(kept, str(path))
    if (seed.origin, seed.mark) != (opening.origin, opening.mark):
        raise BadInput(
            "run-file-changed", f"{path} is not the seed that this run began with; {AGAIN}"
        )
    return replace(known, value=seed.value)


def read_ledger(folder: Path) -> Ledger:
    """The ledger of a run folder, rebuilt from its journal, with what its data's preparation
    cost."""
    ledger, _ = _read(folder)
    return ledger.charged(read_preprocessing(folder)[1])


def read_entries(journal: Journal) -> Iterator[RoundEntry]:
    """The rounds of a journal, after its opening."""
    for place, line in enumerate(journal.lines(), start=1):
        if place > 1 and EXTENDS not in line:
            yield _entry(line, f"{journal.path} at line {place}")


def read_releases(journal: Journal) -> list[RoundEntry]:
    """The rounds as they were released, repeats included: one that was counted ahead has a line of
    its own when it runs, which is left out."""
    released, rounds = [], set()
    for entry in read_entries(journal):
        if entry.again or entry.round not in rounds:
            released.append(entry)
        rounds.add(entry.round)
    return released


def read_parts(journal: Journal, planned: int) -> Parts:
    """T as it was planned, and each larger T that the run was given later."""
    ends = [planned]
    for place, line in enumerate(journal.lines(), start=1):
        if EXTENDS in line:
            end = line[EXTENDS]
            if not isinstance(end, int) or end <= ends[-1]:
                raise BadInput(
                    "ledger-damaged", f"{journal.path} is damaged at line {place}; {AGAIN}"
                )
            ends.append(end)
    return Parts(tuple(ends))


def read_opening(journal: Journal) -> Opening:
    """What a journal was opened for."""
    for line in journal.lines():
        try:
            return Opening.read(line["opens"])
        except (KeyError, TypeError):
            break
    raise BadInput(
        "ledger-damaged", f"{journal.path} does not begin with the description of its run; {AGAIN}"
    )


def described(ledger: Ledger) -> dict[str, Any]:
    """What a run is, and what its users may spend, as JSON values."""
    return {
        "version": VERSION,
        "run": ledger.run.to_json(),
        "user_budget": ledger.user_budget,
    }


class LedgerSummary:
    """The contents of ``ledger.json``: what the run is, and the journal's head, which changes with
    every line. Who took part stands in the journal alone.

    >>> LedgerSummary({"version": 2}).text(Anchor(3, "5c")).strip()
    '{"version": 2, "journal": {"lines": 3, "head": "5c"}}'
    """

    def __init__(self, ledger: Mapping[str, Any]) -> None:
        self._start = json.dumps({**ledger, "journal": None}).removesuffix("null}")

    def text(self, head: Anchor) -> str:
        """The file, after the line that is the journal's head."""
        return f"{self._start}{json.dumps(vars(head))}}}\n"


def read_preprocessing(folder: Path) -> tuple[tuple[Remark, ...], tuple[Cost, ...]]:
    """What is said of a run's data preparation, and its costs."""
    path = folder / PREPARATION
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        steps = [Remark(step["sentence"], step["protection"]) for step in said["steps"]]
        return tuple(steps), tuple(Cost(**cost) for cost in said["costs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            "run-damaged",
            f"{path} cannot be read ({error}), so the cost of preprocessing is unknown; restore it",
        ) from error


def check_anchor(journal: Journal, anchor: Anchor, where: str) -> None:
    """Refuse a journal that does not begin with the lines that ``where`` was written after."""
    if not journal.follows(anchor):
        raise BadInput(
            "ledger-damaged",
            f"{journal.path} is not the journal that {where} names: its first {anchor.lines} lines "
            f"were shortened or changed; {AGAIN}",
        )


def _read(folder: Path) -> tuple[Ledger, Journal]:
    """The ledger and its journal."""
    summary = _read_summary(folder)
    head = summary.pop("journal", None)
    if summary.get("version") != VERSION:
        raise BadInput(
            "wrong-version",
            f"{folder / SUMMARY} was written by another version of dpscaffold (format "
            f"{summary.get('version')}, and this one reads {VERSION}); read it with that version",
        )
    try:
        ledger = Ledger(Mechanism.from_json(summary["run"], "its run"), summary["user_budget"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(
            "ledger-damaged", f"{folder / SUMMARY} is damaged ({error}); {AGAIN}"
        ) from error
    stated = _stated_anchor(folder)
    journal = Journal(folder / JOURNAL)
    check_anchor(journal, Anchor.read(head, str(folder / SUMMARY)), SUMMARY)
    if stated is not None:
        check_anchor(journal, stated, "the statement (privacy.json)")
    if read_opening(journal).run != _run_digest(summary):
        raise BadInput(
            "ledger-of-another-run",
            f"{folder / SUMMARY} describes another run than its journal; {AGAIN}",
        )
    for entry in read_entries(journal):
        if entry.round > ledger.rounds + 1:  # a run takes every round, so a gap is a loss
            raise BadInput(
                "ledger-damaged",
                f"{folder / JOURNAL} lacks round {ledger.rounds + 1}; restore it or start a new "
                f"run",
            )
        ledger.record(entry.round, entry.users, again=entry.again)
    return ledger, journal


def _read_summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    if not path.exists():
        raise BadInput(
            "ledger-missing",
            f"{folder} holds no ledger (ledger.json); name the folder of a private run",
        )
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadInput("ledger-damaged", f"{path} is damaged ({error}); {AGAIN}") from error


def _stated_anchor(folder: Path) -> Anchor | None:
    """The head that the folder's statement names, if there is a statement that names one."""
    path = folder / "privacy.json"
    if not path.exists():
        return None
    try:
        said = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise BadInput("run-damaged", f"{path} is damaged ({error}); restore it") from error
    return Anchor.read(said["journal"], str(path)) if "journal" in said else None


def _entry(line: Mapping[str, Any], where: str) -> RoundEntry:
    try:
        ahead = bool(line.get("ahead", False))
        return RoundEntry(int(line["round"]), tuple(line["users"]), bool(line["again"]), ahead)
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(
            "ledger-damaged", f"{where} is not a round of a ledger ({error}); {AGAIN}"
        ) from error


def _run_digest(summary: Mapping[str, Any]) -> str:
    return digest({"run": summary["run"], "user_budget": summary["user_budget"]})


def _costs_digest(costs: Iterable[Cost]) -> str:
    """What is left at nothing is left out, so that later kinds of cost change no earlier hash."""
    return digest([{key: value for key, value in vars(cost).items() if value} for cost in costs])
