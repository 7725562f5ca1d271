"""A privacy statement: what it holds, as ``privacy.json`` does, and how it reads.

Nothing else in the package puts an ε into words, so that terminal, report, run folder and notebook
say the same. Whoever has the file can compute every number again from ``mechanism``, ``rounds``,
``most_often`` and ``costs`` of its parts. :mod:`dpscaffold.privacy.statement` makes statements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict

from dpscaffold.privacy.mechanism import Mechanism, Stored
from dpscaffold.privacy.numbers import digits_up, percent, round_up
from dpscaffold.privacy.preparation import WITHIN, Cost, Remark

#: What proves an ε, by the name that a statement gives it.
THEOREMS: Mapping[str, str] = {
    "1": "Theorem 1: random participation",
    "2": "Theorem 2: the noise of all participants",
    "4": "Theorem 4: secure sums",
    "cap": "every allowed participation",
    "given": "composition, given who took part",
    "sum": "sum over the parts",
    "convolved": "composition of plans fixed in advance",
    "selection": "the winner of a random number of trials",
}
#: Who held the records: nobody yet, one computer that played all users, or the sites themselves.
Held = Literal["plan", "one computer", "sites"]


@dataclass(frozen=True)
class Guarantee:
    """What is promised towards one adversary.

    Attributes:
        adversary: Its name: ``server``, ``hostile``, ``alone``, ``third_party`` or ``participant``.
        words: Who it is.
        epsilon: ε at the statement's δ over the random draw of participants; None where there is
            none.
        theorem: What proves it, a key of :data:`THEOREMS`.
        guess: How often the best guess whether a record was used is right, at even odds.
        replace_one: ε for replacing one record by another, where ε is for another relation.
        given: ε given who took part, for the user that spent most.
        given_guess: The same for a guess.
        not_more: Why the noise of other users does not count.
        knows: How many users help the adversary.
    """

    adversary: str
    words: str = ""
    epsilon: float | None = None
    theorem: str = ""
    guess: float | None = None
    replace_one: float | None = None
    given: float | None = None
    given_guess: float | None = None
    not_more: str | None = None
    knows: int = 0


@dataclass(frozen=True)
class StatedPart:
    """Rounds of one mechanism as a statement holds them.

    ``most_often`` is the largest number of participations in each group of users, and
    ``participations`` how many users took part how often.
    """

    mechanism: Mechanism
    rounds: int
    name: str = ""
    costs: tuple[Cost, ...] = ()
    most_often: tuple[int, ...] = ()
    participations: Mapping[int, int] = field(default_factory=dict)
    epsilons: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JournalHead:
    """The state of a run's journal: how many lines it had, and the hash of the last one."""

    lines: int
    head: str


