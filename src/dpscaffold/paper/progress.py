"""Progress of a reproduction: a bar over the whole and one over the current cell; lines without a
terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpscaffold.paper.runner import Cell, Watcher
from dpscaffold.report.progress import duration


class Bars(Watcher):
    """Shows the work done and left, counted in user-steps; ``caught`` are the signals that came
    in."""

    def __init__(self, name: str, work: float, caught: list[str], quiet: bool = False) -> None:
        self.name, self.work, self.caught, self.quiet = name, max(work, 1.0), caught, quiet
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.live = not quiet and self.console.is_terminal
        self.started = time.monotonic()
        self.finished = 0.0
        self.current: Cell | None = None
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, console=self.console, disable=not self.live)
        self.whole = self.bars.add_task(name, total=self.work)
        self.cell_bar = self.bars.add_task("", total=1, visible=False)

    def __enter__(self) -> Bars:
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bars.stop()

    def cell(self, cell: Cell, number: int, of: int) -> None:
        """A stack begins."""
        self.current, self.number, self.of = cell, number, of
        title = f"cell {number}/{of}: {cell.title}"
        self.bars.update(
            self.cell_bar, description=title, total=cell.rounds, completed=0, visible=True
        )

    def round(self, round: int) -> None:
        """A round of it is done."""
        assert self.current is not None
        share = round / self.current.rounds
        self.bars.update(self.cell_bar, completed=round)
        self.bars.update(self.whole, completed=self.finished + share * self.current.work)

    def done(self, cell: Cell, seconds: float) -> None:
        """A stack is finished."""
        self.finished += cell.work
        if not self.live and not self.quiet:
            spent = time.monotonic() - self.started
            left = spent / self.finished * (self.work - self.finished)
            self.console.print(
                f"{self.name}: cell {self.number}/{self.of}, {cell.title}, {duration(seconds)}; "
                f"about {duration(left)} left"
            )

    def writing(self) -> None:
        """Solving for a central optimum that is not remembered yet can take a minute: say what goes
        on."""
        what = "solving for the central optima, drawing and writing"
        self.bars.update(self.whole, completed=self.work)
        self.bars.update(self.cell_bar, description=what, total=None, visible=True)
        if not self.live and not self.quiet:
            self.console.print(f"{self.name}: {what}")

    def stop(self) -> str | None:
        """The first signal that came in."""
        return self.caught[0] if self.caught else None
