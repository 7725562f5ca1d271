"""How a run ended: the last line of ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dpscaffold.privacy.mechanism import Stored


@dataclass(frozen=True, kw_only=True)
class Summary(Stored):
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

    algorithm: str | None = None
    data: str | None = None
    simulated: bool | None = None
    ended: str = "unfinished"
    message: str = ""
    rounds: int | float = 0
    seconds: float | None = None
    final: Mapping[str, int | float | None] = field(default_factory=dict)
    metric: str | None = None
    verdict: str | None = None
    warning: str | None = None
    model: str | None = None
    run: str | None = None
    refusals: Mapping[str, int] | None = None
    metrics: Mapping[str, int | float | str | None] = field(default_factory=dict)

    def number(self, name: str, otherwise: float | None = None) -> float | None:
        """One of ``metrics``; ``otherwise`` where the summary does not have it."""
        value = self.metrics.get(name, otherwise)
        return None if isinstance(value, str) else value
