"""The statement of a run whose rounds were planned in parts: every ε and the δ are sums.

Part k is a mechanism of its own, chosen after seeing what the earlier parts showed, with
parameters fixed before it runs: (Σ ε_k, Σ δ_k) holds (Rogers, Roth, Ullman, Vadhan 2016), for every
bound that holds of each part. Given who took part, ε_k adds user by user. What a sum of (ε, δ)
means in human terms is less than a loss distribution would tell, and is stated as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpscaffold.privacy.bound import VIEWS
from dpscaffold.privacy.bounds import LEDGER, PAPER_THIRD_PARTY
from dpscaffold.privacy.composition import ADDED
from dpscaffold.privacy.costs import Cost
from dpscaffold.privacy.human import GROUPS, terms_of
from dpscaffold.privacy.ledger import Ledger, distribution_of
from dpscaffold.privacy.loss import privacy_parameters
from dpscaffold.privacy.mechanism import Mechanism
from dpscaffold.privacy.preparation import Preparation
from dpscaffold.privacy.quote import for_a_person, quote, quoted
from dpscaffold.privacy.statement import large_delta, statement

Said = dict[str, Any]


def statement_of_parts(
    parts: Sequence[Ledger],
    preparation: Sequence[Preparation] = (),
    seed_public: bool = False,
    draw_given: bool = False,
    allowed: Sequence[str] | None = None,
    extra_costs: Sequence[Cost] = (),
    groups: Sequence[int] = GROUPS,
    colluders: int = 1,
    planned: Sequence[str] = (),
) -> Said:
    """As :func:`statement`, of a run that was planned in these parts; one part is stated as it is.

    A part of which no round was run has released nothing. ``extra_costs`` were spent once, beside
    the first part.

    >>> from dpscaffold.privacy import describe
    >>> run = describe(rounds=4, local_steps=2, users=4, cohort_size=2, records=50, batch_sizes=5,
    ...                noise=4.0)
    >>> first, second = Ledger(run), Ledger(run)
    >>> first.record(1, [0, 1]); second.record(1, [0, 2])
    >>> one, both = statement_of_parts([first]), statement_of_parts([first, second])
    >>> both["server"]["epsilon"] == 2 * one["server"]["epsilon"], both["delta"] == 2 * one["delta"]
    (True, True)
    """
    begun = [part for k, part in enumerate(parts) if k == 0 or part.rounds]
    each = [
        statement(
            part.run,
            ledger=part,
            preparation=preparation,
            seed_public=seed_public,
            draw_given=draw_given,
            allowed=allowed,
            extra_costs=extra_costs if k == 0 else (),
            groups=groups,
            colluders=colluders,
            planned=planned,
        )
        for k, part in enumerate(begun)
    ]
    if len(each) == 1:
        return each[0]
    run = replace(begun[0].run, rounds=sum(part.run.rounds for part in begun))
    charged = [part.charged(extra_costs if k == 0 else ()) for k, part in enumerate(begun)]
    return _added(each, charged, run, tuple(groups), [c.name for c in extra_costs], draw_given)


def _added(
    each: Sequence[Said],
    parts: Sequence[Ledger],
    run: Mechanism,
    groups: tuple[int, ...],
    costs: Sequence[str],
    draw_given: bool,
) -> Said:
    """The first part's statement with every number that is spent replaced by the sum."""
    said = dict(each[0])
    delta = math.fsum(one["delta"] for one in each) if each[0]["guarantee"] else each[0]["delta"]
    said["rounds"] = sum(one["rounds"] for one in each)
    said["mechanism"] = {**said["mechanism"], "rounds": run.rounds}
    said["delta"], said["run"] = delta, run.to_dict()
    said["parts"] = [_part(one) for one in each]
    if not said["guarantee"]:
        return said
    for view in (*VIEWS, PAPER_THIRD_PARTY.name):
        said[view] = _view([one[view] for one in each], delta)
    rows = zip(*(one["bounds"] for one in each), strict=True)
    said["bounds"] = [_row(same, delta) for same in rows]
    # The largest of each part, added: at least the largest sum over users.
    replaced = _total([one["ledger"]["replace_one"] for one in each])
    said["ledger"] = {**_ledger(parts), "replace_one": replaced}
    for view in VIEWS:
        said[view]["ledger"] = said["ledger"]["epsilon"]
    whole = math.fsum(one["planned"]["epsilon"] for one in each)
    said["planned"] = {"rounds": run.rounds, "epsilon": whole}
    said["epsilon_by_delta"] = [
        {"delta": math.fsum(row["delta"] for row in same)}
        | {view: _total([row[view] for row in same]) for view in VIEWS}
        for same in zip(*(one["epsilon_by_delta"] for one in each), strict=True)
    ]
    stated = replace(run, delta=min(delta, 1 - 1e-12))
    said["human"] = _human(said, stated, groups)
    said["delta_note"] = note = large_delta(stated)
    rest = [sentence for sentence in said["outside"] if sentence != each[0]["delta_note"]]
    said["outside"] = [*([note] if note else []), *rest]
    said["quoted"] = quoted(said, draw_given)
    said["person"] = for_a_person(said)
    times = "once" if len(each) == 2 else f"{len(each) - 1} times"
    said["quote"] = quote(said, stated, costs, draw_given) + (
        f" The run was given more rounds {times} after it was planned: epsilon and delta are the "
        f"sums of its {len(each)} parts, as for runs one after another."
    )
    return said


