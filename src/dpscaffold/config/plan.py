"""``[plan]``, and next to it ``[facts]`` and ``[stopping]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from dpscaffold.algorithms import ALGORITHMS, ITERATIVE
from dpscaffold.config.table import ConfigTable
from dpscaffold.errors import BadInput
from dpscaffold.setting.plan import ONE_ROUND, Plan


class PlanSettings(ConfigTable):
    """``[plan]``: the fields of :class:`~dpscaffold.setting.plan.Plan`, which checks them."""

    rounds: int = Plan.rounds
    """T, the number of communication rounds, warm-start rounds included. Value: an integer, 1
    or more. Example: ``400``"""
    local_steps: int = Plan.local_steps
    """K, the number of local steps of each participant in a round. Value: an integer, 1 or
    more. Example: ``20``"""
    user_ratio: float = Plan.user_ratio
    """l, the share of users in a round: ⌊lM⌋ users take part. Value: a number above 0 and at most
    1. Example: ``0.5``"""
    data_ratio: float = Plan.data_ratio
    """s, the share of records in a batch: a step uses ⌊sR⌋ of a user's R records. Value: a number
    above 0 and at most 1. Example: ``0.1``"""
    learning_rate: float | Literal["plan"] = Plan.learning_rate
    """η₀: the local step size is η₀/(sK). With 'plan', train chooses it from public facts. Value: a
    number above 0, or 'plan'. Example: ``0.2``"""
    server_rate: float = Plan.server_rate
    """η_g, the server's step size: the factor of the mean of the users' updates. Value: a number
    above 0. Example: ``0.5``"""
    regularisation: float = Plan.regularisation
    """λ, the ℓ2 term of every step, outside clipping and noise. Value: a number, 0 or more.
    Example: ``0.0``"""
    weighting: Literal["uniform", "records", "noise"] = Plan.weighting
    """How participants are averaged: all equally, by their numbers of records, or by their noise:
    1/(v + C²), where v is the variance of a user's noise. Example: ``"records"``"""
    aggregation: Literal["mean", "clipped"] = Plan.aggregation
    """What the server makes of the users' updates: their mean, or, with 'clipped', the mean after
    those longer than the median of their round were scaled down to it, so that no single user can
    move the model far. It costs no privacy, but rules out bounds that need a plain sum. Example:
    ``"clipped"``"""
    warm_rounds: int | None = None
    """The number of rounds that only set control variates (scaffold-warm); by default round(4/l).
    Value: an integer, 0 or more. Example: ``5``"""
    averaging: Literal["none", "uniform", "tail"] = Plan.averaging
    """The output model: the last one, the mean of all, or the mean of the last rounds
    ('tail'). Averaging costs no privacy. Example: ``"tail"``"""
    tail: float = Plan.tail
    """The share of rounds that 'tail' averages. Value: a number above 0 and at most 1. Example:
    ``0.25``"""
    evaluate_every: int = Plan.evaluate_every
    """The number of rounds between two evaluations. The last round is always evaluated. Value: an
    integer, 1 or more. Example: ``5``"""
    checkpoint_every: int = Plan.checkpoint_every
    """The number of rounds between two checkpoints. Value: an integer, 1 or more. Example:
    ``20``"""
    seed: int | None = None
    """The seed of the participants and of a network's initial weights; without secret noise also of
    batches and noise. Value: an integer, 0 or more; left out: 0, and with secret noise a new
    seed of the operating system draws the participants. Example: ``7``"""
    max_rounds: int | None = None
    """The largest T that the run may be extended to later (train --resume RUN --set plan.rounds=…).
    ε is calibrated and stated for this number of rounds. Value: an integer, plan.rounds or
    more; left out: the run is planned for plan.rounds. Example: ``800``"""
    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt"] = Plan.schedule
    """How the step size changes over the rounds: constant, linear or cosine decay to 0, or divided
    by the square root of the round number. Example: ``"cosine"``"""
    steps_by_user: tuple[int, ...] | None = None
    """The number of local steps of each user, in the users' order, if they differ. The largest must
    be plan.local_steps, which is used for accounting (algorithm fednova). Value: a list of
    integers, 1 or more. Example: ``[50, 20, 10]``"""
    _built: Plan = PrivateAttr()

    @model_validator(mode="after")
    def _checked(self) -> PlanSettings:
        values = self.model_dump()
        if self.learning_rate == "plan":
            values["learning_rate"] = Plan.learning_rate
        self._built = Plan(**values)
        return self

    @property
    def rate(self) -> float:
        """η₀ where it is a number."""
        return self.build().learning_rate

    def build(self, planned: float | None = None) -> Plan:
        """The plan; ``planned`` is what ``learning_rate = "plan"`` came to, or represents it."""
        if self.learning_rate != "plan":
            return self._built
        if planned is None:
            raise BadInput(
                "learning-rate-not-planned",
                "plan.learning_rate is 'plan', which 'train' chooses from the roster; give a "
                "number here, for example the one that 'dpscaffold plan' recommends",
            )
        return replace(self._built, learning_rate=planned)


