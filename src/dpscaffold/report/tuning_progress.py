"""A bar of progress while a grid is tuned or a plan is made."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dpscaffold.training.events import Event, RoundDone, StackBegun, StopRequested


class Rounds:
    """Shows how far the current stack is, and how many there were: what comes next may depend on
    what was found, so there is no bar over the whole. Without a terminal there is one line for each
    stack instead."""

    def __init__(self, caught: list[str], quiet: bool = False, title: str = "tuning") -> None:
        self.title = title
        self.caught = caught
        self.console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=max(4, min(40, self.console.width - 46))),
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds"),
            TimeElapsedColumn(),
        )
        hidden = quiet or not self.console.is_terminal
        self.plain = hidden and not quiet
        self.begun = time.monotonic()
        self.bars = Progress(*columns, console=self.console, disable=hidden, transient=True)
        self.stacks = 0
        self.bar = self.bars.add_task(title, total=1)

    def __enter__(self) -> Rounds:
        self.bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bars.stop()

    def __call__(self, event: Event) -> None:
        """Count the rounds of a stack; a signal that came in stops the work."""
        if isinstance(event, StackBegun):
            self.stacks += 1
            said = f"{self.title} {self.stacks}"
            self.bars.update(self.bar, description=said, total=event.rounds, completed=0)
            self._print(event)
        if not isinstance(event, RoundDone):
            return
        self.bars.update(self.bar, completed=event.round)
        if self.caught:
            raise StopRequested(self.caught[0])

    def _print(self, event: StackBegun) -> None:
        """A line that says what begins, and when."""
        if self.plain:
            doing = "" if event.title == self.title else f": {event.title}"
            part = f", part {event.number} of {event.of}" if event.of > 1 else ""
            seconds = time.monotonic() - self.begun
            self.console.print(
                f"{self.title} {self.stacks}{doing}{part}, {event.rounds} rounds ({seconds:.0f} s)",
                markup=False,
            )
