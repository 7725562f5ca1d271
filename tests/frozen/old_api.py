"""What the package says of neutral descriptions, in the words of the API of version 0.2.0.

``python -m frozen.old_api KIND < inputs.json > outputs.json`` runs in ``.venv-old``. This file
never changes with the product: what today's package says is asked by ``compare/adapter.py``.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dpscaffold.privacy import Mechanism, PrivacyError, describe
from dpscaffold.privacy.bound import no_guarantee
from dpscaffold.privacy.bounds import (
    CAP,
    PAPER_THIRD_PARTY,
    RANDOM_PARTICIPATION,
    SECURE_CAP,
    bound_for,
)
from dpscaffold.privacy.by_user import epsilons_by_group
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.ledger import spent
from dpscaffold.privacy.mechanism import SecureTerms

Said = dict[str, Any]


def number(value: float | None) -> float | str | None:
    """A number of a JSON file, where infinity is a word."""
    if value is None:
        return None
    return float(value) if math.isfinite(value) else "infinite"


def mechanism(given: Mapping[str, Any]) -> Mechanism:
    """The package's own description of a neutral one."""
    kinds = given["users"]
    users = sum(kind["count"] for kind in kinds)

    def each(key: str) -> list[Any]:
        return [kind[key] for kind in kinds for _ in range(kind["count"])]

    noise = each("noise")
    least = min(noise)
    sums = given["secure_sums"]
    return describe(
        rounds=given["rounds"],
        local_steps=given["local_steps"],
        users=users,
        cohort_size=given["cohort"],
        records=each("size"),
        batch_sizes=each("batch"),
        noise=least,
        clip=given["clip"],
        sampling=given["sampling"],
        unit=given["unit"],
        memory=given["memory"],
        one_sum=given["linear_uploads"],
        weighting=given["weighting"],
        delta=given["delta"],
        max_participations=given["most_participations"],
        may_decline=given["may_decline"],
        hidden_draw=given["draw_is_hidden"],
        declared_sizes=given["declared_sizes"],
        unproved_hooks=given["unproved"],
        query={"gradients": "gradients", "bounded-sums": "sums"}[given["release"]],
        secure=SecureTerms(sums["colluders"], sums["least"]) if sums else None,
        voids=given["void_attempts"],
        louder=[one / least for one in noise] if least and len(set(noise)) > 1 else None,
        weights=each("weight") if given["weighting"] == "noise" else None,
        aggregation=given["server_mean"],
    )


def prepared(given: Mapping[str, Any], sampling: str) -> tuple[Cost, ...]:
    """Further mechanisms on the same records, for the neighbours of the run."""
    found = []
    for place, one in enumerate(given["prepared"]):
        cost = Cost(
            f"prepared {place}",
            noise=one.get("noise"),
            epsilon=one.get("epsilon"),
            delta=one.get("delta", 0.0),
            add_remove=one.get("noise_if_added"),
            alone=one.get("own_share", 1.0),
        ).under(sampling)
        assert cost is not None  # every one is given for both neighbours
        found.append(cost)
    return tuple(found)


def attempted(ask: Callable[[], Any]) -> Any:
    """What was said, or the code of the refusal."""
    try:
        return ask()
    except PrivacyError as error:
        return {"refused": error.code}


def of_mechanism(given: Mapping[str, Any]) -> Said:
    """ε towards each adversary, by which bound, and what participations cost."""
    run = attempted(lambda: mechanism(given))
    if isinstance(run, dict):
        return run
    said: Said = {"stored": run.to_dict()}
    if reason := no_guarantee(run):
        return {**said, "refused": "no-guarantee", "reason": reason}
    costs = prepared(given, run.sampling)
    rounds, repeats = given["completed"], tuple(given["repeated_rounds"])
    colluders = given["pooling_participants"]
    for view in ("server", "third_party", "participant"):
        bound = attempted(lambda view=view: bound_for(run, view, repeats, colluders))
        if isinstance(bound, dict):
            said[view] = bound
            continue
        said[f"{view}_by"] = bound.name
        said[view] = attempted(
            lambda bound=bound: number(bound.epsilon(run, rounds, costs, repeats))
        )
    alone = tuple(cost.if_others_collude for cost in costs)
    if run.secure is not None:
        said["alone"] = attempted(
            lambda: number(RANDOM_PARTICIPATION.epsilon(run, rounds, alone, repeats))
        )
        said["cap_in_sums"] = attempted(
            lambda: number(SECURE_CAP.epsilon(run, None, costs, repeats))
        )
    said["cap"] = attempted(lambda: number(CAP.epsilon(run, None, costs, repeats)))
    if len(run.groups) > 1:
        server = bound_for(run, "server", repeats, colluders)
        said["by_kind_of_user"] = attempted(
            lambda: [number(e) for e in epsilons_by_group(server, run, rounds, costs, repeats)]
        )
    for times in given["participations"]:
        said[f"given_{times}"] = attempted(
            lambda times=times: [number(spent(run, times, group, costs)) for group in run.groups]
        )
        if run.secure is not None:
            own = replace(run, secure=None)
            said[f"alone_given_{times}"] = attempted(
                lambda own=own, times=times: [
                    number(spent(own, times, group, alone)) for group in own.groups
                ]
            )
    said["published"] = attempted(lambda: number(PAPER_THIRD_PARTY.epsilon(run, rounds, costs)))
    return said


KINDS: dict[str, Callable[[Mapping[str, Any]], Said]] = {"mechanisms": of_mechanism}


def main() -> None:
    """Answer a list of neutral descriptions of one kind, in their order."""
    ask = KINDS[sys.argv[1]]
    json.dump([ask(given) for given in json.load(sys.stdin)], sys.stdout, allow_nan=False)


if __name__ == "__main__":
    main()
