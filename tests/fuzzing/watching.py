"""Time limits for a case, and which errors count as an answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from dpscaffold.cli import _sentence

#: No answer may take more seconds of CPU, which on an idle machine is the time one waits.
SLOWEST = 20.0
#: Nor wait so long for something else, on a machine that is busy too.
HANGS = 600.0
#: After so long, work that was asked for (a training of a million rounds) is interrupted as a
#: person would do it.
PATIENCE = 2.0
#: Files that do such work; whatever else is slow is slow to answer.
WORKING = ("rounds.py", "game.py", "onerun.py", "trial.py", "stack.py", "optimum.py", "solving.py")
WORKING += ("probe.py",)  # reproduce --list --estimate times rounds of every shape


class Overdue(BaseException):
    """A case took too long; no ``except Exception`` swallows it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@contextmanager
def watched() -> Iterator[None]:
    """Interrupt long work after :data:`PATIENCE`, and give up after :data:`SLOWEST`."""
    waited = PATIENCE

    def late(number: int, frame: FrameType | None) -> None:
        nonlocal waited
        if waited >= SLOWEST:
            raise Overdue(waited)
        if _works(frame):
            signal.raise_signal(signal.SIGINT)
        step = min(PATIENCE, SLOWEST - waited)
        waited += step
        signal.setitimer(signal.ITIMER_PROF, step)

    def hangs(number: int, frame: FrameType | None) -> None:
        raise Overdue(HANGS)

    before = signal.signal(signal.SIGPROF, late), signal.signal(signal.SIGALRM, hangs)
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    try:
        yield
    except KeyboardInterrupt:
        pass
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGPROF, before[0])
        signal.signal(signal.SIGALRM, before[1])


def _works(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.endswith(WORKING):
            return True
        frame = frame.f_back
    return False


def sentence_of(error: Exception) -> str | None:
    """What the command line says of an error, or None where it shows a traceback."""
    return _sentence(error)