def _part(said: Said) -> dict[str, Any]:
    views = {view: said[view]["epsilon"] for view in VIEWS}
    return {"rounds": said["rounds"], "delta": said["delta"], "epsilon": views}


def _view(same: Sequence[Mapping[str, Any]], delta: float) -> dict[str, Any]:
    """One view of all parts: the sum, and that it is one."""
    said = {**same[0], "epsilon": _total([one["epsilon"] for one in same])}
    if "replace_one" in said:
        said["replace_one"] = _total([one["replace_one"] for one in same])
    if "delta" in said:
        said |= {"delta": delta, "composition": ADDED}
    if "training_alone" in said:  # of the first part with the preparation's cost beside it
        alone = [one.get("training_alone", one["epsilon"]) for one in same]
        said["training_alone"] = _total(alone)
    return said


def _row(same: Sequence[Mapping[str, Any]], delta: float) -> dict[str, Any]:
    """One bound of all parts; it applies where it does to each."""
    barred = next((row for row in same if not row["applies"]), None)
    epsilon = None if barred else _total([row["epsilon"] for row in same])
    said = {**same[0], "epsilon": epsilon, "delta": delta}
    return said | ({"applies": False, "reason": barred["reason"]} if barred else {})


def spent_over_parts(parts: Sequence[Ledger]) -> NDArray[np.float64]:
    """ε of every user given who took part, (M,): its sum over the parts."""
    return np.asarray(np.sum([part.epsilons() for part in parts], axis=0))


def _ledger(parts: Sequence[Ledger]) -> dict[str, Any]:
    """What users spent given who took part: each user's sum over the parts."""
    spent = spent_over_parts(parts)
    spread = distribution_of(np.sum([part.participations for part in parts], axis=0), spent)
    return {
        "epsilon": float(spent.max()),
        "bound": LEDGER.name,
        "participations": spread["participations"],
        "epsilon_over_users": spread["epsilon"],
    }


def _human(said: Said, run: Mechanism, groups: tuple[int, ...]) -> dict[str, Any]:
    """What (Σ ε, Σ δ) means for one person, by view."""
    spent = {view: said[view]["epsilon"] for view in VIEWS}
    spent["ledger"] = said["ledger"]["epsilon"]
    found = {}
    for view, epsilon in spent.items():
        if epsilon is not None:
            law = privacy_parameters(epsilon, run.delta, epsilon / 64 or 1.0)
            found[view] = terms_of((law,), run, "added", groups).to_json()
    return found


def _total(values: Sequence[float | None]) -> float | None:
    """The sum, or None where one of them is not finite or not there."""
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None
