"""The public plan of a run: everything about it that is neither data nor privacy nor
performance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from dpscaffold.checks import floor_share, least_ratio
from dpscaffold.config.table import RunTable
from dpscaffold.errors import BadInput
from dpscaffold.privacy.seeds import public_seed

if TYPE_CHECKING:
    from torch import Tensor

Weighting = Literal["uniform", "records", "noise"]
Schedule = Literal["constant", "linear", "cosine", "inverse-sqrt"]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Averaging = Literal["none", "uniform", "tail"] | Share
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]

#: The share of the last rounds that each kind of averaging takes: a share may be given too, as the
#: experiments of the paper do, but under noise others than a half have gained little.
AVERAGED = {"none": 0.0, "uniform": 1.0, "tail": 0.5}

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
    "averaging": "none",
    "schedule": "constant",
    "steps_by_user": None,
}


class Plan(RunTable):
    """``[plan]``: what the parties agree on before a run; stored with every result.

    Its fields are the keys of the table, which explain them. T rounds; K steps of a participant in
    a round; ⌊lM⌋ users in a round, drawn without replacement; batches of b_i = ⌊sR_i⌋ records;
    steps of η_l = η₀/(sK) along the gradient and λy.

    >>> Plan(rounds=10, user_ratio=0.25).cohort_size(users=10)
    2
    """

    table: ClassVar[str] = "plan"

    rounds: Count = 100
    """T, the number of communication rounds, warm-start rounds included. Value: an integer, 1
    or more. Example: ``400``"""
    local_steps: Count = 50
    """K, the number of local steps of each participant in a round. Value: an integer, 1 or
    more. Example: ``20``"""
    user_ratio: Share = 0.2
    """l, the share of users in a round: ⌊lM⌋ users take part. Value: a number above 0 and at most
    1. Example: ``0.5``"""
    data_ratio: Share = 0.2
    """s, the share of records in a batch: a step uses ⌊sR⌋ of a user's R records. Value: a number
    above 0 and at most 1. Example: ``0.1``"""
    learning_rate: Rate | None = None
    """η₀: the local step size is η₀/(sK). Left out, it is chosen from public numbers: the sizes of
    the sites, the plan and the noise. Value: a number above 0. Example: ``0.2``"""
    server_rate: Rate = 1.0
    """η_g, the server's step size: the factor of the mean of the users' updates. Value: a number
    above 0. Example: ``0.5``"""
    regularisation: float = Field(default=5e-3, ge=0, allow_inf_nan=False)
    """λ, the ℓ2 term of every step, outside clipping and noise. Value: a number, 0 or more.
    Example: ``0.0``"""
    weighting: Weighting = "uniform"
    """How participants are averaged: all equally, by their numbers of records, or by their noise:
    1/(v + C²), where v is the variance of a user's noise. Example: ``"records"``"""
    warm_rounds: int | None = Field(default=None, ge=0)
    """The number of rounds that only set control variates (scaffold-warm); by default round(4/l).
    Value: an integer, 0 or more. Example: ``5``"""
    averaging: Averaging = "none"
    """The output model: the last one, the mean of all, or of the last half of the rounds ('tail'),
    or of another share of the last rounds. Averaging costs no privacy. Value: 'none', 'uniform',
    'tail', or a number above 0 and at most 1. Example: ``"tail"``"""
    evaluate_every: Count = 10
    """The number of rounds between two evaluations. The last round is always evaluated. Value: an
    integer, 1 or more. Example: ``5``"""
    checkpoint_every: Count = 10
    """The number of rounds between two checkpoints. Value: an integer, 1 or more. Example:
    ``20``"""
    seed: int | None = Field(default=None, ge=0)
    """The seed of the participants and of a network's initial weights; without secret noise also of
    batches and noise. Value: an integer, 0 or more; left out: 0, and with secret noise a new
    seed of the operating system draws the participants. Example: ``7``"""
    schedule: Schedule = "constant"
    """How the step size changes over the rounds: constant, linear or cosine decay to 0, or divided
    by the square root of the round number. Example: ``"cosine"``"""
    steps_by_user: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """The number of local steps of each user, in the users' order, if they differ. The largest must
    be plan.local_steps, which is used for accounting (algorithm fednova). Value: a list of
    integers, 1 or more. Example: ``[50, 20, 10]``"""

    @classmethod
    def one_round(cls, seed: int | None = None) -> Plan:
        """The plan of one sum over all records of all users (:func:`~dpscaffold.ridge`).

        >>> Plan.one_round().step_size
        1.0
        """
        return cls(**ONE_ROUND, seed=seed)  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _agreeing(self) -> Plan:
        """What keys say of each other."""
        steps = self.steps_by_user
        if steps is not None and max(steps) != self.local_steps:
            raise BadInput(
                "steps-disagree",
                f"plan.local_steps is {self.local_steps}, and the largest of plan.steps_by_user is "
                f"{max(steps)}; set plan.local_steps = {max(steps)}, which is what is accounted",
            )
        return self

    @cached_property
    def public_seed(self) -> int:
        """The seed of first weights, and of all draws of a run without secret noise."""
        return public_seed(self.seed)

    @cached_property
    def step_size(self) -> float:
        """η_l = η₀/(sK); η₀ was given, or a run has chosen it."""
        if self.learning_rate is None:
            raise BadInput(
                "missing-key",
                "plan.learning_rate is left out, and only a run chooses it; give a number",
            )
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
        left = 1 - (round - 1) / max(self.rounds, round)
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

    def batch_sizes(self, sizes: Tensor) -> Tensor:
        """b_i = ⌊sR_i⌋ of users who hold ``sizes`` records, (M,); refuses an empty batch."""
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

    @property
    def averaged_share(self) -> float:
        """The share of the last rounds whose models are averaged; 0 where the last one is given
        out.

        >>> Plan(averaging="tail").averaged_share, Plan(averaging=0.25).averaged_share
        (0.5, 0.25)
        """
        asked = self.averaging
        return AVERAGED[asked] if isinstance(asked, str) else asked

    def averaged_from(self, warm_rounds: int) -> float:
        """The first round whose x is part of the averaged output; ∞ where none is."""
        if self.averaged_share == 0:
            return math.inf
        last = max(1, math.ceil(self.averaged_share * (self.rounds - warm_rounds)))
        return max(warm_rounds, self.rounds - last) + 1
