"""A run described for the accountant: a :class:`~dpscaffold.privacy.mechanism.Mechanism` from the
plain numbers of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from dpscaffold.privacy.errors import PrivacyError
from dpscaffold.privacy.mechanism import (
    RELATIONS,
    Aggregation,
    Clip,
    Group,
    Mechanism,
    Query,
    Relation,
    Sampling,
    SecureTerms,
    Unit,
    Weighting,
    check,
    check_batches,
)

Value = TypeVar("Value")

#: How many users' numbers are read at a time.
BLOCK = 1 << 16

#: The paper's δ, one over all training records, by name.
RECORDS: Literal["1/records"] = "1/records"
Delta = float | Literal["1/records"]


def describe(
    *,
    rounds: int,
    local_steps: int,
    users: int,
    cohort_size: int,
    records: Sequence[int] | int,
    batch_sizes: Sequence[int] | NDArray[np.integer[Any]] | int,
    noise: float,
    clip: Clip = 1.0,
    sampling: Sampling = "fixed",
    unit: Unit = "record",
    memory: bool = True,
    one_sum: bool = False,
    weighting: Weighting = "uniform",
    delta: Delta | None = None,
    max_participations: int | None = None,
    may_decline: str | None = None,
    hidden_draw: bool = False,
    declared_sizes: bool = False,
    unproved_hooks: Sequence[str] = (),
    query: Query = "gradients",
    secure: SecureTerms | None = None,
    voids: int = 0,
    louder: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    aggregation: Aggregation = "mean",
) -> Mechanism:
    """A :class:`Mechanism` from plain numbers. What is not said counts as the worse case.

    Args:
        rounds: T.
        local_steps: K.
        users: M.
        cohort_size: m, the users that take part in a round.
        records: R_i, one number for all users or one per user.
        batch_sizes: b_i, likewise. With a user as unit neither is kept.
        noise: σ_g.
        clip: C.
        sampling: ``"fixed"`` or ``"poisson"``.
        unit: ``"record"`` or ``"user"``.
        memory: Whether users keep a memory between rounds.
        one_sum: Whether uploads are proved to be one vector, linear in the noised gradient.
        weighting: ``"uniform"`` or ``"records"``.
        delta: δ, by default 1/(10·n), n being the number of records ΣR_i or, with a user as unit,
            of users M; ``"1/records"`` is the paper's 1/n.
        max_participations: The most rounds that any user takes part in.
        may_decline: Why a drawn user may decline; None if none may.
        hidden_draw: Whether it stays secret who takes part.
        declared_sizes: Whether sizes are constants that do not depend on the data.
        unproved_hooks: Functions of the algorithm that no bound is proved for.
        query: What is summed over a batch, ``"gradients"`` or bounded ``"sums"``.
        secure: Colluders and the shortest list, where the server sees only sums.
        voids: How many attempts at a round may end without a result.
        louder: σ_i over ``noise`` for each user, where users differ; the smallest is 1.
        weights: Each user's weight in the mean, public numbers; only with ``weighting="noise"``.
        aggregation: What the server makes of uploads: their ``"mean"``, or that of ``"clipped"``
            ones.

    >>> run = describe(rounds=400, local_steps=50, users=100, cohort_size=20,
    ...                records=4000, batch_sizes=800, noise=60)
    >>> run.user_ratio, run.worst.rate, run.delta
    (0.2, 0.2, 2.5e-07)
    """
    if users < 1:
        raise PrivacyError(
            "out-of-range", f"users={users} leaves nobody to protect; give at least 1"
        )
    sizes, draws = (
        _per_user("records", records, users),
        _per_user("batch_sizes", batch_sizes, users),
    )
    if unit == "user":  # neither may be revealed, and neither matters
        check_batches(sizes, draws)
        sizes, draws = _Same(1, users), _Same(1, users)
    if (weights is not None) != (weighting == "noise"):
        raise PrivacyError(
            "missing-argument",
            f"weights belong to weighting='noise', and weighting is {weighting!r}; give both",
        )
    own = (_numbers("louder", louder, users), _numbers("weights", weights, users))
    counts = Counter(zip(sizes, draws, *own, strict=True))
    groups = tuple(Group(r, b, n, loud, weight) for (r, b, loud, weight), n in counts.items())
    places = {kind: place for place, kind in enumerate(counts)}
    kinds = zip(sizes, draws, *own, strict=True) if len(groups) > 1 else ()
    membership = tuple(places[kind] for kind in kinds)
    if delta is None or delta == RECORDS:
        total = sum(group.records * group.users for group in groups)
        # Without records there is no useful default; the checks below say what is wrong.
        delta = (1.0 if delta == RECORDS else 0.1) / total if total > 0 else 0.5
    elif isinstance(delta, str):
        raise PrivacyError(
            "unknown-choice", f"delta={delta!r} is unknown; give a number or {RECORDS!r}"
        )
    run = Mechanism(
        rounds=rounds,
        local_steps=local_steps,
        users=users,
        cohort_size=cohort_size,
        groups=groups,
        membership=membership,
        noise=float(noise),
        clip=clip if clip == "median" else float(clip),
        sampling=sampling,
        unit=unit,
        memory=memory,
        one_sum=one_sum,
        weighting=weighting,
        delta=float(delta),
        max_participations=max_participations,
        may_decline=may_decline,
        hidden_draw=hidden_draw,
        declared_sizes=declared_sizes,
        unproved_hooks=tuple(unproved_hooks),
        query=query,
        secure=secure,
        voids=voids,
        aggregation=aggregation,
    )
    check(run)
    return run


def choose_relation(
    neighbours: str | None, sampling: str, unit: str, declared: bool
) -> Relation | None:
    """The neighbours that are asked for, refused where no bound is proved for them.

    >>> choose_relation("zero-out", "poisson", "record", declared=False)
    'zero-out'
    """
    if neighbours is None:
        return None
    known = next((name for name in RELATIONS if name == neighbours), None)
    if known is None:
        raise PrivacyError(
            "unknown-choice",
            f"neighbours={neighbours!r} is unknown; give {', '.join(map(repr, RELATIONS))}",
        )
    whole = unit == "user" or sampling == "fixed"
    if whole != (known == "replace-one"):
        proved = "'replace-one'" if whole else "'zero-out' or 'add-remove'"
        kind = "a user as unit" if unit == "user" else f"{sampling} batches"
        raise PrivacyError(
            "neighbours-not-proved", f"neighbours={known!r} is not proved for {kind}; give {proved}"
        )
    if known == "add-remove" and not declared:
        raise PrivacyError(
            "sizes-not-declared",
            "neighbours='add-remove' needs sizes that do not depend on the data; give "
            "data.declared_sizes, or neighbours='zero-out'",
        )
    return known


@dataclass(frozen=True)
class _Same(Generic[Value]):
    """One value for all of ``users``, who may be many."""

    value: Value
    users: int

    def __iter__(self) -> Iterator[Value]:
        return repeat(self.value, self.users)


@dataclass(frozen=True)
class _Whole:
    """Whole numbers that are read some at a time, so that no list of all users is made."""

    values: Sequence[int] | NDArray[np.integer[Any]]

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self.values), BLOCK):
            yield from map(int, self.values[start : start + BLOCK])


def _numbers(name: str, values: Sequence[float] | None, users: int) -> Iterable[float]:
    """One number for each user; 1 where there are none."""
    if values is None:
        return _Same(1.0, users)
    if len(values) != users:
        raise PrivacyError(
            "count-differs", f"{name} has {len(values)} entries for {users} users; give one each"
        )
    return [float(value) for value in values]


def _per_user(
    name: str, values: Sequence[int] | NDArray[np.integer[Any]] | int, users: int
) -> Iterable[int]:
    if isinstance(values, int):
        return _Same(values, users)
    if len(values) != users:
        raise PrivacyError(
            "count-differs",
            f"{name} has {len(values)} entries for {users} users; give one number, or one per user",
        )
    return _Whole(values)
