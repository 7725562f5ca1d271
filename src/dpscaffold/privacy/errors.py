"""What is said when a description cannot be accounted for."""

from __future__ import annotations


class PrivacyError(ValueError):
    """A description, a bound or a ledger that cannot be used.

    Args:
        code: A short name of the mistake, such as ``out-of-range``; docs/errors.md lists all codes.
        message: One sentence that names the argument, its value and what to do. The command line
            prints it and exits with status 2.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


def bad_delta(name: str, value: object) -> str:
    """What to say of a δ that is no probability.

    >>> bad_delta("privacy.delta", 1).partition(";")[0]
    'privacy.delta is 1, and it must lie strictly between 0 and 1'
    """
    return (
        f"{name} is {value}, and it must lie strictly between 0 and 1; give a small number such "
        f"as 1e-6, or leave it out for 1/(10 × all records)"
    )
