"""What a run releases, in plain numbers: all that the accountant needs to know of it.

Whatever runs also describes itself with these types, so that what ran and what is accounted are the
same numbers. They are frozen and hold neither data nor randomness. What is stored of them, in a
statement or a ledger, is read back with the same checks.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache, cached_property, wraps
from typing import Annotated, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from dpscaffold.errors import BadInput

Sampling = Literal["fixed", "poisson"]
Unit = Literal["record", "user"]
Weighting = Literal["uniform", "records", "noise"]
#: What is summed over a batch: clipped gradients, or vectors of which any two are at most 2C apart
#: (bounded sums, docs/privacy-proofs.md).
Query = Literal["gradients", "sums"]
Clip = float | Literal["median"]
#: Which pairs of datasets are hidden from one another; see :attr:`Mechanism.relation`.
Relation = Literal["replace-one", "zero-out", "add-remove"]

#: The paper's δ by name: one over the number of all training records.
RECORDS: Literal["1/records"] = "1/records"
Delta = float | Literal["1/records"]

#: A number of rounds, steps or users.
Count = Annotated[int, Field(ge=1)]
STRICT = ConfigDict(extra="forbid", strict=True)

#: The least and the most σ_g that a run may have, besides 0.
LEAST_NOISE, MOST_NOISE = 1e-9, 1e7
#: The least noise of a step that anything is stated of: less hides nothing.
LEAST_STATED = 0.05

PAIRS: dict[Relation, str] = {
    "replace-one": "one record of one user replaced by another",
    "zero-out": "one record of one user replaced by an empty one, every R_i staying as it is",
    "add-remove": "one record of one user added or removed, every size being declared in advance",
}


def noise_scale(noise: float, unit: Unit, clip: Any, batch: Any) -> Any:
    """The standard deviation of the noise on the mean: 2Cσ_g/b, or 2Cσ_g towards whole users.

    >>> noise_scale(60.0, "record", clip=1.0, batch=800)
    0.15
    """
    if noise == 0:
        return 0.0 * batch
    return 2 * clip * noise / (batch if unit == "record" else 1)


T = TypeVar("T")


def refusing(kind: type[T]) -> type[T]:
    """A class of pydantic that refuses the first wrong field in one sentence."""
    made: Any = kind
    plain = made.__init__

    @wraps(plain)
    def checked(*args: Any, **values: Any) -> None:
        try:
            plain(*args, **values)
        except ValidationError as error:
            raise _mistake_of(error) from None

    made.__init__ = checked
    return kind


def _mistake_of(error: ValidationError) -> BadInput:
    """What is wrong first, in one sentence that names the field and its value."""
    first = error.errors()[0]
    known = first.get("ctx", {}).get("error")
    if isinstance(known, BadInput):
        return known
    code = "unknown-choice" if first["type"] == "literal_error" else "out-of-range"
    field = next((str(name) for name in reversed(first["loc"]) if str(name).isidentifier()), "it")
    said = first["msg"].replace("Input should be", "it must be")
    value = "" if first["type"].startswith("missing") else f"={first['input']!r:.60}"
    return BadInput(code, f"{field}{value} cannot be used: {said}")


class Stored:
    """What is kept as JSON, and read back with the checks of its fields."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, without what has its default."""
        values: dict[str, Any] = self._adapter().dump_python(
            self, mode="json", exclude_defaults=True
        )
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str) -> Self:
        """The inverse of :meth:`to_json`; ``where`` names the file.

        >>> run = describe(rounds=4, local_steps=1, users=2, cohort_size=1, records=[8, 9],
        ...                batch_sizes=2, noise=3)
        >>> Mechanism.from_json(run.to_json(), "a file") == run
        True
        """
        try:
            read: Self = cls._adapter().validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            raise BadInput(
                "run-damaged",
                f"{where} cannot be read by this version ({_mistake_of(error)}); restore it, or "
                f"train again",
            ) from error
        return read

    @classmethod
    @cache
    def _adapter(cls) -> TypeAdapter[Any]:
        return TypeAdapter(cls)


