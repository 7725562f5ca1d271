"""Mechanisms as data: what one step, one participation and one run release, in plain numbers.

Whatever runs also describes itself with these types, so that what ran and what is accounted are the
same numbers. They are frozen, hold no data and no randomness, and can be written to JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from dpscaffold.privacy.errors import PrivacyError, bad_delta

Sampling = Literal["fixed", "poisson"]
Unit = Literal["record", "user"]
Weighting = Literal["uniform", "records", "noise"]
Aggregation = Literal["mean", "clipped"]
#: What is summed over a batch: clipped gradients, or vectors of which any two are at most 2C apart
#: (bounded sums, docs/privacy-proofs.md, Bounded sums).
Query = Literal["gradients", "sums"]
Clip = float | Literal["median"]
#: Which pairs of datasets are hidden from one another; see :attr:`Mechanism.relation`.
Relation = Literal["replace-one", "zero-out", "add-remove"]
RELATIONS: tuple[Relation, ...] = ("replace-one", "zero-out", "add-remove")

#: The least and the most σ_g that a run may have, besides 0. Less hides nothing that the accountant
#: could measure; the losses of more are below what double precision tells from nothing.
LEAST_NOISE, MOST_NOISE = 1e-9, 1e7


@dataclass(frozen=True)
class GaussianMechanism:
    """The noised step: a batch of b of a user's R records, each gradient clipped to C, and noise
    (2C/b)·N(0, σ_g²) on their mean.

    For ``unit="user"`` the noise is 2C·N(0, σ_g²) and a user's whole dataset is the unit. What
    trains (:class:`~dpscaffold.Gaussian`), what is accounted and what is stored
    (:class:`Mechanism`) are this type with more fields, so that they share these four.

    >>> GaussianMechanism(clip=1.0, noise=60.0).scale(clip=1.0, batch=800)
    0.15
    """

    clip: Clip = 1.0
    noise: float = 1.0
    sampling: Sampling = "fixed"
    unit: Unit = "record"

    def scale(self, clip: Any, batch: Any) -> Any:
        """The standard deviation of the noise on the mean: 2Cσ_g/b, or 2Cσ_g towards whole
        users."""
        if self.noise == 0:
            return 0.0 * batch
        return 2 * clip * self.noise / (batch if self.unit == "record" else 1)


@dataclass(frozen=True)
class Group:
    """Users that hold the same number of records and draw the same number of them: R_i, b_i, how
    many. Where users have budgets of their own, ``louder`` is σ_i over the σ_g of the run, which is
    the smallest; with ``weighting="noise"`` ``weight`` is their weight in the mean."""

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
class SecureTerms:
    """Secure sums: the server sees sums over lists of at least ``least`` users, and at most
    ``colluders`` users share what they know with it.

    A member of a list A adds noise of multiplier σ_g·√((m − k)/(|A| − k)): σ_g is that of a list of
    all m who were drawn.
    """

    colluders: int
    least: int


PAIRS: dict[Relation, str] = {
    "replace-one": "one record of one user replaced by another",
    "zero-out": "one record of one user replaced by an empty one, every R_i staying as it is",
    "add-remove": "one record of one user added or removed, every size being declared in advance",
}


@dataclass(frozen=True, kw_only=True)
class Mechanism(GaussianMechanism):
    """T rounds of a Gaussian mechanism; in each, m of M users drawn uniformly take part with K
    steps. Build it with :func:`~dpscaffold.privacy.describe.describe`.

    ``groups`` are the distinct (R_i, b_i); ``membership`` gives each user's group and is empty when
    there is only one. ``memory`` says that users keep something between rounds (SCAFFOLD's c_i).
    Warm-start rounds are rounds like any other and count in ``rounds``. ``may_decline`` is the
    reason why a drawn user may stay away (a budget per user, a site's own policy), besides
    ``max_participations``; ``hidden_draw`` says that nobody but the server and the participants can
    tell who takes part. ``declared_sizes`` says that R_i, and with it every rate, divisor and
    weight, is a constant that was declared without looking at the data. ``one_sum`` says that
    every upload is one vector, linear in the noised gradient, so that a third party sees nothing
    of a round but one weighted sum. ``unproved_hooks`` names parts of the algorithm with which no
    bound was proved: with any of them there is no guarantee. ``query`` says what is summed; a bound
    lists the queries that it is proved for. ``secure`` says that the server sees only sums of
    uploads, and ``voids`` how many attempts at a round may end without a result: each counts as a
    further participation. ``aggregation`` says what the server makes of a round's uploads: their
    mean, or a mean of what is left of them after large ones were scaled down, which is
    post-processing of uploads but no sum of them. With a user as unit the groups say nothing of
    R_i.

    ``noise`` is the smallest σ_i. Whoever ignores :attr:`Group.louder` states too large an ε, never
    too small a one. ``protects`` asks about the records of these groups alone, by their places;
    empty asks about the worst of all.
    """

    rounds: int
    local_steps: int
    users: int
    cohort_size: int
    groups: tuple[Group, ...]
    membership: tuple[int, ...]
    memory: bool
    weighting: Weighting
    delta: float
    max_participations: int | None = None
    may_decline: str | None = None
    hidden_draw: bool = False
    declared_sizes: bool = False
    one_sum: bool = False
    unproved_hooks: tuple[str, ...] = ()
    query: Query = "gradients"
    secure: SecureTerms | None = None
    voids: int = 0
    protects: tuple[int, ...] = ()
    aggregation: Aggregation = "mean"

    @property
    def unequal(self) -> bool:
        """Whether users differ in their noise."""
        return any(group.louder != 1.0 for group in self.groups)

    @property
    def protected_groups(self) -> tuple[Group, ...]:
        """The groups whose records are asked about."""
        return tuple(self.groups[g] for g in self.protects) or self.groups

    @property
    def least_noise(self) -> float:
        """The smallest σ_i of the users whose records are asked about."""
        return self.noise * min(group.louder for group in self.protected_groups)

    @property
    def declines(self) -> str | None:
        """Why a drawn user may take no part in a round, or None where every one does."""
        cap = None if self.max_participations is None else "max_participations"
        return ", ".join(reason for reason in (cap, self.may_decline) if reason) or None

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

    @cached_property
    def worst(self) -> Group:
        """The group with the largest b_i/R_i, whose ε is the largest among users with equal noise.

        δ(ε) of one step is a hockey-stick divergence between (1−q)Q + qP and Q, in either order
        (for fixed-size batches, that of the first order and its mirror image). It is convex in q
        and smallest at q = 0, where the two agree, hence non-decreasing in q for every ε: the step
        with the larger rate dominates the other, and domination survives adaptive composition and a
        data-independent coin (Zhu, Dong, Wang 2022). With a user as unit the rate plays no part at
        all.
        """
        return max(self.protected_groups, key=lambda group: group.rate)

    def group_of(self, user: int) -> Group:
        """The (R_i, b_i) of one user."""
        if not 0 <= user < self.users:
            raise PrivacyError(
                "unknown-user",
                f"user={user} is not one of the {self.users} users; give 0 to {self.users - 1}",
            )
        return self.groups[self.membership[user]] if self.membership else self.groups[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` reads them back. What belongs to secure sums, to
        noise that differs between users, or to another mean is left out of other runs."""
        values = asdict(self)
        for name in ("secure", "voids", "protects"):
            if not values[name]:
                del values[name]
        if self.aggregation == "mean":
            del values["aggregation"]
        for group in values["groups"]:
            for name in ("louder", "weight"):
                if group[name] == 1.0:
                    del group[name]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Mechanism:
        """The inverse of :meth:`to_dict`, checked as if it had been described again."""
        try:
            fields = dict(values)
            groups = tuple(Group(**group) for group in fields.pop("groups"))
            membership = tuple(int(i) for i in fields.pop("membership"))
            hooks = tuple(str(hook) for hook in fields.pop("unproved_hooks"))
            given = fields.pop("secure", None)
            secure = None if given is None else SecureTerms(**given)
            protects = tuple(int(g) for g in fields.pop("protects", ()))
            run = cls(groups=groups, membership=membership, unproved_hooks=hooks, secure=secure,
                      protects=protects, **fields)  # fmt: skip
        except (TypeError, KeyError, ValueError) as error:
            raise PrivacyError(
                "run-damaged", f"the stored description of the run cannot be read ({error})"
            ) from error
        check(run)
        return run


def check_batches(sizes: Iterable[int], draws: Iterable[int]) -> None:
    """Refuse batches that hold nobody, or more than there are."""
    for records, batch in dict.fromkeys(zip(sizes, draws, strict=True)):
        if batch < 1:
            raise PrivacyError(
                "empty-batch",
                f"a user with {records} records draws a batch of {batch}; raise data_ratio so "
                f"that every batch holds at least 1 record",
            )
        if batch > records:
            raise PrivacyError(
                "batch-too-large",
                f"records={records} is fewer than the batch of {batch}; a batch may hold at most "
                f"all of a user's records",
            )


def unusable_noise(name: str, noise: float) -> str:
    """The sentence for a σ_g that no run may have; ``name`` is what the value is called."""
    much = "more than can be accounted for" if noise > 1 else "too little to hide anything"
    return f"{name} is {noise:g}, {much}; give a number from {LEAST_NOISE:g} to {MOST_NOISE:g}"


def check(run: Mechanism) -> None:
    """Refuse a description that nothing could run, naming the argument, its value and what would
    do."""
    for name in ("rounds", "local_steps", "users", "cohort_size"):
        if getattr(run, name) < 1:
            raise PrivacyError(
                "out-of-range",
                f"{name}={getattr(run, name)} describes nothing that runs; give at least 1",
            )
    if run.cohort_size > run.users:
        raise PrivacyError(
            "out-of-range",
            f"cohort_size={run.cohort_size} cannot be drawn from {run.users} users; give at "
            f"most that many",
        )
    if not 0.0 < run.delta < 1.0:
        raise PrivacyError("out-of-range", bad_delta("delta", run.delta))
    if not (math.isfinite(run.noise) and run.noise >= 0.0):
        raise PrivacyError(
            "out-of-range",
            f"noise={run.noise} is not a noise multiplier; give a finite number above 0",
        )
    if run.noise and not LEAST_NOISE <= run.noise <= MOST_NOISE:
        raise PrivacyError("noise-out-of-range", unusable_noise("noise", run.noise))
    if run.clip != "median" and not 0 < float(run.clip) <= (math.inf if run.noise == 0 else 1e300):
        raise PrivacyError(
            "out-of-range",
            f"clip={run.clip} does not bound a gradient; give a number above 0, or 'median'",
        )
    for name, value, allowed in (
        ("sampling", run.sampling, ("fixed", "poisson")),
        ("unit", run.unit, ("record", "user")),
        ("weighting", run.weighting, ("uniform", "records", "noise")),
        ("query", run.query, ("gradients", "sums")),
        ("aggregation", run.aggregation, ("mean", "clipped")),
    ):
        if value not in allowed:
            raise PrivacyError(
                "unknown-choice",
                f"{name}={value!r} is unknown; give {' or '.join(map(repr, allowed))}",
            )
    check_batches([g.records for g in run.groups], [g.batch for g in run.groups])
    if sum(group.users for group in run.groups) != run.users:
        raise PrivacyError(
            "count-differs",
            f"the groups hold {sum(g.users for g in run.groups)} users of {run.users}; all must "
            f"be in one",
        )
    if run.membership and (
        len(run.membership) != run.users or max(run.membership) >= len(run.groups)
    ):
        raise PrivacyError(
            "count-differs",
            "membership does not give each user one of the groups; describe the run again",
        )
    if run.max_participations is not None and run.max_participations < 1:
        raise PrivacyError(
            "out-of-range",
            f"max_participations={run.max_participations} lets nobody take part; give at least 1",
        )
    _check_groups(run)
    _check_secure(run)


def _check_groups(run: Mechanism) -> None:
    """Refuse noise below the run's σ_g, weights that are none, and groups that are not there."""
    if min(group.louder for group in run.groups) != 1.0 or not all(
        math.isfinite(group.louder) and run.noise * group.louder <= MOST_NOISE
        for group in run.groups
    ):
        raise PrivacyError(
            "out-of-range",
            "louder is sigma_i over the smallest sigma of a run: give finite numbers, the smallest "
            "of which is 1",
        )
    if not all(math.isfinite(group.weight) and group.weight > 0 for group in run.groups):
        raise PrivacyError(
            "out-of-range", "weight is a user's weight in the mean; give finite numbers above 0"
        )
    if any(not 0 <= place < len(run.groups) for place in run.protects):
        raise PrivacyError(
            "count-differs",
            f"protects={run.protects} names a group that is not there; give 0 to "
            f"{len(run.groups) - 1}",
        )


def _check_secure(run: Mechanism) -> None:
    """Refuse lists in which fewer than two honest members hide each other."""
    if run.voids < 0:
        raise PrivacyError(
            "out-of-range", f"voids={run.voids} is no number of attempts; give 0 or more"
        )
    if run.secure is None:
        return
    least, colluders = run.secure.least, run.secure.colluders
    if colluders < 0 or least - colluders < 2 or least > run.cohort_size:
        raise PrivacyError(
            "too-few-sites",
            f"secure sums of at least {least} users, {colluders} of them colluders, where "
            f"{run.cohort_size} take part; give at least 2 more users than colluders, and at most "
            f"as many as take part",
        )
