"""A bar of progress while a grid is tuned or a plan is made."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dpscaffold.training.events import Event, RoundDone, StackBegun, StopRequested


class Rounds:
    """Shows how far the current stack is, and how many there were: what comes next may depend on
    what was found, so there is no bar over the whole. Without a terminal nothing is shown."""

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
        if not isinstance(event, RoundDone):
            return
        self.bars.update(self.bar, completed=event.round)
        if self.caught:
            raise StopRequested(self.caught[0])