@refusing
@dataclass(frozen=True, config=STRICT)
class Group:
    """Users that hold the same number of records and draw the same number of them: R_i, b_i, how
    many.

    Where users have budgets of their own, ``louder`` is σ_i over the σ_g of the run, which is the
    smallest; with ``weighting="noise"`` ``weight`` is their weight in the mean.
    """

    records: int
    batch: int
    users: Annotated[int, Field(ge=1)]
    louder: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise BadInput(
                "empty-batch",
                f"a user with {self.records} records draws a batch of {self.batch}; raise "
                f"data_ratio so that every batch holds at least 1 record",
            )
        if self.batch > self.records:
            raise BadInput(
                "batch-too-large",
                f"records={self.records} is fewer than the batch of {self.batch}; a batch may hold "
                f"at most all of a user's records",
            )

    @property
    def rate(self) -> float:
        """b_i/R_i."""
        return self.batch / self.records


@refusing
@dataclass(frozen=True, config=STRICT)
class SecureSums:
    """The server sees sums over lists of at least ``least`` users, and at most ``colluders`` users
    share what they know with it.

    A member of a list A adds noise of multiplier σ_g·√((m − k)/(|A| − k)): σ_g is that of a list of
    all m who were drawn.
    """

    colluders: int
    least: int


@refusing
@dataclass(frozen=True, kw_only=True, config=STRICT)
class Mechanism(Stored):
    """T rounds of a Gaussian mechanism; in each, m of M users drawn uniformly take part with K
    steps. Build it with :func:`describe`.

    One step takes a batch of b of a user's R records, clips each gradient to C and adds noise
    (2C/b)·N(0, σ_g²) to their mean. With ``unit="user"`` the noise is 2C·N(0, σ_g²), and a user's
    whole dataset is the unit.

    Every field is one that the theorems of :mod:`dpscaffold.privacy.adversary` read; a description
    with any other field cannot be made.

    Attributes:
        clip: C.
        noise: σ_g.
        sampling: Batches of a fixed size, or Poisson batches.
        unit: What is protected.
        rounds: T, warm-start rounds included.
        local_steps: K.
        users: M.
        cohort_size: m.
        groups: The distinct kinds of users. With a user as unit they say nothing of R_i.
        membership: Each user's group; empty when there is only one.
        memory: Whether users keep something between rounds (SCAFFOLD's c_i).
        weighting: How uploads are weighted in the mean.
        delta: δ.
        declines: Why a drawn user may stay away (a budget of its own, a site's policy); None where
            none may.
        declared_sizes: Whether every R_i, and with it every rate, divisor and weight, is a constant
            that was declared without looking at the data.
        one_sum: Whether every upload is one vector, linear in the noised gradient, so that who sees
            models alone sees one weighted sum of a round.
        unproved_hooks: Parts of the algorithm that no theorem covers; with any there is no
            guarantee.
        query: What is summed over a batch.
        secure: Secure sums, where the server sees nothing else.
        extra: Attempts beyond the T rounds: those that ended without a result, and rounds that were
            run again with fresh noise. Each counts as one more participation of every user.
    """

    clip: Annotated[float, Field(gt=0)] | Literal["median"] = 1.0
    noise: float = 1.0
    sampling: Sampling = "fixed"
    unit: Unit = "record"
    rounds: Count
    local_steps: Count
    users: Count
    cohort_size: Count
    groups: tuple[Group, ...]
    memory: bool
    weighting: Weighting
    delta: Annotated[float, Field(gt=0, lt=1)]
    membership: tuple[int, ...] = ()
    declines: str | None = None
    declared_sizes: bool = False
    one_sum: bool = False
    unproved_hooks: tuple[str, ...] = ()
    query: Query = "gradients"
    secure: SecureSums | None = None
    extra: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        check_noise("noise", self.noise)
        check_noise("noise times louder", self.noise * max(group.louder for group in self.groups))
        if self.noise and self.clip == math.inf:
            raise BadInput("out-of-range", "clip=inf does not bound a gradient; give a number")
        if self.cohort_size > self.users:
            raise BadInput(
                "out-of-range",
                f"cohort_size={self.cohort_size} cannot be drawn from {self.users} users; give at "
                f"most that many",
            )
        if min(group.louder for group in self.groups) != 1.0:
            raise BadInput(
                "out-of-range",
                "louder is sigma_i over the smallest sigma of a run; give 1 for the smallest",
            )
        if not _is_partition(self.groups, self.membership, self.users):
            raise BadInput(
                "count-differs",
                f"groups and membership do not put each of the {self.users} users into one group; "
                f"describe the run again",
            )
        if self.secure is not None:
            _check_lists(self.secure, self.cohort_size)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: there may be a group for each of a million users."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The place of every user's group, (M,)."""
        if not self.membership and len(self.groups) > 1:
            raise BadInput(
                "unknown-user",
                f"every user is in one of {len(self.groups)} groups, and a stored statement does "
                f"not say in which; ask the run's ledger",
            )
        return np.broadcast_to(np.array(self.membership or 0, dtype=np.int64), self.users)

    @property
    def unequal(self) -> bool:
        """Whether users differ in their noise."""
        return any(group.louder != 1.0 for group in self.groups)

    @property
    def least_stated(self) -> float:
        """The smallest σ_g of which anything is stated; K steps on a whole user count as one."""
        return LEAST_STATED * (math.sqrt(self.local_steps) if self.unit == "user" else 1.0)

    @property
    def user_ratio(self) -> float:
        """l = m/M."""
        return self.cohort_size / self.users

    @property
    def protected(self) -> int:
        """How many the guarantee protects: n = ΣR_i records, or M users."""
        if self.unit == "user":
            return self.users
        return sum(group.records * group.users for group in self.groups)

    @property
    def relation(self) -> Relation:
        """The neighbours by name.

        ``replace-one``: one record (or user) is another; noise multiplier σ_g. ``zero-out``: a
        record is an empty one, whose gradient is zero, and every R_i, rate and divisor stays;
        multiplier 2σ_g. ``add-remove``: a record is there or not, which needs sizes that were
        declared, since b_i computed from the data would reveal it; multiplier 2σ_g.
        """
        if self.unit == "user" or self.sampling == "fixed":
            return "replace-one"
        return "add-remove" if self.declared_sizes else "zero-out"

    @property
    def neighbours(self) -> str:
        """Which pairs of datasets the guarantee hides from one another."""
        if self.unit == "user":
            return "one user's whole dataset replaced by another (replace-one)"
        return f"{PAIRS[self.relation]} ({self.relation})"

    def place(self, user: int) -> int:
        """The place of a user's group."""
        if not 0 <= user < self.users:
            raise BadInput(
                "unknown-user",
                f"user={user} is not one of the {self.users} users; give 0 to {self.users - 1}",
            )
        return int(self.places[user])


