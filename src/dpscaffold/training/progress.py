"""A live line while a run goes on; plain lines where there is no terminal."""

from __future__ import annotations

import re
import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dpscaffold.privacy.numbers import round_up
from dpscaffold.runs.history import HistoryRow
from dpscaffold.training.events import Event, RoundDone


class Progress:
    """A listener for :func:`~dpscaffold.train`: shows round, accuracy, loss, ε and the time
    left."""

    def __init__(self, label: str, rounds: int, quiet: bool = False) -> None:
        self.label, self.rounds, self.quiet = label, rounds, quiet
        self.console = Console(stderr=True)
        self._last = HistoryRow(0)
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

    def __exit__(self, *raised: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, event: Event) -> None:
        """Take note of a finished round."""
        if isinstance(event, RoundDone):
            self._note(event.round, event.rows[0])

    def _note(self, round: int, row: HistoryRow) -> None:
        now = time.monotonic()
        self._first = self._first or (round - 1, now)
        evaluated = "train_loss" in row.metrics
        if evaluated:
            self._last = row
        if self.quiet:
            return
        if self._live:
            self._live.update(Text(self.line(round, now, self.console.width), no_wrap=True))
        elif round == self.rounds or (evaluated and now - self._printed > 2):
            self._printed = now
            self.console.print(self.line(round, now), highlight=False, soft_wrap=True)

    def line(self, round: int, now: float, width: int | None = None) -> str:
        """One line of text, of at most ``width``: what is left goes first, ε stays to the last."""
        from dpscaffold.tasks.metrics import titled  # with torch, which a run has loaded by then

        place = f"round {round}/{self.rounds}"
        parts = [f"{self.label}: {place}"]
        last = self._last.metrics
        shown = next((name for name in last if name.startswith("test_")), "")
        if (value := last.get(shown)) is not None:
            parts.append(f"{titled(shown)} {value:.3f}")
        if "train_loss" in last:
            loss = last["train_loss"]
            parts.append("loss inf" if loss is None else f"loss {loss:.4f}")
        # The ε that the statement will quote.
        towards = "everybody" if "epsilon_everybody" in last else "server"
        spent = last.get(f"epsilon_{towards}")
        epsilon = "" if spent is None else f"ε({towards}) ≤ {round_up(spent)}"
        parts += [part for part in (epsilon, self._left(round, now)) if part]
        return _within(parts, place, epsilon, width)

    def _left(self, round: int, now: float) -> str:
        """The time left, by the pace so far."""
        assert self._first is not None
        done = round - self._first[0]
        if not done or round >= self.rounds:
            return ""
        return f"{duration((now - self._first[1]) / done * (self.rounds - round))} left"


def _within(parts: list[str], place: str, epsilon: str, width: int | None) -> str:
    """The parts on one line of a width; ε is kept as long as there is room for it alone.

    >>> parts = ["DP-SCAFFOLD: round 7/400", "loss 0.4312", "ε(server) ≤ 0.87", "12 s left"]
    >>> _within(parts, "round 7/400", "ε(server) ≤ 0.87", 40)
    'round 7/400, ε(server) ≤ 0.87'
    """
    if width is None or len(", ".join(parts)) <= width:
        return ", ".join(parts)
    tail = [epsilon] if epsilon else []
    middle = [part for part in parts[1:] if part != epsilon]
    for head in (parts[0], place):
        for count in range(len(middle), -1, -1):
            line = ", ".join([head, *middle[:count], *tail])
            if len(line) <= width:
                return line
    return (re.sub(r"\(.*\)", "", epsilon) or place)[:width]


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
