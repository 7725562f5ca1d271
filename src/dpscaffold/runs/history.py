"""One evaluated round of a run: a line of ``metrics.jsonl``, and a row of ``result.history``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpscaffold.errors import BadInput

#: Metrics by name; None where a value is not finite, or not defined.
MetricValues = Mapping[str, float | None]


@dataclass(frozen=True, eq=False)
class HistoryRow(Mapping[str, Any]):
    """What is known of one round: its number, and metrics by name.

    ``metrics`` are those of the evaluated model (``test_accuracy``, ``train_loss``, …, and with
    ``last_`` in front those of the last iterate where the model is an average), what the round
    itself measured, and the ε spent so far (``epsilon_server``, ``epsilon_everybody``). A value
    that is not finite is None. In JSON all of them are keys of one object, and
    ``row["test_accuracy"]`` is ``row.metrics["test_accuracy"]``.

    >>> row = HistoryRow(3, {"train_loss": 0.5})
    >>> row["train_loss"], dict(row)
    (0.5, {'round': 3, 'train_loss': 0.5})
    """

    round: int
    metrics: MetricValues = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.round if key == "round" else self.metrics[key]

    def __iter__(self) -> Iterator[str]:
        yield "round"
        yield from self.metrics

    def __len__(self) -> int:
        return 1 + len(self.metrics)

    @classmethod
    def from_json(cls, values: Any) -> HistoryRow:
        """A row from JSON values, where they are one."""
        metrics = dict(values) if isinstance(values, Mapping) else {}
        round = metrics.pop("round", None)
        numbers = (value is None or type(value) in (int, float) for value in metrics.values())
        if type(round) is not int or not all(numbers):
            raise BadInput("wrong-type", f"a row is {values!r:.60}, which is no row of a history")
        return cls(round, metrics)
