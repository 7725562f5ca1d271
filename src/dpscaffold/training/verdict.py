"""Whether a trained model is of use: next to the constant baseline, and if it is not, why.

All of it is computed on test records and is outside ε, as the metrics are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from dpscaffold.algorithms import scaffold_balanced
from dpscaffold.config import Run, solve_noise
from dpscaffold.config.noise import dominating_site
from dpscaffold.federation.roster import FEW_USERS
from dpscaffold.privacy.page import Statement
from dpscaffold.runs.history import MetricValues

if TYPE_CHECKING:
    from dpscaffold.federation import Federation

#: A change is advised where it lowers the noise by this factor at least.
WORTH = 1.3
#: The noise of all rounds, as a multiple of the largest signal, from which on it is the cause.
LOUD = 0.3


@dataclass(frozen=True)
class Verdict:
    """Whether a model is ``better`` than the constant baseline, and the sentence that says it."""

    better: Literal["no", "slightly", "yes"]
    sentence: str


#: The metrics by which a model is compared with the baseline; the first must be known.
COMPARED = {"number": ("r2",), "labels": ("label_auc",), "class": ("accuracy", "balanced_accuracy")}


def verdict(federation: Federation, final: MetricValues, baseline: MetricValues) -> Verdict | None:
    """The last evaluated round next to the baseline; None where nothing can be compared.

    A model counts as better where its metric exceeds the baseline's by two standard errors: of two
    classes AUC, of more accuracy or balanced accuracy, of numbers R².
    """
    names = COMPARED[federation.target.kind]
    if len(federation.target.classes) == 2 and names[0] == "accuracy":
        names = ("auc",)
    pairs = [(final.get(f"test_{name}"), baseline.get(f"test_{name}")) for name in names]
    if None in pairs[0]:
        return None
    gain = max(value - plain for value, plain in pairs if value is not None and plain is not None)
    constant = _constant(federation)
    if gain <= 2 * _standard_error(names[0], federation.test.labels):
        return Verdict("no", f"no better than {constant}")
    if gain < (0.1 if names[0].endswith("auc") else 0.05):
        return Verdict("slightly", f"only slightly better than {constant}")
    return Verdict("yes", f"better than {constant}")


def _standard_error(metric: str, labels: torch.Tensor) -> float:
    """How far the metric of a useless model strays from the baseline."""
    rows = len(labels)
    if metric == "auc":
        positive = int((labels == 1).sum())
        return math.sqrt((rows + 1) / (12 * max(1, positive * (rows - positive))))
    return 2 / rows if metric == "r2" else 0.5 / math.sqrt(rows)


def _constant(federation: Federation) -> str:
    """The constant answer, in words; that of numbers is private and is not shown."""
    target = federation.target
    if target.kind == "number":
        return "always answering the mean"
    if target.kind == "labels":
        return "the same answer for all records"
    most = int(torch.bincount(federation.train.labels, minlength=len(target.classes)).argmax())
    return f'always answering "{target.classes[most]}"'


def cause(run: Run, statement: Statement, overshoots: bool, named: bool = False) -> str:
    """The largest cause of a bad model, and what helps; ``overshoots`` says that the training loss
    is above that of a constant answer. ``named`` says to name sites and their sizes, which are
    private."""
    privacy, plan = run.privacy, run.plan
    if privacy is None or privacy.noise == 0:
        rate = f"lower plan.learning_rate (now {run.settled.learning_rate:g})"
        more = f"more rounds may help (plan.rounds is {plan.rounds})"
        return f"the step size is too large: {rate}" if overshoots else more
    if privacy.clip == "median":
        return ""

    # Users with budgets of their own have no common ε that a change could keep.
    kept = None if statement.by_group else statement.towards("server").epsilon
    changes, quieter = _quieter(run, kept)
    if changes:
        times = _noise(run) / _noise(quieter)
        options = " ".join(f"--set {change.key}={change.value}" for change in changes)
        why = changes[0].why if named else changes[0].why.partition(" (")[0]
        return f"{why}; {times:.2g} times less noise at the same ε: {options}"
    if overshoots and plan.learning_rate is not None:
        return (
            f"the step size {plan.learning_rate:g} is too large for the noise: leave "
            f"plan.learning_rate out"
        )

    loud = _noise(run) * math.sqrt(run.task.parameters)
    if loud <= LOUD:
        return f"not the noise: try more rounds (plan.rounds is {plan.rounds}) or other columns"
    if (privacy.sampling, privacy.unit) == ("fixed", "record"):
        return (
            "batches of fixed size need more noise: --set privacy.sampling=poisson (ε then covers "
            "removing the content of a record, not replacing it)"
        )
    return (
        f"the noise is {loud:.2g} times the largest signal: the records are few for this ε; "
        f"use more records, fewer columns or a larger ε"
    )


@dataclass(frozen=True)
class Change:
    """A key with another value, why it lowers the noise, and the run that has it."""

    key: str
    value: Any
    why: str
    run: Run


def _quieter(run: Run, epsilon: float | None) -> tuple[list[Change], Run]:
    """Changes of the plan that lower the noise at the same ε, the largest first, and the run with
    all of them."""
    changes: list[Change] = []
    while tried := list(_candidates(run, epsilon)):
        best = min(tried, key=lambda change: _noise(change.run))
        if _noise(best.run) * WORTH > _noise(run):
            break
        changes.append(best)
        run = best.run
    return changes, run


def _candidates(run: Run, epsilon: float | None) -> Iterator[Change]:
    plan = run.plan
    if plan.weighting == "uniform" and len(set(run.roster.sizes)) > 1:
        loudest = (dominating_site(run) or "").partition(";")[0].replace("(", "of ").strip(")")
        why = "sites with few records count as much as large ones"
        why = f"{why} ({loudest})" if loudest else why
        changed = replace(run, plan=plan.changed(weighting="records"))
        yield Change("plan.weighting", "records", why, changed)
    if run.cohort_size < run.users <= FEW_USERS and epsilon:
        why = f"only {run.cohort_size} of {run.users} sites take part in a round"
        changed = solve_noise(replace(run, plan=plan.changed(user_ratio=1.0)), epsilon)
        yield Change("plan.user_ratio", 1, why, changed)
    if _keeps_noise(run):
        why = f"the control variates of {run.algorithm.name} keep the noise of small sites"
        balanced = replace(run, algorithm=scaffold_balanced())
        yield Change("algorithm.name", balanced.algorithm.name, why, balanced)


def _keeps_noise(run: Run) -> bool:
    """Whether its control variates carry noise that they do not know of."""
    return "control" in run.algorithm.remembers and not run.algorithm.noise_aware


def _noise(run: Run) -> float:
    """The deviation of the noise of all rounds on one coordinate, as a multiple of the largest
    signal: T·K steps along gradients of norm C. Plain controls add the mean of all sites'."""
    variance = run.round_noise**2
    if _keeps_noise(run):
        uniform = replace(run, plan=run.plan.changed(weighting="uniform"))
        variance = 2 * variance + float(uniform.site_noise.square().mean()) / run.users
    steps = run.plan.rounds * run.plan.local_steps
    return math.sqrt(variance / steps) / float(run.limits.clip)
