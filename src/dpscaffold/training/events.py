"""Progress of many runs: stacks that begin, their rounds, and their end.

A listener is called with every event, in order; it may raise :class:`StopRequested` to end the
work. A single run calls ``on_round`` instead (:class:`~dpscaffold.training.training.Training`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class StopRequested(RuntimeError):
    """A signal asked to stop; what is finished is kept."""


@dataclass(frozen=True)
class StackBegun:
    """The ``number``-th of ``of`` stacks begins; ``work`` counts its user-steps."""

    title: str
    number: int
    of: int
    rounds: int
    work: float


@dataclass(frozen=True)
class RoundDone:
    """A round of ``of`` is over in all runs of the stack."""

    round: int
    of: int


@dataclass(frozen=True)
class StackDone:
    """The stack that began is finished, after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Writing:
    """All runs are finished; the results are about to be written."""


Event = StackBegun | RoundDone | StackDone | Writing
Listener = Callable[[Event], None]


def silence(event: Event) -> None:
    """Nobody listens."""
