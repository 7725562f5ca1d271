"""ε of a configuration towards the server and third parties, computed once and kept."""

from __future__ import annotations

import math

from dpscaffold.config import Configuration
from dpscaffold.paper.formula import published
from dpscaffold.paper.solving import remember, run_of
from dpscaffold.privacy import SERVER, THIRD_PARTY, epsilon, no_guarantee, noise_seen


def epsilons(settings: Configuration) -> dict[str, float | None]:
    """ε by column of a RESULT.md; None where there is none.

    That towards a third party is named where a theorem makes it smaller than the server's.
    """
    run = run_of(settings)
    names = ("server, random participation (PLD)", "third party, as published")
    if no_guarantee(run):
        return dict.fromkeys(names)
    found: dict[str, float | None] = {}
    found[names[0]] = remember("epsilon server", run, 0.0, lambda: epsilon(run, SERVER))
    printed = remember("epsilon published", run, 0.0, lambda: published(run))
    found[names[1]] = printed if math.isfinite(printed) else None
    if noise_seen(run, THIRD_PARTY).theorem == "2":
        found["third party, aggregate"] = remember(
            "epsilon aggregate", run, 0.0, lambda: epsilon(run, THIRD_PARTY)
        )
    return found
