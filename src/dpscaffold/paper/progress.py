"""Progress of a reproduction: a bar over the whole and one over the current cell; lines without a
terminal."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpscaffold.training.events import (
    Event,
    RoundDone,
    StackBegun,
    StackDone,
    StopRequested,
    Writing,
)
from dpscaffold.training.progress import duration


class ReproductionProgress:
    """Shows the work done and left, counted in user-steps; ``caught`` are the signals that came
    in."""

    def __init__(self, name: str, work: float, caught: list[str], quiet: bool = False) -> None:
        self.name, self.work, self.caught, self.quiet = name, max(work, 1.0), caught, quiet
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.live = not quiet and self.console.is_terminal
        self.started = time.monotonic()
        self.finished = 0.0
        self.current: StackBegun | None = None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, console=self.console, disable=not self.live)
        self.whole = self.bars.add_task(name, total=self.work)
        self.cell_bar = self.bars.add_task("", total=1, visible=False)

    def __enter__(self) -> ReproductionProgress:
        self.bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.bars.stop()

    def __call__(self, event: Event) -> None:
        """Show what an event says; a signal that came in stops the work after its round."""
        match event:
            case StackBegun():
                self._begin(event)
            case RoundDone():
                self._round(event)
                if self.caught:
                    raise StopRequested(self.caught[0])
            case StackDone():
                self._done(event.seconds)
            case Writing():
                self._writing()
            case _:
                pass

    def _begin(self, stack: StackBegun) -> None:
        self.current = stack
        title = f"cell {stack.number}/{stack.of}: {stack.title}"
        self.bars.update(
            self.cell_bar, description=title, total=stack.rounds, completed=0, visible=True
        )

    def _round(self, event: RoundDone) -> None:
        if self.current is None:
            return
        done = self.finished + event.round / event.of * self.current.work
        self.bars.update(self.cell_bar, completed=event.round)
        self.bars.update(self.whole, completed=done)

    def _done(self, seconds: float) -> None:
        stack = self.current
        assert stack is not None
        self.finished += stack.work
        if not self.live and not self.quiet:
            spent = time.monotonic() - self.started
            left = spent / self.finished * max(0.0, self.work - self.finished)
            self.console.print(
                f"{self.name}: cell {stack.number}/{stack.of}, {stack.title}, "
                f"{duration(seconds)}; about {duration(left)} left"
            )

    def _writing(self) -> None:
        """Solving for a central optimum that is not remembered yet can take a minute: say what goes
        on."""
        what = "solving for the central optima, drawing and writing"
        self.bars.update(self.whole, completed=self.work)
        self.bars.update(self.cell_bar, description=what, total=None, visible=True)
        if not self.live and not self.quiet:
            self.console.print(f"{self.name}: {what}")
