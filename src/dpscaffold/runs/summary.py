"""The summary of a run: the content of ``summary.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dpscaffold.privacy.record import JsonRecord, optional


@dataclass(frozen=True, eq=False, kw_only=True)
class Summary(JsonRecord):
    """How a run ended, and its last metrics. ``Summary()`` is that of a run that has not ended.

    - ``ended``: ``completed``, ``interrupted``, ``budget`` or ``stalled``; ``message``: why.
    - ``final``: the last evaluated round; ``metric``: the metric that represents the run.
    - ``verdict``: whether the model is better than a constant; ``warning``: what may be wrong.
    - ``model``: the folder of the model, or why there is none.
    - ``run``, ``refusals``: only of a deployed run: its id, and how often each reason for a refusal
      was given.
    - ``metrics``: numbers under names that start with ``late_`` (mean over the last 10 % of the
      rounds), ``baseline_`` (a constant) or ``optimum_`` (the central optimum).
    """

    REST: ClassVar[str] = "metrics"

    algorithm: str | None = optional()
    data: str | None = optional()
    simulated: bool | None = optional()
    ended: str = "unfinished"
    message: str = ""
    rounds: float = 0
    seconds: float | None = optional()
    final: Mapping[str, float | None] = field(default_factory=dict)
    metric: str | None = optional()
    verdict: str | None = optional()
    warning: str | None = optional()
    model: str | None = optional()
    run: str | None = optional()
    refusals: Mapping[str, int] | None = optional()
    metrics: Mapping[str, float | str | None] = field(default_factory=dict)

    def number(self, name: str, otherwise: float | None = None) -> float | None:
        """One of ``metrics``; ``otherwise`` where the summary does not have it."""
        value = self.metrics.get(name, otherwise)
        return None if isinstance(value, str) else value
