"""A live line while a run goes on; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dpscaffold.privacy.numbers import round_up
from dpscaffold.runs.history import HistoryRow, MetricValues
from dpscaffold.training.training import OnRound

#: The seconds between two lines where there is no terminal.
PAUSE = 2.0


@contextmanager
def live_line(label: str, rounds: int, on_round: OnRound) -> Iterator[OnRound]:
    """The same callback, which also shows round, accuracy, loss, ε and the time left."""
    console = Console(stderr=True)
    live = console.is_terminal or console.is_jupyter
    columns = (TextColumn("{task.description}"), BarColumn(10), TimeRemainingColumn())
    evaluated: MetricValues = {}
    printed = 0.0

    with Progress(*columns, console=console, disable=not live) as bars:
        bar = bars.add_task(f"{label}: preparing", total=rounds)

        def show(row: HistoryRow) -> None:
            nonlocal evaluated, printed
            on_round(row)
            new = "train_loss" in row.metrics
            evaluated = row.metrics if new else evaluated
            line = f"{label}: round {row.round}/{rounds}{in_words(row.metrics, evaluated)}"
            bars.update(bar, description=line, completed=row.round)
            now = time.monotonic()
            if not live and (row.round == rounds or (new and now - printed > PAUSE)):
                printed = now
                console.print(line, highlight=False, soft_wrap=True)

        yield show


def in_words(spent: MetricValues, evaluated: MetricValues) -> str:
    """ε, the metric that represents the model and its loss; ε is first, so that it is not cut
    off."""
    from dpscaffold.tasks.metrics import titled  # with torch, which a run has loaded by then

    words = ""
    towards = "everybody" if "epsilon_everybody" in spent else "server"  # as the statement quotes
    epsilon = spent.get(f"epsilon_{towards}")
    if epsilon is not None:
        words += f", ε({towards}) ≤ {round_up(epsilon)}"
    metric = next((name for name in evaluated if name.startswith("test_")), "")
    value = evaluated.get(metric)
    if value is not None:
        words += f", {titled(metric)} {value:.3f}"
    if "train_loss" in evaluated:
        loss = evaluated["train_loss"]
        words += ", loss inf" if loss is None else f", loss {loss:.4f}"
    return words


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
