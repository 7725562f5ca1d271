"""What is public about a federation, and what a plan must keep to: the input of the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpscaffold.checks import whole
from dpscaffold.config.extras import FactsSettings
from dpscaffold.errors import BadInput
from dpscaffold.federation.roster import FEW_USERS, Roster
from dpscaffold.federation.schema import MOST_CLASSES, Target, schema_of
from dpscaffold.planning.surrogate import SurrogateAssumptions
from dpscaffold.privacy.numbers import digits_up

#: The most users, records of one, weights of a linear model, and rounds that a plan is made for:
#: beyond them what is public takes no end to hold, or σ_g to solve for.
MOST_USERS, MOST_RECORDS, MOST_WEIGHTS, MOST_ROUNDS = 10**7, 10**12, 10**8, 10**6


@dataclass(frozen=True)
class Facts:
    """Public facts about a federation.

    Args:
        sizes: R_i, the training records of every user.
        features: The number of features after preparation.
        classes: The number of classes; 0 if a number is predicted.
        similarity: γ in per cent, how alike users are; None if it is unknown.
        row_norm: The norm of a row that preparation guarantees; None if there is none, as for
            standardised features.

    >>> facts = Facts.of(users=3, records=50, features=40, classes=10)
    >>> facts.sizes, facts.guess.similarity
    ((50, 50, 50), 0.0)
    """

    sizes: tuple[int, ...]
    features: int
    classes: int
    similarity: float | None = None
    row_norm: float | None = 1.0

    def __post_init__(self) -> None:
        if not self.sizes:
            raise BadInput("out-of-range", "facts.users is 0; give one user or more")
        for _, size in {(type(size), size) for size in self.sizes}:
            most("facts.records", whole("facts.records", size, 1), MOST_RECORDS)
        whole("facts.features", self.features, 1)
        if isinstance(self.classes, bool) or self.classes == 1 or self.classes < 0:
            raise BadInput(
                "too-few-classes",
                f"facts.classes is {self.classes}; give 2 or more, or 0 where a number is "
                f"predicted",
            )
        most("facts.classes", self.classes, MOST_CLASSES)
        if self.features * max(1, self.classes) > MOST_WEIGHTS:
            raise BadInput(
                "too-many-weights",
                f"facts.features is {self.features} and facts.classes is {self.classes}, more than "
                f"{MOST_WEIGHTS} weights of a linear model; give at most "
                f"{MOST_WEIGHTS // max(1, self.classes)} features, or fewer classes",
            )
        _ = self.guess

    @classmethod
    def of(
        cls,
        *,
        users: int,
        records: int | Sequence[int],
        features: int,
        classes: int,
        similarity: float | None = None,
        row_norm: float | None = 1.0,
    ) -> Facts:
        """Facts from the number of users and their records.

        Args:
            users: M, the number of users.
            records: The training records of a user: one number for all users, or a list.
            features: The number of features after preparation.
            classes: The number of classes; 0 if a number is predicted.
            similarity: γ in per cent, how alike users are; None if it is unknown.
            row_norm: The largest norm of a row; None if there is no bound.
        """
        most("facts.users", whole("facts.users", users, 1), MOST_USERS)
        sizes = (records,) * users if isinstance(records, int) else tuple(records)
        if len(sizes) != users:
            raise BadInput(
                "count-differs",
                f"facts.records lists {len(sizes)} sizes and facts.users is {users}; give one "
                f"each, or one number for all",
            )
        return cls(sizes, features, classes, similarity, row_norm)

    @property
    def users(self) -> int:
        """M."""
        return len(self.sizes)

    @property
    def dimension(self) -> int:
        """d."""
        return self.features

    @property
    def target(self) -> Target:
        """What is predicted."""
        return Target.numbered(self.classes) if self.classes else Target("number")

    @property
    def guess(self) -> SurrogateAssumptions:
        """What a surrogate supposes: where γ is unknown, that users have nothing in common, be it
        their classes or their models."""
        known = 0.0 if self.similarity is None else self.similarity
        return SurrogateAssumptions(known, self.row_norm, self.similarity is None)

    @property
    def roster(self) -> Roster:
        """The users as a server would know them."""
        return Roster(self.sizes, (), schema_of((), self.target, self.features), "public facts")


@dataclass(frozen=True)
class Limits:
    """What you can afford.

    Args:
        rounds: T at most.
        local_steps: K at most.
        cohort_size: m, participants in a round, at most; None: all users up to 200, then a fifth.
    """

    rounds: int = 400
    local_steps: int = 10
    cohort_size: int | None = None

    def __post_init__(self) -> None:
        most("the most rounds", whole("the most rounds", self.rounds, 1), MOST_ROUNDS)
        whole("the most local steps", self.local_steps, 1)
        if self.cohort_size is not None:
            whole("participants", self.cohort_size, 1)

    def share(self, users: int) -> float:
        """l: all that may take part. By default these are all users, up to
        :data:`~dpscaffold.federation.roster.FEW_USERS`; beyond that a fifth of the users, and at
        least that many.

        >>> Limits().share(13), Limits().share(400), Limits().share(5000)
        (1.0, 0.5, 0.2)
        """
        usual = min(users, max(FEW_USERS, users // 5))
        count = usual if self.cohort_size is None else self.cohort_size
        if count > users:
            raise BadInput(
                "out-of-range",
                f"participants is {count}, and there are {users} users; at most {users} can take "
                f"part",
            )
        return count / users


def most(name: str, value: int, bound: int) -> int:
    """``value``, or a refusal where it is beyond what a plan is made for.

    >>> most("facts.users", 5, 10)
    5
    """
    if value > bound:
        raise BadInput(
            "out-of-range",
            f"{name} is {value}; a plan is made for at most {bound}, give that or fewer",
        )
    return value


def least_batch_ratio(sizes: Sequence[int], asked: float | None) -> float:
    """s: the one asked for, or 0.2, and more where a user's batch would else be below four records
    or all that it has; a batch below one record is refused."""
    if asked is None:
        smallest = min(sizes)
        return min(1.0, max(0.2, min(4, smallest) / smallest))
    for user, size in enumerate(sizes):
        if asked * size < 1 - 1e-9:
            raise BadInput(
                "empty-batch",
                f"plan.data_ratio is {asked:g}, and user {user} has {size} records, a batch below "
                f"one; use at least {digits_up(1 / min(sizes), 4)}",
            )
    return asked


def _missing(given: FactsSettings) -> str:
    needed = ("users", "records", "features", "classes")
    missing = [f"facts.{name}" for name in needed if getattr(given, name) is None]
    return (
        f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not given; say them in "
        f"[facts] or as options (classes = 0 where a number is predicted)"
    )


def facts_of(given: FactsSettings) -> Facts:
    """The facts of a ``[facts]`` table; those that are missing are named."""
    users, records, features, classes = given.users, given.records, given.features, given.classes
    if users is None and isinstance(records, tuple):
        users = len(records)
    if users is None or records is None or features is None or classes is None:
        raise BadInput("missing-argument", _missing(given))
    return Facts.of(
        users=users,
        records=records,
        features=features,
        classes=classes,
        similarity=None if given.similarity == "unknown" else given.similarity,
        row_norm=_norm(1.0 if given.row_norm is None else given.row_norm),
    )


def _norm(said: float | str) -> float | None:
    return None if isinstance(said, str) else said
