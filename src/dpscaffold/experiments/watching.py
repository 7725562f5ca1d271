"""What is told about progress while many runs are under way."""

from __future__ import annotations

from typing import Any


class Stopped(RuntimeError):
    """A signal asked to stop; what is finished is kept."""


class Watcher:
    """What is told about progress; a subclass shows it. ``stop`` returns the signal that asked to
    stop."""

    def cell(self, cell: Any, number: int, of: int) -> None:
        """A stack begins."""

    def round(self, round: int) -> None:
        """A round of the current stack is done."""

    def done(self, cell: Any, seconds: float) -> None:
        """The stack is finished."""

    def writing(self) -> None:
        """All runs are finished; the results are about to be written."""

    def stop(self) -> str | None:
        """The name of a signal that asked to stop, or None."""
        return None
