"""Whole plans: made for a row and an ε from public facts alone, trained as they are, and shown next
to the best choice that was made with the test data in view."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dpscaffold.atomic import write_text
from dpscaffold.checks import floor_share
from dpscaffold.data.shapes import shape_of
from dpscaffold.errors import BadInput
from dpscaffold.paper.cases import Case
from dpscaffold.paper.results import Place, Results, SeedSummary, average
from dpscaffold.paper.solving import sizes_of
from dpscaffold.paper.text import markdown, percent
from dpscaffold.planning.facts import Facts, Limits
from dpscaffold.planning.recommendation import Goal, Preset, as_tables, recommend
from dpscaffold.training.events import Listener

#: The line of an experiment that holds the plans, and the file of them in its folder.
LINE, FILE = "planned, nothing looked at", "plans.json"

#: What a case keeps of its own: who is hidden from whom, and the ε.
KEPT = ("epsilon", "view", "sampling", "delta", "unit")

#: The dotted keys that a plan sets; and plans by row, column and the digest of the case that each
#: was made for.
PlanKeys = dict[str, str | float]
Plans = dict[tuple[str, str, str], PlanKeys]


def public_facts(case: Case) -> Facts:
    """What is public of a case: the sizes, the shape after preparation, γ where the partition is by
    similarity, and rows of norm 1."""
    data = case.settings.data
    shape = shape_of(data)
    if shape is None:
        raise BadInput(
            "learning-rate-not-planned",
            f"data.source is {data.source!r}, whose features and classes only its files tell; a "
            f"step size is planned from public facts, so give one (plan.learning_rate)",
        )
    return Facts(sizes_of(data), *shape, getattr(data, "similarity", None))


def asked(case: Case) -> tuple[Facts, Goal, Limits, Preset]:
    """What the planner receives for a case: the facts, ε, the task, λ, and the case's T, K and
    participants as the most that one can afford; no record."""
    settings, facts = case.settings, public_facts(case)
    plan, privacy = settings.plan, settings.privacy
    assert privacy is not None and isinstance(privacy.epsilon, float)
    limits = Limits(plan.rounds, plan.local_steps, floor_share(plan.user_ratio, facts.users))
    goal = Goal(privacy.epsilon, "server", privacy.delta, "poisson")
    preset = Preset(
        regularisation=plan.regularisation,
        task=settings.task.build(facts),
        secure=settings.sums,
    )
    return facts, goal, limits, preset


def make_plans(
    cases: Sequence[Case], folder: Path, device: torch.device, tell: Listener
) -> list[Case]:
    """The runs of the plans, one for each row, private column and seed. A plan is made once and
    kept in the folder; only the configuration is read for it, no data."""
    plans, runs = read_plans(folder), list[Case]()
    places: dict[tuple[str, str], dict[int, Case]] = {}
    for case in filter(lambda case: case.private, cases):
        seeds = places.setdefault((case.labels["row"], case.labels["column"]), {})
        seeds.setdefault(case.labels["seed"], case)
    for place, seeds in places.items():
        first = next(iter(seeds.values()))
        key = (*place, first.digest)
        if key not in plans:
            plans[key] = _keys(first, device, tell)
            write_plans(plans, folder)
        runs += [_run(case, plans[key]) for case in seeds.values()]
    return runs


def read_plans(folder: Path) -> Plans:
    """The plans that were made so far."""
    try:
        rows = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {(row["row"], row["column"], row["case"]): dict(row["plan"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _keys(case: Case, device: torch.device, tell: Listener) -> PlanKeys:
    """The dotted keys of the plan that is recommended for a case."""
    facts, goal, limits, preset = asked(case)
    found = recommend(facts, goal, limits, preset, device=device, tell=tell, curve=False)
    tables = as_tables(found)
    return {
        f"{table}.{key}": value
        for table in ("algorithm", "plan", "privacy")
        for key, value in tables[table].items()
        if table != "privacy" or key not in KEPT
    }


def _run(case: Case, plan: PlanKeys) -> Case:
    """The case with the algorithm and the plan that were chosen, in the line of plans."""
    changed = case.with_set({"algorithm": False}).with_set(plan)
    return replace(changed, labels=case.labels | {"line": LINE, "choice": described(plan)})


def described(plan: PlanKeys) -> str:
    """A plan in few words.

    >>> plan: PlanKeys = {"algorithm.name": "fedavg", "plan.rounds": 400, "plan.local_steps": 1}
    >>> described(plan | {"plan.learning_rate": 0.5, "plan.tail": 0.25, "privacy.clip": 1.0})
    'fedavg, T = 400, K = 1, C = 1, η₀ = 0.5, average of the last 0.25'
    """
    return (
        f"{plan['algorithm.name']}, T = {plan['plan.rounds']}, K = {plan['plan.local_steps']}, "
        f"C = {plan['privacy.clip']:g}, η₀ = {plan['plan.learning_rate']:g}, average of the last "
        f"{plan['plan.tail']:g}"
    )


def write_plans(plans: Plans, folder: Path) -> None:
    """Keep plans in a folder, one a line."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = ("row", "column", "case")
    rows = [dict(zip(keys, key, strict=True)) | {"plan": plan} for key, plan in plans.items()]
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    write_text(folder / FILE, f"[\n {lines}\n]\n")


def plan_parts(results: Results) -> list[str]:
    """Every plan next to the best choice of the same row and ε; nothing where none is finished."""
    rows, lost = [], []
    for place in [place for place in results.places if place[2] == LINE]:
        rivals = [one for one in results.places if one[:2] == place[:2] and one[2] != LINE]
        if not rivals:
            continue
        best = max(rivals, key=lambda one: _summary(results, one).rank)
        ours, top = _summary(results, place), _summary(results, best)
        lost.append(100 * (top.mean - (ours.mean if ours.runs else 0.0)))
        rows.append(
            [
                place[0],
                place[1].partition(" ")[0],
                results.chosen(place),
                percent(ours),
                f"{best[2]}, {results.chosen(best)}",
                percent(top),
                f"{lost[-1]:.2f}",
            ]
        )
    if not rows:
        return []
    header = ["row", "ε", "plan", "accuracy", "best in view", "its accuracy", "lost"]
    said = (
        f"Each plan was made from public facts alone and trained as it is; next to it is the best "
        f"of all choices that were tried **with the test data in view**. Over {len(lost)} plans "
        f"planning loses {sum(lost) / len(lost):.2f} points on average and at most "
        f"{max(lost):.2f}."
    )
    return ["## Whole plans against the best in view", said, markdown(header, rows)]


def _summary(results: Results, place: Place) -> SeedSummary:
    return results.summary(place, results.chosen(place), average)
