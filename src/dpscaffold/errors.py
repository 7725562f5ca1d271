"""What is said to a user whose input cannot be used: one sentence, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """Input refused at the edge.

    The message is one sentence that names the argument, its value and what would do. The command
    line prints it and exits with status 2.
    """


class Diverged(RuntimeError):
    """A run whose parameters or loss stopped being finite; the last checkpoint is kept (exit status
    3)."""


class DeviceLost(RuntimeError):
    """A device that gave up in the middle of a run; the last checkpoint is kept, and the run can go
    on from it (exit status 5)."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint ``" (did you mean 'x'?)"`` when a choice looks like ``word``, else the empty string.

    >>> nearest("rouds", ["rounds", "seed"])
    " (did you mean 'rounds'?)"
    >>> nearest("zzz", ["rounds", "seed"])
    ''
    """
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