@dataclass(frozen=True)
class Statement(Stored):
    """Everything that may be said about a run's privacy.

    Attributes:
        held: Who held the records.
        users: M, or 0 where it is not known.
        reason: Why nothing is guaranteed; None where something is.
        seeded: Whether the noise comes from a stored seed: then ε is what secret noise would give.
        quotes_given: Whether ε given who took part is the one to quote, because somebody may have
            chosen the draw.
        delta: δ.
        neighbours: Which datasets are hidden from one another.
        unit: ``record`` or ``user``.
        guarantees: One for each adversary.
        by_group: ε towards the server of each group of users, where users have noise of their own.
        parts: The mechanisms, in the order in which they ran.
        curves: By theorem, the largest ε that matters and δ at a few values of ε from 0 to it, of
            the adversary that learns most of those whom the theorem is about.
        preparation: How the records were prepared.
        outside: What no ε covers: a code and a sentence each.
        needs: What has to be true for it to hold, likewise.
        journal: The state of the run's journal when the statement was written.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    held: Held = "plan"
    users: int = 0
    reason: str | None = None
    seeded: bool = False
    quotes_given: bool = False
    delta: float | None = None
    neighbours: str = ""
    unit: str = "record"
    guarantees: tuple[Guarantee, ...] = ()
    by_group: tuple[float, ...] = ()
    parts: tuple[StatedPart, ...] = ()
    curves: Mapping[str, tuple[float, tuple[float, ...]]] = field(default_factory=dict)
    preparation: tuple[Remark, ...] = ()
    outside: tuple[tuple[str, str], ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    journal: JournalHead | None = None

    @property
    def guarantee(self) -> bool:
        """Whether anything is guaranteed."""
        return any(one.epsilon is not None or one.given is not None for one in self.guarantees)

    def towards(self, name: str) -> Guarantee:
        """The guarantee towards an adversary; one without ε where nothing is promised."""
        found = (one for one in self.guarantees if one.adversary == name)
        return next(found, Guarantee(name))

    @property
    def epsilon(self) -> float | None:
        """The ε to quote, towards the server; a winner of private tuning has one towards whoever is
        given the model alone."""
        return _quoted(self, self.guarantees[0]).epsilon if self.guarantees else None

    @property
    def promises_little(self) -> bool:
        """Whether ε promises next to nothing."""
        return (self.epsilon or 0.0) > LITTLE

    @property
    def rounds(self) -> int:
        """How many rounds were run, or planned."""
        return sum(part.rounds for part in self.parts)

    @property
    def run(self) -> Mechanism | None:
        """The mechanism of the last part."""
        return self.parts[-1].mechanism if self.parts else None

    def __repr__(self) -> str:
        return line(self)

    def _repr_markdown_(self) -> str:
        return page(self)


#: What is protected, by unit.
WHAT = {"record": "record", "user": "user's whole dataset"}
#: The relation between neighbours, in a verb.
_CHANGED = {
    "replace-one": "replaced by another",
    "zero-out": "replaced by an empty one",
    "add-remove": "added or removed",
}


#: Above this ε promises next to nothing.
LITTLE = 10.0


@dataclass(frozen=True)
class Row:
    """What is promised against one adversary, as people read it."""

    words: str
    epsilon: str
    guess: str
    theorem: str


def page(said: Statement, title: str = "") -> str:
    """The statement as Markdown: who held the records, what is promised to whom by which theorem,
    and what is not covered; ``title`` is what the run is called.

    >>> print(page(Statement(reason="the run is not private")).splitlines()[0])
    **Nothing is guaranteed: the run is not private.**
    """
    text = _template().render(
        said=said,
        title=title,
        one="site" if said.held == "sites" else "user",
        what=WHAT[said.unit],
        changed=_changed(said),
        rows=table(said),
        covered=[step for step in said.preparation if step.protection in WITHIN],
        costs=[cost for part in said.parts for cost in part.costs],
        why_not_more=_why_not_more(said),
    )
    joined = re.sub(r"(?<=[^|\n])\n(?=\w)", " ", text)  # the lines of one paragraph
    return re.sub(r"\n{3,}", "\n\n", joined).strip() + "\n"


def _why_not_more(said: Statement) -> Guarantee | None:
    """An adversary who sees sums alone where these hide no more, for a reason that a plan can
    change."""
    if said.run is None or said.run.memory or said.run.local_steps > 1:
        return None
    return next((one for one in said.guarantees if one.not_more is not None), None)


def table(said: Statement) -> list[Row]:
    """One row for each adversary; those that are promised the same share one."""
    words: dict[tuple[str, str, str], list[str]] = {}
    for one in said.guarantees:
        quoted = _quoted(said, one)
        if quoted.epsilon is None:
            continue
        guess = "" if quoted.guess is None else percent(quoted.guess)
        same = (round_up(quoted.epsilon), guess, THEOREMS[quoted.theorem])
        words.setdefault(same, []).append(one.words)
    return [Row("; ".join(who), *same) for same, who in words.items()]


def line(said: Statement) -> str:
    """ε with its adversary, δ and neighbours, in one line.

    >>> line(Statement(reason="the run is not private"))
    'nothing is guaranteed: the run is not private'
    """
    if not said.guarantee:
        return f"nothing is guaranteed: {said.reason}"
    first = said.guarantees[0]
    who = "whoever knows who took part" if said.quotes_given else first.words.partition(",")[0]
    text = (
        f"ε = {round_up(said.epsilon)} at δ = {digits_up(said.delta or 0.0)} against {who}, for "
        f"one {WHAT[said.unit]} {_changed(said)}"
    )
    if first.replace_one is not None:
        text += f" ({round_up(first.replace_one)} for replacing it)"
    if said.promises_little:
        text += f". An ε above {LITTLE:g} promises next to nothing."
    return f"with secret noise {text}" if said.seeded else text


def _quoted(said: Statement, one: Guarantee) -> Guarantee:
    """What is quoted of it: given who took part, where somebody may have chosen the draw."""
    if not said.quotes_given or one.given is None:
        return one
    return replace(one, epsilon=one.given, guess=one.given_guess, theorem="given")


def _changed(said: Statement) -> str:
    return _CHANGED["replace-one" if said.run is None else said.run.relation]


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    text = resources.files("dpscaffold.privacy").joinpath("statement.md.j2").read_text("utf-8")
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"up": round_up, "digits_up": digits_up}
    return environment.from_string(text)
