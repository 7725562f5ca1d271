"""``[plan]``, and beside it ``[facts]`` and ``[stopping]``."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from pydantic import Field, PrivateAttr, model_validator

from dpscaffold.config.table import ConfigTable
from dpscaffold.errors import BadInput
from dpscaffold.setting.plan import Plan


class PlanSettings(ConfigTable):
    """``[plan]``: the fields of :class:`~dpscaffold.setting.plan.Plan`, which checks them."""

    rounds: int = Plan.rounds
    local_steps: int = Plan.local_steps
    user_ratio: float = Plan.user_ratio
    data_ratio: float = Plan.data_ratio
    learning_rate: float | Literal["plan"] = Plan.learning_rate
    server_rate: float = Plan.server_rate
    regularisation: float = Plan.regularisation
    weighting: Literal["uniform", "records"] = Plan.weighting
    warm_rounds: int | None = None
    averaging: Literal["none", "uniform", "tail"] = Plan.averaging
    tail: float = Plan.tail
    evaluate_every: int = Plan.evaluate_every
    checkpoint_every: int = Plan.checkpoint_every
    seed: int | None = None
    max_rounds: int | None = None
    schedule: Literal["constant", "linear", "cosine", "inverse-sqrt"] = Plan.schedule
    steps_by_user: tuple[int, ...] | None = None
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
        """The plan; ``planned`` is what ``learning_rate = "plan"`` came to, or stands for it."""
        if self.learning_rate != "plan":
            return self._built
        if planned is None:
            raise BadInput(
                "plan.learning_rate is 'plan', which 'train' chooses from the roster; give a "
                "number here, for example the one that 'dpscaffold plan' recommends"
            )
        return replace(self._built, learning_rate=planned)


class FactsSettings(ConfigTable):
    """``[facts]``: what is public about the data, for ``dpscaffold plan`` and
    ``plan.learning_rate = "plan"``.

    ``classes`` is 0 where a number is predicted; ``row_norm`` is what preparation guarantees, or
    ``"none"``. ``planned`` names the keys that were chosen on a public surrogate.
    """

    users: int | None = None
    records: int | tuple[int, ...] | None = None
    features: int | None = None
    classes: int | None = None
    similarity: float | Literal["unknown"] = "unknown"
    row_norm: float | Literal["none"] | None = None
    planned: tuple[str, ...] = ()


class StoppingSettings(ConfigTable):
    """``[stopping]``: end a run early by public rows
    (:class:`~dpscaffold.training.stopping.Stopping`).

    ``path`` is a CSV or Parquet file of raw rows that are public, ``label`` its column of what is
    true, by default that of the data. ε is that of all planned rounds, whenever the run ends.
    """

    path: str
    label: str | None = None
    patience: int = Field(default=5, ge=1)


assert {f.name for f in fields(Plan)} == set(PlanSettings.model_fields), (
    "[plan] and Plan must have the same fields"
)
