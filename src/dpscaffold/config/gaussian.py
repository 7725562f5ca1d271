"""The privacy part of a run: what is done to every gradient before it may influence anything."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from dpscaffold.checks import choice, number
from dpscaffold.config.budget import View
from dpscaffold.config.budgets import Epsilon, checked, louder_of
from dpscaffold.errors import BadInput
from dpscaffold.privacy.mechanism import (
    Aggregation,
    Delta,
    GaussianMechanism,
    Mechanism,
    Relation,
    Weighting,
    check_noise,
    describe,
)

if TYPE_CHECKING:
    from dpscaffold.algorithms import Algorithm
    from dpscaffold.config.secure import Secure

#: Clip bounds that float32 can hold, together with C/‖g‖ and sums of many gradients of length C.
_CLIPS = (1e-20, 1e30)

#: Fields from which the noise is solved. They are not stored.
SOLVED = ("epsilon", "view")


class _Default(float):
    """A default that can be told from the same number given by hand."""


@dataclass(frozen=True)
class Gaussian(GaussianMechanism):
    """Clip every per-example gradient to C, then add Gaussian noise to the batch's mean.

    One step releases H̃ = (1/b)Σ_j g_j/max(1, ‖g_j‖/C) + (2C/b)·N(0, σ_g²I), the norm being over
    the whole parameter vector. With ``unit="user"`` the noise is 2C·N(0, σ_g²I), which hides a
    user's whole dataset.

    Args:
        clip: C, fixed in advance; or ``"median"``, the paper's heuristic, which computes C from
            the private batch and therefore gives **no guarantee**.
        noise: σ_g, in units of the sensitivity 2C/b of replacing one record.
        sampling: ``"fixed"`` draws batches of exactly b records, ``"poisson"`` each record with
            rate b/R and the constant divisor b.
        unit: What is hidden: one ``"record"``, or everything of one ``"user"``.
        secret: Draw batches and noise from the operating system instead of the plan's seed.
        neighbours: Which datasets are hidden from one another; by default what sampling and data
            imply. Batches of fixed size, and a user as unit, hide ``"replace-one"``. Poisson
            batches hide ``"zero-out"`` (a record replaced by an empty one, R_i and b_i staying as
            they are), and ``"add-remove"`` if the federation's sizes are declared constants.
        noise_by_user: σ_i of every user, in the users' order, if they differ; ``noise`` is the
            smallest of them.
        epsilon: Instead of noise: a :class:`~dpscaffold.config.Setting` solves for the smallest
            noise that keeps it, as a configuration does. A table gives each user a budget of its
            own, by name; ``"default"`` is for all that it does not name.
        view: The adversary that ``epsilon`` is against; by default the budget's.

    >>> Gaussian(clip=1.0, noise=60.0).to_json()["noise"]
    60.0
    """

    noise: float = _Default(1.0)
    secret: bool = False
    neighbours: Relation | None = None
    noise_by_user: tuple[float, ...] | None = None
    epsilon: Epsilon | None = None
    view: View | None = None

    def __post_init__(self) -> None:
        self._check_epsilon()
        choice("privacy.sampling", self.sampling, ("fixed", "poisson"))
        choice("privacy.unit", self.unit, ("record", "user"))
        check_noise("privacy.noise", number("privacy.noise", self.noise))
        if self.noise_by_user is not None:
            self._check_noises(self.noise_by_user)
        # Whether sizes are declared is the data's to say; the setting asks again with them.
        if self.neighbours is not None:
            choose_relation(self.neighbours, self.sampling, self.unit, declared=True)
        self._check_clip()

    def _check_noises(self, noises: Sequence[float]) -> None:
        """σ_i must be usable, and σ_g the smallest of them."""
        if isinstance(noises, str) or not isinstance(noises, Sequence) or not noises:
            raise BadInput(
                "not-a-list",
                f"privacy.noise_by_user is {noises!r}; give a list with the noise of every user",
            )
        for place, noise in enumerate(noises):
            name = f"privacy.noise_by_user[{place}]"
            check_noise(name, number(name, noise))
        if min(noises) != self.noise:
            raise BadInput(
                "noise-disagrees",
                f"privacy.noise is {self.noise:g}, and the smallest of privacy.noise_by_user is "
                f"{min(noises):g}; set privacy.noise = {min(noises)!r}",
            )
        object.__setattr__(self, "noise_by_user", tuple(float(noise) for noise in noises))

    def noise_of(self, user: int) -> float:
        """σ_i."""
        return self.noise if self.noise_by_user is None else self.noise_by_user[user]

    def _check_clip(self) -> None:
        if self.clip == "median":
            return
        numeric = isinstance(self.clip, int | float) and not isinstance(self.clip, bool)
        if not numeric or not float(self.clip) > 0:
            raise BadInput(
                "out-of-range", f"privacy.clip is {self.clip!r}; give a positive number or 'median'"
            )
        clip = float(self.clip)
        if not (_CLIPS[0] <= clip <= _CLIPS[1] or math.isinf(clip)):
            raise BadInput(
                "clip-not-exact",
                f"privacy.clip is {self.clip}, to which float32 gradients cannot be clipped "
                f"exactly; give a number from {_CLIPS[0]:g} to {_CLIPS[1]:g}",
            )
        if math.isinf(clip) and self.noise > 0:
            raise BadInput(
                "clip-infinite",
                f"privacy.clip is infinite while privacy.noise is {self.noise}; noise needs a "
                f"finite clip",
            )

    def _check_epsilon(self) -> None:
        if self.view is not None:
            choice("privacy.view", self.view, get_args(View))
        if self.epsilon is None:
            if self.view is not None:
                raise BadInput(
                    "missing-key", "privacy.view is given without privacy.epsilon; give both"
                )
            return
        object.__setattr__(self, "epsilon", checked(self.epsilon))
        if not isinstance(self.noise, _Default) or self.noise_by_user is not None:
            raise BadInput(
                "noise-or-epsilon",
                f"privacy needs either noise or epsilon, and both are given ({self.noise} and "
                f"{self.epsilon}); leave one out",
            )

    def to_json(self) -> dict[str, Any]:
        """What an offer and a ledger hold: plain JSON values, with the noise that was solved
        for."""
        if self.epsilon is not None:
            raise BadInput(
                "epsilon-without-sizes",
                "an offer names the noise; epsilon is solved for sizes, so give noise",
            )
        values = {name: getattr(self, name) for name in STORED}
        if self.noise_by_user is None:
            del values["noise_by_user"]
        clip = self.clip if self.clip == "median" else float(self.clip)
        return {**values, "clip": clip, "noise": float(self.noise)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Gaussian:
        """The inverse of :meth:`to_json`; every type is checked, and unknown keys are refused.

        >>> given = Gaussian(2.0, 3.0, "poisson", secret=True, neighbours="zero-out")
        >>> Gaussian.from_json(given.to_json()) == given
        True
        """
        known, kinds = set(STORED), get_type_hints(cls)
        if not isinstance(values, Mapping):
            raise BadInput("wrong-type", f"privacy is {values!r:.60}; give a table")
        for name in values:
            if name not in known and values[name] is not None:
                raise BadInput("unknown-key", f"privacy.{name} is not a key of a mechanism")
        missing = known - values.keys() - {"neighbours", "noise_by_user"}
        if missing:
            raise BadInput("missing-key", f"privacy lacks {', '.join(sorted(missing))}")
        read = {n: _typed(kinds[n], values[n], f"privacy.{n}") for n in known & values.keys()}
        return cls(**read)

    def run(
        self,
        algorithm: Algorithm | None,
        *,
        rounds: int,
        local_steps: int,
        sizes: Sequence[int],
        cohort_size: int,
        batch_sizes: Sequence[int] | NDArray[np.integer[Any]],
        weighting: Weighting,
        aggregation: Aggregation,
        declared: bool,
        delta: Delta | None,
        declines: str | None = None,
        secure: Secure | None = None,
        weights: Sequence[float] | None = None,
    ) -> Mechanism:
        """A run of this mechanism, as data for the accountant: every run is described here.

        Args:
            algorithm: None where it is not known, which counts as the worse (users have a memory).
            rounds: T, all that are planned.
            local_steps: K.
            sizes: R_i of every user.
            cohort_size: m.
            batch_sizes: b_i of every user.
            weighting: How uploads are weighted in the mean.
            aggregation: What the server makes of the uploads of a round.
            declared: Whether R_i are constants that were declared without looking at the data.
            delta: δ, or None for the default.
            declines: Why a drawn user may stay away.
            secure: Secure sums, where the server sees sums only.
            weights: The users' public weights in the mean, with ``weighting="noise"``.
        """
        return describe(
            rounds=rounds,
            local_steps=local_steps,
            users=len(sizes),
            cohort_size=cohort_size,
            records=sizes,
            batch_sizes=batch_sizes,
            memory=algorithm is None or algorithm.memory,
            one_sum=algorithm is not None and algorithm.one_sum,
            unproved_hooks=() if algorithm is None else tuple(algorithm.unproved),
            query="gradients" if algorithm is None or algorithm.sums is None else "sums",
            noise=self.noise,
            clip=self.clip,
            sampling=self.sampling,
            unit=self.unit,
            weighting=weighting,
            aggregation=aggregation,
            delta=delta,
            declines=declines,
            declared_sizes=declared
            and self.sampling == "poisson"
            and self.neighbours != "zero-out",
            secure=None if secure is None else secure.terms(cohort_size),
            extra=0 if secure is None else secure.voids,
            louder=None if self.noise_by_user is None else louder_of(self.noise_by_user),
            weights=weights if weighting == "noise" else None,
        )


#: The fields of a mechanism whose noise is known.
STORED = tuple(one.name for one in fields(Gaussian) if one.name not in SOLVED)


def _typed(kind: Any, value: Any, name: str) -> Any:
    """A JSON value as the type that a field has."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise BadInput(
            "wrong-type", f"{name} is {value!r:.60} ({error.errors()[0]['msg']})"
        ) from None


def choose_relation(
    neighbours: str | None, sampling: str, unit: str, declared: bool
) -> Relation | None:
    """The neighbours that are asked for, refused where no bound is proved for them.

    >>> choose_relation("zero-out", "poisson", "record", declared=False)
    'zero-out'
    """
    if neighbours is None:
        return None
    choice("privacy.neighbours", neighbours, get_args(Relation))
    known = cast(Relation, neighbours)
    whole = unit == "user" or sampling == "fixed"
    if whole != (known == "replace-one"):
        proved = "'replace-one'" if whole else "'zero-out' or 'add-remove'"
        kind = "a user as unit" if unit == "user" else f"{sampling} batches"
        raise BadInput(
            "neighbours-not-proved", f"neighbours={known!r} is not proved for {kind}; give {proved}"
        )
    if known == "add-remove" and not declared:
        raise BadInput(
            "sizes-not-declared",
            "neighbours='add-remove' needs sizes that do not depend on the data; give "
            "data.declared_sizes, or neighbours='zero-out'",
        )
    return known
