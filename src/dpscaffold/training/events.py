"""Events while runs are under way: one protocol for progress, tracking and stacks.

A listener is called with every event, in order; it may raise :class:`StopRequested` to end the
work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpscaffold.runs.history import HistoryRow

if TYPE_CHECKING:
    from torch import Tensor


class StopRequested(RuntimeError):
    """A signal asked to stop; what is finished is kept."""


@dataclass(frozen=True)
class Evaluated:
    """The models of a round were evaluated: one row of metrics per run."""

    round: int
    rows: Sequence[HistoryRow]


@dataclass(frozen=True)
class RoundDone:
    """A round of ``of`` is over: x^t of every run, (P,) each, and what is known of the round, the
    metrics included where it was evaluated and they are known by then."""

    round: int
    of: int
    params: Sequence[Tensor]
    rows: Sequence[HistoryRow]


@dataclass(frozen=True)
class Checkpointed:
    """The run can be resumed from this round."""

    round: int


@dataclass(frozen=True)
class Ended:
    """A run is over: ``completed``, ``interrupted`` or ``budget``, with a sentence where there is
    one."""

    round: int
    how: str
    message: str = ""


@dataclass(frozen=True)
class StackBegun:
    """The ``number``-th of ``of`` stacks begins; ``work`` counts its user-steps."""

    title: str
    number: int
    of: int
    rounds: int
    work: float


@dataclass(frozen=True)
class StackDone:
    """That stack is finished."""

    title: str
    number: int
    of: int
    work: float
    seconds: float


@dataclass(frozen=True)
class Writing:
    """All runs are finished; the results are about to be written."""


Event = Evaluated | RoundDone | Checkpointed | Ended | StackBegun | StackDone | Writing
Listener = Callable[[Event], None]


def silence(event: Event) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class CallbackListener:
    """A listener for one run that calls ``observer(round, row)`` after every round."""

    observer: Callable[[int, HistoryRow], None]

    def __call__(self, event: Event) -> None:
        """Hand a finished round on."""
        if isinstance(event, RoundDone):
            self.observer(event.round, event.rows[0])


@dataclass(frozen=True)
class ListenerList:
    """A listener that tells all of its own, in order."""

    listeners: tuple[Listener, ...]

    def __call__(self, event: Event) -> None:
        """Tell everyone."""
        for listener in self.listeners:
            listener(event)