def _is_partition(groups: Sequence[Group], membership: Sequence[int], users: int) -> bool:
    """Whether each user is in one group, and every group has as many as it says."""
    sizes = [group.users for group in groups]
    listed = not membership or Counter(membership) == dict(enumerate(sizes))
    return listed and sum(sizes) == users


def _check_lists(secure: SecureSums, cohort_size: int) -> None:
    """Refuse lists in which fewer than two honest members hide each other."""
    if secure.colluders < 0 or secure.least - secure.colluders < 2 or secure.least > cohort_size:
        raise BadInput(
            "too-few-sites",
            f"secure sums of at least {secure.least} users, {secure.colluders} of them colluders, "
            f"where {cohort_size} take part; give at least 2 more users than colluders, and at "
            f"most as many as take part",
        )


def check_delta(name: str, delta: float) -> None:
    """Refuse a δ outside (0, 1)."""
    if not 0.0 < delta < 1.0:
        raise BadInput("out-of-range", f"{name} is {delta:g}; it must lie strictly between 0 and 1")


def check_noise(name: str, noise: float) -> None:
    """Refuse a σ_g that no run may have; 0 is no noise at all."""
    if not (math.isfinite(noise) and noise >= 0.0):
        raise BadInput(
            "out-of-range", f"{name} is {noise:g}, which is no noise; give a number above 0"
        )
    if noise and not LEAST_NOISE <= noise <= MOST_NOISE:
        much = "more than can be accounted for" if noise > 1 else "too little to hide anything"
        raise BadInput(
            "noise-out-of-range",
            f"{name} is {noise:g}, {much}; give a number from {LEAST_NOISE:g} to {MOST_NOISE:g}",
        )


