"""The summary of a run: the content of ``summary.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dpscaffold.errors import BadInput


@dataclass(frozen=True, eq=False, kw_only=True)
class Summary(Mapping[str, Any]):
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

    def to_json(self) -> dict[str, Any]:
        """One object, with the metrics as its keys; what has no value is left out."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        metrics = values.pop("metrics")
        known = {name: value for name, value in values.items() if value is not None}
        return {**known, **metrics}

    @classmethod
    def from_json(cls, values: Any, where: str = "the summary") -> Summary:
        """The inverse of :meth:`to_json`; ``where`` says in messages what is read."""
        names = {one.name for one in fields(cls)} - {"metrics"}
        known = {name: value for name, value in values.items() if name in names}
        metrics = {name: value for name, value in values.items() if name not in names}
        try:
            return _stored().validate_python({**known, "metrics": metrics})
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join((where, *map(str, first["loc"])))
            raise BadInput(
                "wrong-type", f"{name} is {first['input']!r:.60} ({first['msg']})"
            ) from error

    def __getitem__(self, key: str) -> Any:
        return self.to_json()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_json())

    def __len__(self) -> int:
        return len(self.to_json())


@cache
def _stored() -> TypeAdapter[Summary]:
    return TypeAdapter(Summary)
