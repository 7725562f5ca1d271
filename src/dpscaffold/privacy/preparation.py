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

The sentence next to it is for people; nobody decides anything from its words. What a private
step, or any other private mechanism on the same records, spends is a :class:`Cost`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol, TypeVar, cast, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from dpscaffold.errors import BadInput
from dpscaffold.privacy.loss import REACH, Loss, privacy_parameters, step_losses
from dpscaffold.privacy.mechanism import STRICT, Mechanism, Sampling, refusing

Protection = Literal["none needed", "public", "private", "unprotected", "drafted"]
PROTECTIONS: tuple[Protection, ...] = get_args(Protection)
#: What stands within the guarantee; anything else that a step may say of itself does not.
WITHIN: tuple[Protection, ...] = ("none needed", "public", "private")

#: Finest grid, in points, on which a further mechanism is composed.
POINTS = 1 << 20

Rows = TypeVar("Rows")
P = TypeVar("P")

#: What is said of users who were chosen by their sizes in a run that hides sizes.
COUNTED = (
    "Who takes part, who holds which record and which ones are for training was decided by how "
    "many records there are, which this run hides."
)


@refusing
@pydantic_dataclass(frozen=True, config=STRICT)
class Cost:
    """A mechanism that was run next to the training, on the same records and for the same
    neighbours.

    Give either ``noise``, a Gaussian's standard deviation over its ℓ2-sensitivity, or ``epsilon``
    and ``delta``. It is composed with the training's loss distribution: exactly for a Gaussian,
    through the dominating pair of (ε, δ)-DP otherwise, which is never worse than adding the ε and
    the δ.

    A mechanism that may stand next to runs of either kind gives ``noise`` for replace-one
    neighbours (one record of one user replaced) and ``add_remove`` for add/remove ones, the
    divisors being public constants; :meth:`under` chooses. ``seeded`` says that the noise was drawn
    from a stored seed, as in a simulation, and can be drawn again by whoever knows it. In a secure
    sum the noise of other sites counts; ``alone`` is the share of it that is left if all of them
    collude with the server.

    >>> Cost("private mean", noise=4.0).noise
    4.0
    """

    name: str
    noise: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    epsilon: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    delta: Annotated[float, Field(ge=0, lt=1)] = 0.0
    add_remove: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    seeded: bool = False
    alone: Annotated[float, Field(gt=0, le=1)] = 1.0

    def __post_init__(self) -> None:
        if (self.noise is None) == (self.epsilon is None):
            raise BadInput(
                "noise-or-epsilon",
                f"the cost {self.name!r} needs either noise or epsilon, and not both",
            )

    def under(self, sampling: Sampling) -> Cost | None:
        """This cost for the neighbours of a run that samples so; None where it is not known.

        >>> Cost("mean", noise=3.0, add_remove=6.0).under("poisson").noise
        6.0
        """
        if self.epsilon is not None or sampling == "fixed":
            return replace(self, add_remove=None)
        if self.add_remove is None:
            return None
        return replace(self, noise=self.add_remove, add_remove=None)

    @property
    def if_others_collude(self) -> Cost:
        """This cost, as :meth:`under` chose it, towards a server with which all other sites
        collude."""
        if self.noise is None:
            return self
        return replace(self, noise=self.noise * self.alone, add_remove=None, alone=1.0)

    def added_to(self, law: Loss) -> Loss:
        """The loss of a run and of this mechanism, on a grid that is no finer than need be."""
        stated = self.epsilon or 0.0
        reach = stated if self.noise is None else (1 / self.noise + 2 * REACH) / (2 * self.noise)
        factor = math.ceil(reach / (law.interval * POINTS))
        if factor > 1:
            law = law.on_grid(factor * law.interval)
        if self.noise is None:
            return law.compose(privacy_parameters(stated, self.delta, law.interval))
        return law.compose(step_losses(1.0, self.noise, "fixed", law.interval)[0])


def together(name: str, costs: Sequence[Cost]) -> Cost:
    """Several Gaussians on the same records as the one that they are: 1/z² = Σ 1/z_i².

    Exact, for adaptive releases too (Dong, Roth and Su, "Gaussian differential privacy", 2022).

    >>> together("both", [Cost("a", noise=3.0), Cost("b", noise=4.0)]).noise
    2.4
    """

    return Cost(
        name,
        noise=_joint_noise([cost.noise for cost in costs]),
        add_remove=_joint_noise([cost.add_remove for cost in costs]),
        seeded=any(cost.seeded for cost in costs),
    )


def _joint_noise(multipliers: Sequence[float | None]) -> float | None:
    """The multiplier of all together; None where one is not known."""
    squares = [1 / noise**2 for noise in multipliers if noise is not None]
    return None if len(squares) < len(multipliers) else 1 / math.sqrt(sum(squares))


def with_costs(law: Loss, costs: tuple[Cost, ...]) -> Loss:
    """The loss of the training and of every further mechanism together."""
    for cost in costs:
        law = cost.added_to(law)
    return law


class Preparation(Protocol):
    """One step of a preparation, as far as privacy is concerned."""

    @property
    def protection(self) -> Protection:
        """How the records that it was fitted on are protected."""

    @property
    def cost(self) -> Cost | None:
        """What a private step spent."""

    @property
    def sentence(self) -> str:
        """What was done, for people."""


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


def prepared(steps: Iterable[Preparation], unit: str) -> tuple[Remark, ...]:
    """Steps as a statement holds them: what was done, and how it treats private records."""
    return tuple(Remark(sentence_of(step, unit), step.protection) for step in steps)


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
        cost = step.cost.under(run.sampling)
        if cost is not None and run.unit == "record" and not divided:
            costs.append(cost)
            continue
        sentence = (
            f"{step.cost.name}: its noise hides single records (replace-one), not what this run "
            f"protects."
        )
        unprotected.append(Remark(sentence, "unprotected"))
    return tuple(costs), tuple(unprotected)