def with_one_round(tables: Any) -> Any:
    """The tables of a configuration, with the plan of one round where the algorithm takes a single
    sum; a key of ``[plan]`` that is given stays.

    >>> with_one_round({"algorithm": {"name": "fedavg"}})
    {'algorithm': {'name': 'fedavg'}}
    >>> with_one_round({"algorithm": {"name": ["no name"]}})  # refused later, with its key
    {'algorithm': {'name': ['no name']}}
    """
    algorithm = tables.get("algorithm") if isinstance(tables, Mapping) else None
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else None
    plan = tables.get("plan", {}) if isinstance(tables, Mapping) else None
    once = isinstance(name, str) and name in ALGORITHMS and name not in ITERATIVE
    if not once or not isinstance(plan, Mapping):
        return tables
    return {**tables, "plan": {**ONE_ROUND, **plan}}


class FactsSettings(ConfigTable):
    """``[facts]``: what is public about the data, for ``dpscaffold plan`` and
    ``plan.learning_rate = "plan"``."""

    users: int | None = None
    """M, the publicly known number of users. Example: ``100``"""
    records: int | tuple[int, ...] | None = None
    """The number of training records of a user: one number, or one per user. Example: ``4000``"""
    features: int | None = None
    """The number of features after preprocessing. Example: ``40``"""
    classes: int | None = None
    """The number of classes; 0 if a number is predicted. Example: ``10``"""
    similarity: float | Literal["unknown"] = "unknown"
    """γ, the similarity of the users in per cent; 'unknown' assumes 0. Example: ``10.0``"""
    row_norm: float | Literal["none"] | None = None
    """The row norm that preprocessing guarantees, or 'none'. By default 1 for a plan; in training
    it is read from the schema. Example: ``1.0``"""
    secure_sums: bool = False
    """Whether secure sums are available, so that a plan may use them if they are better. Example:
    ``true``"""
    planned: tuple[str, ...] = ()
    """The keys that were chosen from public facts; written by 'plan' and 'train'. Example:
    ``["plan.learning_rate"]``"""


class StoppingSettings(ConfigTable):
    """``[stopping]``: end a run early by public rows
    (:class:`~dpscaffold.training.stopping.Stopping`)."""

    path: str
    """A CSV or Parquet file of public raw rows. The run stops when their metric no longer improves;
    ε is still that of all planned rounds. Example: ``"public.csv"``"""
    label: str | None = None
    """The label column of this file; by default that of the data. Example: ``"readmitted"``"""
    patience: int = Field(default=5, ge=1)
    """The number of evaluations without an improvement after which the run stops. Example:
    ``10``"""


assert {f.name for f in fields(Plan)} == set(PlanSettings.model_fields), (
    "[plan] and Plan must have the same fields"
)
