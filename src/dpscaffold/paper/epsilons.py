"""ε of a configuration by view and bound, computed once in a process."""

from __future__ import annotations

from dpscaffold.config import Configuration
from dpscaffold.paper.solving import remember, run_of
from dpscaffold.privacy import (
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    RANDOM_PARTICIPATION_RDP,
    Bound,
    Mechanism,
    bound_for,
    no_guarantee,
)

#: What a RESULT.md lists: the column's name and the bound.
COLUMNS: dict[str, Bound] = {
    "server, random participation (PLD)": RANDOM_PARTICIPATION,
    "server, random participation (RDP)": RANDOM_PARTICIPATION_RDP,
    "third party, as published": PAPER_THIRD_PARTY,
}


def epsilons(settings: Configuration) -> dict[str, float | None]:
    """ε by column; None where a bound does not apply.

    The third party's own best bound is named where it is below the server's (memoryless, K = 1).
    """
    run = run_of(settings)
    found = {name: _epsilon(run, bound) for name, bound in COLUMNS.items()}
    third = RANDOM_PARTICIPATION if no_guarantee(run) else bound_for(run, "third_party")
    if third is not RANDOM_PARTICIPATION:
        found[f"third party, {third.name.replace('_', ' ')}"] = _epsilon(run, third)
    return found


def _epsilon(run: Mechanism, bound: Bound) -> float | None:
    if no_guarantee(run) or bound.applies(run) is not None:
        return None
    return remember(f"epsilon {bound.name}", run, 0.0, lambda: bound.epsilon(run))
