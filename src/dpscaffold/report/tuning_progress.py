"""A line of progress while a grid is tuned or a plan is made."""

from __future__ import annotations

import time

from rich.console import Console
from rich.status import Status

from dpscaffold.events import Event, RoundDone, StackBegun, Stopped


class Rounds:
    """Shows the rounds that are done, over all stacks of the grid."""

    def __init__(self, caught: list[str], quiet: bool = False, title: str = "tuning") -> None:
        self.title = title
        self.caught = caught
        self.console = Console(stderr=True, highlight=False)
        self.status: Status | None = None
        if not quiet and self.console.is_terminal:
            self.status = self.console.status(f"{title}: beginning")
        self.started = time.monotonic()
        self.before, self.last = 0, 0

    def __enter__(self) -> Rounds:
        if self.status:
            self.status.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self.status:
            self.status.stop()

    def __call__(self, event: Event) -> None:
        """Count the rounds of all stacks; a signal that came in stops the work."""
        if isinstance(event, StackBegun):
            self.before += self.last
        if not isinstance(event, RoundDone):
            return
        self.last = event.round
        if self.status:
            spent = time.monotonic() - self.started
            done = self.before + event.round
            self.status.update(f"{self.title}: {done} rounds of stacked runs, {spent:.0f} s")
        if self.caught:
            raise Stopped(self.caught[0])
