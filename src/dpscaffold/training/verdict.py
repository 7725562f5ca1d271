"""Whether a trained model is of use: next to the constant baseline, and if it is not, why.

All of it is computed on test records and is outside ε, as the metrics are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from dpscaffold.algorithms import scaffold_balanced
from dpscaffold.config import Run, solve_noise
from dpscaffold.config.budgets import Epsilon
from dpscaffold.config.noise import dominating_site
from dpscaffold.federation.roster import FEW_USERS
from dpscaffold.federation.schema import Target
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


def _compared_metric(target: Target) -> str:
    if target.kind == "class":
        return "auc" if len(target.classes) == 2 else "accuracy"
    return "r2" if target.kind == "number" else "label_auc"


def verdict(federation: Federation, final: MetricValues, baseline: MetricValues) -> Verdict | None:
    """The last evaluated round next to the baseline; None where nothing can be compared.

    A model counts as better where its metric exceeds the baseline's by two standard errors: of two
    classes AUC, of more accuracy or balanced accuracy, of numbers R².
    """
    shown = _compared_metric(federation.target)
    gains = {name: _gain(final, baseline, name) for name in (shown, "accuracy")}
    if shown == "accuracy":
        gains["balanced_accuracy"] = _gain(final, baseline, "balanced_accuracy")
    gain = gains[shown]
    if gain is None:
        return None
    if shown != "auc":
        gain = max(value for value in gains.values() if value is not None)
    if gain <= 2 * _standard_error(shown, federation.test.labels):
        return Verdict("no", f"no better than {_constant(federation)}")
    if gain < (0.1 if shown.endswith("auc") else 0.05):
        return Verdict("slightly", f"only slightly better than {_constant(federation)}")
    return Verdict("yes", f"better than {_constant(federation)}")


def _gain(final: MetricValues, baseline: MetricValues, name: str) -> float | None:
    value, constant = final.get(f"test_{name}"), baseline.get(f"test_{name}")
    return None if value is None or constant is None else float(value) - float(constant)


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


def cause(setting: Run, statement: Statement, overshoots: bool, named: bool = False) -> str:
    """The largest cause of a bad model, and what helps; ``overshoots`` says that the training loss
    is above that of a constant answer. ``named`` says to name sites and their sizes, which are
    private."""
    privacy, plan = setting.privacy, setting.plan
    if privacy is None or privacy.noise == 0:
        rate = f"lower plan.learning_rate (now {setting.settled.learning_rate:g})"
        more = f"more rounds may help (plan.rounds is {plan.rounds})"
        return f"the step size is too large: {rate}" if overshoots else more
    if privacy.clip == "median":
        return ""
    changes, quieter = _quieter(setting, _kept(setting, statement))
    if changes:
        times = _noise(setting) / _noise(quieter)
        options = " ".join(f"--set {key}={value}" for key, (value, _) in changes.items())
        why = next(iter(changes.values()))[1]
        why = why if named else why.partition(" (")[0]
        return f"{why}; {times:.2g} times less noise at the same ε: {options}"
    return _cause_of_noise(setting, overshoots)


def _kept(setting: Run, statement: Statement) -> Epsilon | None:
    """ε towards the server, or that of each user where they have budgets of their own."""
    run = setting.mechanism
    if not statement.by_group or run is None or len(statement.parts) > 1:
        return statement.towards("server").epsilon
    names = setting.roster.names or tuple(str(user) for user in range(setting.users))
    return {name: statement.by_group[run.place(user)] for user, name in enumerate(names)}


def _cause_of_noise(setting: Run, overshoots: bool) -> str:
    """The cause where no other setting has less noise at the same ε."""
    privacy, plan = setting.privacy, setting.plan
    assert privacy is not None
    if overshoots and plan.learning_rate is not None:
        return (
            f"the step size {plan.learning_rate:g} is too large for the noise: leave "
            f"plan.learning_rate out"
        )
    loud = _noise(setting) * math.sqrt(setting.task.parameters)
    if loud > LOUD and (privacy.sampling, privacy.unit) == ("fixed", "record"):
        return (
            "batches of fixed size need more noise: --set privacy.sampling=poisson (ε then covers "
            "removing the content of a record, not replacing it)"
        )
    if loud > LOUD:
        return (
            f"the noise is {loud:.2g} times the largest signal: the records are few for this ε; "
            f"use more records, fewer columns or a larger ε"
        )
    return f"not the noise: try more rounds (plan.rounds is {plan.rounds}) or other columns"


def _quieter(setting: Run, epsilon: Epsilon | None) -> tuple[dict[str, tuple[Any, str]], Run]:
    """Changes of the plan that lower the noise at the same ε, the largest first: what to set, to
    which value and why; and the setting with all of them."""
    changes: dict[str, tuple[Any, str]] = {}
    while True:
        tried = [
            (_noise(changed), key, value, why, changed)
            for key, value, why, changed in _candidates(setting, epsilon)
        ]
        if not tried:
            return changes, setting
        noise, key, value, why, changed = min(tried, key=lambda one: one[0])
        if noise * WORTH > _noise(setting):
            return changes, setting
        changes[key], setting = (value, why), changed


def _candidates(setting: Run, epsilon: Epsilon | None) -> list[tuple[str, Any, str, Run]]:
    plan = setting.plan
    found: list[tuple[str, Any, str, Run]] = []
    if plan.weighting == "uniform" and len(set(setting.roster.sizes)) > 1:
        loudest = (dominating_site(setting) or "").partition(";")[0].replace("(", "of ").strip(")")
        why = "sites with few records count as much as large ones"
        changed = replace(setting, plan=plan.changed(weighting="records"))
        found.append(
            ("plan.weighting", "records", f"{why} ({loudest})" if loudest else why, changed)
        )
    if setting.cohort_size < setting.users <= FEW_USERS and epsilon:
        why = f"only {setting.cohort_size} of {setting.users} sites take part in a round"
        changed = solve_noise(replace(setting, plan=plan.changed(user_ratio=1.0)), epsilon)
        found.append(("plan.user_ratio", 1, why, changed))
    if _keeps_noise(setting):
        why = f"the control variates of {setting.algorithm.name} keep the noise of small sites"
        balanced = replace(setting, algorithm=scaffold_balanced())
        found.append(("algorithm.name", balanced.algorithm.name, why, balanced))
    return found


def _keeps_noise(setting: Run) -> bool:
    """Whether its control variates carry noise that they do not know of."""
    return "control" in setting.algorithm.remembers and not setting.algorithm.noise_aware


def _noise(setting: Run) -> float:
    """The deviation of the noise of all rounds on one coordinate, as a multiple of the largest
    signal: T·K steps along gradients of norm C. Plain controls add the mean of all sites'."""
    assert setting.privacy is not None
    variance = setting.round_noise**2
    if _keeps_noise(setting):
        equal = setting.plan.changed(weighting="uniform")
        uniform = replace(setting, plan=equal)
        variance = 2 * variance + float(uniform.site_noise.square().mean()) / setting.users
    steps = setting.plan.rounds * setting.plan.local_steps
    return math.sqrt(variance / steps) / float(setting.privacy.clip)
