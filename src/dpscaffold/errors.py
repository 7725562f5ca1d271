"""What is said to a user whose input cannot be used: one sentence, no traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BadInput(ValueError):
    """Input that is refused.

    Args:
        code: A short name of the mistake, such as ``unknown-column``. It stays the same when the
            message is reworded, so match it in programs and tests; docs/errors.md lists all codes.
        message: One sentence that names the argument, its value and what to do. The command line
            prints it and exits with status 2.

    >>> refused = BadInput("not-a-number", "plan.rounds is 'ten'; give a whole number")
    >>> print(refused.code, "|", refused)
    not-a-number | plan.rounds is 'ten'; give a whole number
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


class BadValue(BadInput):
    """A value that a validator refuses; the name of its table is put before the message."""


class Diverged(RuntimeError):
    """A run whose parameters or loss stopped being finite; the last checkpoint is kept (exit status
    3)."""

    code = "diverged"


class DeviceLost(RuntimeError):
    """A device that gave up in the middle of a run; the last checkpoint is kept, and the run can go
    on from it (exit status 5)."""

    code = "device-lost"


class RankLost(DeviceLost):
    """Another process of a run that several processes share is gone; the last checkpoint is kept,
    and the run can go on from it (exit status 5)."""

    code = "rank-lost"


def nearest(word: str, choices: Iterable[str]) -> str:
    """A hint ``" (did you mean 'x'?)"`` when a choice looks like ``word``, else the empty string.

    >>> nearest("rouds", ["rounds", "seed"])
    " (did you mean 'rounds'?)"
    >>> nearest("zzz", ["rounds", "seed"])
    ''
    """
    close = difflib.get_close_matches(word, list(choices), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""
