"""The public plan of a run: everything about it that is neither data nor privacy nor
performance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from dpscaffold.checks import choice, floor_share, least_ratio, number, whole
from dpscaffold.errors import BadInput
from dpscaffold.privacy.seeds import public_seed

if TYPE_CHECKING:
    from torch import Tensor

Weighting = Literal["uniform", "records", "noise"]
Aggregation = Literal["mean", "clipped"]
Averaging = Literal["none", "uniform", "tail"]
Schedule = Literal["constant", "linear", "cosine", "inverse-sqrt"]

#: One sum over all records of all users: a step of size 1 from x⁰ = 0 is the sum itself.
ONE_ROUND: Mapping[str, int | float | str | None] = {
    "rounds": 1,
    "local_steps": 1,
    "user_ratio": 1.0,
    "data_ratio": 1.0,
    "learning_rate": 1.0,
    "server_rate": 1.0,
    "regularisation": 0.0,
    "weighting": "records",
    "aggregation": "mean",
    "averaging": "none",
    "schedule": "constant",
    "max_rounds": None,
    "steps_by_user": None,
}


@dataclass(frozen=True)
class Plan:
    """What the parties agree on before a run; stored with every result.

    Args:
        rounds: T, communication rounds, warm-start rounds included.
        local_steps: K, steps of each participant in a round.
        user_ratio: l: ⌊lM⌋ users take part in a round, drawn without replacement.
        data_ratio: s: a step uses a batch of b_i = ⌊sR_i⌋ of the user's R_i records.
        learning_rate: η₀: the local step size is η_l = η₀/(sK).
        server_rate: η_g: the server moves by η_g times the mean of the users' moves.
        regularisation: λ of the ℓ2 term λy of every step, outside clipping and noise.
        weighting: The mean over participants: ``"uniform"``, by ``"records"``, or by ``"noise"``:
            1/(v_i + τ²), v_i being the variance of the user's noise.
        aggregation: What the server makes of the moves of a round: their ``"mean"``, or the mean of
            ``"clipped"`` ones, of which none is longer than the median of the round.
        warm_rounds: Rounds that only set control variates; None means round(4/l) if the algorithm
            starts warm.
        averaging: The output: x^T (``"none"``), the mean of all x^t (``"uniform"``), or of the last
            ``tail`` fraction of rounds (``"tail"``). It costs no privacy.
        tail: The fraction of rounds that ``averaging="tail"`` uses.
        evaluate_every: Rounds between two evaluations; the last round is always evaluated.
        checkpoint_every: Rounds between two checkpoints.
        seed: Draws participants and the network's first weights; batches and noise too, unless they
            are secret (:mod:`~dpscaffold.privacy.seeds` says what None means).
        max_rounds: The largest T that the run may be given later: ε is calibrated and stated for
            this many rounds. None: for ``rounds``.
        schedule: How η_l changes over the T rounds: ``"constant"``, ``"linear"`` or ``"cosine"``
            down to 0 at the end, or ``"inverse-sqrt"``: η_l/√t.
        steps_by_user: K_i, the steps of every user in a round, in the users' order, if they differ.
            The largest is ``local_steps``, which is accounted.

    >>> Plan(rounds=10, user_ratio=0.25).cohort_size(users=10)
    2
    """

    rounds: int = 100
    local_steps: int = 50
    user_ratio: float = 0.2
    data_ratio: float = 0.2
    learning_rate: float = 0.5
    server_rate: float = 1.0
    regularisation: float = 5e-3
    weighting: Weighting = "uniform"
    warm_rounds: int | None = None
    averaging: Averaging = "none"
    tail: float = 0.5
    evaluate_every: int = 10
    checkpoint_every: int = 10
    seed: int | None = None
    max_rounds: int | None = None
    schedule: Schedule = "constant"
    steps_by_user: tuple[int, ...] | None = None
    aggregation: Aggregation = "mean"

    @classmethod
    def one_round(cls, seed: int | None = None) -> Plan:
        """The plan of one sum over all records of all users (:func:`~dpscaffold.ridge`).

        >>> Plan.one_round().step_size
        1.0
        """
        return cls(**ONE_ROUND, seed=seed)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        self._check_counts()
        for name in ("user_ratio", "data_ratio", "tail"):
            value = number(f"plan.{name}", getattr(self, name))
            if not 0 < value <= 1:
                raise BadInput("out-of-range", f"plan.{name} is {value}; it must lie in (0, 1]")
        for name in ("learning_rate", "server_rate"):
            value = number(f"plan.{name}", getattr(self, name))
            if not value > 0:
                raise BadInput("out-of-range", f"plan.{name} is {value}; it must be positive")
        if number("plan.regularisation", self.regularisation) < 0:
            raise BadInput(
                "out-of-range",
                f"plan.regularisation is {self.regularisation}; it must be 0 or positive",
            )
        choice("plan.weighting", self.weighting, ("uniform", "records", "noise"))
        choice("plan.aggregation", self.aggregation, ("mean", "clipped"))
        choice("plan.averaging", self.averaging, ("none", "uniform", "tail"))
        choice("plan.schedule", self.schedule, ("constant", "linear", "cosine", "inverse-sqrt"))
        if self.steps_by_user is not None:
            self._check_steps()

    def _check_counts(self) -> None:
        for name in ("rounds", "local_steps", "evaluate_every", "checkpoint_every"):
            whole(f"plan.{name}", getattr(self, name), least=1)
        for name, least in (("seed", 0), ("max_rounds", 1), ("warm_rounds", 0)):
            if getattr(self, name) is not None:
                whole(f"plan.{name}", getattr(self, name), least)
        if self.max_rounds is not None and self.max_rounds < self.rounds:
            raise BadInput(
                "out-of-range",
                f"plan.max_rounds is {self.max_rounds}, and plan.rounds is {self.rounds}; give "
                f"at least as many, or leave plan.max_rounds out",
            )

    def _check_steps(self) -> None:
        """K_i must be integers, and K the largest of them."""
        steps = self.steps_by_user
        if isinstance(steps, str) or not isinstance(steps, Sequence) or not steps:
            raise BadInput(
                "not-a-list",
                f"plan.steps_by_user is {steps!r}; give a list with the local steps of every user",
            )
        for place, count in enumerate(steps):
            whole(f"plan.steps_by_user[{place}]", count, least=1)
        if max(steps) != self.local_steps:
            raise BadInput(
                "steps-disagree",
                f"plan.local_steps is {self.local_steps}, and the largest of plan.steps_by_user is "
                f"{max(steps)}; set plan.local_steps = {max(steps)}, which is what is accounted",
            )
        object.__setattr__(self, "steps_by_user", tuple(steps))

    @cached_property
    def planned(self) -> int:
        """The T that is accounted for: the largest that was fixed in advance."""
        return self.rounds if self.max_rounds is None else self.max_rounds

    @cached_property
    def public_seed(self) -> int:
        """The seed of first weights, and of all draws of a run without secret noise."""
        return public_seed(self.seed)

    @cached_property
    def step_size(self) -> float:
        """η_l = η₀/(sK)."""
        return self.learning_rate / (self.data_ratio * self.local_steps)

    def step_size_in(self, round: int) -> float:
        """η_l in a round, by the schedule; rounds count from 1.

        >>> plan = Plan(4, local_steps=1, data_ratio=1.0, learning_rate=1.0, schedule="linear")
        >>> [plan.step_size_in(t) for t in (1, 2, 3, 4)]
        [1.0, 0.75, 0.5, 0.25]
        """
        if self.schedule == "constant":
            return self.step_size
        if self.schedule == "inverse-sqrt":
            return self.step_size / math.sqrt(round)
        left = 1 - (round - 1) / max(self.planned, round)
        share = left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2
        return self.step_size * share

    def steps_of(self, user: int) -> int:
        """K_i, or K where all users take as many steps."""
        return self.local_steps if self.steps_by_user is None else self.steps_by_user[user]

    def cohort_size(self, users: int) -> int:
        """m = ⌊lM⌋; refuses an empty round."""
        count = floor_share(self.user_ratio, users)
        if count < 1:
            raise BadInput(
                "no-participants",
                f"plan.user_ratio is {self.user_ratio}, which selects no one of {users} users; "
                f"use at least {least_ratio(users)}",
            )
        return count

    def shares(self, sizes: Tensor) -> tuple[Tensor, int]:
        """b_i of users who hold ``sizes`` records, (M,), and m."""
        _ = self.step_size, self.planned  # what engines and accountants ask for next
        if self.steps_by_user is not None and len(self.steps_by_user) != len(sizes):
            raise BadInput(
                "count-differs",
                f"plan.steps_by_user has {len(self.steps_by_user)} numbers for {len(sizes)} users; "
                f"give one for each user, in their order",
            )
        return self.batch_sizes(sizes), self.cohort_size(len(sizes))

    def batch_sizes(self, sizes: Tensor) -> Tensor:
        """b_i = ⌊sR_i⌋ for every user, (M,); refuses an empty batch."""
        batch_sizes = (self.data_ratio * sizes.double() + 1e-9).floor().to(sizes.dtype)
        if bool((batch_sizes < 1).any()):
            user = int((batch_sizes < 1).nonzero()[0])
            size = int(sizes[user])
            raise BadInput(
                "empty-batch",
                f"plan.data_ratio is {self.data_ratio}, which leaves user {user} with {size} "
                f"records an empty batch; use at least {least_ratio(size)} or leave that user out",
            )
        return batch_sizes

    def averaged_from(self, warm_rounds: int) -> float:
        """The first round whose x is part of the averaged output; ∞ where none is."""
        if self.averaging == "none":
            return math.inf
        if self.averaging == "uniform":
            return warm_rounds + 1
        last = max(1, math.ceil(self.tail * (self.rounds - warm_rounds)))
        return max(warm_rounds, self.rounds - last) + 1

    def averages(self, round: int, warm_rounds: int) -> bool:
        """Whether x^round is part of the averaged output."""
        return round >= self.averaged_from(warm_rounds)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
