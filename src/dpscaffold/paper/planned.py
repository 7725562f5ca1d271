"""η₀ that a public surrogate chooses for each private entry of the frontier, next to the best that
was found with the test data in view."""

from __future__ import annotations

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from dpscaffold.atomic import write_text
from dpscaffold.paper.cases import Case
from dpscaffold.paper.definition import Experiment, rate_label
from dpscaffold.paper.results import Place, Results, SeedSummary, average
from dpscaffold.paper.solving import solved_noise
from dpscaffold.paper.text import markdown
from dpscaffold.paper.whole_plans import public_facts
from dpscaffold.paper.widening import at_rate
from dpscaffold.planning.trial import StepSizeTrial, best_trial, choose_rates
from dpscaffold.setting import Setting
from dpscaffold.training.events import Listener

#: The file of chosen step sizes, in the folder of the experiment that chose them.
FILE = "planned.json"

Rates = dict[Place, float]
Scored = dict[Place, tuple[StepSizeTrial, ...]]


def read_planned(root: Path) -> Rates:
    """The step sizes that are chosen by the scores on surrogates so far; empty without any."""
    return {place: best_trial(trials).rate for place, trials in _read(root).items()}


def _read(root: Path) -> Scored:
    try:
        rows = json.loads((root / "planner" / FILE).read_text(encoding="utf-8"))
        return {
            (row["row"], row["column"], row["line"]): tuple(
                StepSizeTrial(one["learning_rate"], tuple(one["scores"]), one["own_models"])
                for one in row["tried"]
            )
            for row in rows
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _without_rate(cases: Sequence[Case], found: Container[Place]) -> list[Case]:
    """The first case of every private place that is not ``found`` yet."""
    first = {_place(case): case for case in reversed(cases)}
    return [case for place, case in first.items() if case.private and place not in found]


def plan_places(
    experiment: Experiment, cases: Sequence[Case], root: Path, device: torch.device, tell: Listener
) -> Rates:
    """Choose η₀ for every private place that has none yet, among the rungs of its row's ladder;
    the scores of all of them on every surrogate are kept at once, algorithm by algorithm. Only the
    configuration is read, no data."""
    found = _read(root)
    for row, line in product(experiment.rows, experiment.lines):
        here = [c for c in cases if _place(c)[::2] == (row.label, line.label)]
        todo = _without_rate(here, found)
        if not todo or not row.ladder:
            continue
        settings = [_public(case) for case in todo]
        guess = public_facts(todo[0]).guess
        choices = choose_rates(settings, guess, row.ladder, widen=False, device=device, tell=tell)
        found |= {_place(c): choice.trials for c, choice in zip(todo, choices, strict=True)}
        _write(found, root / "planner" / FILE)
    return read_planned(root)


def planned_cases(cases: Sequence[Case], rates: Rates) -> list[Case]:
    """The runs at planned step sizes that the cases do not hold already."""
    held = {case.digest for case in cases}
    first: dict[tuple[Place, int], Case] = {}
    for case in cases:
        first.setdefault((_place(case), case.labels["seed"]), case)
    wanted = [at_rate(case, rates[place]) for (place, _), case in first.items() if place in rates]
    return [case for case in wanted if case.digest not in held]


def _place(case: Case) -> Place:
    return case.labels["row"], case.labels["column"], case.labels["line"]


def _public(case: Case) -> Setting:
    """The run of a case without its data, its noise solved."""
    settings, facts = solved_noise(case).settings, public_facts(case)
    assert settings.privacy is not None and settings.privacy.noise is not None
    return Setting(
        facts.roster,
        settings.task.build(facts),
        settings.algorithm.build(),
        settings.plan.build(),
        settings.privacy.mechanism,
    )


def _write(found: Scored, path: Path) -> None:
    """One place a line: the choice, and what it was made from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = ("row", "column", "line")
    rows = [
        dict(zip(keys, place, strict=True))
        | {"learning_rate": best_trial(trials).rate, "tried": [_trial(one) for one in trials]}
        for place, trials in found.items()
    ]
    lines = ",\n ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    write_text(path, f"[\n {lines}\n]\n")


def _trial(one: StepSizeTrial) -> dict[str, object]:
    scores = [round(score, 5) for score in one.scores]
    return {"learning_rate": one.rate, "scores": scores, "own_models": one.own_models}


@dataclass(frozen=True)
class PlannedCell:
    """One place: the planned η₀ and the best one, with the accuracies of their averaged models."""

    place: Place
    planned: float
    best: float
    accuracy: float
    reached: float

    @property
    def lost(self) -> float:
        """Points of accuracy."""
        return 100 * (self.reached - self.accuracy)


def compared(results: Results, rates: Rates) -> list[PlannedCell]:
    """Every place whose planned run is finished, next to the best of the same ladder and K."""
    ladders = {row.label: row.ladder for row in results.experiment.rows}
    found = []
    for place, choices in results.places.items():
        rungs = {rate_label(rung): rung for rung in ladders[place[0]]}
        plain = [choice for choice in choices if choice in rungs]
        by_rate = {rungs[choice]: results.summary(place, choice, average) for choice in plain}
        rate = rates.get(place)
        if rate is None or rate not in by_rate:
            continue
        best = max(by_rate, key=lambda one: (not by_rate[one].diverged, by_rate[one].rank))
        if by_rate[best].runs:
            ours, top = _accuracy(by_rate[rate]), by_rate[best].mean
            found.append(PlannedCell(place, rate, best, ours, top))
    return found


def _accuracy(summary: SeedSummary) -> float:
    """The mean, or 0 where there is none because runs diverged."""
    return summary.mean if summary.runs and not summary.diverged else 0.0


def planner_parts(results: Results, rates: Rates) -> list[str]:
    """What planning costs against choosing with the test data in view, place by place."""
    rows = compared(results, rates)
    parts = ["## Planned against best, test accuracy (%) of the averaged model"]
    if not rows:
        return [*parts, "No planned run is finished yet."]
    lost = [one.lost for one in rows]
    parts.append(
        f"η₀ was chosen among the same values on surrogates with the public facts, and no record "
        f"was read for it; next to it is the best η₀ **with the test data in view**. Over "
        f"{len(rows)} entries planning loses {sum(lost) / len(lost):.2f} points on average, at "
        f"most {max(lost):.2f}, and at most 2 in {sum(x <= 2 for x in lost)} of them."
    )
    header = ["row", "ε, batches", "algorithm", "planned η₀", "accuracy", "best η₀", "best", "lost"]
    table = [
        [
            *one.place,
            f"{one.planned:g}",
            f"{100 * one.accuracy:.2f}",
            f"{one.best:g}",
            f"{100 * one.reached:.2f}",
            f"{one.lost:.2f}",
        ]
        for one in rows
    ]
    return [*parts, markdown(header, table)]
