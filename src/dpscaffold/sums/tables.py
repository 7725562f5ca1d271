"""The tables of a plan of sums by e-mail, as its file has them."""

from __future__ import annotations

from pydantic import ConfigDict, Field, model_validator

from dpscaffold.algorithms import ALGORITHMS, ITERATIVE
from dpscaffold.config import AlgorithmSettings, ConfigTable, TaskSettings
from dpscaffold.config.gaussian import Gaussian
from dpscaffold.config.secure import Colluding
from dpscaffold.deployment.protocol.agreement import SchemaSettings
from dpscaffold.deployment.protocol.steps import refuse_state

#: The algorithms that make a model of one sum, by name.
SUMMED = tuple(name for name in ALGORITHMS if name not in ITERATIVE)


class SumsSettings(Colluding, ConfigTable):
    """``[sums]``: whose sums make the model."""

    members: tuple[str, ...]
    """The names of all sites. Example: ``["north", "south", "west"]``"""
    colluders: int | None = Field(default=None, ge=0)
    """With a number, sums are masked: whoever has all files, together with this number of sites,
    learns only their total, and each site adds less noise. Example: ``1``"""
    attempt: int = Field(default=1, ge=1, le=1000)
    """The number of this attempt. A new number lets every site make, and spend, its sums again.
    privacy.epsilon is for one attempt, and the statement is for all up to this one. Example:
    ``2``"""


class SumsConfiguration(ConfigTable):
    """The whole plan, as a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    rows: SchemaSettings = Field(alias="schema")
    task: TaskSettings = TaskSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings(name=SUMMED[0])
    privacy: Gaussian
    sums: SumsSettings

    @model_validator(mode="after")
    def _no_state(self) -> SumsConfiguration:
        refuse_state(self.rows.prepare)
        return self
