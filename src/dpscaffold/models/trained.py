"""What a training leaves behind: parameters, and all that gives them a meaning."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dpscaffold.federation.schema import Prepared, Schema, Target
from dpscaffold.privacy.page import Statement
from dpscaffold.tasks import Task


@dataclass(frozen=True)
class Origin:
    """Where a model comes from: algorithm, data and rounds; where they were read from a table, the
    columns of what is predicted and of the sites; and the site whose personal model it is."""

    algorithm: str = ""
    data: str = ""
    rounds: int = 0
    label: str | None = None
    site: str | None = None
    personal: str | None = None


@dataclass(frozen=True)
class TrainedParameters:
    """Parameters (P,) of a task with the preparation, target and schema that they were trained
    with. :class:`~dpscaffold.models.model.Model` uses it; :mod:`dpscaffold.models.storage` stores
    it."""

    task: Task
    params: Tensor
    preparation: tuple[Prepared, ...]
    target: Target
    schema: Schema
    privacy: Statement | None = field(default=None, repr=False)
    origin: Origin = field(default_factory=Origin)

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns, in order; numbers, as text, where they have no names."""
        return self.schema.columns

    @property
    def unprotected(self) -> tuple[str, ...]:
        """What leaves with the model although no guarantee covers it: statistics and lists that
        were computed from private records, in sentences."""
        return tuple(s.sentence for s in self.preparation if s.protection == "unprotected")