Counts = Sequence[int] | NDArray[np.integer[Any]] | int


def describe(
    *,
    users: int,
    records: Counts,
    batch_sizes: Counts,
    noise: float,
    clip: Clip = 1.0,
    unit: Unit = "record",
    delta: Delta | None = None,
    louder: Sequence[float] | None = None,
    weighting: Weighting = "uniform",
    weights: Sequence[float] | None = None,
    memory: bool = True,
    **others: Any,
) -> Mechanism:
    """A :class:`Mechanism` from numbers of single users. What is not said counts as the worse case.

    Args:
        users: M.
        records: R_i, one number for all users or one per user.
        batch_sizes: b_i, likewise. With a user as unit neither is kept.
        noise: σ_g.
        clip: C.
        unit: ``"record"`` or ``"user"``.
        delta: δ, by default 1/(10·n), n being the number of records ΣR_i or, with a user as unit,
            of users M; ``"1/records"`` is the paper's 1/n.
        louder: σ_i over ``noise`` for each user, where users differ; the smallest is 1.
        weighting: ``"uniform"``, ``"records"`` or ``"noise"``.
        weights: Each user's weight in the mean, public numbers; only with ``weighting="noise"``.
        memory: Whether users keep something between rounds.
        others: The other fields of :class:`Mechanism`.

    >>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
    ...                records=4000, batch_sizes=800, noise=60)
    >>> run.user_ratio, run.groups[0].rate, run.delta
    (0.2, 0.2, 2.5e-07)
    """
    if users < 1:
        raise BadInput("out-of-range", f"users={users} leaves nobody to protect; give at least 1")
    if (weights is not None) != (weighting == "noise"):
        raise BadInput(
            "missing-argument",
            f"weights belong to weighting='noise', and weighting is {weighting!r}; give both",
        )
    sizes, draws = _each("records", records, users), _each("batch_sizes", batch_sizes, users)
    own = (_each("louder", louder or 1.0, users), _each("weights", weights or 1.0, users))
    if unit == "user":  # neither may be revealed, and neither matters
        _ = [Group(size, draw, 1) for size, draw in set(zip(sizes, draws, strict=True))]
        sizes = draws = [1] * users
    places: dict[tuple[Any, ...], int] = {}  # in one pass: there may be a million users
    kinds = zip(sizes, draws, *own, strict=True)
    membership = tuple(places.setdefault(kind, len(places)) for kind in kinds)
    groups = tuple(
        Group(records=size, batch=draw, users=n, louder=louder, weight=weight)
        for (size, draw, louder, weight), n in zip(
            places, np.bincount(membership).tolist(), strict=True
        )
    )
    return Mechanism(
        users=users,
        groups=groups,
        membership=membership if len(groups) > 1 else (),
        noise=float(noise),
        clip=clip,
        unit=unit,
        weighting=weighting,
        memory=memory,
        delta=_delta(delta, sum(group.records * group.users for group in groups)),
        **others,
    )


def _delta(delta: Delta | None, protected: int) -> float:
    """δ as it is given, or from how many are protected."""
    if delta is None or delta == RECORDS:
        return (1.0 if delta == RECORDS else 0.1) / protected
    if isinstance(delta, str):
        raise BadInput(
            "unknown-choice", f"delta={delta!r} is unknown; give a number or {RECORDS!r}"
        )
    return float(delta)


def _each(name: str, values: Any, users: int) -> list[Any]:
    """One number for each user."""
    given = np.asarray(values)
    if given.ndim and len(given) != users:
        raise BadInput(
            "count-differs",
            f"{name} has {len(given)} entries for {users} users; give one number, or one per user",
        )
    found: list[Any] = np.broadcast_to(given, users).tolist()
    return found
