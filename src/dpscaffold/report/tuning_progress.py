"""A line of progress while a grid is tuned."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status

from dpscaffold.experiments.watching import Watcher


class Rounds(Watcher):
    """Shows the rounds that are done, over all stacks of the grid."""

    def __init__(self, caught: list[str], quiet: bool = False) -> None:
        self.caught = caught
        self.console = Console(stderr=True, highlight=False)
        self.status: Status | None = None
        if not quiet and self.console.is_terminal:
            self.status = self.console.status("tuning: loading data")
        self.started = time.monotonic()

    def __enter__(self) -> Rounds:
        if self.status:
            self.status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.status:
            self.status.stop()

    def round(self, round: int) -> None:
        """A round of all runs of a stack is done."""
        if self.status:
            self.status.update(
                f"tuning: {round} rounds of stacked runs, {time.monotonic() - self.started:.0f} s"
            )

    def stop(self) -> str | None:
        """The first signal that came in."""
        return self.caught[0] if self.caught else None
