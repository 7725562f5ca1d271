"""A live line while a run goes on; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dpscaffold.events import Event, RoundDone
from dpscaffold.privacy.showing import round_up


class Progress:
    """A listener for :func:`~dpscaffold.train`: shows round, accuracy, loss, ε and the time
    left."""

    def __init__(self, label: str, rounds: int, quiet: bool = False) -> None:
        self.label, self.rounds, self.quiet = label, rounds, quiet
        self.console = Console(stderr=True)
        self._last: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None
        self._printed = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if not self.quiet and (self.console.is_terminal or self.console.is_jupyter):
            self._live = Live(
                Text(f"{self.label}: preparing"), console=self.console, refresh_per_second=8
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take note of a finished round."""
        if isinstance(event, RoundDone):
            self._note(event.round, event.rows[0])

    def _note(self, round: int, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self._first = self._first or (round - 1, now)
        evaluated = "train_loss" in row
        if evaluated:
            self._last = dict(row)
        if self.quiet:
            return
        if self._live:
            self._live.update(Text(self.line(round, now)))
        elif round == self.rounds or (evaluated and now - self._printed > 2):
            self._printed = now
            self.console.print(self.line(round, now), highlight=False, soft_wrap=True)

    def line(self, round: int, now: float) -> str:
        """One line of text."""
        from dpscaffold.scoring import titled  # with torch, which a run has loaded by then

        parts = [f"{self.label}: round {round}/{self.rounds}"]
        shown = next((name for name in self._last if name.startswith("test_")), None)
        if shown is not None and self._last[shown] is not None:
            parts.append(f"{titled(shown)} {self._last[shown]:.3f}")
        if "train_loss" in self._last:
            parts.append(
                f"loss {self._last['train_loss']:.4f}"
                if self._last["train_loss"] is not None
                else "loss inf"
            )
        if self._last.get("epsilon_server") is not None:
            parts.append(f"ε(server) ≤ {round_up(self._last['epsilon_server'])}")
        assert self._first is not None
        done = round - self._first[0]
        if done and round < self.rounds:
            left = (now - self._first[1]) / done * (self.rounds - round)
            parts.append(f"{duration(left)} left")
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
