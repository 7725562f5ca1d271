"""The limits of a run's privacy spending: public, and part of what the parties agree on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dpscaffold.checks import number, whole
from dpscaffold.errors import BadInput
from dpscaffold.privacy import Adversary, Mechanism, adversaries
from dpscaffold.privacy.ledger import USER_BUDGET
from dpscaffold.privacy.mechanism import RECORDS, Delta, check_delta

View = Literal["server", "third-party", "participant"]


@dataclass(frozen=True)
class Budget:
    """The limits of a run's privacy spending; all optional.

    Args:
        delta: δ, by default 1/(10·ΣR_i), or 1/(10·M) if a user is the unit; ``"1/records"`` is the
            paper's 1/ΣR_i.
        user_epsilon: The most ε that any user spends, given who took part. A drawn user whose next
            participation would exceed it declines; the draw and the divisor stay the same.
        view: The adversary that ``epsilon`` is promised to.
        file: A budget file that several runs over the same records share
            (:mod:`~dpscaffold.runs.budget_file`). The run's whole plan is granted before it begins,
            or refused.
        colluders: How many participants share what they know in the view ``participant``.
        absent: Why users may stay away although they were drawn (a deployed site always may).
            Bounds that count everybody's noise then refuse.

    >>> Budget(user_epsilon=1.0).view
    'server'
    """

    delta: Delta | None = None
    user_epsilon: float | None = None
    view: View = "server"
    file: str | Path | None = None
    colluders: int = 1
    absent: str | None = None
    #: Why a drawn user may decline, next to having reached a count: part of what a run does.
    declines: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_file()
        capped = USER_BUDGET if self.user_epsilon is not None else None
        reasons = ", ".join([reason for reason in (capped, self.absent) if reason])
        object.__setattr__(self, "declines", reasons or None)

    def _check_numbers(self) -> None:
        if self.delta is not None and self.delta != RECORDS:
            check_delta("privacy.delta", number("privacy.delta", self.delta))
        if type(self.colluders) is not int or self.colluders != 1:
            whole("privacy.colluders", self.colluders, 1)
        value = self.user_epsilon
        if value is not None and not number("privacy.user_epsilon", value) > 0:
            raise BadInput("out-of-range", f"privacy.user_epsilon is {value}; it must be positive")

    def _check_file(self) -> None:
        """A path becomes text; anything else is refused."""
        if isinstance(self.file, Path):
            object.__setattr__(self, "file", str(self.file))
        if self.file is not None and (not isinstance(self.file, str) or not self.file):
            raise BadInput(
                "wrong-type",
                f"privacy.budget_file is {self.file!r}; give the path of a budget file",
            )

    def against(self, run: Mechanism) -> Adversary:
        """The adversary that the budget names."""
        return adversaries(run, self.colluders)[self.view.replace("-", "_")]
