"""How records were prepared before the training, as the accountant and the statement see it.

Every step of a preparation says, as data, how it treats the records that it was fitted on:

===============  =====================================================================
protection       meaning
===============  =====================================================================
``none needed``  it works record by record and was fitted on nothing
``public``       it was fitted on what no private record went into
``private``      it was fitted by a differentially private mechanism, of a known cost
``unprotected``  it was fitted on private records as they are: outside the guarantee
``drafted``      it computes nothing, but somebody looked at private records to write the
                 configuration: outside the guarantee, and named, not refused, in a release
===============  =====================================================================

The sentence next to it is for people; nobody decides anything from its words.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar, cast, get_args

from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.mechanism import Mechanism

Protection = Literal["none needed", "public", "private", "unprotected", "drafted"]
PROTECTIONS: tuple[Protection, ...] = get_args(Protection)
#: What stands within the guarantee; anything else that a step may say of itself does not.
WITHIN: tuple[Protection, ...] = ("none needed", "public", "private")

Rows = TypeVar("Rows")
P = TypeVar("P")

#: What is said of users who were chosen by their sizes in a run that hides sizes.
COUNTED = (
    "Who takes part, who holds which record and which ones are for training was decided by how "
    "many records there are, which this run hides."
)


class Preparation(Protocol):
    """One step of a preparation, as far as privacy is concerned."""

    @property
    def protection(self) -> Protection:
        """How the records that it was fitted on are protected."""
        ...

    @property
    def cost(self) -> Cost | None:
        """What a private step spent."""
        ...

    @property
    def sentence(self) -> str:
        """What was done, for people."""
        ...


@dataclass(frozen=True)
class Remark:
    """A step that changes no row: what a reader of data decided, or a step of which only this is
    known.

    >>> Remark("The list of labels was read from the data.", "unprotected").cost is None
    True
    """

    sentence: str
    protection: Protection
    cost: Cost | None = None
    #: What is said besides where single records are hidden; it would tell of a whole user.
    named: str = ""
    #: That it looked at how many records users have, which is public only where R_i is.
    counted: bool = False
    #: That what it released was divided by how many records there are, without noise on that.
    divided: bool = False
    #: What a configuration says instead, where the step is outside the guarantee.
    remedy: str = ""

    def __call__(self, rows: Rows) -> Rows:
        """The rows, as they are."""
        return rows


def remarks(steps: Iterable[Preparation]) -> list[Remark]:
    """Steps without their arrays: all that a statement needs of them."""
    return [
        Remark(
            step.sentence,
            step.protection,
            step.cost,
            getattr(step, "named", ""),
            getattr(step, "counted", False),
            getattr(step, "divided", False),
        )
        for step in steps
    ]


def left_open(steps: Iterable[Preparation]) -> list[str]:
    """What is said of the steps that stand outside the guarantee.

    >>> left_open([Remark("Rows have unit norm.", "none needed"), Remark("A mean.", "unprotected")])
    ['A mean.']
    """
    return [step.sentence for step in steps if step.protection not in WITHIN]


def sentence_of(step: Preparation, unit: str) -> str:
    """What a statement says of a step: names of users only where users are not what is hidden.

    >>> step = Remark("Small users were left out.", "none needed", named="They are: north.")
    >>> sentence_of(step, "record"), sentence_of(step, "user")
    ('Small users were left out. They are: north.', 'Small users were left out.')
    """
    named = getattr(step, "named", "")
    return f"{step.sentence} {named}" if named and unit != "user" else step.sentence


def unnamed(steps: Iterable[P], unit: str) -> list[P]:
    """The steps as they may be written down: without the names of users where whole users are
    hidden.

    >>> step = Remark("Small users were left out.", "none needed", named="They are: north.")
    >>> [written.named for written in (*unnamed([step], "record"), *unnamed([step], "user"))]
    ['They are: north.', '']
    """
    hidden = unit == "user"
    return [
        cast(P, replace(step, named="")) if hidden and isinstance(step, Remark) else step
        for step in steps
    ]


@dataclass(frozen=True)
class PreparationStep:
    """One step as a statement holds it: what was done, and how it treats private records."""

    sentence: str
    protection: Protection


def prepared(steps: Iterable[Preparation], unit: str) -> tuple[PreparationStep, ...]:
    """Steps as a statement holds them."""
    return tuple(PreparationStep(sentence_of(step, unit), step.protection) for step in steps)


def charged(
    preparation: Iterable[Preparation], run: Mechanism
) -> tuple[tuple[Cost, ...], tuple[Remark, ...]]:
    """What private preparation adds to a run's account, for the run's own neighbours.

    A step that does not protect what the run protects (a whole user; under add/remove, a quotient
    whose divisor is the number of records) cannot be added; the second part of the answer names it
    as unprotected.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=4, local_steps=5, users=10, cohort_size=2, records=40, batch_sizes=8,
    ...                noise=6, sampling="poisson")
    >>> step = Remark("A noised mean.", "private", Cost("mean", noise=3.0, add_remove=6.0))
    >>> charged([step], run)[0][0].noise
    6.0
    """
    costs, unprotected = [], []
    for step in preparation:
        if getattr(step, "counted", False) and (run.unit == "user" or run.relation == "add-remove"):
            unprotected.append(Remark(COUNTED, "unprotected"))
        if step.cost is None:
            continue
        divided = run.relation == "add-remove" and getattr(step, "divided", False)
        hidden = run.unit == "user" or divided
        cost = None if hidden else step.cost.under(run.sampling)
        if cost is None:
            unprotected.append(
                Remark(
                    f"{step.cost.name}: its noise hides single records (replace-one), not what "
                    f"this run protects.",
                    "unprotected",
                )
            )
        else:
            costs.append(cost)
    return tuple(costs), tuple(unprotected)
