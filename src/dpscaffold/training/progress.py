"""A live line while a run goes on; plain lines where there is no terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from dpscaffold.privacy.numbers import round_up
from dpscaffold.runs.history import HistoryRow, MetricValues

#: The seconds between two lines where there is no terminal.
PAUSE = 2.0


class Progress:
    """Shows round, accuracy, loss, ε and the time left: called with the row of each round."""

    def __init__(self, label: str, rounds: int, shown: bool = True) -> None:
        self.label, self.rounds, self.shown = label, rounds, shown
        self.console = Console(stderr=True)
        self.live = shown and (self.console.is_terminal or self.console.is_jupyter)
        columns = (TextColumn("{task.description}"), BarColumn(10), TimeRemainingColumn())
        self.bars = Bars(*columns, console=self.console, disable=not self.live)
        self.bar = self.bars.add_task(f"{label}: preparing", total=rounds)
        self._evaluated: MetricValues = {}
        self._printed = 0.0

    def __enter__(self) -> Progress:
        self.bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bars.stop()

    def __call__(self, row: HistoryRow) -> None:
        """Show a finished round."""
        evaluated = "train_loss" in row.metrics
        if evaluated:
            self._evaluated = row.metrics
        line = self.line(row)
        self.bars.update(self.bar, description=line, completed=row.round)
        now = time.monotonic()
        due = row.round == self.rounds or (evaluated and now - self._printed > PAUSE)
        if due and self.shown and not self.live:
            self._printed = now
            self.console.print(line, highlight=False, soft_wrap=True)

    def line(self, row: HistoryRow) -> str:
        """The round in words, ε first: it is what must not be cut off."""
        from dpscaffold.tasks.metrics import titled  # with torch, which a run has loaded by then

        parts = [f"{self.label}: round {row.round}/{self.rounds}"]
        # The ε that the statement will quote.
        towards = "everybody" if "epsilon_everybody" in row.metrics else "server"
        spent = row.metrics.get(f"epsilon_{towards}")
        if spent is not None:
            parts.append(f"ε({towards}) ≤ {round_up(spent)}")

        shown = next((name for name in self._evaluated if name.startswith("test_")), "")
        if (value := self._evaluated.get(shown)) is not None:
            parts.append(f"{titled(shown)} {value:.3f}")
        if "train_loss" in self._evaluated:
            loss = self._evaluated["train_loss"]
            parts.append("loss inf" if loss is None else f"loss {loss:.4f}")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds for reading.

    >>> duration(75), duration(8)
    ('1 min 15 s', '8 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
