"""What a run releases, in plain numbers: all that the accountant needs to know of it.

Whatever runs also describes itself with these types, so that what ran and what is accounted are the
same numbers. They are frozen and hold neither data nor randomness. What is stored of them, in a
statement or a ledger, is read back with the same checks.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import repeat
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

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

#: The least and the most σ_g that a run may have, besides 0.
LEAST_NOISE, MOST_NOISE = 1e-9, 1e7
#: The least noise of a step that anything is stated of: less hides nothing.
LEAST_STATED = 0.05

PAIRS: dict[Relation, str] = {
    "replace-one": "one record of one user replaced by another",
    "zero-out": "one record of one user replaced by an empty one, every R_i staying as it is",
    "add-remove": "one record of one user added or removed, every size being declared in advance",
}


@dataclass(frozen=True)
class GaussianMechanism:
    """The noised step: a batch of b of a user's R records, each gradient clipped to C, and noise
    (2C/b)·N(0, σ_g²) on their mean.

    For ``unit="user"`` the noise is 2C·N(0, σ_g²) and a user's whole dataset is the unit. What
    trains and what is accounted (:class:`Mechanism`) share these four fields.

    >>> GaussianMechanism(clip=1.0, noise=60.0).scale(clip=1.0, batch=800)
    0.15
    """

    clip: Clip = 1.0
    noise: float = 1.0
    sampling: Sampling = "fixed"
    unit: Unit = "record"

    def scale(self, clip: Any, batch: Any) -> Any:
        """The standard deviation of the noise on the mean."""
        return noise_scale(self.noise, self.unit, clip, batch)


def noise_scale(noise: float, unit: Unit, clip: Any, batch: Any) -> Any:
    """The standard deviation of the noise on the mean: 2Cσ_g/b, or 2Cσ_g towards whole users."""
    if noise == 0:
        return 0.0 * batch
    return 2 * clip * noise / (batch if unit == "record" else 1)


@dataclass(frozen=True)
class Group:
    """Users that hold the same number of records and draw the same number of them: R_i, b_i, how
    many.

    Where users have budgets of their own, ``louder`` is σ_i over the σ_g of the run, which is the
    smallest; with ``weighting="noise"`` ``weight`` is their weight in the mean.
    """

    records: int
    batch: int
    users: int
    louder: float = 1.0
    weight: float = 1.0

    @property
    def rate(self) -> float:
        """b_i/R_i."""
        return self.batch / self.records


@dataclass(frozen=True)
class SecureSums:
    """The server sees sums over lists of at least ``least`` users, and at most ``colluders`` users
    share what they know with it.

    A member of a list A adds noise of multiplier σ_g·√((m − k)/(|A| − k)): σ_g is that of a list of
    all m who were drawn.
    """

    colluders: int
    least: int


@dataclass(frozen=True, kw_only=True)
class Mechanism(GaussianMechanism):
    """T rounds of a Gaussian mechanism; in each, m of M users drawn uniformly take part with K
    steps. Build it with :func:`describe`.

    Every field is one that the theorems of :mod:`dpscaffold.privacy.adversary` read; a description
    with any other field cannot be made.

    Attributes:
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

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    rounds: int
    local_steps: int
    users: int
    cohort_size: int
    groups: tuple[Group, ...]
    memory: bool
    weighting: Weighting
    delta: float
    membership: tuple[int, ...] = ()
    declines: str | None = None
    declared_sizes: bool = False
    one_sum: bool = False
    unproved_hooks: tuple[str, ...] = ()
    query: Query = "gradients"
    secure: SecureSums | None = None
    extra: int = 0

    def __post_init__(self) -> None:
        check(self)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: there may be a group for each of a million users."""
        return hash(tuple(getattr(self, field.name) for field in fields(self)))

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
        if not self.membership and len(self.groups) > 1:
            raise BadInput(
                "unknown-user",
                f"user={user} is in one of {len(self.groups)} groups, and a stored statement does "
                f"not say in which; ask the run's ledger",
            )
        return self.membership[user] if self.membership else 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without what has its default; :meth:`from_dict` reads them back."""
        values: dict[str, Any] = _stored().dump_python(self, mode="json", exclude_defaults=True)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Mechanism:
        """The inverse of :meth:`to_dict`, checked as if it had been described again.

        >>> run = describe(rounds=4, local_steps=1, users=2, cohort_size=1, records=[8, 9],
        ...                batch_sizes=2, noise=3)
        >>> Mechanism.from_dict(run.to_dict()) == run
        True
        """
        try:
            return _stored().validate_json(json.dumps(dict(values)), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise BadInput(
                "run-damaged",
                f"the stored description of the run cannot be read ({where}: {first['msg']}); "
                f"restore the file",
            ) from error


@cache
def _stored() -> TypeAdapter[Mechanism]:
    return TypeAdapter(Mechanism)


def check(run: Mechanism) -> None:
    """Refuse a description that nothing could run, naming the argument, its value and what would
    do."""
    for name in ("rounds", "local_steps", "users", "cohort_size"):
        if getattr(run, name) < 1:
            raise BadInput(
                "out-of-range",
                f"{name}={getattr(run, name)} describes nothing that runs; give at least 1",
            )
    if run.cohort_size > run.users:
        raise BadInput(
            "out-of-range",
            f"cohort_size={run.cohort_size} cannot be drawn from {run.users} users; give at "
            f"most that many",
        )
    check_delta("delta", run.delta)
    check_noise("noise", run.noise)
    if run.clip != "median" and not 0 < float(run.clip) <= (math.inf if run.noise == 0 else 1e300):
        raise BadInput(
            "out-of-range",
            f"clip={run.clip} does not bound a gradient; give a number above 0, or 'median'",
        )
    for name, allowed in _CHOICES.items():
        if getattr(run, name) not in allowed:
            raise BadInput(
                "unknown-choice",
                f"{name}={getattr(run, name)!r} is unknown; give {' or '.join(map(repr, allowed))}",
            )
    check_batches([g.records for g in run.groups], [g.batch for g in run.groups])
    _check_groups(run)
    _check_attempts(run)


def _check_groups(run: Mechanism) -> None:
    """Refuse noise below the run's σ_g, weights that are none, and users in no group."""
    if sum(group.users for group in run.groups) != run.users:
        raise BadInput(
            "count-differs",
            f"the groups hold {sum(g.users for g in run.groups)} users of {run.users}; all must "
            f"be in one",
        )
    if run.membership and not _fits(run):
        raise BadInput(
            "count-differs",
            "membership does not give each user one of the groups; describe the run again",
        )
    if min(group.louder for group in run.groups) != 1.0 or not all(
        run.noise * group.louder <= MOST_NOISE for group in run.groups
    ):
        raise BadInput(
            "out-of-range",
            "louder is sigma_i over the smallest sigma of a run: give finite numbers, the smallest "
            "of which is 1",
        )
    if not all(math.isfinite(group.weight) and group.weight > 0 for group in run.groups):
        raise BadInput(
            "out-of-range", "weight is a user's weight in the mean; give finite numbers above 0"
        )


def _fits(run: Mechanism) -> bool:
    """Whether the membership puts as many users into every group as it has."""
    places = np.array(run.membership)
    if places.min() < 0 or places.max() >= len(run.groups):
        return False
    counts = np.bincount(places, minlength=len(run.groups))
    return all(int(n) == group.users for n, group in zip(counts, run.groups, strict=True))


def _check_attempts(run: Mechanism) -> None:
    """Refuse lists in which fewer than two honest members hide each other."""
    if run.extra < 0:
        raise BadInput(
            "out-of-range", f"extra={run.extra} is no number of attempts; give 0 or more"
        )
    if run.secure is None:
        return
    least, colluders = run.secure.least, run.secure.colluders
    if colluders < 0 or least - colluders < 2 or least > run.cohort_size:
        raise BadInput(
            "too-few-sites",
            f"secure sums of at least {least} users, {colluders} of them colluders, where "
            f"{run.cohort_size} take part; give at least 2 more users than colluders, and at most "
            f"as many as take part",
        )


_CHOICES = {
    "sampling": get_args(Sampling),
    "unit": get_args(Unit),
    "weighting": get_args(Weighting),
    "query": get_args(Query),
}


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


def check_batches(sizes: Iterable[int], draws: Iterable[int]) -> None:
    """Refuse batches that hold nobody, or more than there are."""
    for records, batch in dict.fromkeys(zip(sizes, draws, strict=True)):
        if batch < 1:
            raise BadInput(
                "empty-batch",
                f"a user with {records} records draws a batch of {batch}; raise data_ratio so "
                f"that every batch holds at least 1 record",
            )
        if batch > records:
            raise BadInput(
                "batch-too-large",
                f"records={records} is fewer than the batch of {batch}; a batch may hold at most "
                f"all of a user's records",
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
    sizes = _each("records", records, users)
    draws = _each("batch_sizes", batch_sizes, users)
    if unit == "user":  # neither may be revealed, and neither matters
        check_batches(sizes, draws)
        sizes = draws = _each("records", 1, users)
    if (weights is not None) != (weighting == "noise"):
        raise BadInput(
            "missing-argument",
            f"weights belong to weighting='noise', and weighting is {weighting!r}; give both",
        )
    own = (_each("louder", louder or 1.0, users), _each("weights", weights or 1.0, users))
    counts = Counter(zip(sizes, draws, *own, strict=True))
    groups = tuple(Group(r, b, n, float(a), float(w)) for (r, b, a, w), n in counts.items())
    places = {kind: place for place, kind in enumerate(counts)}
    kinds = zip(sizes, draws, *own, strict=True) if len(groups) > 1 else ()
    return Mechanism(
        users=users,
        groups=groups,
        membership=tuple(places[kind] for kind in kinds),
        noise=float(noise),
        clip=clip if clip == "median" else float(clip),
        unit=unit,
        weighting=weighting,
        memory=memory,
        delta=_delta(delta, sum(group.records * group.users for group in groups)),
        **others,
    )


def _delta(delta: Delta | None, protected: int) -> float:
    """δ as it is given, or from how many are protected."""
    if delta is None or delta == RECORDS:
        # Without records there is no useful default; the checks say what is wrong.
        return (1.0 if delta == RECORDS else 0.1) / protected if protected > 0 else 0.5
    if isinstance(delta, str):
        raise BadInput(
            "unknown-choice", f"delta={delta!r} is unknown; give a number or {RECORDS!r}"
        )
    return float(delta)


@dataclass(frozen=True)
class _Each:
    """One number for each of many users, read some at a time so that no list of all is made."""

    values: Any
    users: int

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.values, int | float):
            yield from repeat(self.values, self.users)
            return
        for start in range(0, self.users, 1 << 16):
            yield from np.asarray(self.values[start : start + (1 << 16)]).tolist()


def _each(name: str, values: Any, users: int) -> _Each:
    if not isinstance(values, int | float) and len(values) != users:
        raise BadInput(
            "count-differs",
            f"{name} has {len(values)} entries for {users} users; give one number, or one per user",
        )
    return _Each(values, users)
