"""What is said when a description cannot be accounted for."""

from __future__ import annotations


class PrivacyError(ValueError):
    """A description, a bound or a ledger that cannot be used.

    The message is one sentence that names the argument, its value and what would do; the command
    line prints it and exits with status 2.
    """
